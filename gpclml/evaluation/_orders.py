"""Orderings of the points, shared by all models."""

from __future__ import annotations

from numbers import Integral
from typing import cast

import torch
from torch import Tensor

from gpclml.conditioning import as_orders
from gpclml.errors import ArgumentError

__all__ = ["checked_m", "number_of_curves", "shared_orders"]

_OPERATIONS = 3e10  # three times those of all factors of a kind
_NUMBERS = 2**25  # in all held-out blocks
_MOST_ORDERS, _MOST_CURVES, _FEWEST = 1000, 100, 4


def checked_m(m: int | None, count: int) -> int:
    """How many of the observed points the CLML conditions on: nine tenths if not said."""
    if m is None:
        return count - max(1, round(count / 10))
    mend = "m is the number of points conditioned on; at least one must remain."
    return _whole("m", m, 0, count - 1, mend)


def shared_orders(orderings: int | Tensor | None, targets: Tensor, m: int, seed: int) -> Tensor:
    """Orders of all rows, those with missing targets last, ``(k, n)``."""
    n = len(targets)
    missing = targets.isnan()
    if orderings is None:
        held_out = n - int(missing.sum()) - m
        orderings = _affordable(held_out, min(_MOST_ORDERS, _NUMBERS // held_out**2))
    orders = as_orders(orderings, n, torch.Generator().manual_seed(seed)).cpu()
    in_order = orders.sort(-1).values
    if in_order.shape[-1] != n or not bool((in_order == torch.arange(n)).all()):
        raise ArgumentError("orderings", "rows that are no permutations", f"orders of {n} points")
    return orders.gather(-1, missing[orders].to(torch.int8).argsort(dim=-1, stable=True))


def number_of_curves(curves: int | None, num_orders: int, n: int) -> int:
    """How many of the orders have their learning curves computed."""
    if curves is None:
        return min(num_orders, _affordable(n, _MOST_CURVES))
    return _whole("curves", curves, 1, num_orders, "At most as many as orderings.")


def _affordable(size: int, most: int) -> int:
    """How many matrices of this size to factor."""
    return max(int(min(_OPERATIONS // size**3, most)), _FEWEST)


def _whole(argument: str, value: object, least: int, most: int, mend: str) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= cast(int, value) <= most:
        raise ArgumentError(argument, value, f"a whole number from {least} to {most}", mend)
    return int(cast(int, value))
