"""Few-shot tasks to learn from: batches of them, and sources that draw each by its number."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol, Self, cast

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, IterableDataset, default_collate

from gpclml._utils.annotations import is_integer
from gpclml._utils.arguments import check_classes, check_counts, checked, reads_are_free
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError

NO_CLASS = -100
"""The class of padding: what PyTorch's losses ignore."""


@checked
@dataclass(frozen=True, init=False)
class Episodes:
    """A batch of few-shot tasks, each with support points and query points.

    Tasks of different sizes are one batch after :meth:`pad`: the points beyond the sizes of a task
    are padding, which is neither conditioned on nor scored nor passed to a backbone. What is
    predicted there has no meaning. Values of classes are checked only on the CPU, because a check
    on a GPU would wait for it.

    Attributes:
        support_x: Inputs of the support points, which are learned from, ``(tasks, s, *event)``.
        support_y: Their targets, ``(tasks, s)``: classes from 0 as integers, or numbers.
        query_x: Inputs of the query points, which are predicted, ``(tasks, q, *event)``.
        query_y: Their targets, ``(tasks, q)``; None if they are not known, which suffices for
            predictions, and is kept as ``(tasks, 0)``.
        ways: Number of classes of a task; 0 in regression.
        support_sizes: Number of support points of each task, at most s; all s if None is given.
        query_sizes: Number of query points of each task, at most q; all q if None is given.

    Raises:
        ShapeError: The shapes do not fit each other.
        ArgumentError: Classes are not integers from 0 to ``ways - 1``, ``ways`` is below 0, or a
            size is no integer from 0 to the number of points.
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    ways: int
    support_sizes: tuple[int, ...]
    query_sizes: tuple[int, ...]

    def __init__(
        self,
        support_x: Tensor,
        support_y: Tensor,
        query_x: Tensor,
        query_y: Tensor | None = None,
        ways: int = 0,
        support_sizes: Sequence[int] | None = None,
        query_sizes: Sequence[int] | None = None,
    ) -> None:
        check_counts(0, "Use 0 for regression.", ways=ways)
        tasks = support_x.shape[0] if support_x.ndim else 0
        # Targets that are not known are kept as (tasks, 0), so that every field is a tensor.
        known_x = query_x
        if query_y is None or query_y.shape[-1:] == (0,):
            known_x = query_x[:, :0]
            query_y = support_y[..., :0] if support_y.ndim else support_y
        point_sets = ("support", support_x, support_y), ("query", known_x, query_y)
        for name, x, y in point_sets:
            if y.ndim != 2 or y.shape[0] != tasks or x.shape[:2] != y.shape:
                expected = f"({tasks}, n) beside {name}_x of shape ({tasks}, n, ...)"
                got = f"shape {tuple(y.shape)} beside {tuple(x.shape)}"
                raise ShapeError(f"{name}_y", got, expected)
        support_sizes = _sizes("support_sizes", support_sizes, support_x)
        query_sizes = _sizes("query_sizes", query_sizes, query_x)
        for (name, _, y), sizes in zip(point_sets, (support_sizes, query_sizes), strict=True):
            if ways and reads_are_free(y.device):
                points = y[_within(sizes, y)]
                check_classes(f"{name}_y", points, ways, "Number the classes of each task from 0.")
        vars(self).update(  # as a frozen dataclass refuses to set them
            support_x=support_x, support_y=support_y, query_x=query_x, query_y=query_y, ways=ways,
            support_sizes=support_sizes, query_sizes=query_sizes,
        )  # fmt: skip

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.support_x)

    @property
    def num_support(self) -> int:
        """Number of support points of a task, with padding."""
        return self.support_y.shape[-1]

    def mask(self) -> Tensor | None:
        """Which points are no padding, boolean ``(tasks, n)`` on the CPU, support points first.

        None where no point is padding.
        """
        support = _within(self.support_sizes, self.support_x)
        mask = torch.cat([support, _within(self.query_sizes, self.query_x)], dim=1)
        return None if bool(mask.all()) else mask

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
    @checked
    def stack(batches: Sequence[Episodes]) -> Episodes:
        """Joins batches of tasks of one size.

        Args:
            batches: The batches, at least one.

        Raises:
            ShapeError: There is none, or they differ in size, number of classes, shape of inputs
                or in whether targets of query points are known.
        """
        inputs = "support_x", "query_x", "query_y"
        kinds = {(p.ways, *(tuple(getattr(p, name).shape[1:]) for name in inputs)) for p in batches}
        if len(kinds) != 1:
            told = f"(ways, {', '.join(inputs)}) {sorted(map(str, kinds))}"
            got, expected = f"{len(kinds)} kinds of batches: {told}", "one or more of one kind"
            fix = "Episodes.pad joins tasks of different numbers of points."
            raise ShapeError("batches", got, expected, fix)

        def joined(name: str) -> Any:
            values = [getattr(episodes, name) for episodes in batches]
            return torch.cat(values) if isinstance(values[0], Tensor) else sum(values, ())

        fields = {name: joined(name) for name in vars(batches[0]) if name != "ways"}
        return replace(batches[0], **fields)

    @staticmethod
    @checked
    def pad(batches: Sequence[Episodes], support: int | None = None) -> Episodes:
        """Joins batches of tasks of any numbers of points, filled up with padding.

        Objectives and predictions of a task are those that it has alone. Padding has inputs of
        zeros, and as targets NaN or the class -100, which PyTorch's losses ignore.

        Args:
            batches: The batches, at least one.
            support: Number of support points with padding; that of the largest task if None. An
                objective that conditions on them, ``LastPoints(m=support)``, needs one number for
                all batches.

        Raises:
            ArgumentError: A task has more points.
            ShapeError: As of :meth:`stack`, but for the size.

        Examples:
            >>> import torch
            >>> from gpclml.meta import Episodes
            >>> x, y = torch.rand(1, 9, 2), torch.rand(1, 9)
            >>> large = Episodes(x[:, :5], y[:, :5], x[:, 5:], y[:, 5:])
            >>> small = Episodes(x[:, :2], y[:, :2], x[:, 2:5], y[:, 2:5])
            >>> both = Episodes.pad([large, small])
            >>> both.support_x.shape, both.support_sizes, both.query_sizes
            (torch.Size([2, 5, 2]), (5, 2), (4, 3))
        """
        s = max((episodes.support_x.shape[1] for episodes in batches), default=0)
        q = max((episodes.query_x.shape[1] for episodes in batches), default=0)
        check_counts(s, "The largest task has as many.", support=support)
        return Episodes.stack([episodes._filled(support or s, q) for episodes in batches])

    def _filled(self, support: int, queries: int) -> Episodes:
        """The same tasks with padding up to these numbers of points."""
        # Where targets of query points are not known there are none to fill up.
        known = queries if self.query_y.shape[1] == self.query_x.shape[1] else 0
        sizes = {"support_x": support, "support_y": support, "query_x": queries, "query_y": known}
        filled = {}
        for name, size in sizes.items():
            values = getattr(self, name)
            missing = math.nan if values.is_floating_point() else NO_CLASS
            more = [0, 0] * (values.ndim - 2) + [0, size - values.shape[1]]
            filled[name] = pad(values, more, value=missing if name.endswith("y") else 0)
        return replace(self, **filled)

    def to(self, *args: Any, **kwargs: Any) -> Episodes:
        """The tasks on another device, or with inputs of another dtype; targets keep theirs.

        Targets far from zero, such as years or prices, need the digits that they came with.

        Args:
            *args: As for ``torch.Tensor.to``, which also takes a tensor to be like.
            **kwargs: As for ``torch.Tensor.to``.
        """
        support_x, query_x = self.support_x.to(*args, **kwargs), self.query_x.to(*args, **kwargs)
        support_y, query_y = (y.to(support_x.device) for y in (self.support_y, self.query_y))
        moved = {"support_x": support_x, "query_x": query_x}
        return replace(self, **moved, support_y=support_y, query_y=query_y)


def _sizes(name: str, sizes: Sequence[int] | None, x: Tensor) -> tuple[int, ...]:
    """Numbers of points of each task, of inputs ``(tasks, n, *event)``."""
    tasks, n = x.shape[:2]
    sizes = tasks * [n] if sizes is None else sizes
    if len(sizes) != tasks or not all(is_integer(size) and 0 <= size <= n for size in sizes):
        raise ArgumentError(name, list(sizes), f"{tasks} integers from 0 to {n}, one a task")
    return tuple(map(int, sizes))


def _within(sizes: Sequence[int], x: Tensor) -> Tensor:
    """Which values ``(tasks, n, ...)`` are within the sizes, boolean ``(tasks, n)``."""
    return torch.arange(x.shape[1]) < torch.tensor(sizes).unsqueeze(-1)


class Tasks(Protocol):
    """A source of numbered tasks, such as :class:`~gpclml.meta.ImageTasks`."""

    def draw(self, indices: Sequence[int]) -> Episodes:
        """Draws tasks by their numbers, as one batch."""
        ...


class NumberedTasks(ABC):
    """Base class of sources of tasks, each of which depends on its number alone."""

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
        return Episodes.stack([self._task(index) for index in indices])

    @abstractmethod
    def _task(self, index: int) -> Episodes:
        """The task of this number, as a batch of one."""

    def to(self, device: torch.device | str) -> Self:
        """The same tasks with their data on another device, where tasks are put together then.

        What a task is made of is drawn on the CPU in any case, so that it is the same task.

        Args:
            device: The device.
        """
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Episodes):
                setattr(moved, name, value.to(device))
        return moved


class DatasetTasks(NumberedTasks):
    """Tasks that a data set contains, of one size or of many, read into memory.

    An item is one task: tensors or arrays ``(support_x, support_y, query_x, query_y)`` of shapes
    ``(s, *event)``, ``(s,)``, ``(q, *event)`` and ``(q,)``, without the last one where it is not
    known, or :class:`Episodes` of one task. Smaller tasks are padded to the largest numbers of
    support and of query points. Numbers beyond the last task start again from the first;
    ``evaluate_tasks`` scores each of them once at most.

    Args:
        dataset: A map-style data set, or a sequence of such items.
        ways: Number of classes of a task, of items that are tensors; 0 in regression.

    Attributes:
        tasks: All tasks, as one batch.

    Raises:
        UnsupportedError: It is an iterable-style data set.
        ArgumentError: It is empty.
        ShapeError: An item is no task, or items differ in ways or in the shape of inputs.

    Examples:
        >>> import torch
        >>> from gpclml.meta import DatasetTasks
        >>> x, y = torch.rand(20, 9, 2), torch.rand(20, 9)
        >>> sizes = [2 + i % 4 for i in range(20)]
        >>> items = [(x[i, :s], y[i, :s], x[i, s:], y[i, s:]) for i, s in enumerate(sizes)]
        >>> tasks = DatasetTasks(items)
        >>> len(tasks), tasks.draw([0, 1]).support_sizes
        (20, (2, 3))
    """

    @checked
    def __init__(self, dataset: Dataset[Any] | Sequence[Any], ways: int = 0) -> None:
        check_counts(0, "Use 0 for regression.", ways=ways)
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            expected, fix = "a data set with a length", "Read its items into a list."
            raise UnsupportedError("dataset", type(dataset).__name__, expected, fix)
        if not len(dataset):
            raise ArgumentError("dataset", "no item", "one or more tasks")
        tasks = [_read_task(dataset, index, ways) for index in range(len(dataset))]
        try:
            self.tasks: Episodes = Episodes.pad(tasks)
        except ShapeError as error:
            expected = "tasks of one number of classes and one shape of inputs"
            raise ShapeError("dataset", f"items that differ ({error})", expected) from error

    def __len__(self) -> int:
        return self.tasks.num_tasks

    def _task(self, index: int) -> Episodes:
        fields, first = vars(self.tasks), index % len(self)
        rows = {name: fields[name][first : first + 1] for name in fields if name != "ways"}
        return replace(self.tasks, **rows)


def _read_task(dataset: Any, index: int, ways: int) -> Episodes:
    """An item of a data set as a batch of one task."""
    task = dataset[index]
    try:
        if not isinstance(task, Episodes):
            if not isinstance(task, tuple | list) or len(task) not in (3, 4):
                size = f" of {len(task)}" if isinstance(task, Sized) else ""
                raise TypeError(type(task).__name__ + size)
            task = Episodes(*(torch.as_tensor(values).unsqueeze(0) for values in task), ways=ways)
        if task.num_tasks != 1:
            raise ValueError(f"{task.num_tasks} tasks")
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "tensors (support_x, support_y, query_x, query_y), or Episodes of one task"
        raise ShapeError("dataset", f"item {index}: {error}", expected) from error
    return task


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
        >>> import torch
        >>> from gpclml.meta import ImageTasks
        >>> images, labels = torch.rand(120, 1, 28, 28), torch.arange(120) % 6
        >>> tasks = ImageTasks(images, labels, ways=5, shots=1, queries=16)
        >>> tasks.draw(range(8)).support_x.shape
        torch.Size([8, 5, 1, 28, 28])
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
        _, classes, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
        self._rows = classes.argsort(stable=True).split(counts.tolist())  # of each class
        if self.num_classes < ways:
            raise ArgumentError("ways", ways, f"at most the {self.num_classes} classes there are")
        if (fewest := int(counts.min())) < shots + queries:
            expected = f"at most the {fewest} images of the smallest class"
            suggestion = "Take fewer shots or queries, or leave out that class."
            raise ArgumentError("shots + queries", shots + queries, expected, suggestion)

    @property
    def num_classes(self) -> int:
        """Number of classes that tasks are drawn from, including turned ones."""
        return len(self._rows) * (4 if self.rotations else 1)

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        # A class and a quarter turn of it are one number, so that turns are drawn like classes.
        chosen = torch.randperm(self.num_classes, generator=generator)[: self.ways].tolist()
        size, members = self.shots + self.queries, []
        for quarter_turns, label in (divmod(number, len(self._rows)) for number in chosen):
            rows = self._rows[label]
            drawn = rows[torch.randperm(len(rows), generator=generator)[:size]]
            images = self.images[drawn.to(self.images.device)]
            members.append(torch.rot90(images, quarter_turns, (-2, -1)))
        images = unit_range(torch.stack(members))  # (ways, shots + queries, *event)
        labels = torch.arange(self.ways, device=images.device).unsqueeze(-1).expand(-1, size)
        support, query = (
            tuple(values[:, which].flatten(0, 1).unsqueeze(0) for values in (images, labels))
            for which in (slice(None, self.shots), slice(self.shots, None))
        )
        return Episodes(*support, *query, ways=self.ways)


def _read(dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """All images ``(N, channels, height, width)`` of a data set and their classes ``(N,)``."""
    pairs = [dataset[index] for index in range(len(cast(Sized, dataset)))]
    images, labels = default_collate(pairs)
    if images.ndim != 4:
        got = f"a data set of images of shape {tuple(images.shape[1:])}"
        raise ShapeError("images", got, "(channels, height, width) each")
    return images, labels


@checked
@dataclass(eq=False)
class PeriodicTasks(NumberedTasks):
    r"""Sine waves of unknown amplitude and phase, :math:`y = a \sin(x + \phi) + \epsilon`.

    :math:`a \sim U(0.1, 5)`, :math:`\phi \sim U(0, \pi)`, noise of standard deviation 0.1;
    support points uniform on [-5, 5] (Patacchiola et al. 2020, Section 5.1; Finn et al. 2017).
    Query points are spread evenly: on [-5, 5], or ``out_of_range`` on [-5, 10]. Task ``i``
    depends on ``seed`` and ``i`` alone. Inputs are ``(tasks, n, 1)``.

    Args:
        support: Number of support points.
        queries: Number of query points.
        out_of_range: Whether query points extend beyond the range of support points.
        seed: Seed of all tasks.

    Raises:
        ArgumentError: A number is out of range.
    """

    support: int = 5
    queries: int = 50
    _: KW_ONLY
    out_of_range: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(support=self.support, queries=self.queries)

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        amplitude = 0.1 + 4.9 * torch.rand((), generator=generator)
        phase = math.pi * torch.rand((), generator=generator)
        support = 10 * torch.rand(self.support, generator=generator) - 5
        # The range changes no draw: support points are those of tasks within it.
        last = 10.0 if self.out_of_range else 5.0
        x = torch.cat([support, torch.linspace(-5.0, last, self.queries)])
        noise = 0.1 * torch.randn(len(x), generator=generator)
        y = amplitude * torch.sin(x + phase) + noise
        return regression_episode(x.unsqueeze(-1), y, self.support)


def regression_episode(x: Tensor, y: Tensor, support: int) -> Episodes:
    """A regression task of points ``(n, *event)`` and targets ``(n,)``, support points first."""
    # A batch of one: the base class joins them.
    x, y = x.unsqueeze(0), y.unsqueeze(0)
    return Episodes(x[:, :support], y[:, :support], x[:, support:], y[:, support:])


def unit_range(images: Tensor) -> Tensor:
    """Scales integers from 0 to 255 to numbers from 0 to 1; other numbers are not changed."""
    return images if images.is_floating_point() else images.float() / 255


def task_generator(seed: int, index: int) -> torch.Generator:
    """The generator of the task of that number."""
    # torch's CPU generator uses 32 bits of a seed: all numbers are mixed into them.
    mixed = numpy.random.SeedSequence([seed, index]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed[0]))
