"""Convolutional networks that extract features for few-shot learning."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked
from gpclml.errors import ShapeError
from gpclml.kernels.networks import reset_network
from gpclml.meta.first_block import first_block

__all__ = ["Conv3", "Conv4", "ConvBlocks", "ResNet10"]


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
