"""Tasks whose images are turned, cropped and mirrored at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta.episodes import Episodes, NumberedTasks, task_generator, unit_range
from gpclml.meta.evaluation import Tasks
from gpclml.meta.tasks import transformed

__all__ = ["AugmentedTasks"]

_STREAM = 1  # of random numbers, apart from that of the tasks themselves


class AugmentedTasks(NumberedTasks):
    """The tasks of another source, each image turned, cropped and mirrored at random.

    It is for training: a network learns to ignore these changes. Each support and query image is
    changed in its own way, which depends only on the number of its task and the seed. Pixels are
    interpolated; those from outside of an image are 0.

    Args:
        tasks: Source of tasks of images, ``(tasks, n, channels, height, width)``.
        degrees: Largest angle by which an image is turned, to either side.
        crop: Smallest side of a crop, as a share of the image's; crops are scaled to full size.
        mirrored: Whether half of the images are mirrored, left to right.
        seed: Seed of the changes.

    Raises:
        ArgumentError: A number is out of range.
        ShapeError: In drawing: the source has no images.

    Examples:
        >>> tasks = AugmentedTasks(ImageTasks(images, labels), degrees=15, crop=0.8)
        >>> tasks.draw(range(8)).support_x.shape
        torch.Size([8, 5, 1, 28, 28])
    """

    @checked
    def __init__(
        self,
        tasks: Tasks,
        *,
        degrees: float = 0.0,
        crop: float = 1.0,
        mirrored: bool = False,
        seed: int = 0,
    ) -> None:
        if not 0 <= degrees <= 180:
            raise ArgumentError("degrees", degrees, "an angle from 0 to 180")
        if not 0 < crop <= 1:
            raise ArgumentError("crop", crop, "a share of the side, above 0 and at most 1")
        self.tasks = tasks
        self.degrees: float = float(degrees)
        self.crop: float = float(crop)
        self.mirrored = mirrored
        self.seed = seed

    def _tasks(self, indices: Sequence[int]) -> Episodes:
        drawn = self.tasks.draw(indices)
        if drawn.support_x.ndim != 5:
            got, expected = f"points of shape {tuple(drawn.support_x.shape[2:])}", "images"
            raise ShapeError("tasks", got, f"{expected}, (channels, height, width)")
        x = unit_range(drawn.points()[0])
        height, width = x.shape[-2:]
        maps = [self._maps(index, x.shape[1], height / width) for index in indices]
        changes = torch.stack(maps)
        x = transformed(x.flatten(0, 1), changes.flatten(0, 1).to(x)).unflatten(0, x.shape[:2])
        support, query = x[:, : drawn.num_support], x[:, drawn.num_support :]
        return Episodes(support, drawn.support_y, query, drawn.query_y, ways=drawn.ways)

    def to(self, device: torch.device | str) -> Self:
        """The same tasks, put together and changed on another device.

        Args:
            device: The device.
        """
        if not isinstance(self.tasks, NumberedTasks):
            expected = "numbered tasks, such as ImageTasks"
            raise ArgumentError("tasks", type(self.tasks).__name__, expected)
        moved = super().to(device)
        moved.tasks = self.tasks.to(device)
        return moved

    def _maps(self, index: int, count: int, ratio: float) -> Tensor:
        """Where the pixels of each image of a task come from: affine maps ``(count, 2, 3)``."""
        generator = task_generator(self.seed, index, _STREAM)
        turn, size, right, below, side = torch.rand(5, count, generator=generator)
        angle = (2 * turn - 1) * math.radians(self.degrees)
        size = self.crop + (1 - self.crop) * size
        shifts = [(1 - size) * (2 * one - 1) for one in (right, below)]  # within the image
        flip = torch.where(side < 0.5, -1.0, 1.0) if self.mirrored else torch.ones(count)
        cos, sin = size * angle.cos(), size * angle.sin()
        across = torch.stack([flip * cos, -ratio * sin, shifts[0]], dim=-1)
        down = torch.stack([flip * sin / ratio, cos, shifts[1]], dim=-1)
        return torch.stack([across, down], dim=-2)
