"""Means over seeds, and differences between methods paired by seed, with standard errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas
from scipy.stats import binomtest

__all__ = [
    "CELL",
    "SETTINGS",
    "label_kernels",
    "label_objectives",
    "means",
    "ordered_objectives",
    "paired_differences",
    "sign_test",
    "verdicts",
]

CELL = ("dataset", "n", "kernel_label", "objective_label")
"""What tells the groups of seeds apart."""

SETTINGS = ("mean", "optimizer", "steps", "lr", "dtype", "device")
"""Settings of a cell that belong to its kernel; one with several values enters the label."""

_ROUNDING = 1e-6
_FIRST_OBJECTIVES = ("lml", "clml")


def label_kernels(cells: pandas.DataFrame) -> pandas.Series:
    """The kernel of each cell, with the settings that differ within that kernel.

    Args:
        cells: Cells as ``benchmarks.runner.load_results`` gives them.
    """
    return _labels(cells, "kernel", SETTINGS)


def label_objectives(cells: pandas.DataFrame) -> pandas.Series:
    """The objective of each cell, with its held-out share where that differs.

    Args:
        cells: Cells as ``benchmarks.runner.load_results`` gives them.
    """
    return _labels(cells, "objective", ("held_out",))


def ordered_objectives(labels: Iterable[str]) -> list[str]:
    """The distinct objectives in the order of tables and figures: the LML first, then the CLML.

    Args:
        labels: Labels of objectives; each begins with the objective's name.
    """
    rank = {name: place for place, name in enumerate(_FIRST_OBJECTIVES)}
    return sorted(set(labels), key=lambda label: (rank.get(label.split()[0], len(rank)), label))


def means(cells: pandas.DataFrame, metric: str, by: Sequence[str]) -> pandas.DataFrame:
    """Mean of a metric over seeds.

    Args:
        cells: A row for each cell, with the metric's column.
        metric: Name of the metric.
        by: Columns that tell the groups apart.

    Returns:
        A row a group: ``mean``, standard error ``se`` (sample standard deviation over
        root k; NaN for one seed) and number of ``seeds``, k. Indexed by the groups, sorted.
    """
    return cells.groupby(list(by))[metric].agg(mean="mean", se="sem", seeds="count")


def paired_differences(
    cells: pandas.DataFrame, baseline: pandas.DataFrame, metric: str, on: Sequence[str]
) -> pandas.DataFrame:
    """Mean over seeds of a metric less that of a baseline on the same rows.

    Only seeds that both have count. Dataset and n must be among ``on``, for the rows are a
    function of dataset, n and seed. Differences within rounding, 1e-6, are zero: a model that
    fell back to the baseline is the baseline.

    Args:
        cells: Cells with columns ``kernel_label`` and ``objective_label``.
        baseline: Cells to subtract, at most one for each value of ``on`` and seed.
        metric: Name of the metric.
        on: Columns that a cell and its baseline share, besides the seed.

    Returns:
        As from :func:`means`, the number of seeds being that of pairs; grouped by dataset, n,
        kernel and objective label.
    """
    keys = [*on, "seed"]
    other = baseline[[*keys, metric]].rename(columns={metric: "baseline"})
    pairs = cells.merge(other, on=keys, validate="many_to_one")
    difference = pairs[metric] - pairs["baseline"]
    pairs["difference"] = difference.where(difference.abs() > _ROUNDING, 0.0)
    return means(pairs, "difference", CELL)


def verdicts(differences: pandas.DataFrame) -> pandas.Series:
    """What each mean paired difference says: ``"win"``, ``"loss"`` or ``"tie"``.

    Args:
        differences: As from :func:`paired_differences`, of a metric that is better the lower.

    Returns:
        A win below minus two standard errors, a loss above two, a tie between or for one pair.
    """
    verdict = differences["mean"].map(lambda _: "tie").astype(object)
    verdict[differences["mean"] < -2 * differences["se"]] = "win"
    verdict[differences["mean"] > 2 * differences["se"]] = "loss"
    return verdict


def sign_test(differences: Iterable[float]) -> tuple[int, int, float]:
    """Whether differences are as often below zero as above.

    Args:
        differences: One a data set; zeros do not count.

    Returns:
        The number below zero, the number that is not zero, and the two-sided p-value of the
        sign test (1 where all are zero).
    """
    nonzero = [value for value in differences if value]
    below = sum(value < 0 for value in nonzero)
    return below, len(nonzero), float(binomtest(below, len(nonzero)).pvalue) if nonzero else 1.0


def _labels(cells: pandas.DataFrame, name: str, settings: Sequence[str]) -> pandas.Series:
    labels = cells[name].copy()
    for _, group in cells.groupby(name):
        for setting in settings:
            values = group[setting].dropna()
            if values.nunique() > 1:
                labels[values.index] += values.map(lambda value, s=setting: f" {s}={value}")
    return labels
