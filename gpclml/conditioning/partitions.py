"""Partitions of points into batches: at random, or of one class each."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError

__all__ = ["partition_at_random", "partition_by_class"]


@checked
def partition_at_random(
    num_data: int, batch_size: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Batches of points in random order; the last may be smaller.

    Args:
        num_data: Number N of points.
        batch_size: Points of a batch.
        generator: Source of the order; torch's own if None.

    Returns:
        Indices, each of 0 to N - 1 in one of them.

    Raises:
        ArgumentError: A number is below 1.
    """
    for name, number in (("num_data", num_data), ("batch_size", batch_size)):
        if number < 1:
            raise ArgumentError(name, number, "at least 1")
    return list(torch.randperm(num_data, generator=generator).split(batch_size))


@checked(labels="integer (N,)")
def partition_by_class(
    labels: Tensor, batch_size: int | None = None, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Batches of points of one class each.

    Points of a class curve the log likelihood in much the same directions: the bound of the
    evidence over such batches is tighter than over random ones of the same size, as a rule
    (Immer et al. 2023, Section 4.2).

    Args:
        labels: Classes, ``(N,)``.
        batch_size: Most points of a batch; all of a class if None.
        generator: Source of the order; torch's own if None.

    Returns:
        Indices, in random order of the batches.

    Raises:
        ShapeError: The labels are no vector, or empty.
        ArgumentError: The batch size is below 1.
    """
    if batch_size is not None and batch_size < 1:
        raise ArgumentError("batch_size", batch_size, "at least 1, or None")
    batches = []
    for label in labels.unique().cpu():
        members = (labels.cpu() == label).nonzero().squeeze(-1)
        shuffled = members[torch.randperm(len(members), generator=generator)]
        batches += shuffled.split(batch_size or len(shuffled))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator)]
