"""The study of classes and counts: ``python -m benchmarks.tables classes run``, and ``report``."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pandas
from typer import Option

from benchmarks import data
from benchmarks._options import check_known, check_positive, names
from benchmarks._tables import describe_error, section, table, with_error
from benchmarks.data.classes import BINARY, COUNTS, MULTICLASS, load_labelled
from benchmarks.study import Study
from benchmarks.tables import class_methods, report
from benchmarks.tables.cells import TEST_SHARE, balanced, sizes_of
from benchmarks.tables.class_methods import CLASS_METHODS, COUNT_METHODS, MULTICLASS_METHODS, Task
from benchmarks.tables.peers import Peer, installed
from benchmarks.tables.scores import Array, check_finite
from benchmarks.tables.study import Methods, MostTest, Sizes, Splits

DEVELOPMENT = (
    "birthwt", "contraception", "pima", "swiss-labor", "doctor-visits", "interlocks", "quine",
)  # fmt: skip
"""The tables by which anything may be chosen or tuned: of each kind every other name, from the
second."""

JUDGED = (
    "biopsy", "breast-cancer", "credit-card", "spam", "titanic", "articles", "fishing", "nmes",
)  # fmt: skip
"""The others, by which what was chosen is judged, and nothing else."""

_SETS = {
    "development": DEVELOPMENT, "judged": JUDGED, "classes": BINARY, "multiclass": MULTICLASS,
    "counts": COUNTS,
}  # fmt: skip
_EVERY = {**CLASS_METHODS, **COUNT_METHODS}

_LEAST = 1e-6  # a probability: a class thought impossible costs 14 nats where it comes
_BINS = [f"bin_{index}" for index in range(10)]


def _methods(name: str) -> Mapping[str, Peer]:
    """The methods for a table's targets, those of this library first."""
    if name in COUNTS:
        return COUNT_METHODS
    return MULTICLASS_METHODS if name in MULTICLASS else CLASS_METHODS


def task_rows(name: str, n: int, split: int, most_test: int) -> tuple[Task, Array]:
    """A method's task and the test targets, rows drawn as by ``benchmarks.tables.cells``."""
    whole = load_labelled(name)
    rows = data.split(len(whole.targets), split, TEST_SHARE)
    train, test = data.subset(rows.train, n, split).numpy(), rows.test[:most_test].numpy()
    # An input that is equal in all training rows says nothing, and has no scale.
    x = whole.inputs[:, np.ptp(whole.inputs[train], axis=0) > 0]
    x = (x - x[train].mean(0)) / x[train].std(0)
    exposure = np.ones(len(x)) if whole.exposure is None else whole.exposure
    y = whole.targets.astype(float)
    return Task(x[train], y[train], x[test], exposure[train], exposure[test], split), y[test]


def score_classes(probabilities: Array | float, y: Array) -> dict[str, float]:
    """Scores of probabilities of m rows: ``nll``, the log loss, Brier score, accuracy.

    Probabilities are those of class 1 of two, ``(m,)`` or one for all, or of each class,
    ``(m, classes)``, where the Brier score is half the sum over classes. Of two classes ``bin_0``
    to ``bin_9`` are, of the rows whose probability is in that tenth of [0, 1], the sum of
    probabilities less the number in class 1.
    """
    p, labels, bins = np.asarray(probabilities), y.astype(int), []
    if p.ndim < 2:
        p = np.clip(np.broadcast_to(p, y.shape), _LEAST, 1 - _LEAST)
        bins = np.bincount((10 * p).astype(int), p - y, minlength=10).tolist()
        p = np.stack([1 - p, p], axis=1)
    # A class that no training row has got no column.
    p = np.pad(p, ((0, 0), (0, max(0, labels.max() + 1 - p.shape[1]))))
    indicators = np.eye(p.shape[1])[labels]
    scores = {
        "nll": -np.mean(np.log(np.clip((p * indicators).sum(1), _LEAST, 1 - _LEAST))),
        "brier": np.mean(((p - indicators) ** 2).sum(1)) / 2,
        "accuracy": np.mean(p.argmax(1) == labels),
    }
    return check_finite(scores | dict(zip(_BINS, bins, strict=False)))


def score_counts(prediction: Any, y: Array, unit: float) -> dict[str, float]:
    """Scores of densities of counts: ``nll``, ``rmse`` of the mean, coverage of 90 % intervals.

    Args:
        prediction: See :mod:`benchmarks.tables.class_methods`.
        y: The counts.
        unit: What errors are measured in: the standard deviation of the training counts.
    """
    # From the .05 to the .95 quantile, each the least count that has so much up to it.
    reached, below = np.asarray(prediction.cdf(y)), np.asarray(prediction.cdf(y - 1))
    scores = {
        "nll": -np.mean(np.asarray(prediction.log_prob(y))),
        "rmse": np.sqrt(np.mean((np.asarray(prediction.mean) - y) ** 2)) / unit,
        "coverage_90": np.mean((reached >= 0.05) & (below < 0.95)),
    }
    return check_finite(scores)


