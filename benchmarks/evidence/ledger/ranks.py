"""Whether two scores rank models alike."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import spearmanr

__all__ = ["best_place", "rank_correlation"]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation of two scores of the same models.

    Args:
        first: At least two values, not all equal.
        second: As many.
    """
    return float(spearmanr(first, second).statistic)  # type: ignore[attr-defined]


def best_place(values: Sequence[float]) -> int:
    """Place of the largest value, the first of equal ones."""
    return max(range(len(values)), key=values.__getitem__)
