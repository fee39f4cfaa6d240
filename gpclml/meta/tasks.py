"""Few-shot tasks to learn from: images to classify, functions, angles, head poses."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from gpclml._utils.arguments import check_counts, checked
from gpclml.errors import ArgumentError, ShapeError
from gpclml.meta.episodes import (
    Episodes,
    NumberedTasks,
    SingleTasks,
    task_generator,
    unit_range,
)
from gpclml.meta.evaluation import Tasks

__all__ = [
    "AugmentedTasks",
    "HeadPoseTasks",
    "ImageTasks",
    "PeriodicTasks",
    "RotationTasks",
    "transformed",
]

_QUARTER_TURNS = 4
_PITCHES, _YAWS = 7, 19


class ImageTasks(NumberedTasks):
    """N-way K-shot classification tasks from labelled images.

    The images of a class follow each other. Task ``i`` is drawn from a generator seeded by ``seed``
    and ``i``, so that it is the same for every worker and in every order.

    Args:
        images: Images, ``(N, channels, height, width)``; integers count as 0 to 255 and become
            0 to 1. Or a data set of pairs of an image ``(channels, height, width)`` and its class,
            which is read into memory; the guide to few-shot tasks does so with Omniglot.
        labels: Their classes, any integers, ``(N,)``; None for a data set, which has them.
        ways: Number of classes of a task.
        shots: Support images of each class.
        queries: Query images of each class.
        rotations: Whether each quarter turn of a class is another class, as usual for Omniglot
            (Santoro et al. 2016).
        seed: Seed of all tasks.

    Raises:
        ShapeError: The numbers of images and labels differ, or images to be turned are not square.
        ArgumentError: A number is below 1, there are fewer classes than ways, a class has too few
            images, or tensors come without labels.

    Examples:
        >>> tasks = ImageTasks(images, labels, ways=5, shots=1, queries=16)
        >>> tasks.draw(range(8)).support_x.shape
        torch.Size([8, 5, 1, 28, 28])
        >>> from torch.utils.data import TensorDataset
        >>> tasks = ImageTasks(TensorDataset(images, labels), ways=5, shots=1, queries=16)
    """

    @checked(images="(N, channels, height, width)", labels="integer (N,)")
    def __init__(
        self,
        images: Tensor | Dataset[Any],
        labels: Tensor | None = None,
        *,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        rotations: bool = False,
        seed: int = 0,
    ) -> None:
        check_counts(ways=ways, shots=shots, queries=queries)
        if isinstance(images, Dataset):
            images, labels = _read(images)
        if labels is None:
            raise ArgumentError("labels", None, "the classes of the images")
        if rotations and images.shape[-1] != images.shape[-2]:
            got = f"images of shape {tuple(images.shape[1:])}"
            raise ShapeError("images", got, "square ones, to be turned", "Pass rotations=False.")
        self.images = images
        self.labels = labels
        self.ways = ways
        self.shots = shots
        self.queries = queries
        self.rotations = rotations
        self.seed = seed
        on_cpu = labels.cpu()
        self._rows = [(on_cpu == label).nonzero()[:, 0] for label in on_cpu.unique()]
        self._places = _turned_places(images.shape[-1]).to(images.device) if rotations else None
        if self.num_classes < ways:
            raise ArgumentError("ways", ways, f"at most the {self.num_classes} classes there are")
        fewest = min(len(rows) for rows in self._rows)
        if fewest < shots + queries:
            expected = f"at most the {fewest} images of the smallest class"
            suggestion = "Take fewer shots or queries, or leave out that class."
            raise ArgumentError("shots + queries", shots + queries, expected, suggestion)

    @property
    def num_classes(self) -> int:
        """Number of classes that tasks are drawn from, including turned ones."""
        return len(self._rows) * (_QUARTER_TURNS if self.rotations else 1)

    def _tasks(self, indices: Sequence[int]) -> Episodes:
        """On the device of the images."""
        drawn = [self._draw(index) for index in indices]
        rows, turns = (
            torch.stack(part).to(self.images.device) for part in zip(*drawn, strict=True)
        )
        images = unit_range(self.images[rows])  # (tasks, ways, shots + queries, *event)
        if self._places is not None:
            places = self._places[turns][:, :, None, None].expand(*images.shape[:-2], -1)
            images = images.flatten(-2).gather(-1, places).unflatten(-1, images.shape[-2:])
        labels = torch.arange(self.ways, device=images.device).unsqueeze(-1).expand_as(rows)
        support, query = slice(None, self.shots), slice(self.shots, None)
        parts = [
            values[:, :, which].flatten(1, 2)
            for which in (support, query)
            for values in (images, labels)
        ]
        return Episodes(*parts, ways=self.ways)

    def _draw(self, index: int) -> tuple[Tensor, Tensor]:
        """Rows ``(ways, shots + queries)`` and quarter turns, drawn on the CPU for every device."""
        generator = task_generator(self.seed, index)
        chosen = torch.randperm(self.num_classes, generator=generator)[: self.ways].tolist()
        each, rows, turns = self.shots + self.queries, [], []
        for turn, place in (divmod(one, len(self._rows)) for one in chosen):
            own = self._rows[place]
            rows.append(own[torch.randperm(len(own), generator=generator)[:each]])
            turns.append(turn)
        return torch.stack(rows), torch.tensor(turns)


def _read(dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """All images ``(N, channels, height, width)`` of a data set and their classes ``(N,)``."""
    pairs = [dataset[index] for index in range(len(cast(Sized, dataset)))]
    images, labels = default_collate(pairs)
    if images.ndim != 4:
        got = f"a data set of images of shape {tuple(images.shape[1:])}"
        raise ShapeError("images", got, "(channels, height, width) each")
    return images, labels


class PeriodicTasks(SingleTasks):
    r"""Sine waves of unknown amplitude and phase, :math:`y = a \sin(x + \phi) + \epsilon`.

    :math:`a \sim U(0.1, 5)`, :math:`\phi \sim U(0, \pi)`, noise of standard deviation 0.1;
    support points uniform on [-5, 5] (Patacchiola et al. 2020, Section 5.1; Finn et al. 2017).
    Query points are spread evenly: on [-5, 5], or ``out_of_range`` on [-5, 10]. Task ``i``
    depends on ``seed`` and ``i`` alone. Inputs are ``(tasks, n, 1)``.

    Args:
        support: Number of support points.
        queries: Number of query points.
        out_of_range: Whether query points extend beyond the range of support points.
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
        self.support = support
        self.queries = queries
        self.range: tuple[float, float] = (-5.0, 10.0 if out_of_range else 5.0)
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