def run_class_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Fits one method and tests it.

    Args:
        cell: Its configuration: ``table``, ``n`` (training rows), ``split``, ``method``
            and ``most_test``.

    Returns:
        Scores, ``seconds`` of fit and prediction, ``num_test``, ``num_data``, ``num_features``;
        ``failure``: the error that ended the method, in whose place there are no scores, else
        empty.
    """
    name, method = cell["table"], cell["method"]
    drawn = name, cell["n"], cell["split"], cell["most_test"]
    task, y = task_rows(*drawn)
    about = {"num_test": len(y), "num_data": len(load_labelled(name).targets)}
    about["num_features"] = task.x.shape[1]
    try:
        prediction, seconds = _predicted(method, *drawn)
        if name in COUNTS:
            scores = score_counts(prediction, y, float(task.y.std()) or 1.0)
        else:
            scores = score_classes(prediction, y)
    except Exception as error:  # how a method fails is a result
        return {**about, "failure": describe_error(error)}
    return {**about, **scores, "seconds": seconds, "failure": ""}


@functools.lru_cache(maxsize=len(_EVERY))
def _predicted(method: str, name: str, *drawn: int) -> tuple[Any, float]:
    """Predictions and their seconds, kept for the average of several methods."""
    predict = _methods(name)[method].predict
    if method == class_methods.AVERAGE:
        members = [_predicted(each, name, *drawn) for each in class_methods.MEMBERS]
        predictions, seconds = zip(*members, strict=True)
        return predict(predictions), sum(seconds)
    start = time.perf_counter()
    prediction = predict(task_rows(name, *drawn)[0])
    return prediction, time.perf_counter() - start


def make_class_grid(
    tables: Annotated[
        tuple[str, ...], Option(help=f"Tables, comma-separated; or {', '.join(_SETS)}."), names
    ] = ("classes", "multiclass", "counts"),
    n: Sizes = (50, 100, 200, 400, 1000),
    splits: Splits = 10,
    methods: Methods = None,
    most_test: MostTest = 1000,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Every combination of these settings, splits and sizes first.

    Raises:
        UnknownNameError: No such table or method.
        ArgumentError: A number is below 1, or the package of a method that was named is missing.
    """
    chosen = list(dict.fromkeys(t for name in tables for t in _SETS.get(name, (name,))))
    check_known("tables", chosen, (*BINARY, *MULTICLASS, *COUNTS))
    check_positive(splits=splits, most_test=most_test, **{f"n {size}": size for size in n})
    present = installed({name: _EVERY[name].package for name in _EVERY}, methods, quiet)
    sizes = {name: sizes_of(len(load_labelled(name).targets), n) for name in chosen}
    return [
        case | {"method": method, "most_test": most_test}
        for case in balanced(range(splits), sizes)
        for method in _methods(case["table"])
        if method in present
    ]


_ABOUT = (
    "A case is a table and a number of training rows; a method's score in it is the mean over "
    "splits. Ranks are in log loss, of each method among those of other packages and itself, means "
    "over cases, the last where it failed in a split; scores are means over the cases of a table "
    "and then over tables, `-` where it failed. Log loss is in nats a row, of probabilities of "
    f"classes cut to [{_LEAST:g}, 1 - {_LEAST:g}]. The calibration error is that of ten equal bins "
    "of the probability of class 1, the test rows of all splits of a case together. RMSE is in "
    "units of the standard deviation of the training counts. Coverage is that of the interval from "
    "the .05 to the .95 quantile: of few counts that is above .9. Seconds are medians of fit and "
    "prediction, on one core with other work beside."
)
_FORMATS = {
    "rank": ".1f", "log loss": ".3f", "Brier": ".4f", "accuracy": ".3f", "calibration error": ".3f",
    "RMSE": ".3f", "coverage 90": ".3f", "failures": "d", "seconds": ".2f",
}  # fmt: skip


def _sections(cells: pandas.DataFrame) -> Iterator[str]:
    yield section("What the numbers are", _ABOUT)
    for kind, known in (("Classes", BINARY), ("Counts", COUNTS)):
        for half, members in (("judged", JUDGED), ("development", DEVELOPMENT)):
            chosen = cells["table"].isin(known) & cells["table"].isin(members)
            whole = report.whole_rows(cells[chosen])
            if len(whole):
                yield from _compare(f"{kind}, {half} tables", whole)
    several = report.whole_rows(cells[cells["table"].isin(MULTICLASS)])
    if len(several):
        yield from _compare("More than two classes", several)
        losses = report.case_means(several, "nll").map("{:.3f}".format)
        said = "Means over splits."
        yield section("More than two classes: log loss of each case", said, table(losses))
    yield from report.failures(cells, ["table"], ["n", "split", "method", "failure"])


