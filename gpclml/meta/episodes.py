"""Batches of few-shot tasks, and sources that draw each task by its number."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy
import torch
from torch import Tensor

from gpclml._utils.arguments import check_classes, check_counts, checked, reads_are_free
from gpclml.errors import ArgumentError, ShapeError

__all__ = ["Episodes", "NumberedTasks", "SingleTasks", "placed", "task_generator", "unit_range"]


@checked
@dataclass(frozen=True, init=False)
class Episodes:
    """A batch of few-shot tasks of one size, each with support points and query points.

    Values of classes are checked only on the CPU, because a check on a GPU would wait for it.

    Attributes:
        support_x: Inputs of the support points, which are learned from, ``(tasks, s, *event)``.
        support_y: Their targets, ``(tasks, s)``: classes from 0 as integers, or numbers.
        query_x: Inputs of the query points, which are predicted, ``(tasks, q, *event)``.
        query_y: Their targets, ``(tasks, q)``; None if they are not known, which suffices for
            predictions, and is kept as ``(tasks, 0)``.
        ways: Number of classes of a task; 0 in regression.

    Raises:
        ShapeError: The shapes do not fit each other.
        ArgumentError: Classes are not integers from 0 to ``ways - 1``, or ``ways`` is below 0.
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    ways: int

    def __init__(
        self,
        support_x: Tensor,
        support_y: Tensor,
        query_x: Tensor,
        query_y: Tensor | None = None,
        ways: int = 0,
    ) -> None:
        unknown = support_y[..., :0] if support_y.ndim else support_y
        values = support_x, support_y, query_x, unknown if query_y is None else query_y, ways
        for field, value in zip(fields(Episodes), values, strict=True):
            object.__setattr__(self, field.name, value)
        check_counts(0, "Use 0 for regression.", ways=self.ways)
        tasks = self.support_x.shape[0] if self.support_x.ndim else 0
        for name in ("support", "query"):
            x, y = getattr(self, f"{name}_x"), getattr(self, f"{name}_y")
            if name == "query" and y.shape[-1:] == (0,):  # not known
                x = x[:, :0]
            if y.ndim != 2 or y.shape[0] != tasks or x.shape[:2] != y.shape:
                expected = f"({tasks}, n) beside {name}_x of shape ({tasks}, n, ...)"
                got = f"shape {tuple(y.shape)} beside {tuple(x.shape)}"
                raise ShapeError(f"{name}_y", got, expected)
            if self.ways and reads_are_free(y.device):
                suggestion = "Number the classes of each task from 0."
                check_classes(f"{name}_y", y, self.ways, suggestion)

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.support_x)

    @property
    def num_support(self) -> int:
        """Number of support points of a task."""
        return self.support_y.shape[-1]

    def points(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all points, support points first.

        Raises:
            ArgumentError: Targets of query points are not known.
        """
        if self.query_y.shape[-1] != self.query_x.shape[1]:
            got = "tasks without targets of their query points"
            raise ArgumentError("episodes", got, "all targets", "Without them, use predict.")
        return self.inputs(), torch.cat([self.support_y, self.query_y], dim=1)

    def inputs(self) -> Tensor:
        """Inputs of all points, support points first."""
        return torch.cat([self.support_x, self.query_x], dim=1)

    @staticmethod
    def stack(parts: Sequence[Episodes]) -> Episodes:
        """Joins batches of tasks of one size.

        Args:
            parts: The batches, at least one.

        Raises:
            ShapeError: There is none, or they have tasks of several sizes.
        """
        sizes = {(p.ways, p.support_x.shape[1:], p.query_x.shape[1:]) for p in parts}
        if len(sizes) != 1:
            got = f"{len(sizes)} kinds of batches: (ways, support, query) {sorted(map(str, sizes))}"
            raise ShapeError("parts", got, "one or more batches of tasks of one size")
        names = [field.name for field in fields(Episodes) if field.name != "ways"]
        tensors = [torch.cat([getattr(part, name) for part in parts]) for name in names]
        return Episodes(*tensors, ways=parts[0].ways)

    def to(self, *args: object, **kwargs: object) -> Episodes:
        """The tasks with inputs, and targets of a regression, of another dtype or device.

        Args:
            *args: As for ``torch.Tensor.to``; a dtype does not change classes.
            **kwargs: As for ``torch.Tensor.to``.
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


def placed(episodes: Episodes, like: Tensor) -> Episodes:
    """The tasks on the device of a tensor, inputs in its type; targets keep theirs.

    Numbers far from zero, such as years or prices, need the digits that they came with.
    """
    moved = episodes.to(like.device)
    x = (moved.support_x.to(like.dtype), moved.query_x.to(like.dtype))
    return Episodes(x[0], moved.support_y, x[1], moved.query_y, ways=moved.ways)


class NumberedTasks(ABC):
    """Base class of sources of tasks of one size, each of which depends on its number alone."""

    @checked
    def draw(self, indices: Sequence[int]) -> Episodes:
        """Draws tasks by their numbers, as one batch.

        Args:
            indices: Numbers of tasks, from 0.

        Raises:
            ArgumentError: There is no number, or one that is below 0 or no integer.
        """
        if len(indices) == 0 or min(indices) < 0:
            got = min(indices) if len(indices) else "none"
            raise ArgumentError("indices", got, "numbers of tasks from 0, one or more")
        return self._tasks(indices)

    @abstractmethod
    def _tasks(self, indices: Sequence[int]) -> Episodes:
        """The tasks of these numbers."""

    def to(self, device: torch.device | str) -> Self:
        """The same tasks with their images on another device, where tasks are put together then.

        What a task is made of is drawn on the CPU in any case, so that it is the same task.

        Args:
            device: The device.
        """
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device))
        return moved


class SingleTasks(NumberedTasks):
    """Base class of sources that make one task after the other."""

    def _tasks(self, indices: Sequence[int]) -> Episodes:
        return Episodes.stack([self._task(index) for index in indices])

    @abstractmethod
    def _task(self, index: int) -> Episodes:
        """One task, as a batch of one."""


def unit_range(images: Tensor) -> Tensor:
    """Scales integers from 0 to 255 to numbers from 0 to 1; other numbers are not changed."""
    return images if images.is_floating_point() else images.float() / 255


def task_generator(seed: int, index: int, *stream: int) -> torch.Generator:
    """The generator of the task of that number, or another one of it."""
    # torch's CPU generator uses 32 bits of a seed: all numbers are mixed into them.
    mixed = numpy.random.SeedSequence([seed, index, *stream]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed[0]))
