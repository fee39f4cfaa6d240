"""Checks and shapes that strategies share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml.errors import ArgumentError

__all__ = ["check_below", "integer", "stack_by_size"]


def stack_by_size(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Blocks of one size in one tensor, ``(k_i, b_i)``, sizes in the order they come."""
    sizes = dict.fromkeys(block.numel() for block in blocks)
    return [torch.stack([b for b in blocks if b.numel() == size]) for size in sizes]


def integer(argument: str, value: int, least: int) -> int:
    """The value, if it is an integer of at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise ArgumentError(argument, repr(value), f"an integer of at least {least}")
    return int(value)


def check_below(argument: str, value: int, n: int) -> None:
    """Refuses a number of points conditioned on that leaves none of n to be scored."""
    if value >= n:
        raise ArgumentError(
            argument,
            value,
            f"an integer below the {n} observed points",
            "m is the number of points conditioned on; at least one must remain to be scored.",
        )
