"""Orders in which points arrive, and partitions of points into batches."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked

__all__ = [
    "as_orders",
    "partition_at_random",
    "partition_by_class",
]


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
    return [batches[i] for i in torch.randperm(len(batches), generator=generator)]


@checked(orderings="index (k, n)")
def as_orders(orderings: int | Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Orders of n points, ``(k, n)``, drawn at random if their number is given.

    Args:
        orderings: Their number, or the orders themselves.
        n: Number of points.
        generator: Source of random orders, on the CPU.

    Raises:
        ArgumentError: If the number is below one.
        ShapeError: If given orders do not have two dimensions.
    """
    if isinstance(orderings, int):
        check_counts(orderings=orderings)
        return torch.stack([torch.randperm(n, generator=generator) for _ in range(orderings)])
    return orderings
