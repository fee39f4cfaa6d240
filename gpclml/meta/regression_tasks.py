"""Few-shot regression tasks: periodic functions, and the angle of a turned image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta.episodes import (
    Episodes,
    NumberedTasks,
    check_counts,
    task_generator,
    unit_range,
)

__all__ = ["PeriodicTasks", "RotationTasks"]


class PeriodicTasks(NumberedTasks):
    r"""Sine waves of unknown amplitude and phase, :math:`y = a \sin(x + \phi) + \epsilon`.

    :math:`a \sim U(0.1, 5)`, :math:`\phi \sim U(0, \pi)`, noise of standard deviation 0.1;
    support points uniform on [-5, 5] (Patacchiola et al. 2020, Section 5.1; Finn et al. 2017).
    Query points are spread evenly: on [-5, 5], or ``out_of_range`` on [-5, 10]. Task ``i``
    depends on ``seed`` and ``i`` alone. Inputs are ``(tasks, n, 1)``.

    Args:
        support: Points to learn from.
        queries: Points to predict.
        out_of_range: Whether queries go beyond where support points are.
        noise: Standard deviation of the noise.
        seed: Seed of all tasks.

    Raises:
        ArgumentError: A number is out of range.
    """

    @checked
    def __init__(
        self,
        support: int = 5,
        queries: int = 50,
        *,
        out_of_range: bool = False,
        noise: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_counts(support=support, queries=queries)
        if not 0 <= noise < math.inf:
            raise ArgumentError("noise", noise, "a number, 0 or above")
        self.support, self.queries = support, queries
        self.range = (-5.0, 10.0 if out_of_range else 5.0)
        self.noise = noise
        self.seed = seed

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        amplitude = 0.1 + 4.9 * torch.rand((), generator=generator)
        phase = math.pi * torch.rand((), generator=generator)
        support = 10 * torch.rand(self.support, generator=generator) - 5
        x = torch.cat([support, torch.linspace(*self.range, self.queries)])
        noise = self.noise * torch.randn(len(x), generator=generator)
        y = amplitude * torch.sin(x + phase) + noise
        return _episode(x.unsqueeze(-1), y, self.support)


class RotationTasks(NumberedTasks):
    """The angle by which an image is turned, from a few turned views whose angle is known.

    A task is one image; its views are turned by angles uniform on [-90°, 90°] (bilinear,
    background where nothing was), and targets are angles in units of 90°. Task ``i`` depends
    on ``seed`` and ``i`` alone. Inputs are ``(tasks, n, channels, size, size)``.

    Args:
        images: Images, ``(N, channels, height, width)``; integers count as 0 to 255 and become
            0 to 1. Zero is background.
        support: Views to learn from.
        queries: Views to predict.
        seed: Seed of all tasks.

    Raises:
        ShapeError: Images are not square or not of four dimensions.
        ArgumentError: A number is out of range.
    """

    @checked(images="(N, channels, height, width)")
    def __init__(
        self, images: Tensor, support: int = 10, queries: int = 20, *, seed: int = 0
    ) -> None:
        if images.ndim != 4 or images.shape[-1] != images.shape[-2] or len(images) == 0:
            expected = "(N, channels, size, size), square and at least one"
            raise ShapeError("images", tuple(images.shape), expected)
        check_counts(support=support, queries=queries)
        self.images = images
        self.support, self.queries = support, queries
        self.seed = seed

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        image = unit_range(self.images[torch.randint(len(self.images), (), generator=generator)])
        angle = 2 * torch.rand(self.support + self.queries, generator=generator) - 1
        return _episode(_turned(image, angle * math.pi / 2), angle, self.support)


def _turned(image: Tensor, angles: Tensor) -> Tensor:
    """The image turned by each angle in radians, ``(n, channels, size, size)``."""
    cos, sin = angles.cos(), angles.sin()
    zero = torch.zeros_like(cos)
    turns = torch.stack([cos, -sin, zero, sin, cos, zero], dim=-1).reshape(-1, 2, 3).to(image)
    images = image.expand(len(angles), *image.shape)
    grid = torch.nn.functional.affine_grid(turns, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


def _episode(x: Tensor, y: Tensor, support: int) -> Episodes:
    x, y = x.unsqueeze(0), y.unsqueeze(0)
    return Episodes(x[:, :support], y[:, :support], x[:, support:], y[:, support:])
