"""Means over seeds and differences paired by seed, as tables of text, data sets side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from re import split
from types import MappingProxyType

import numpy
import pandas
from scipy.stats import binomtest

CELL = ("dataset", "n", "kernel_label", "objective_label")
"""What tells the groups of seeds apart."""

SETTINGS = ("mean", "optimizer", "steps", "lr", "dtype", "device")
"""Settings of a cell that belong to its kernel; one with several values enters the label."""

_ROUNDING = 1e-6
_FIRST_OBJECTIVES = ("lml", "clml")


def labels(cells: pandas.DataFrame, name: str, settings: Sequence[str]) -> pandas.Series:
    """The entry of each cell in a column, with those of its settings that differ within it."""
    labelled = cells[name].copy()
    for _, group in cells.groupby(name):
        for setting in settings:
            values = group[setting].dropna()
            if values.nunique() > 1:
                labelled[values.index] += values.map(lambda value, s=setting: f" {s}={value}")
    return labelled


def ordered_objectives(labels: Iterable[str]) -> list[str]:
    """The distinct objectives in the order of tables and figures: the LML first, then the CLML."""
    rank = {name: level for level, name in enumerate(_FIRST_OBJECTIVES)}
    return sorted(set(labels), key=lambda label: (rank.get(label.split()[0], len(rank)), label))


def means(cells: pandas.DataFrame, metric: str, by: Sequence[str]) -> pandas.DataFrame:
    """Mean of a metric over seeds.

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
    # Raises where a baseline has two cells for a pair.
    pairs = cells.merge(other, on=keys, validate="many_to_one")
    # A deep kernel that fell back is the plain one up to rounding.
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
    mean, limit = differences["mean"], 2 * differences["se"]
    verdict = numpy.select([mean < -limit, mean > limit], ["win", "loss"], "tie")
    return pandas.Series(verdict, differences.index, dtype=object)


def sign_test(differences: Iterable[float]) -> tuple[int, int, float]:
    """Whether differences are as often below zero as above.

    Returns:
        The number below zero, the number that is not zero, and the two-sided p-value of the
        sign test (1 where all are zero).
    """
    # Ties say nothing of either side.
    nonzero = [value for value in differences if value]
    below = sum(value < 0 for value in nonzero)
    return below, len(nonzero), float(binomtest(below, len(nonzero)).pvalue) if nonzero else 1.0


METRICS = {
    "rmse": "RMSE (standard deviations of all targets of the data set)",
    "nll": "NLL (nats per test point, in the same unit)",
    "crps": "CRPS (in the unit of the RMSE)",
    "coverage_95": "Coverage of the 95% interval",
}
"""The metrics of the tables and their headings."""

JUDGED = ("rmse", "nll", "crps")
"""The metrics of which less is better."""

_PLAIN: Mapping[str, str] = MappingProxyType(
    {"kernel": "rbf", "mean": "constant", "objective": "lml"}
)


