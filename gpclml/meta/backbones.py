"""Convolutional networks that extract features for few-shot learning."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from gpclml._utils.arguments import check_counts, checked
from gpclml.errors import ShapeError
from gpclml.kernels.networks import reset_network

__all__ = [
    "Conv3",
    "Conv4",
    "ConvBlocks",
    "ResNet10",
    "first_block",
]


class ConvBlocks(torch.nn.Module):
    """Blocks of 3x3 convolution, batch normalization, 2x2 max pooling and ReLU.

    Pooling and ReLU commute and are applied in the cheaper order. Channels are last in memory.

    Args:
        blocks: Number of blocks.
        channels: Channels of an image.
        width: Channels of each block.
        generator: Source of the start; seed 0 if None.

    Examples:
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
            *[_block(*pair) for pair in itertools.pairwise(sizes)]
        )
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        reset_network(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(n, q)`` of images ``(n, channels, height, width)``.

        A side has 2 to the number of blocks pixels or more.

        Raises:
            ShapeError: Images have another number of channels or dimensions, or are too small.
        """
        _check_images(images, self.channels, 2 ** len(self.blocks))
        images = images.contiguous(memory_format=torch.channels_last)
        hooks = self.blocks._forward_hooks or self.blocks._forward_pre_hooks
        values = None if hooks else first_block(cast(Any, self.blocks[0]), images)
        if values is None:
            return self.blocks(images).flatten(1)
        for block in itertools.islice(self.blocks, 1, None):
            values = block(values)
        return values.flatten(1)


class Conv4(ConvBlocks):
    """Four :class:`ConvBlocks`, the usual backbone of few-shot classification.

    (Vinyals et al. 2016; Snell et al. 2017.) Images have 16 pixels a side or more.

    Args:
        channels: Channels of an image.
        width: Channels of each block.
        generator: Source of the start; seed 0 if None.

    Examples:
        >>> Conv4()(torch.rand(10, 1, 28, 28)).shape
        torch.Size([10, 64])
    """

    @checked
    def __init__(
        self, channels: int = 1, width: int = 64, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(4, channels, width, generator)


class Conv3(torch.nn.Module):
    """Three dilated 3x3 convolutions of stride two with ReLU, without normalization.

    The backbone of head-pose regression (Patacchiola et al. 2020, supplementary).

    Args:
        channels: Channels of an image.
        width: Channels of each layer.
        generator: Source of the start; seed 0 if None.

    Examples:
        >>> Conv3()(torch.rand(10, 3, 100, 100)).shape
        torch.Size([10, 2916])
    """

    @checked
    def __init__(
        self, channels: int = 3, width: int = 36, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_counts(channels=channels, width=width)
        self.channels = channels
        sizes = [channels] + 3 * [width]
        layers: list[torch.nn.Module] = []
        for size, next_size in itertools.pairwise(sizes):
            convolution = torch.nn.utils.skip_init(
                torch.nn.Conv2d, size, next_size, 3, stride=2, dilation=2
            )
            layers += [convolution, torch.nn.ReLU()]
        self.layers: torch.nn.Sequential = torch.nn.Sequential(*layers)
        reset_network(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(n, q)`` of images ``(n, channels, height, width)``, sides 29 or more.

        Raises:
            ShapeError: Images have another number of channels or dimensions, or are too small.
        """
        _check_images(images, self.channels, 29)
        return self.layers(images).flatten(1)


class ResNet10(torch.nn.Module):
    """A residual network of ten layers, the deeper backbone of few-shot classification.

    (He et al. 2016; Chen et al. 2019.) A 7x7 convolution of stride two and pooling, four blocks of
    two 3x3 convolutions, each block but the first of half the resolution and twice the channels,
    and the mean over places. Convolutions have no biases. Images have 16 pixels a side or more.

    Args:
        channels: Channels of an image.
        width: Channels of the first block.
        generator: Source of the start; seed 0 if None.

    Examples:
        >>> ResNet10()(torch.rand(10, 3, 84, 84)).shape
        torch.Size([10, 512])
    """

    @checked
    def __init__(
        self, channels: int = 3, width: int = 64, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_counts(channels=channels, width=width)
        self.channels = channels
        sizes = [width, *(width * 2**k for k in range(4))]
        self.layers: torch.nn.Sequential = torch.nn.Sequential(
            _convolution(channels, width, 7, 2),
            torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(3, stride=2, padding=1),
            *(_Residual(*pair) for pair in itertools.pairwise(sizes)),
            torch.nn.AdaptiveAvgPool2d(1),
        )
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        reset_network(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(n, 8 width)`` of images ``(n, channels, height, width)``.

        Raises:
            ShapeError: Images have another number of channels or dimensions, or are too small.
        """
        _check_images(images, self.channels, 16)
        return self.layers(images.contiguous(memory_format=torch.channels_last)).flatten(1)


class _Residual(torch.nn.Module):
    """ReLU of the images and what two convolutions add to them.

    Where the width changes the resolution is halved, and the images pass a convolution of 1x1.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.added = torch.nn.Sequential(
            _convolution(channels, width, 3, stride),
            torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(),
            _convolution(width, width, 3, 1),
            torch.nn.BatchNorm2d(width),
        )
        self.kept = torch.nn.Sequential()
        if stride == 2:
            self.kept.append(_convolution(channels, width, 1, stride))
            self.kept.append(torch.nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        return (self.kept(images) + self.added(images)).relu()


def _convolution(channels: int, width: int, size: int, stride: int) -> torch.nn.Module:
    return torch.nn.utils.skip_init(
        torch.nn.Conv2d, channels, width, size, stride=stride, padding=size // 2, bias=False
    )


def _check_images(images: Tensor, channels: int, side: int) -> None:
    if images.ndim != 4 or images.shape[1] != channels or min(images.shape[2:]) < side:
        expected = f"(n, {channels}, height, width) with sides of {side} pixels or more"
        suggestion = "Resize the images, or take a backbone of fewer blocks or other channels."
        raise ShapeError("images", f"shape {tuple(images.shape)}", expected, suggestion)


def _block(channels: int, width: int) -> torch.nn.Sequential:
    convolution = torch.nn.utils.skip_init(torch.nn.Conv2d, channels, width, 3, padding=1)
    return torch.nn.Sequential(
        convolution, torch.nn.BatchNorm2d(width), torch.nn.MaxPool2d(2), torch.nn.ReLU()
    )


_AT_ONCE = 2**18  # numbers of an array between convolution and pooling: one that caches hold
_MOST_CHANNELS = 4  # of images, whose patches are kept
_LAYERS = [torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.MaxPool2d, torch.nn.ReLU]
_pool: Any = torch.ops.aten.max_pool2d_with_indices
_pool_backward: Any = torch.ops.aten.max_pool2d_with_indices_backward
_relu_backward: Any = torch.ops.aten.threshold_backward


def first_block(block: torch.nn.Sequential, images: Tensor) -> Tensor | None:
    r"""The output of a block of :class:`~gpclml.meta.ConvBlocks`, whose statistics are updated.

    A convolution of images with one channel makes arrays of sixty-four, the largest of the network,
    which convolution, normalization and pooling each write and read again. But over all patches p
    of the images a channel with weights w has mean :math:`w^\top \bar p` and variance
    :math:`w^\top \operatorname{Cov}(p)\, w`: normalization becomes a part of the weights, and a few
    images at a time, only what is left after pooling is written. In evaluation the running
    statistics stand in their place.

    None where the block is better called: on a GPU, of images that need a gradient, with hooks.
    Channels of the output are last in memory.
    """
    if not _applies(block, images):
        return None
    convolution, normalization = cast(Any, block[0]), cast(Any, block[1])
    n, channels, height, width = images.shape
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, 9 * channels)
    weight = convolution.weight.flatten(1)
    if normalization.training:
        mean = patches.mean(0)
        patches = patches.sub_(mean)
        variance = ((weight @ (patches.mT @ patches / len(patches))) * weight).sum(1)
        scale = normalization.weight * torch.rsqrt(variance + normalization.eps)
        # Normalization takes the bias out; optimizers are given its gradient all the same.
        shift = normalization.bias + 0.0 * convolution.bias
        with torch.no_grad():
            count, momentum = len(patches), normalization.momentum
            normalization.running_mean.lerp_(weight @ mean + convolution.bias, momentum)
            normalization.running_var.lerp_(variance * (count / (count - 1)), momentum)
            normalization.num_batches_tracked.add_(1)
    else:
        scale = normalization.weight * torch.rsqrt(normalization.running_var + normalization.eps)
        shift = normalization.bias + scale * (convolution.bias - normalization.running_mean)
    sides = (n, height, width)
    return cast(Tensor, _Pooled.apply(patches, scale.unsqueeze(1) * weight, shift, sides))


def _applies(block: torch.nn.Sequential, images: Tensor) -> bool:
    if [type(layer) for layer in block] != _LAYERS:
        return False
    convolution, normalization = cast(Any, block[0]), cast(Any, block[1])
    return (
        normalization.track_running_stats
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
        differentiates = any(ctx.needs_input_grad)
        places = torch.empty_like(out if differentiates else out[:at_once], dtype=torch.long)
        work, columns = patches.new_empty(at_once * height * width, size), weight.mT.contiguous()
        of_places = places.split(at_once) if differentiates else itertools.repeat(places)
        parts = zip(patches.split(len(work)), out.split(at_once), of_places, strict=differentiates)
        for rows, part, place in parts:
            values = torch.addmm(shift, rows, columns, out=work[: len(rows)])
            values = values.view(-1, height, width, size).permute(0, 3, 1, 2)
            _pool.out(values, [2, 2], [2, 2], out=part, indices=place[: len(part)])
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
        grad = _relu_backward(grads[0], out, 0).contiguous(memory_format=torch.channels_last)
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