class RotationTasks(SingleTasks):
    """The angle by which an image is turned, from a few turned views of known angle.

    A task is one image. Its views are turned by angles uniform on [-90°, 90°], with bilinear
    interpolation and background outside of it; targets are angles in units of 90°. Task ``i``
    depends on ``seed`` and ``i`` alone. Inputs are ``(tasks, n, channels, size, size)``.

    Args:
        images: Images, ``(N, channels, height, width)``; integers count as 0 to 255 and become
            0 to 1. Zero is background.
        support: Number of support views.
        queries: Number of query views.
        seed: Seed of all tasks.

    Raises:
        ShapeError: Images are not square or not of four dimensions.
        ArgumentError: A number is out of range.
    """

    @checked(images="(N, channels, height, width)")
    def __init__(
        self, images: Tensor, support: int = 10, queries: int = 20, *, seed: int = 0
    ) -> None:
        if images.shape[-1] != images.shape[-2]:
            expected = "(N, channels, size, size), square"
            raise ShapeError("images", tuple(images.shape), expected)
        check_counts(support=support, queries=queries)
        self.images = images
        self.support = support
        self.queries = queries
        self.seed = seed

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        image = unit_range(self.images[torch.randint(len(self.images), (), generator=generator)])
        angle = 2 * torch.rand(self.support + self.queries, generator=generator) - 1
        views = _turned(image, angle * math.pi / 2)
        return _episode(views, angle.to(views.device), self.support)


