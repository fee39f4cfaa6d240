"""Orders in which points arrive."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError

__all__ = ["as_orders"]


@checked(orderings="index (k, n)")
def as_orders(orderings: int | Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Orders of n points, ``(k, n)``: random ones if a number is given.

    Args:
        orderings: Their number, or the orders themselves.
        n: Number of points.
        generator: Of the random orders, on the CPU.

    Raises:
        ArgumentError: If the number is below one.
        ShapeError: If given orders have no two dimensions.
    """
    if isinstance(orderings, int):
        if orderings < 1:
            raise ArgumentError("orderings", orderings, "at least 1")
        return torch.stack([torch.randperm(n, generator=generator) for _ in range(orderings)])
    if orderings.ndim != 2 or 0 in orderings.shape:
        raise ShapeError("orderings", tuple(orderings.shape), f"(k, {n}), k permutations")
    return orderings