def _compare(title: str, cells: pandas.DataFrame) -> Iterator[str]:
    """Standing, log loss against n, and differences to the best of others."""
    is_count = cells["table"].iloc[0] in COUNTS
    methods = _methods(cells["table"].iloc[0])
    peers = class_methods.COUNT_PEERS if is_count else class_methods.CLASS_PEERS
    losses = report.case_means(cells, "nll")
    rivals = [name for name in losses if name in peers]
    ranks = rank_among(losses, rivals).mean().sort_values()
    metrics = {"log loss": "nll", "RMSE": "rmse", "coverage 90": "coverage_90"}
    if not is_count:
        metrics = {"log loss": "nll", "Brier": "brier", "accuracy": "accuracy"}
    columns = {"what": pandas.Series({name: methods[name].about for name in losses}), "rank": ranks}
    for heading, metric in metrics.items():
        values = _without_failures(report.case_means(cells, metric))
        columns[heading] = report.over_tables(values).mean()
    if methods is CLASS_METHODS:
        columns["calibration error"] = report.over_tables(calibration_errors(cells)).mean()
    grouped = cells.groupby("method")
    columns["failures"] = grouped["failure"].agg(lambda v: int((v != "").sum()))
    columns["seconds"] = grouped["seconds"].median()
    standing = pandas.DataFrame(columns).loc[ranks.index].rename_axis(index="method")
    formats = {name: form for name, form in _FORMATS.items() if name in standing}
    listed, cases = ", ".join(sorted(set(cells["table"]))), len(losses)
    said = f"{listed}: {cases} cases, {cells['split'].nunique()} splits at most."
    yield section(title, said, table(report.format_columns(standing, formats)))
    losses = losses[list(ranks.index)]
    grouped_by_size = cells.groupby(["method", cells["n"].map(report.size_of)])
    times = grouped_by_size["seconds"].median().unstack().reindex(ranks.index)
    times = times.rename_axis("method").add_prefix("n ≤ ").map("{:.2f}".format)
    yield section(f"{title}: seconds against n", "Medians of fit and prediction.", table(times))
    said = "Means and standard errors over tables."
    yield section(f"{title}: log loss against n", said, table(_sized(losses)))
    if rivals:
        best = ranks[rivals].idxmin()
        said = (
            f"Log loss less that of {best}, which has the best mean rank of other packages' "
            "methods; means and standard errors over tables, below zero where it is better."
        )
        less = losses.drop(columns=best).sub(losses[best], axis=0)
        yield section(f"{title}: beside {best}", said, table(_sized(less, "+")))


def rank_among(losses: pandas.DataFrame, rivals: Sequence[str]) -> pandas.DataFrame:
    """Ranks of each column among these and itself, row by row; NaN, a failure, is the last."""
    ranks = {}
    for name in losses:
        better = losses[[*rivals]].lt(losses[name], axis=0).sum(axis=1)
        ranks[name] = 1 + better.where(losses[name].notna(), len({*rivals} - {name}))
    return pandas.DataFrame(ranks)


def _without_failures(values: pandas.DataFrame) -> pandas.DataFrame:
    """The same without numbers for methods that failed: means over other cases compare cases."""
    return values.loc[:, values.notna().all()].reindex(columns=values.columns)


def calibration_errors(cells: pandas.DataFrame) -> pandas.DataFrame:
    """Calibration errors of the cases, from the test rows of all their splits together.

    Returns:
        A row for each case, a column for each method: the mean over rows of the distance between
        mean probability and share of class 1 in the bin of the row.
    """
    grouped = cells[cells["failure"] == ""].groupby(["table", "n", "method"])
    return (grouped[_BINS].sum().abs().sum(axis=1) / grouped["num_test"].sum()).unstack("method")


def _sized(values: pandas.DataFrame, sign: str = "") -> pandas.DataFrame:
    """Means with standard errors over tables, a row for each method, a column for each size."""
    sizes = values.index.get_level_values("n").map(report.size_of)
    groups = {"all": values} | {f"n ≤ {s}": values[sizes == s] for s in sorted(set(sizes))}
    columns = {}
    for heading, group in groups.items():
        means = report.over_tables(_without_failures(group))
        columns[heading] = [with_error(means[name].dropna(), sign=sign) for name in means]
    return pandas.DataFrame(columns, pandas.Index(list(values), name="method"))


CLASSES = Study(
    name="tables classes",
    about="This library's models of classes and counts, beside other ways to predict them.",
    title="Classes and counts",
    running="Fits each method to random training rows of each table and tests its probabilities on "
    "other rows, once a split.",
    reporting="ranks, scores, calibration, differences to the best of others, failures.",
    grid=make_class_grid,
    cell=run_class_cell,
    needed=("table", "n", "split", "method", "failure", "nll"),
    label="{table} n={n} split {split} {method}",
    tables=_sections,
    data=False,
    apart=("method", "table", "n", "split", "most_test"),
)
