"""The tables of the report, test functions side by side."""

from __future__ import annotations

import numpy
import pandas

from benchmarks.uci.tables import CELL, difference_table, mean_table, paired_differences, wide

__all__ = [
    "REGRETS", "labelled", "less_baseline", "less_lml", "mean_rows", "median_rows", "second_rows",
]  # fmt: skip

REGRETS = {"simple_regret": "Simple regret", "inference_regret": "Inference regret"}
"""The regrets of a cell and their headings."""

BASELINE = ("single-task", "lml")
"""Surrogate and objective that others are compared with."""

LEAST_REGRET = 1e-6
"""Regrets below count as this: the largest values are known to about so many digits."""


def labelled(done: pandas.DataFrame) -> pandas.DataFrame:
    """Cells with the columns by which :mod:`benchmarks.uci.tables` groups and pairs them.

    Returns:
        The cells with ``log_simple_regret`` and ``log_inference_regret``, logarithms to base 10,
        ``dataset`` (function), ``n`` (iterations), ``kernel_label`` (surrogate, with its Adam
        steps where they differ) and ``objective_label``.
    """
    labels = done["surrogate"].copy()
    if done["steps"].dropna().nunique() > 1:
        stepped = done["steps"].notna()
        labels[stepped] += done["steps"][stepped].map(lambda steps: f" steps={int(steps)}")
    logs = {
        f"log_{name}": numpy.log10(done[name].clip(lower=LEAST_REGRET).astype(float))
        for name in REGRETS
    }
    return done.assign(
        dataset=done["function"], n=done["iterations"], kernel_label=labels,
        objective_label=done["objective"], **logs,
    )  # fmt: skip


def median_rows(cells: pandas.DataFrame, regret: str) -> pandas.DataFrame:
    """Median and quartiles of a regret over seeds, as text.

    Args:
        cells: Cells as :func:`labelled` gives them.
        regret: One of :data:`REGRETS`.
    """
    quantiles = cells.groupby(list(CELL))[regret].quantile([0.25, 0.5, 0.75]).unstack()
    texts = [f"{row[1]:.3g} [{row[0]:.2g}, {row[2]:.2g}]" for row in quantiles.to_numpy()]
    quantiles["text"] = texts
    return _named(wide(quantiles["text"]))


def mean_rows(cells: pandas.DataFrame, regret: str) -> pandas.DataFrame:
    """Mean and standard error over seeds of a regret's logarithm, as text.

    Args:
        cells: Cells as :func:`labelled` gives them.
        regret: One of :data:`REGRETS`.
    """
    return _named(mean_table(cells, f"log_{regret}"))


def less_baseline(cells: pandas.DataFrame, regret: str) -> pandas.DataFrame:
    """Differences of a regret's logarithm to the baseline's, paired by seed, as text.

    Args:
        cells: Cells as :func:`labelled` gives them.
        regret: One of :data:`REGRETS`.

    Returns:
        Mean ± standard error; empty without the baseline or anything beside it.
    """
    surrogate, objective = BASELINE
    is_baseline = (cells["surrogate"] == surrogate) & (cells["objective"] == objective)
    return _differences(cells[~is_baseline], cells[is_baseline], regret, ("dataset", "n"))


def less_lml(cells: pandas.DataFrame, regret: str) -> pandas.DataFrame:
    """Differences of a regret's logarithm to that of the LML, same surrogate, paired by seed.

    Args:
        cells: Cells as :func:`labelled` gives them.
        regret: One of :data:`REGRETS`.

    Returns:
        Mean ± standard error; empty without the LML or anything beside it.
    """
    is_lml = cells["objective"] == "lml"
    on = ("dataset", "n", "kernel_label")
    return _differences(cells[~is_lml], cells[is_lml], regret, on)


def second_rows(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Median wall time of a cell over seeds, seconds: all fits, and choosing all points."""
    medians = cells.groupby(list(CELL))[["fit_seconds", "acquisition_seconds"]].median()
    texts = [f"{fit:.1f} + {chosen:.1f}" for fit, chosen in medians.to_numpy()]
    return _named(wide(medians.assign(text=texts)["text"]))


def _differences(
    cells: pandas.DataFrame, baseline: pandas.DataFrame, regret: str, on: tuple[str, ...]
) -> pandas.DataFrame:
    metric = f"log_{regret}"
    differences = paired_differences(cells, baseline, metric, on)
    return differences if differences.empty else _named(difference_table(differences, metric))


def _named(table: pandas.DataFrame) -> pandas.DataFrame:
    return table.rename_axis(index=["iterations", "surrogate", "objective"])
