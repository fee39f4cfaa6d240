r"""The first block of a convolutional network in training, where images need no gradient.

A convolution of images with one channel makes arrays of sixty-four. They are the largest of the
network, and convolution, normalization and pooling each write them and read them again, which takes
longer than their arithmetic. But over all patches p of the images a channel with weights w has mean
:math:`w^\top \bar p` and variance :math:`w^\top \operatorname{Cov}(p)\, w`: normalization becomes a
part of the weights, and a few images at a time, only what is left after pooling is written.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

__all__ = ["first_block"]

_AT_ONCE = 2**18  # numbers of an array between convolution and pooling: one that caches hold
_MOST_CHANNELS = 4  # of images, whose patches are kept
_LAYERS = [torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.MaxPool2d, torch.nn.ReLU]
_pool: Any = torch.ops.aten.max_pool2d_with_indices
_pool_backward: Any = torch.ops.aten.max_pool2d_with_indices_backward


def first_block(block: torch.nn.Sequential, images: Tensor) -> Tensor | None:
    """The output of a block of :class:`~gpclml.meta.ConvBlocks`, whose statistics are updated.

    None where the block is better called: in evaluation, on a GPU, of images that need a gradient,
    with hooks. Channels of the output are last in memory.
    """
    if not _applies(block, images):
        return None
    convolution, normalization = cast(Any, block[0]), cast(Any, block[1])
    n, channels, height, width = images.shape
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, 9 * channels)
    mean = patches.mean(0)
    patches = patches.sub_(mean)
    weight = convolution.weight.flatten(1)
    variance = ((weight @ (patches.mT @ patches / len(patches))) * weight).sum(1)
    scale = normalization.weight * torch.rsqrt(variance + normalization.eps)
    # Normalization takes the bias out; optimizers are given its gradient all the same.
    shift = normalization.bias + 0.0 * convolution.bias
    with torch.no_grad():
        count, momentum = len(patches), normalization.momentum
        normalization.running_mean.lerp_(weight @ mean + convolution.bias, momentum)
        normalization.running_var.lerp_(variance * (count / (count - 1)), momentum)
        normalization.num_batches_tracked.add_(1)
    sides = (n, height, width)
    return cast(Tensor, _Pooled.apply(patches, scale.unsqueeze(1) * weight, shift, sides))


def _applies(block: torch.nn.Sequential, images: Tensor) -> bool:
    if [type(layer) for layer in block] != _LAYERS:
        return False
    convolution, normalization = cast(Any, block[0]), cast(Any, block[1])
    return (
        block.training
        and normalization.training
        and normalization.track_running_stats
        and normalization.momentum is not None
        and not images.requires_grad
        and images.device.type == "cpu"
        and images.shape[1] <= _MOST_CHANNELS
        and images.dtype == convolution.weight.dtype == normalization.weight.dtype
        and not any(one._forward_hooks or one._forward_pre_hooks for one in (block, *block))
        and not any(one._backward_hooks or one._backward_pre_hooks for one in (block, *block))
        and not torch.is_autocast_enabled("cpu")
    )


def _pooled(patches: Tensor, weight: Tensor, shift: Tensor, sides: tuple[int, ...]) -> Tensor:
    """ReLU of the largest values of windows of 2 x 2, where all arrays are kept."""
    values = torch.addmm(shift, patches, weight.mT)
    return max_pool2d(values.view(*sides, -1).permute(0, 3, 1, 2), 2).relu()


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, patches, weight, shift, sides):
        (n, height, width), size = sides, len(weight)
        at_once = max(1, _AT_ONCE // (height * width * size))
        out = patches.new_empty(n, height // 2, width // 2, size).permute(0, 3, 1, 2)
        places = torch.empty_like(out, dtype=torch.long)
        work, columns = patches.new_empty(at_once * height * width, size), weight.mT.contiguous()
        parts = zip(
            patches.split(len(work)), out.split(at_once), places.split(at_once), strict=True
        )
        for rows, part, place in parts:
            values = torch.addmm(shift, rows, columns, out=work[: len(rows)])
            values = values.view(-1, height, width, size).permute(0, 3, 1, 2)
            _pool.out(values, [2, 2], [2, 2], out=part, indices=place)
        out.relu_()
        ctx.save_for_backward(patches, weight, shift, out, places)
        ctx.sides, ctx.at_once = sides, at_once
        return out

    @staticmethod
    def backward(ctx, *grads):
        patches, weight, shift, out, places = ctx.saved_tensors
        n, height, width = ctx.sides
        if torch.is_grad_enabled():  # for a second derivative
            values = _pooled(patches, weight, shift, ctx.sides)
            found = torch.autograd.grad(values, (weight, shift), grads[0], create_graph=True)
            return None, *found, None
        size, at_once = len(weight), min(n, ctx.at_once)
        grad = torch.where(out > 0, grads[0], 0.0).contiguous(memory_format=torch.channels_last)
        of_weight = patches.new_zeros(patches.shape[1], size)
        work = patches.new_empty(at_once, height, width, size).permute(0, 3, 1, 2)
        parts = zip(
            patches.split(at_once * height * width), grad.split(at_once), places.split(at_once),
            strict=True,
        )  # fmt: skip
        for rows, part, place in parts:
            values = work[: len(part)]
            _pool_backward.grad_input(
                part, values, [2, 2], [2, 2], [0, 0], [1, 1], False, place, grad_input=values
            )
            of_weight.addmm_(rows.mT, values.permute(0, 2, 3, 1).reshape(-1, size))
        return None, of_weight.mT, grad.sum((0, 2, 3)), None
