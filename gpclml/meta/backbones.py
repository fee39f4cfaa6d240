"""Convolutional networks that extract features for few-shot learning."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad
from torch.nn.utils import skip_init

from gpclml._utils.arguments import check_counts, checked
from gpclml.errors import ShapeError
from gpclml.kernels.networks import reset_network


class ConvBlocks(torch.nn.Module):
    """Blocks of 3x3 convolution, batch normalization, 2x2 max pooling and ReLU.

    Pooling and ReLU commute and are applied in the cheaper order. Channels are last in memory.

    Args:
        blocks: Number of blocks.
        channels: Channels of an image.
        width: Channels of each block.
        generator: Source of the start; seed 0 if None.

    Examples:
        >>> import torch
        >>> from gpclml.meta import ConvBlocks
        >>> ConvBlocks(2)(torch.rand(10, 1, 8, 8)).shape
        torch.Size([10, 256])
    """

    @checked
    def __init__(
        self,
        blocks: int,
        channels: int = 1,
        width: int = 64,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_counts(blocks=blocks, channels=channels, width=width)
        self.channels = channels
        sizes = [channels] + blocks * [width]
        self.blocks: torch.nn.Sequential = torch.nn.Sequential(
            *itertools.starmap(_Block, itertools.pairwise(sizes))
        )
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        reset_network(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(n, q)`` of images ``(n, channels, height, width)``.

        A side has 2 to the number of blocks pixels or more.

        Raises:
            ShapeError: Images have another number of channels or dimensions, or are too small.
        """
        side = 2 ** len(self.blocks)
        if images.ndim != 4 or images.shape[1] != self.channels or min(images.shape[2:]) < side:
            expected = f"(n, {self.channels}, height, width) with sides of {side} pixels or more"
            suggestion = "Resize the images, or take a backbone of fewer blocks or other channels."
            raise ShapeError("images", f"shape {tuple(images.shape)}", expected, suggestion)
        return self.blocks(images.contiguous(memory_format=torch.channels_last)).flatten(1)


