"""The networks that are compared: MLPs, CNNs and residual networks without normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml.errors import ArgumentError
from gpclml.kernels.networks import MLP

__all__ = ["ARCHITECTURES", "network"]

ARCHITECTURES = (
    *(f"mlp-{width}x{depth}" for width in (8, 32, 128) for depth in (1, 2, 3)),
    *(f"cnn-{width}x{depth}" for width in (4, 8, 16) for depth in (1, 2, 3)),
    *(f"resnet-{width}x{depth}" for width in (4, 8) for depth in (1, 2)),
)
"""Twenty-two of them: width, and number of hidden layers, convolutions or residual blocks."""


def network(name: str, channels: int, size: int, outputs: int, seed: int) -> torch.nn.Module:
    """A network by its name, such as ``"mlp-32x2"``, ``"cnn-8x3"``, ``"resnet-8x1"``.

    Args:
        name: Family, width and depth.
        channels: Of the images.
        size: Of the images.
        outputs: Number of outputs.
        seed: Seed of its start.

    Raises:
        ArgumentError: The name is none of a network.
    """
    family, _, shape = name.partition("-")
    width, _, depth = shape.partition("x")
    build = {"mlp": _mlp, "cnn": _cnn, "resnet": _resnet}.get(family)
    if build is None or not width.isdecimal() or not depth.isdecimal():
        raise ArgumentError("architecture", repr(name), "e.g. mlp-32x2, cnn-8x3, resnet-8x1")
    if not int(width) or not int(depth):
        raise ArgumentError("architecture", repr(name), "a width and a depth of at least 1")
    with torch.random.fork_rng(devices=[]):  # torch's layers draw their start from the global one
        torch.manual_seed(seed)
        return build(channels, size, outputs, int(width), int(depth))


def _mlp(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    sizes = [channels * size * size, *[width] * depth, outputs]
    return torch.nn.Sequential(torch.nn.Flatten(), MLP(sizes, generator=generator))


def _cnn(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for layer in range(depth):
        wide = width * 2**layer
        layers += [torch.nn.Conv2d(channels, wide, 3, padding=1), torch.nn.ReLU()]
        channels = wide
        if size > 3:
            layers.append(torch.nn.MaxPool2d(2))
            size //= 2
    layers += [torch.nn.Flatten(), torch.nn.Linear(channels * size * size, outputs)]
    return torch.nn.Sequential(*layers)


def _resnet(channels: int, size: int, outputs: int, width: int, depth: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(channels, width, 3, padding=1, bias=False), Shift(), torch.nn.ReLU(),
    ]  # fmt: skip
    for block in range(depth):
        wide = width * 2**block
        layers.append(
            FixupBlock(width * 2 ** max(block - 1, 0), wide, depth, stride=1 + (block > 0))
        )
    last = torch.nn.Linear(width * 2 ** (depth - 1), outputs)
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), Shift(), last]
    return torch.nn.Sequential(*layers)


class Shift(torch.nn.Module):
    """A number that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.shift


class Scale(torch.nn.Module):
    """A number that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x * self.scale


class FixupBlock(torch.nn.Module):
    """A residual block that trains without normalization (Zhang et al. 2019, Fixup, Section 3).

    Args:
        inputs: Channels in.
        outputs: Channels out.
        blocks: Number of blocks of the network, by which its start is scaled.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int, stride: int = 1) -> None:
        super().__init__()
        first = torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        second = torch.nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        with torch.no_grad():
            first.weight.mul_(blocks**-0.5)
            second.weight.zero_()
        self.branch = torch.nn.Sequential(
            Shift(), first, Shift(), torch.nn.ReLU(), Shift(), second, Scale(), Shift()
        )
        plain = inputs == outputs and stride == 1
        self.skip = (
            torch.nn.Identity()
            if plain
            else torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images of the block's channels, ``(N, outputs, ...)``."""
        return torch.relu(self.skip(x) + self.branch(x))
