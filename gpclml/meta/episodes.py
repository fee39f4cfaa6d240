"""Few-shot tasks: what they hold, and how classification tasks are drawn from labelled images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy
import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError

__all__ = [
    "Episodes",
    "ImageTasks",
    "NumberedTasks",
    "check_counts",
    "task_generator",
    "unit_range",
]

_QUARTER_TURNS = 4


@dataclass(frozen=True)
class Episodes:
    """A batch of tasks of one size, each with points to learn from and points to predict.

    Attributes:
        support_x: Inputs to learn from, ``(tasks, s, *event)``.
        support_y: Their targets, ``(tasks, s)``: classes from 0 as integers, or numbers.
        query_x: Inputs to predict, ``(tasks, q, *event)``.
        query_y: Their targets, ``(tasks, q)``.
        ways: Number of classes of a task; 0 in regression.
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    ways: int = 0

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return len(self.support_x)

    @property
    def num_support(self) -> int:
        """How many points a task has to learn from."""
        return self.support_y.shape[-1]

    @staticmethod
    def stack(parts: Sequence[Episodes]) -> Episodes:
        """Batches of tasks of one size as one batch.

        Args:
            parts: At least one.
        """
        names = [field.name for field in fields(Episodes) if field.name != "ways"]
        tensors = [torch.cat([getattr(part, name) for part in parts]) for name in names]
        return Episodes(*tensors, ways=parts[0].ways)

    def to(self, *args: object, **kwargs: object) -> Episodes:
        """The same with inputs (and, in regression, targets) as ``Tensor.to`` would have them.

        Args:
            *args: As for ``torch.Tensor.to``; a dtype leaves classes as they are.
            **kwargs: The same.
        """

        def moved(values: Tensor) -> Tensor:
            there = values.to(*args, **kwargs)  # type: ignore[arg-type]
            return there if values.is_floating_point() else there.to(values.dtype)

        return Episodes(
            self.support_x.to(*args, **kwargs),  # type: ignore[arg-type]
            moved(self.support_y),
            self.query_x.to(*args, **kwargs),  # type: ignore[arg-type]
            moved(self.query_y),
            ways=self.ways,
        )


class NumberedTasks(ABC):
    """A source of tasks of one size, each drawn by its number alone."""

    def draw(self, indices: Sequence[int]) -> Episodes:
        """These tasks as one batch.

        Args:
            indices: Numbers of tasks, from 0.
        """
        return Episodes.stack([self._task(index) for index in indices])

    @abstractmethod
    def _task(self, index: int) -> Episodes:
        """One task, as a batch of one."""


class ImageTasks(NumberedTasks):
    """N-way K-shot classification tasks from labelled images.

    Images of one class are side by side. Task ``i`` is drawn from a generator seeded by ``seed``
    and ``i`` alone: it is the same whichever worker draws it, in whatever order.

    Args:
        images: Images, ``(N, channels, height, width)``; integers count as 0 to 255 and become
            0 to 1.
        labels: Their classes, any integers, ``(N,)``.
        ways: Classes a task.
        shots: Images of each class to learn from.
        queries: Images of each class to predict.
        rotations: Whether each quarter turn of a class is a class of its own, as usual for
            Omniglot (Santoro et al. 2016).
        seed: Seed of all tasks.

    Raises:
        ShapeError: Images and labels do not fit.
        ArgumentError: A number is below 1, there are fewer classes than ways, or a class has
            too few images.

    Examples:
        >>> tasks = ImageTasks(images, labels, ways=5, shots=1, queries=16)
        >>> tasks.draw(range(8)).support_x.shape
        torch.Size([8, 5, 1, 28, 28])
    """

    @checked(images="(N, channels, height, width)", labels="integer (N,)")
    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        rotations: bool = False,
        seed: int = 0,
    ) -> None:
        check_counts(ways=ways, shots=shots, queries=queries)
        if rotations and images.shape[-1] != images.shape[-2]:
            got = f"images of shape {tuple(images.shape[1:])}"
            raise ShapeError("images", got, "square ones, to be turned", "Pass rotations=False.")
        self.images = images
        self.ways, self.shots, self.queries = ways, shots, queries
        self.rotations = rotations
        self.seed = seed
        self._rows = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
        if self.num_classes < ways:
            raise ArgumentError("ways", ways, f"at most the {self.num_classes} classes there are")
        fewest = min(len(rows) for rows in self._rows)
        if fewest < shots + queries:
            expected = f"at most the {fewest} images of the smallest class"
            mend = "Take fewer shots or queries, or leave out that class."
            raise ArgumentError("shots + queries", shots + queries, expected, mend)

    @property
    def num_classes(self) -> int:
        """Number of classes that tasks are drawn from, turned ones included."""
        return len(self._rows) * (_QUARTER_TURNS if self.rotations else 1)

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        chosen = torch.randperm(self.num_classes, generator=generator)[: self.ways].tolist()
        images = torch.stack([self._images_of(one, generator) for one in chosen])
        labels = torch.arange(self.ways).unsqueeze(-1).expand(-1, self.shots + self.queries)
        support, query = slice(None, self.shots), slice(self.shots, None)
        parts = [
            values[:, which].flatten(0, 1).unsqueeze(0)
            for which in (support, query)
            for values in (images, labels)
        ]
        return Episodes(*parts, ways=self.ways)

    def _images_of(self, index: int, generator: torch.Generator) -> Tensor:
        turns, place = divmod(index, len(self._rows))
        rows = self._rows[place]
        order = torch.randperm(len(rows), generator=generator)[: self.shots + self.queries]
        images = unit_range(self.images[rows[order]])
        return torch.rot90(images, turns, dims=(-2, -1)) if turns else images


def check_counts(**numbers: int) -> None:
    """Raises an ArgumentError if one of these numbers is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ArgumentError(name, number, "at least 1")


def unit_range(images: Tensor) -> Tensor:
    """Integers from 0 to 255 as numbers from 0 to 1; others as they are."""
    return images if images.is_floating_point() else images.float() / 255


def task_generator(seed: int, index: int) -> torch.Generator:
    """The generator of one task.

    Args:
        seed: Seed of all tasks, 0 or above.
        index: Number of the task, 0 or above.
    """
    # torch's CPU generator looks at 32 bits of a seed: both numbers are mixed into them.
    mixed = numpy.random.SeedSequence([seed, index]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed[0]))
