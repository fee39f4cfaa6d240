"""Differences over seeds: their mean, its error, and whether it has a sign."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["differs", "mean_and_error"]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of values and its standard error, infinite for a single value.

    Args:
        values: At least one.
    """
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def differs(values: Sequence[float], sign: int, errors: float = 2.0) -> bool:
    """Whether the mean of paired differences has a sign, beyond so many standard errors.

    Args:
        values: Differences, one a seed.
        sign: +1 or -1.
        errors: How many.
    """
    mean, error = mean_and_error(values)
    return sign * mean > errors * error
