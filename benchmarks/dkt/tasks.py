"""Regression tasks of images, and the network of Patacchiola et al. (2020) for head poses."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor
from torch.nn.utils import skip_init

from gpclml.kernels.networks import reset_network
from gpclml.meta import Episodes
from gpclml.meta.tasks import NumberedTasks, regression_episode, task_generator, unit_range

_PITCHES, _YAWS = 7, 19


def turned(images: Tensor, angles: Tensor) -> Tensor:
    """Images ``(N, channels, size, size)``, each turned by its angle, zero outside of it."""
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # Affine maps tell where the pixels of a view come from: the inverse of its rotation.
    maps = torch.stack([cos, -sin, zero, sin, cos, zero], -1).reshape(-1, 2, 3)
    grid = torch.nn.functional.affine_grid(maps, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


@dataclass(eq=False)
class RotationTasks(NumberedTasks):
    """The angle by which an image is turned, from a few turned views of known angle.

    A task is one image. Its views are turned by angles uniform on [-90°, 90°], with bilinear
    interpolation and background outside of it; targets are angles in units of 90°. Inputs are
    ``(tasks, n, channels, size, size)``.

    Args:
        images: Square images, ``(N, channels, size, size)``; zero is background.
        support: Number of support views.
        queries: Number of query views.
        seed: Seed of all tasks.
    """

    images: Tensor
    support: int = 10
    queries: int = 20
    _: KW_ONLY
    seed: int = 0

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        image = unit_range(self.images[torch.randint(len(self.images), (), generator=generator)])
        y = 2 * torch.rand(self.support + self.queries, generator=generator) - 1
        views = turned(image.expand(len(y), *image.shape), (y * math.pi / 2).to(image))
        return regression_episode(views, y.to(views.device), self.support)


@dataclass(eq=False)
class HeadPoseTasks(NumberedTasks):
    r"""The pitch of a head along a path of 19 pictures, from the pitches of a few of them.

    A task is one person whose head turns from yaw 0 to 180 degrees in steps of ten while its
    pitch follows :math:`a \sin(\phi + i)`, :math:`a \sim U(-3, 3)`, :math:`\phi \sim U(-5, 5)`, in
    units of 10 degrees about level and rounded to them (Patacchiola et al. 2020, Section 5.1).
    Targets are pitches in units of 30 degrees, from -1 to 1. Support points are drawn from
    the path; all others are query points.

    Args:
        images: Pictures by person, pitch and yaw, ``(people, 7, 19, channels, height, width)``.
        support: Number of support pictures, below the number of yaws.
        yaws: Number of yaws of the path, from 0 degrees on; 10 to train for tests out of range.
        support_yaws: Number of yaws that support points are drawn from; all of the path if None.
        seed: Seed of all tasks.
    """

    images: Tensor
    support: int = 5
    _: KW_ONLY
    yaws: int = _YAWS
    support_yaws: int | None = None
    seed: int = 0

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        person = int(torch.randint(len(self.images), (), generator=generator))
        amplitude, phase = (2 * torch.rand(2, generator=generator) - 1) * torch.tensor([3.0, 5.0])
        path = torch.arange(self.yaws)
        pitches = (amplitude * torch.sin(phase + path)).round().long()  # -3 .. 3
        chosen = torch.randperm(self.support_yaws or self.yaws, generator=generator)[: self.support]
        # Support points first, in the order in which they were drawn.
        order = torch.cat([chosen, path[~torch.isin(path, chosen)]])
        images = unit_range(self.images[person, pitches + _PITCHES // 2, path])
        targets = (pitches / (_PITCHES // 2)).to(images.device)
        return regression_episode(images[order], targets[order], self.support)


def conv3(
    channels: int = 3, width: int = 36, generator: torch.Generator | None = None
) -> torch.nn.Sequential:
    """Three dilated 3x3 convolutions of stride two with ReLU, without normalization.

    The backbone of head-pose regression (Patacchiola et al. 2020, supplementary).

    Args:
        channels: Channels of an image, whose sides have 29 pixels or more.
        width: Channels of each layer.
        generator: Source of the start; seed 0 if None.
    """
    layers = [
        layer
        for inputs in (channels, width, width)
        for layer in (
            skip_init(torch.nn.Conv2d, inputs, width, 3, stride=2, dilation=2),
            torch.nn.ReLU(),
        )
    ]
    network = torch.nn.Sequential(*layers, torch.nn.Flatten())
    reset_network(network, generator)
    return network
