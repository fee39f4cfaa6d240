"""Data in batches, from tensors or from a loader; partitions of points, and orders of arrival."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import cast

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, checked
from gpclml.errors import ArgumentError, ShapeError

Loader = Iterable[Sequence[Tensor]]
"""Gives pairs of points and targets: a ``DataLoader``, or a list of pairs."""

Data = Loader | tuple[Tensor, Tensor]
Points = Tensor | Iterable[Tensor | Sequence[Tensor]]
"""Points, or a loader of points or of sequences that begin with them."""


def batches_of(
    argument: str, data: Data, size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Points and targets, on the device, from an iterable of pairs or from two tensors."""
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor):
        x, y = _checked_pair(argument, data)
        data = zip(x.split(size), y.split(size), strict=True)
    empty = True
    for pair in data:
        x, y = _checked_pair(argument, pair)
        if len(x):
            empty = False
            yield x.to(device), y.to(device)
    if empty:
        raise _no_batches(argument)


def points_of(argument: str, x: Points, size: int, device: torch.device) -> Iterator[Tensor]:
    """Points, on the device, so many at a time whatever a loader gives."""
    left: Tensor | None = None  # fewer than a batch, to which the next ones are joined
    for element in [x] if isinstance(x, Tensor) else x:
        points = element[0] if isinstance(element, list | tuple) and len(element) else element
        if not isinstance(points, Tensor) or points.ndim == 0:
            got = f"an element of type {type(element).__name__}"
            raise ArgumentError(argument, got, "tensors of points, or pairs with targets")
        if len(points):
            points = points.to(device)
            if left is not None and left.shape[1:] == points.shape[1:]:
                points = torch.cat([left, points])
            elif left is not None:  # ragged sequences, as long as the longest of their batch
                yield left
            *whole, left = points.split(size)
            yield from whole
    if left is None:
        raise _no_batches(argument)
    yield left


def _checked_pair(argument: str, pair: object) -> tuple[Tensor, Tensor]:
    expected = "pairs of tensors, points and targets, as many of both"
    if (
        not isinstance(pair, list | tuple)
        or len(pair) != 2
        or not all(isinstance(values, Tensor) and values.ndim > 0 for values in pair)
    ):
        raise ArgumentError(argument, f"an element of type {type(pair).__name__}", expected)
    x, y = pair
    if len(x) != len(y):
        raise ShapeError(argument, f"{len(x)} points and {len(y)} targets", expected)
    return x, y


def _no_batches(argument: str) -> ArgumentError:
    suggestion = "A generator gives its batches once: pass a DataLoader, or make it anew."
    return ArgumentError(argument, "no points", "at least one batch", suggestion)


