"""Products of features with weights, a few thousand columns at a time: no array is copied whole."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["column_square_sums", "row_square_sums", "scaled_product"]

_COLUMNS_AT_ONCE = 4096


def scaled_product(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    """First diag(scale) secondᵀ, ``(n, R)``, ``(m, R)`` and ``(R,)`` to ``(n, m)``."""
    total = first.new_zeros(len(first), len(second))
    pieces = (first.split(_COLUMNS_AT_ONCE, -1), second.split(_COLUMNS_AT_ONCE, -1))
    for left, right, weights in zip(*pieces, scale.split(_COLUMNS_AT_ONCE), strict=True):
        total = torch.addmm(total, left * weights, right.mT)
    return total


def row_square_sums(features: Tensor, scale: Tensor) -> Tensor:
    """The diagonal of features diag(scale) featuresᵀ, ``(n, R)`` and ``(R,)`` to ``(n,)``."""
    total = features.new_zeros(len(features))
    for part, weights in zip(
        features.split(_COLUMNS_AT_ONCE, -1), scale.split(_COLUMNS_AT_ONCE), strict=True
    ):
        total = total + part.square() @ weights
    return total


def column_square_sums(features: Tensor, scale: Tensor) -> Tensor:
    """The diagonal of featuresᵀ diag(scale) features, ``(n, R)`` and ``(n,)`` to ``(R,)``."""
    parts = [scale @ part.square() for part in features.split(_COLUMNS_AT_ONCE, -1)]
    return torch.cat(parts)