class HeadPoseTasks(SingleTasks):
    r"""The pitch of a head along a path of 19 pictures, from the pitches of a few of them.

    A task is one person whose head turns from yaw 0 to 180 degrees in steps of ten while its
    pitch follows :math:`a \sin(\phi + i)`, :math:`a \sim U(-3, 3)`, :math:`\phi \sim U(-5, 5)`, in
    units of 10 degrees about level and rounded to them (Patacchiola et al. 2020, Section 5.1).
    Targets are pitches in units of 30 degrees, from -1 to 1. Support points are drawn from
    the path; all others are query points. Task ``i`` depends on ``seed`` and ``i`` alone. Inputs
    are ``(tasks, n, channels, height, width)``.

    Args:
        images: Pictures by person, pitch and yaw, ``(people, 7, 19, channels, height, width)``;
            integers count as 0 to 255 and become 0 to 1.
        support: Number of support pictures.
        yaws: Number of yaws of the path, from 0 degrees on; 10 to train for tests out of range.
        support_yaws: Number of yaws that support points are drawn from; all of the path if None.
        seed: Seed of all tasks.

    Raises:
        ShapeError: Images have another shape.
        ArgumentError: A number is out of range.
    """

    @checked(images="(people, 7, 19, channels, height, width)")
    def __init__(
        self,
        images: Tensor,
        support: int = 5,
        *,
        yaws: int = _YAWS,
        support_yaws: int | None = None,
        seed: int = 0,
    ) -> None:
        support_yaws = yaws if support_yaws is None else support_yaws
        check_counts(support=support, yaws=yaws, support_yaws=support_yaws)
        if not support_yaws <= yaws <= _YAWS:
            got = f"{support_yaws} of {yaws}"
            raise ArgumentError("support_yaws", got, f"at most yaws, and those at most {_YAWS}")
        if support > support_yaws or support == yaws:
            expected = f"at most the {support_yaws} pictures to choose from, and fewer than {yaws}"
            raise ArgumentError("support", support, expected)
        self.images = images
        self.support = support
        self.yaws = yaws
        self.support_yaws = support_yaws
        self.seed = seed

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        person = int(torch.randint(len(self.images), (), generator=generator))
        amplitude, phase = (2 * torch.rand(2, generator=generator) - 1) * torch.tensor([3.0, 5.0])
        path = torch.arange(self.yaws)
        pitches = (amplitude * torch.sin(phase + path)).round().long()  # -3 .. 3
        chosen = torch.randperm(self.support_yaws, generator=generator)[: self.support]
        order = torch.cat([chosen, path[~torch.isin(path, chosen)]])
        images = unit_range(self.images[person, pitches + _PITCHES // 2, path])
        targets = (pitches / (_PITCHES // 2)).to(images.device)
        return _episode(images[order], targets[order], self.support)


def _turned_places(side: int) -> Tensor:
    """Where the pixels of a square image come from, row by row, in each quarter turn."""
    places = torch.arange(side * side).reshape(side, side)
    return torch.stack([torch.rot90(places, turn).flatten() for turn in range(_QUARTER_TURNS)])


def _turned(image: Tensor, angles: Tensor) -> Tensor:
    """The image turned by each angle in radians, ``(n, channels, size, size)``."""
    cos, sin = angles.cos(), angles.sin()
    zero = torch.zeros_like(cos)
    turns = torch.stack([cos, -sin, zero, sin, cos, zero], dim=-1).reshape(-1, 2, 3).to(image)
    return transformed(image.expand(len(angles), *image.shape), turns)


def transformed(images: Tensor, maps: Tensor) -> Tensor:
    """Images moved: affine maps ``(n, 2, 3)`` tell where pixels come from; background 0."""
    grid = torch.nn.functional.affine_grid(maps, list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


def _episode(x: Tensor, y: Tensor, support: int) -> Episodes:
    x, y = x.unsqueeze(0), y.unsqueeze(0)
    return Episodes(x[:, :support], y[:, :support], x[:, support:], y[:, support:])


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