def mean_table(done: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Each method's mean over seeds with its standard error, as text.

    Returns:
        A row for each n, kernel and objective, a column a data set; the number of seeds in
        brackets where it is below the highest.
    """
    return wide(_texts(means(done, metric, CELL)))


def less_lml(done: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Each objective less the LML of the same kernel, paired by seed.

    Returns:
        As from :func:`benchmarks.uci.tables.paired_differences`.
    """
    is_lml = done["objective"] == "lml"
    on = ("dataset", "n", "kernel_label")
    return paired_differences(done[~is_lml], done[is_lml], metric, on)


def less_plain(
    done: pandas.DataFrame, metric: str, plain: Mapping[str, str] = _PLAIN
) -> pandas.DataFrame:
    """Each kernel and objective less the plain one, the ARD GP (rbf, lml), paired by seed.

    Returns:
        As from :func:`benchmarks.uci.tables.paired_differences`; empty without the plain one.
    """
    is_plain = (done[list(plain)] == list(plain.values())).all(axis=1)
    # The plain GP may be there under several settings that do not matter to it.
    baseline = done[is_plain].drop_duplicates(["dataset", "n", "seed"])
    return paired_differences(done[~is_plain], baseline, metric, ("dataset", "n"))


def difference_table(differences: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Mean paired differences as text, and what they say over data sets.

    Args:
        differences: As from :func:`benchmarks.uci.tables.paired_differences`.
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
    return _ordered(pandas.DataFrame(columns), "kernel", "objective")


def wide(values: pandas.Series) -> pandas.DataFrame:
    """Values indexed by dataset, n, kernel and objective, with data sets side by side."""
    return _ordered(_beside(values), "n", "kernel", "objective")


def _beside(values: pandas.Series) -> pandas.DataFrame:
    """A column a data set, ``"-"`` for what is missing."""
    frame = values.astype(object).unstack("dataset").rename_axis(columns=None)
    return frame.where(frame.notna(), "-")


def _ordered(table: pandas.DataFrame, *names: str) -> pandas.DataFrame:
    """A table with these names of its index, of which the last holds objectives, sorted."""
    table.index = table.index.set_names(names)
    rank = ordered_objectives(table.index.get_level_values(-1)).index
    return table.loc[sorted(table.index, key=lambda row: (*map(_natural, row[:-1]), rank(row[-1])))]


def _natural(value: object) -> list[tuple[int, str]]:
    """A key that sorts 300 before 1000."""
    return [
        (int(digits), "") if digits.isdigit() else (-1, digits)
        for digits in split(r"(\d+)", str(value))
    ]


def _texts(statistics: pandas.DataFrame) -> pandas.Series:
    most = statistics["seeds"].max()

    def text(mean: float, error: float, seeds: int) -> str:
        spread = "" if seeds < 2 else f" ± {error:.3f}"
        return f"{mean:z.3f}{spread}" + ("" if seeds == most else f" [{seeds}]")

    texts = [text(*row) for row in statistics[["mean", "se", "seeds"]].itertuples(index=False)]
    return pandas.Series(texts, index=statistics.index, dtype=object)


def _signs(differences: pandas.Series) -> str:
    below, number, p = sign_test(differences)
    return f"{below} of {number} ({p:.2g})"


def _counts(verdict: pandas.Series) -> str:
    return " / ".join(str(int((verdict == name).sum())) for name in ("win", "loss", "tie"))


def _worst(differences: pandas.DataFrame) -> str:
    ratio = (differences["mean"] / differences["se"]).where(differences["mean"] > 0)
    if not ratio.notna().any():
        return "-"
    level = ratio.idxmax()
    row = differences.loc[level]
    return f"{level[0]} n = {level[1]}: {row['mean']:.4f} ± {row['se']:.4f}"


PUBLISHED_SHARE = 0.1
"""The share that the published CLML holds out, m = 0.9 n."""

PUBLISHED_MEDIANS: Mapping[str, Mapping[int, tuple[float, float]]] = MappingProxyType(
    {
        "boston": {
            100: (0.411, 0.334), 200: (0.405, 0.279), 300: (0.331, 0.224), 400: (0.283, 0.241),
            455: (0.279, 0.229),
        },
        "concrete": {
            100: (0.731, 0.588), 200: (0.497, 0.476), 300: (0.446, 0.439), 400: (0.409, 0.439),
            500: (0.364, 0.425), 600: (0.392, 0.395), 700: (0.361, 0.385),
        },
        "energy": {
            100: (0.285, 0.238), 200: (0.220, 0.199), 300: (0.198, 0.194), 400: (0.171, 0.154),
            500: (0.138, 0.141), 600: (0.130, 0.122), 691: (0.106, 0.118),
        },
        "power": {
            100: (0.444, 0.364), 200: (0.358, 0.289), 300: (0.322, 0.283), 400: (0.306, 0.280),
            500: (0.303, 0.273), 600: (0.293, 0.266), 700: (0.291, 0.267),
        },
        "wine-red": {
            100: (1.074, 0.998), 200: (1.298, 0.974), 300: (1.198, 0.955), 400: (1.107, 0.893),
            500: (1.117, 0.845), 600: (0.969, 0.888), 700: (0.974, 0.831),
        },
        "wine-white": {
            100: (1.397, 1.115), 200: (1.178, 1.023), 300: (1.164, 0.953), 400: (1.178, 0.960),
            500: (1.178, 0.951), 600: (1.206, 0.918), 700: (1.164, 0.890),
        },
    }
)  # fmt: skip
"""RMSE under the LML and under the CLML by data set and n, medians of ten trials, normalised
units: Lotfi et al. (2022), box plots of Figures 9(a) and 24, read off to about 0.01."""


def published_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """Medians of the RMSE over seeds beside those of Lotfi et al. (2022).

    Returns:
        A row for each n, kernel and data set that both have (bottleneck kernel, constant mean,
        CLML with m = 0.9 n): published and own medians under the LML and the CLML. Empty
        where there is none.
    """
    deep = done[(done["kernel"] == "deep-bottleneck") & (done["mean"] == "constant")]
    share = deep["held_out"] == PUBLISHED_SHARE
    deep = deep[(deep["objective"] == "lml") | ((deep["objective"] == "clml") & share)]
    medians = deep.groupby(["dataset", "n", "kernel_label", "objective"])["rmse"].median()
    rows = {}
    for name, n, kernel in medians.index.droplevel("objective").unique():
        pair = PUBLISHED_MEDIANS.get(name, {}).get(n)
        ours = [medians.get((name, n, kernel, objective)) for objective in ("lml", "clml")]
        if pair is not None and None not in ours:
            rows[name, n, kernel] = [f"{value:.3f}" for value in (*pair, *ours)]
    columns = ["paper, LML", "paper, CLML", "ours, LML", "ours, CLML"]
    index = pandas.MultiIndex.from_tuples(list(rows), names=["dataset", "n", "kernel"])
    return pandas.DataFrame(list(rows.values()), index=index, columns=columns)


def turning_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """The first n at which an objective no longer has a lower mean RMSE than the LML.

    Returns:
        A row for each kernel and objective, a column a data set: the lowest n whose mean
        paired difference is zero or above, ``"> n"`` where there is none up to n. Empty with
        a single n.
    """
    differences = less_lml(done, "rmse")["mean"].reset_index()
    if differences["n"].nunique() < 2:
        return pandas.DataFrame()

    def first_turn(group: pandas.DataFrame) -> str:
        turned = group.loc[group["mean"] >= 0, "n"]
        return f"> {group['n'].max()}" if turned.empty else str(turned.min())

    groups = differences.groupby(["dataset", "kernel_label", "objective_label"])
    return _ordered(_beside(groups.apply(first_turn, include_groups=False)), "kernel", "objective")


def seconds_table(done: pandas.DataFrame) -> pandas.DataFrame:
    """Median wall time of building and training one model, seconds, as text."""
    seconds = done.groupby(list(CELL))["train_seconds"].median()
    return wide(seconds.map("{:.2f}".format))
