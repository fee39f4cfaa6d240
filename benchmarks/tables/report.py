"""What the report says: ranks and scores, wins, and the regret of choosing one model."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas
from numpy.typing import ArrayLike
from scipy.stats import norm, t

from benchmarks._figures import MARKERS, PALETTE, bare, new_figure, save_figure
from benchmarks._tables import section, table, with_error
from benchmarks.tables.candidates import CANDIDATES, CRITERIA
from benchmarks.tables.cells import DEVELOPMENT, JUDGED, METHODS
from gpclml.errors import DataError

KEY = ["table", "n", "split"]
"""What tells the rows apart that methods are compared on."""

SIZES = (50, 100, 200, 400, 1000)
"""Tables are grouped by the least of these that is not below their training rows."""

HIGH_NLL = 5.0
"""An NLL above it is counted: with the mean and deviation of the training targets it is 1.4."""

_TWO = float(norm.cdf(2.0))
_MOST_ROWS = 100  # of a list


def sections(cells: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report, in Markdown."""
    whole = whole_rows(cells)
    yield section("What was run", _about(cells, whole), table(described(whole, METHODS)))
    yield section("Standing", _ABOUT_STANDING, table(format_columns(standing(whole), _FORMATS)))
    ranks = ranks_by_size(whole)
    about = "Mean rank in NLL by number of training rows; in brackets the number of cases."
    yield section(
        "Ranks against n", about, table(format_columns(ranks, dict.fromkeys(ranks, ".1f")))
    )
    for metric in ("nll", "crps"):
        about = _ABOUT_WINS.format(metric=metric.upper())
        yield section(f"Wins in {metric.upper()}", about, table(win_table(whole, metric)))
    single = _single_models(whole)
    if len(single) > 1:
        about = _ABOUT_REGRET.format(models=", ".join(single[:-1]) + " and " + single[-1])
        yield section("Choosing one model", about, table(_regret_table(whole)))
    yield from failures(whole, KEY)


def failures(
    cells: pandas.DataFrame, index: list[str], columns: Sequence[str] = ("method", "failure")
) -> Iterator[str]:
    """The section of cells that failed, if there are, a row each, at most 100."""
    failed = cells[cells["failure"] != ""]
    if len(failed):
        listed = failed.set_index(index)[[*columns]].head(_MOST_ROWS)
        yield section("Methods that failed", f"{len(failed)} cells.", table(listed))


_ABOUT_STANDING = (
    "A case is a table and a number of training rows; a method's score in it is the mean over "
    "splits. Ranks are among all methods listed, means over cases, the last for a method that "
    "failed in a split. Scores are in units of the standard deviation of the training targets, "
    "means over cases of a table and then over tables; `without worst` leaves out the table that "
    f"is worst for the method itself. `NLL > {HIGH_NLL:g}` counts cells. Seconds are medians, of "
    "fit, residuals on folds where the density needs them, and prediction, on one core with other "
    "work beside."
)
_ABOUT_WINS = (
    "Cases that the row wins against the column in {metric}, beyond two standard errors of the "
    "mean paired difference over splits. Splits share rows, so that their scores are correlated: "
    "the variance is (1/J + r/(1 - r)) s² for J splits, r being the share of a table's rows in a "
    "test set (Nadeau and Bengio 2003, Section 5, whose n_2/n_1 is r/(1 - r) where all rows are "
    "used). For few splits two errors are the quantile of Student's t of the same probability."
)
_ABOUT_REGRET = (
    "NLL of what is chosen less that of the best of {models} in hindsight, "
    "on each split; mean over the cases of a table, then over tables, ± standard error over "
    "tables. Below zero: better than any one of them. `without worst` leaves out the table "
    "that is worst for the row itself, `median` is that of the tables."
)
_FORMATS = {
    "rank NLL": ".1f", "rank CRPS": ".1f", "rank RMSE": ".1f", "NLL": ".3f",
    "NLL without worst": ".3f", "CRPS": ".4f", "RMSE": ".4f", "coverage 50": ".3f",
    "coverage 95": ".3f", f"NLL > {HIGH_NLL:g}": "d", "failures": "d", "seconds": ".2f",
}  # fmt: skip


def whole_rows(cells: pandas.DataFrame) -> pandas.DataFrame:
    """The cells of rows that every method has been run on."""
    # Means over other rows would compare rows, not methods.
    count = cells.groupby(KEY)["method"].transform("nunique")
    return cells[count == cells["method"].nunique()]


