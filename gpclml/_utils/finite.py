"""Whether all numbers are finite, at the cost of one sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["all_finite"]


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite.

    A sum is finite only where every value is; one that overflows is looked at value by value.

    Args:
        values: Any shape; real.
    """
    return math.isfinite(values.detach().sum().item()) or bool(torch.isfinite(values).all())