class Conv4(ConvBlocks):
    """Four :class:`ConvBlocks`, the usual backbone of few-shot classification.

    (Vinyals et al. 2016; Snell et al. 2017.) Images have 16 pixels a side or more.

    Args:
        channels: Channels of an image.
        width: Channels of each block.
        generator: Source of the start; seed 0 if None.

    Examples:
        >>> import torch
        >>> from gpclml.meta import Conv4
        >>> Conv4()(torch.rand(10, 1, 28, 28)).shape
        torch.Size([10, 64])
    """

    @checked
    def __init__(
        self, channels: int = 1, width: int = 64, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(4, channels, width, generator)


_NUMBERS_AT_ONCE = 2**18  # in an array between convolution and pooling: one that caches hold
_MOST_CHANNELS = 4  # of images, whose patches are kept
_LAYERS = [torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.MaxPool2d, torch.nn.ReLU]
_pool: Any = torch.ops.aten.max_pool2d_with_indices
_pool_backward: Any = torch.ops.aten.max_pool2d_with_indices_backward
_relu_backward: Any = torch.ops.aten.threshold_backward


class _Block(torch.nn.Sequential):
    r"""A block of :class:`ConvBlocks`, which is trained on few channels in one pass on a CPU.

    A convolution of images with one channel makes arrays of sixty-four, the largest of the network,
    which convolution, normalization and pooling each write and read again. But over all patches p
    of the images a channel with weights w has mean :math:`w^\top \bar p` and variance
    :math:`w^\top \operatorname{Cov}(p)\, w`: normalization becomes a part of the weights, and a few
    images at a time, only what is left after pooling is written.
    """

    def __init__(self, channels: int, width: int) -> None:
        convolution = skip_init(torch.nn.Conv2d, channels, width, 3, padding=1)
        super().__init__(
            convolution, torch.nn.BatchNorm2d(width), torch.nn.MaxPool2d(2), torch.nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The output ``(n, width, height / 2, width / 2)``, channels last in memory."""
        if not self._takes_one_pass(images):
            return super().forward(images)
        convolution, norm = cast(Any, self[0]), cast(Any, self[1])
        n, channels, height, width = images.shape
        windows = pad(images, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        # A row for each place of each image, in the order of channels-last memory.
        patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, 9 * channels)
        weight = convolution.weight.flatten(1)
        mean, count = patches.mean(0), len(patches)
        patches = patches.sub_(mean)
        variance = ((weight @ (patches.mT @ patches / count)) * weight).sum(1)
        scale = norm.weight * torch.rsqrt(variance + norm.eps)
        # Normalization takes the bias out; optimizers are given its gradient all the same.
        shift = norm.bias + 0.0 * convolution.bias
        with torch.no_grad():
            norm.running_mean.lerp_(weight @ mean + convolution.bias, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
            norm.num_batches_tracked.add_(1)
        sides = (n, height, width)
        return cast(Tensor, _Pooled.apply(patches, scale.unsqueeze(1) * weight, shift, sides))

    def _takes_one_pass(self, images: Tensor) -> bool:
        """In training on a CPU, unless images need a gradient or a layer was changed or hooked."""
        hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        norm = cast(Any, self[1])
        return (
            [type(layer) for layer in self] == _LAYERS
            and norm.training
            and norm.track_running_stats
            and norm.momentum is not None
            and images.device.type == "cpu"
            and images.shape[1] <= _MOST_CHANNELS
            and not images.requires_grad
            and images.dtype == cast(Any, self[0]).weight.dtype == norm.weight.dtype
            and not any(getattr(layer, name) for layer in self for name in hooks)
            and not torch.is_autocast_enabled("cpu")
        )


class _Pooled(torch.autograd.Function):
    """ReLU of the largest values of windows of 2 x 2 of ``patches @ weight.mT + shift``."""

    @staticmethod
    def forward(ctx, patches, weight, shift, sides):
        (n, height, width), channels = sides, len(weight)
        size = max(1, _NUMBERS_AT_ONCE // (height * width * channels))  # images at once
        out = patches.new_empty(n, height // 2, width // 2, channels).permute(0, 3, 1, 2)
        indices = torch.empty_like(out, dtype=torch.long)
        work, columns = patches.new_empty(size * height * width, channels), weight.mT.contiguous()
        for first in range(0, n, size):
            rows = patches[first * height * width : (first + size) * height * width]
            pooled = out[first : first + size]
            values = torch.addmm(shift, rows, columns, out=work[: len(rows)])
            values = values.view(-1, height, width, channels).permute(0, 3, 1, 2)
            _pool.out(values, [2, 2], [2, 2], out=pooled, indices=indices[first : first + size])
        # ReLU commutes with the largest value, and is cheaper on a quarter of the numbers.
        out.relu_()
        ctx.save_for_backward(patches, weight, shift, out, indices)
        ctx.sides, ctx.size = sides, size
        return out

    @staticmethod
    def backward(ctx, *grads):
        patches, weight, shift, out, indices = ctx.saved_tensors
        n, height, width = ctx.sides
        if torch.is_grad_enabled():  # for a second derivative
            values = torch.addmm(shift, patches, weight.mT).view(n, height, width, -1)
            pooled = max_pool2d(values.permute(0, 3, 1, 2), 2).relu()
            grad = torch.autograd.grad(pooled, (weight, shift), grads[0], create_graph=True)
            return None, *grad, None
        # Gradients of all values are made again for a few images at a time, never as one array.
        size = min(n, ctx.size)
        grad = _relu_backward(grads[0], out, 0).contiguous(memory_format=torch.channels_last)
        grad_weight = patches.new_zeros(patches.shape[1], len(weight))
        work = patches.new_empty(size, height, width, len(weight)).permute(0, 3, 1, 2)
        blocks = patches.split(size * height * width), grad.split(size), indices.split(size)
        for rows, grad_pooled, index in zip(*blocks, strict=True):
            values = work[: len(index)]
            _pool_backward.grad_input(
                grad_pooled, values, [2, 2], [2, 2], [0, 0], [1, 1], False, index, grad_input=values
            )
            grad_weight.addmm_(rows.mT, values.permute(0, 2, 3, 1).reshape(-1, len(weight)))
        return None, grad_weight.mT, grad.sum((0, 2, 3)), None