def _about(cells: pandas.DataFrame, whole: pandas.DataFrame) -> str:
    tables = set(whole["table"])
    half = "tables set apart for judging (judged half)" if tables <= set(JUDGED) else (
        "tables that choices may be tuned on (development half)"
        if tables <= set(DEVELOPMENT) else "tables of both halves"
    )  # fmt: skip
    absent = [name for name in METHODS if name not in set(whole["method"])]
    left_out = cells.groupby(KEY).ngroups - whole.groupby(KEY).ngroups
    cases = whole.groupby(["table", "n"]).ngroups
    sentences = [
        f"{len(tables)} {half}: {', '.join(sorted(tables))}.",
        f"{cases} cases, {whole['split'].nunique()} splits at most.",
        f"Not run, or not installed: {', '.join(absent)}." if absent else "",
        f"Left out: {left_out} splits that some methods have not been run on." if left_out else "",
    ]
    return " ".join(filter(None, sentences))


def described(cells: pandas.DataFrame, about: Mapping[str, str]) -> pandas.DataFrame:
    """What each of the methods is."""
    present = {name: what for name, what in about.items() if name in set(cells["method"])}
    return pandas.Series(present, name="what").rename_axis("method").to_frame()


def _pivot(cells: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """A row for each split of each case, a column for each method; NaN where it failed."""
    wide = cells.pivot_table(metric, KEY, "method", dropna=False, observed=True)
    others = [name for name in dict.fromkeys(cells["method"]) if name not in METHODS]
    present = [name for name in (*METHODS, *others) if name in set(cells["method"])]
    wide = wide.reindex(columns=present)
    return wide.dropna(how="all")


def case_means(cells: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Means over splits, NaN for a method that failed in one."""
    # No mean over the splits that worked: a failure is no missing value.
    return _pivot(cells, metric).groupby(level=["table", "n"]).agg(lambda v: v.mean(skipna=False))


def case_ranks(cells: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Ranks among the methods in each case, the last for one that failed in a split."""
    return case_means(cells, metric).rank(axis=1, na_option="bottom")


def over_tables(values: Any) -> Any:
    """Means over the cases of each table."""
    return values.groupby(level="table").mean()


def standing(cells: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each method: ranks, mean scores, coverage, failures, seconds; best NLL first."""
    table_means = {
        metric: over_tables(case_means(cells, metric)) for metric in ("nll", "crps", "rmse")
    }
    nll, cases = table_means["nll"], cells.groupby("method")
    results = pandas.DataFrame(
        {
            "rank NLL": case_ranks(cells, "nll").mean(),
            "rank CRPS": case_ranks(cells, "crps").mean(),
            "rank RMSE": case_ranks(cells, "rmse").mean(),
            "NLL": nll.mean(),
            "NLL without worst": (nll.sum() - nll.max()) / (nll.count() - 1),
            "CRPS": table_means["crps"].mean(),
            "RMSE": table_means["rmse"].mean(),
            "coverage 50": over_tables(case_means(cells, "coverage_50")).mean(),
            "coverage 95": over_tables(case_means(cells, "coverage_95")).mean(),
            f"NLL > {HIGH_NLL:g}": cases["nll"].agg(lambda v: int((v > HIGH_NLL).sum())),
            "failures": cases["failure"].agg(lambda v: int((v != "").sum())),
            "seconds": cases["seconds"].median(),
        }
    )
    return results.sort_values("rank NLL").rename_axis(index="method")


def size_of(n: int) -> int:
    """The size that a case of n training rows is counted with."""
    return next((size for size in SIZES if size >= n), SIZES[-1])


def ranks_by_size(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Mean ranks in NLL, a row for each method, a column for each size with its cases."""
    ranks = case_ranks(cells, "nll")
    sizes = ranks.index.get_level_values("n").map(size_of)
    means = ranks.groupby(sizes).mean().T
    means = means.loc[ranks.mean().sort_values().index]
    means.columns = [f"{size} ({int((sizes == size).sum())})" for size in means]
    return means.rename_axis(index="method")


def corrected_error(differences: ArrayLike, share: float) -> float:
    """The standard error of a mean over random splits of one table, which share rows.

    Args:
        differences: One a split.
        share: Share of the table's rows that are test rows of a split: the expected share of
            them that another split tests on too.

    Returns:
        The root of (1/J + share / (1 - share)) s² (Nadeau and Bengio 2003); infinite for one split.
    """
    count = np.size(differences)
    if count < 2:
        return math.inf
    return math.sqrt((1 / count + share / (1 - share)) * float(np.var(differences, ddof=1)))


def win_table(cells: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Numbers of cases in which the row is better than the column beyond two standard errors."""
    scores = _pivot(cells, metric)
    methods = list(scores.columns)
    shares = cells.groupby(["table", "n"])[["num_test", "num_data"]].first()
    wins = pandas.DataFrame(0, pandas.Index(methods, name="method"), methods)
    for case, splits in scores.groupby(level=["table", "n"]):
        values = splits.to_numpy()
        share = float(shares.loc[case, "num_test"] / shares.loc[case, "num_data"])
        # Few splits: Student's quantile in place of two.
        errors = t.ppf(_TWO, len(values) - 1) if len(values) > 1 else math.inf
        for (i, row), (j, column) in itertools.permutations(enumerate(values.T), 2):
            differences = (row - column)[np.isfinite(row - column)]
            error = errors * corrected_error(differences, share)
            if len(differences) and differences.mean() < -error:
                wins.iat[i, j] += 1
    return wins


def _single_models(cells: pandas.DataFrame) -> list[str]:
    methods = set(cells["method"])
    return [name for name in CANDIDATES if name in methods]


def regrets(cells: pandas.DataFrame) -> pandas.DataFrame:
    """NLL less that of the best candidate in hindsight.

    Returns:
        A row for each split of each case, a column for each way to choose a candidate, to take
        always the same one, a mixture, or a peer; NaN where it has none.
    """
    nll = _pivot(cells, "nll")
    single = _single_models(cells)
    ours = nll[single]
    # Hindsight: no criterion can be below it but a mixture.
    best, chosen = ours.min(axis=1), {}
    for criterion in CRITERIA:
        if criterion in cells:
            values = _pivot(cells, criterion).reindex(index=ours.index, columns=single)
            values = values.where(ours.notna())  # a model without predictions cannot be chosen
            largest = values.eq(values.max(axis=1), axis=0).to_numpy().argmax(axis=1)
            picked = pandas.Series(ours.to_numpy()[range(len(ours)), largest], ours.index)
            chosen[f"by {criterion}"] = picked.where(values.notna().any(axis=1))
    always = {f"always {name}": ours[name] for name in single}
    others = {name: nll[name] for name in nll if name not in CANDIDATES}
    return pandas.DataFrame({**chosen, **always, **others}).sub(best, axis=0)


def _regret_table(cells: pandas.DataFrame) -> pandas.DataFrame:
    results = regrets(cells)
    table_means = over_tables(results)
    sizes = results.index.get_level_values("n").map(size_of)
    columns: dict[str, Any] = {
        "what": [CRITERIA.get(name.removeprefix("by "), METHODS.get(name, "")) for name in results],
        "median": [f"{table_means[name].median():+.3f}" for name in results],
        "all": [with_error(table_means[name].dropna(), sign="+") for name in results],
        "without worst": [
            with_error(table_means[name].dropna().sort_values()[:-1], sign="+") for name in results
        ],
    }
    for size in sorted(set(sizes)):
        sized = over_tables(results[sizes == size])
        columns[f"n ≤ {size}"] = [with_error(sized[name].dropna(), sign="+") for name in results]
    return pandas.DataFrame(columns, pandas.Index(list(results), name="choice"))


def draw_figure(cells: pandas.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draws the mean regret in NLL against n: criteria, the best fixed choice, the mixtures.

    Args:
        cells: Finished cells.
        path: The image file.

    Raises:
        DataError: The file cannot be written, or there are no cells of some model of this library.
    """
    missing = sorted(set(CANDIDATES) - set(cells["method"]))
    if missing:
        raise DataError(
            f"The figure needs cells of {', '.join(missing)}. Run them, or leave it out."
        )
    results = regrets(whole_rows(cells))
    sizes = results.index.get_level_values("n").map(size_of)
    figure = new_figure(9.0, 4.4, layout="constrained")
    axes: Any = figure.subplots()
    for index, name in enumerate(name for name in _DRAWN if name in results):
        values = results[name].groupby([results.index.get_level_values("table"), sizes]).mean()
        means = values.groupby(level=1).median().dropna()
        axes.plot(
            means.index, means, "-" if name.startswith("by") else "--", marker=MARKERS[index],
            color=PALETTE[index % len(PALETTE)], label=_DRAWN[name],
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(sorted(set(sizes)), map(str, sorted(set(sizes))))
    axes.set_xlabel("training rows n")
    axes.set_ylabel("NLL less the best candidate's, median of tables")
    axes.minorticks_off()
    bare(axes)
    figure.legend(loc="outside right upper", frameon=False)
    save_figure(figure, path)


# The mixture first, in the colour that is for what is ours.
_DRAWN = {
    "stack": "calibrated mixture (Regressor)",
    "by lml": "chosen by LML", "by bic": "chosen by BIC", "by loo": "chosen by leave-one-out",
    "by clml_80": "chosen by CLML, m = .8 n",
    "always rbf": "always RBF", "always matern": "always Matern",
    "loo-stack": "plain mixture of models", "by-folds": "chosen by refits of five folds",
}  # fmt: skip


def format_columns(values: pandas.DataFrame, formats: dict[str, str]) -> pandas.DataFrame:
    """Numbers as text."""
    return values.assign(
        **{
            name: [format(value, form) if value == value else "-" for value in values[name]]
            for name, form in formats.items()
        }
    )