class TrainingBatches:
    """All training data in batches, as often as an objective needs them.

    Tensors are gone through in random orders. A loader gives its own batches in its own order, and
    is read anew in each pass.
    """

    def __init__(
        self,
        x: Tensor | Loader,
        y: Tensor | None,
        num_data: int,
        *,
        batch_size: int | None,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self.x, self.y = x, y
        self._num_data, self._generator, self._device = num_data, generator, device
        self._pass: Iterator[tuple[Tensor, Tensor]] = iter(())
        if isinstance(x, Tensor):
            if y is None:
                expected = "targets of the points, or a loader as train_x"
                raise ArgumentError("train_y", None, expected)
            if len(x) != len(y):
                raise ShapeError("train_y", f"{len(y)} targets", f"{len(x)}, as the points")
            _check_values(x, y)
            self._check_count(len(x))
            self.batch_size: int = batch_size or len(x)
            return
        self.batch_size = 0
        for name, value in (("train_y", y), ("batch_size", batch_size)):
            if value is not None:
                got = f"{type(value).__name__} beside a loader"
                raise ArgumentError(name, got, "None", "The loader gives batches with targets.")
        # It would be empty in the second pass.
        if isinstance(x, Iterator):
            got = f"a {type(x).__name__}, which gives its batches once"
            raise ArgumentError("train_x", got, "a DataLoader, or a list of pairs")

    def _check_count(self, count: int) -> None:
        if count != self._num_data:
            expected = f"num_data = {self._num_data}, as the objective has it"
            raise ArgumentError("train_x", f"{count} points", expected)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All data once, in a fresh order."""
        if isinstance(self.x, Tensor):
            yield from map(self._rows, self._partition())
            return
        count = 0
        for x, y in batches_of("train_x", self.x, 0, self._device):
            _check_values(x, y)
            count += len(x)
            yield x, y
        # A loader may drop its last batch, against which the prior would weigh too much.
        self._check_count(count)

    def __len__(self) -> int:
        """The number of batches."""
        if isinstance(self.x, Tensor):
            return math.ceil(len(self.x) / self.batch_size)
        if not isinstance(self.x, Sized):
            got = f"a {type(self.x).__name__} without a length"
            raise ArgumentError("train_x", got, "a DataLoader, or a list of pairs")
        if not len(self.x):
            raise _no_batches("train_x")
        return len(self.x)

    def drawn(self) -> tuple[Tensor, Tensor]:
        """One of its batches, drawn by its size so that points are as likely; a loader's next."""
        if self.batch_size:
            batches = self._partition()
            # By size: points of small batches would be drawn too often.
            sizes = torch.tensor([float(len(rows)) for rows in batches])
            return self._rows(batches[int(torch.multinomial(sizes, 1, generator=self._generator))])
        # A loader's batches are taken as they come, over the end of a pass.
        batch = next(self._pass, None)
        if batch is None:
            self._pass = iter(self)
            batch = next(self._pass)
        return batch

    def _partition(self) -> list[Tensor]:
        return partition_at_random(self._num_data, self.batch_size, self._generator)

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, y = cast(Tensor, self.x), cast(Tensor, self.y)
        return x[rows.to(x.device)], y[rows.to(y.device)]


def _check_values(x: Tensor, y: Tensor) -> None:
    suggestion = "Every point needs a target here: leave out points without one."
    check_finite("train_x", x, suggestion)
    check_finite("train_y", y, suggestion)


@checked
def partition_at_random(
    num_data: int, batch_size: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Splits points into batches at random; the last may be smaller.

    Args:
        num_data: Number N of points.
        batch_size: Points of a batch.
        generator: Source of the order; torch's own if None.

    Returns:
        Indices of each batch, together 0 to N - 1.

    Raises:
        ArgumentError: A number is below 1.
    """
    check_counts(num_data=num_data, batch_size=batch_size)
    return list(torch.randperm(num_data, generator=generator).split(batch_size))


@checked(labels="integer (N,)")
def partition_by_class(
    labels: Tensor, batch_size: int | None = None, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Splits points into batches of one class each.

    The log likelihoods of points of one class have similar curvature, so that the bound of the
    evidence over such batches is mostly tighter than over random ones of the same size (Immer et
    al. 2023, Section 4.2).

    Args:
        labels: Classes, ``(N,)``.
        batch_size: Most points of a batch; all of a class if None.
        generator: Source of the order; torch's own if None.

    Returns:
        Indices of each batch, the batches in random order.

    Raises:
        ShapeError: The labels are not a vector, or empty.
        ArgumentError: The batch size is below 1.
    """
    check_counts(batch_size=batch_size)
    batches = []
    for label in labels.unique().cpu():
        members = (labels.cpu() == label).nonzero().squeeze(-1)
        shuffled = members[torch.randperm(len(members), generator=generator)]
        batches += shuffled.split(batch_size or len(shuffled))
    # Otherwise each pass would end with the last class.
    return [batches[i] for i in torch.randperm(len(batches), generator=generator)]


@checked(orderings="index (k, n)")
def as_orders(orderings: int | Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Orders of n points, ``(k, n)``, drawn at random if their number is given.

    Args:
        orderings: Their number, or the orders themselves.
        n: Number of points.
        generator: Source of random orders, on the CPU.

    Raises:
        ArgumentError: If the number is below one, or an order is not a permutation.
        ShapeError: If given orders do not have two dimensions.
    """
    if isinstance(orderings, Tensor):
        # Sorted, a permutation is 0 to n - 1.
        in_order = orderings.sort(-1).values.cpu()
        if in_order.shape[-1] != n or not bool((in_order == torch.arange(n)).all()):
            got = "rows that are no permutations"
            raise ArgumentError("orderings", got, f"orders of {n} points")
        return orderings
    check_counts(orderings=orderings)
    return torch.stack([torch.randperm(n, generator=generator) for _ in range(orderings)])
