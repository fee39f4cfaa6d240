"""Means and paired differences as tables of text, data sets side by side."""

from __future__ import annotations

from re import split
from typing import Any

import pandas

from benchmarks.uci.statistics import (
    CELL,
    means,
    ordered_objectives,
    paired_differences,
    sign_test,
    verdicts,
)

__all__ = [
    "JUDGED",
    "METRICS",
    "difference_table",
    "less_lml",
    "less_plain",
    "mean_table",
    "ordered_rows",
    "wide",
    "win_table",
]

METRICS = {
    "rmse": "RMSE (standard deviations of all targets of the data set)",
    "nll": "NLL (nats per test point, in the same unit)",
    "crps": "CRPS (in the unit of the RMSE)",
    "coverage_95": "Coverage of the 95% interval",
}
"""The metrics of the tables and their headings."""

JUDGED = ("rmse", "nll", "crps")
"""The metrics of which less is better."""

_PLAIN = {"kernel": "rbf", "mean": "constant", "objective": "lml"}


def mean_table(done: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Each method's mean over seeds with its standard error, as text.

    Args:
        done: Finished cells with their labels.
        metric: One of ``METRICS``.

    Returns:
        A row for each n, kernel and objective, a column a data set; the number of seeds in
        brackets where it is below the highest.
    """
    return wide(_texts(means(done, metric, CELL)))


def less_lml(done: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Each objective less the LML of the same kernel, paired by seed.

    Args:
        done: Finished cells with their labels.
        metric: Name of a metric.

    Returns:
        As from :func:`benchmarks.uci.statistics.paired_differences`.
    """
    is_lml = done["objective"] == "lml"
    on = ("dataset", "n", "kernel_label")
    return paired_differences(done[~is_lml], done[is_lml], metric, on)


def less_plain(done: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Each kernel and objective less the plain ARD GP (rbf, lml), paired by seed.

    Args:
        done: Finished cells with their labels.
        metric: Name of a metric.

    Returns:
        As from :func:`benchmarks.uci.statistics.paired_differences`; empty without an ARD GP.
    """
    plain = (done[list(_PLAIN)] == list(_PLAIN.values())).all(axis=1)
    baseline = done[plain].drop_duplicates(["dataset", "n", "seed"])
    return paired_differences(done[~plain], baseline, metric, ("dataset", "n"))


def difference_table(differences: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Mean paired differences as text, and what they say over data sets.

    Args:
        differences: As from :func:`benchmarks.uci.statistics.paired_differences`.
        metric: The metric that they are of.

    Returns:
        As from :func:`mean_table`, differences beyond two standard errors in bold. For
        metrics of which less is better, two further columns: at how many of the data sets it
        is below zero with the p-value of the sign test, and at how many it is clearly so.
    """
    verdict = verdicts(differences)
    texts = _texts(differences)
    table = wide(texts.where(verdict == "tie", "**" + texts + "**"))
    if metric not in JUDGED:
        return table
    by = list(CELL[1:])
    places = [tuple(row) for row in table.index]
    below = differences["mean"].groupby(level=by).agg(_signs)
    table["below 0 (p)"] = below.loc[places].tolist()
    table["wins / losses / ties"] = verdict.groupby(level=by).agg(_counts).loc[places].tolist()
    return table


def win_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """How often each method is clearly better and worse than the plain ARD GP.

    Args:
        done: Finished cells with their labels.

    Returns:
        A row for each kernel and objective. For each metric the numbers of data sets and n
        with a mean paired difference beyond two standard errors below zero, above, and
        between; for RMSE and NLL the difference that is most standard errors above zero.
        Empty without an ARD GP.
    """
    columns = {}
    by = list(CELL[2:])
    for metric in JUDGED:
        differences = less_plain(done, metric)
        if differences.empty:
            return pandas.DataFrame()
        counts = verdicts(differences).groupby(level=by).agg(_counts)
        columns[f"{metric.upper()}, wins / losses / ties"] = counts
        if metric != "crps":
            places = {key: _worst(group) for key, group in differences.groupby(level=by)}
            columns[f"most unfavourable {metric.upper()}"] = pandas.Series(places, dtype=object)
    table = pandas.DataFrame(columns)
    table.index = table.index.set_names(["kernel", "objective"])
    return table.loc[ordered_rows(table.index, place=1)]


def wide(values: pandas.Series) -> pandas.DataFrame:
    """Values indexed by dataset, n, kernel and objective, with data sets side by side.

    Args:
        values: The values; what is missing becomes ``"-"``.
    """
    frame = values.astype(object).unstack("dataset")
    frame = frame.where(frame.notna(), "-").rename_axis(columns=None)
    frame.index = frame.index.set_names(["n", "kernel", "objective"])
    return frame.loc[ordered_rows(frame.index, place=2)]


def ordered_rows(index: pandas.Index, place: int) -> list[Any]:
    """The entries of an index whose level ``place`` holds objectives, the LML and CLML first."""
    rank = {label: i for i, label in enumerate(ordered_objectives(index.get_level_values(place)))}
    return sorted(index, key=lambda row: (*map(_natural, row[:place]), rank[row[place]]))


def _natural(value: object) -> list[tuple[int, str]]:
    """A key that sorts 300 before 1000."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in split(r"(\d+)", str(value))
    ]


def _texts(statistics: pandas.DataFrame) -> pandas.Series:
    most = statistics["seeds"].max()
    texts = [_text(row, most) for row in statistics.itertuples()]
    return pandas.Series(texts, index=statistics.index, dtype=object)


def _text(row: Any, most: int) -> str:
    spread = "" if row.seeds < 2 else f" ± {row.se:.3f}"
    return f"{row.mean:z.3f}{spread}" + ("" if row.seeds == most else f" [{row.seeds}]")


def _signs(differences: pandas.Series) -> str:
    below, number, p = sign_test(differences)
    return f"{below} of {number} ({p:.2g})"


def _counts(verdict: pandas.Series) -> str:
    return " / ".join(str(int((verdict == name).sum())) for name in ("win", "loss", "tie"))


def _worst(differences: pandas.DataFrame) -> str:
    ratio = (differences["mean"] / differences["se"]).where(differences["mean"] > 0)
    if not ratio.notna().any():
        return "-"
    place = ratio.idxmax()
    row = differences.loc[place]
    return f"{place[0]} n = {place[1]}: {row['mean']:.4f} ± {row['se']:.4f}"
