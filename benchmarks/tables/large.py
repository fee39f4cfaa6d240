"""The study of large tables: ``python -m benchmarks.tables large run``, and ``large report``."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from unittest import mock

import numpy as np
import pandas
import threadpoolctl
import torch
from typer import Option

from benchmarks import data
from benchmarks._figures import PALETTE, bare, new_figure, save_figure
from benchmarks._options import check_known, check_positive, names
from benchmarks._tables import describe_error, section, table
from benchmarks.speed.timing import highest_resident, start_of_peak
from benchmarks.study import Study
from benchmarks.tables.cells import balanced
from benchmarks.tables.large_methods import LARGE_METHODS, OURS, Effort
from benchmarks.tables.peers import installed
from benchmarks.tables.report import case_means, described, failures, standing
from benchmarks.tables.scores import METRICS, Array, score
from benchmarks.tables.study import Methods, Splits
from gpclml.errors import DataError

TABLES = ("kin40k", "protein", "pol", "tamielectric", "bike", "power", "naval", "kin8nm")

PUBLISHED = {
    ("kin40k", "exact GP on eight GPUs (Wang et al. 2019)"): 0.099,
    ("protein", "exact GP on eight GPUs (Wang et al. 2019)"): 0.536,
}
"""RMSE of other splits."""

_NATS, _SHARE = 0.1, 1.05  # beyond which a difference in NLL, a ratio of RMSEs, is told


def split_rows(name: str, split: int, n: int) -> tuple[Array, Array, Array, Array]:
    """Inputs and targets of training rows, n of a random 90 %, and of the other 10 %.

    All are standardized by the training rows; inputs that are constant in these are left out.
    """
    whole = data.load(name)
    x, y = whole.inputs.numpy(), whole.targets.numpy()
    order = np.random.default_rng(split).permutation(len(x))
    train, test = order[: int(0.9 * len(x))][:n], order[int(0.9 * len(x)) :]
    x = x[:, np.ptp(x[train], axis=0) > 0]  # a deviation of equal values need not round to zero
    x = (x - x[train].mean(0)) / x[train].std(0)
    y = (y - y[train].mean()) / y[train].std()
    return x[train], y[train], x[test], y[test]


def measure(
    method: str, rows: tuple[Array, Array, Array, Array], seed: int, effort: Effort
) -> dict[str, Any]:
    """Scores of a method, its seconds and its memory at the peak, in this process."""
    x, y, test_x, test_y = rows
    if package := LARGE_METHODS[method].package:
        importlib.import_module(package)  # takes neither time nor memory of the fit
    before = start_of_peak()
    times = [(time.perf_counter(), time.process_time())]
    predict = LARGE_METHODS[method].predict(x, y, seed, effort)
    times.append((time.perf_counter(), time.process_time()))
    prediction = predict(test_x)
    times.append((time.perf_counter(), time.process_time()))
    peak = highest_resident() - before
    (fit, cpu_fit), (predicting, cpu_predicting) = np.diff(times, axis=0).tolist()
    below = np.asarray(prediction.cdf(test_y))
    return {
        **score(prediction, test_y, 1.0),
        "coverage_90": float(np.mean((below >= 0.05) & (below <= 0.95))),
        "seconds": fit + predicting, "fit_seconds": fit, "fit_cpu": cpu_fit,
        "predict_seconds": predicting, "predict_cpu": cpu_predicting, "GiB": peak / 2**30,
    }  # fmt: skip


def _send(connection: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        with threadpoolctl.threadpool_limits(1):
            connection.send(measure(*arguments))
    except Exception as error:  # how a method fails is a result
        connection.send({"failure": describe_error(error)})


def run_large_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Fits one method and tests it, in a process of its own with one thread.

    Args:
        cell: Its configuration: ``table``, ``split``, ``n`` (training rows), ``method``,
            ``effort`` and ``limit`` (seconds), ``steps``.

    Returns:
        The scores of :func:`benchmarks.tables.scores.score` and ``coverage_90``, of standardized
        targets; wall and processor seconds; ``GiB`` at the peak beyond those before the fit;
        ``failure``, in whose place there are no scores, else empty.
    """
    rows = split_rows(cell["table"], cell["split"], cell["n"])
    about = {"num_test": len(rows[3]), "num_features": rows[0].shape[1]}
    about["num_data"] = data.load(cell["table"]).num_data
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    effort = Effort(cell["effort"], cell["steps"])
    arguments = there, cell["method"], rows, cell["split"], effort
    process = context.Process(target=_send, args=arguments, daemon=True)
    # The start method of joblib's workers is one that a new process does not know.
    method = mock.patch("multiprocessing.spawn.get_start_method", return_value="spawn")
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}), method:
        process.start()
    there.close()
    try:
        # A process that is killed, for lack of memory say, closes its end.
        ended = here.poll(cell["limit"])
        answer = here.recv() if ended else {"failure": f"not ended after {cell['limit']} s"}
    except EOFError:
        process.join()
        answer = {"failure": f"its process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
    return {**about, "failure": "", **answer}


def make_large_grid(
    tables: Annotated[tuple[str, ...], Option(help="Tables, comma-separated."), names] = TABLES,
    splits: Splits = 1,
    methods: Methods = None,
    rows: Annotated[int | None, Option(min=50, help="Most training rows, to try it.")] = None,
    effort: Annotated[float, Option(help="Processor seconds of training step by step.")] = 240.0,
    steps: Annotated[
        int | None, Option(min=1, help="Most steps, epochs, trees: to try it.")
    ] = None,
    limit: Annotated[float, Option(help="Wall seconds after which a method has failed.")] = 7200.0,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Every combination of these settings, splits first.

    Raises:
        UnknownNameError: No such table or method.
        ArgumentError: A number is not positive, or the package of a method that was named is
            missing.
    """
    check_known("tables", tables, data.names())
    check_positive(effort=effort, limit=limit)
    packages = {name: method.package for name, method in LARGE_METHODS.items()}
    chosen = installed(packages, methods, quiet)
    sizes = {name: [min(rows or 10**9, int(0.9 * data.load(name).num_data))] for name in tables}
    return [
        case | {"method": method, "effort": effort, "steps": steps, "limit": limit}
        for case in balanced(range(splits), sizes)
        for method in chosen
    ]


def _sections(cells: pandas.DataFrame) -> Iterator[str]:
    present = set(cells["method"])
    about = described(cells, {name: method.about for name, method in LARGE_METHODS.items()})
    yield section("Methods", table(about))
    means = {metric: case_means(cells, metric).droplevel("n") for metric in ("rmse", "nll")}
    # Ranks among other methods than on another table would not be comparable.
    counts = cells.groupby("method")["table"].transform("nunique")
    whole = cells[counts == cells["table"].nunique()]
    if len(whole):
        columns = ["rank NLL", "rank CRPS", "rank RMSE", "coverage 50", "coverage 95", "failures"]
        results = standing(whole)[columns].astype(float).round(3)
        said = "Among the methods that have been run on all of these tables."
        yield section("Mean ranks", said, table(results))
    for metric, digits in (("rmse", 4), ("nll", 3), ("crps", 4), ("coverage_90", 3)):
        said = "Means over splits; `-`: failed, or not run."
        yield section(metric.upper().replace("_", " "), said, table(_wide(cells, metric, digits)))
    if present & set(OURS):
        lines = list(_behind(cells, means))
        yield section("Behind the best", _ABOUT_BEHIND, "\n".join(lines) or "None.")
    for metric in ("fit_cpu", "fit_seconds", "predict_cpu", "predict_seconds", "GiB"):
        yield section(_COSTS[metric], table(_wide(cells, metric, 2)))
    index = pandas.MultiIndex.from_tuples(list(PUBLISHED), names=["table", "method"])
    published = pandas.DataFrame({"RMSE": list(PUBLISHED.values())}, index)
    yield section("Published", "On other random splits.", table(published))
    yield from failures(cells, ["table", "split"])


_ABOUT_BEHIND = (
    f"Tables on which a method of this library is worse than the best of all methods by more than "
    f"{_NATS} nats, or {100 * (_SHARE - 1):.0f} % of the RMSE; in brackets its score and the best."
)
_COSTS = {
    "fit_cpu": "Processor seconds of fitting", "fit_seconds": "Wall seconds of fitting",
    "predict_cpu": "Processor seconds of predicting",
    "predict_seconds": "Wall seconds of predicting", "GiB": "GiB at the peak above the start",
}  # fmt: skip


def _wide(cells: pandas.DataFrame, metric: str, digits: int) -> pandas.DataFrame:
    """A row for each method, a column for each table."""
    means = case_means(cells, metric).droplevel("n").T
    columns = [name for name in TABLES if name in means] or list(means)
    return means[columns].map(lambda v: f"{v:.{digits}f}" if v == v else "-")


def _behind(cells: pandas.DataFrame, means: Mapping[str, pandas.DataFrame]) -> Iterator[str]:
    """A line for each of this library's methods and each score: where others are better."""
    for method in (name for name in OURS if name in set(cells["method"])):
        tried = set(cells.loc[cells["method"] == method, "table"])
        for metric, values in means.items():
            told = []
            for name, row in values[values.index.isin(tried)].iterrows():
                best, mine = row.min(), row[method]
                limit = best + _NATS if metric == "nll" else _SHARE * best
                if not mine <= limit:  # a method that failed has no score
                    told.append(f"{name} ({mine:.3f}; {row.idxmin()} {best:.3f})")
            if told:
                yield f"- {method}, {metric.upper()}: {', '.join(told)}"


_LABELS = {
    "regressor": "Regressor", "deep-neighbors": "deep kernel, neighbours",
    "neighbors-64": "64 neighbours", "neighbors-256": "256 neighbours",
    "subset": "GP of 5,000 rows", "svgp-512": "SVGP 512", "svgp-1024": "SVGP 1024",
    "svgp-deep": "SVGP, deep kernel", "vnngp": "VNNGP", "gpboost": "GPBoost", "muygps": "MuyGPyS",
    "lightgbm": "LightGBM", "catboost": "CatBoost", "network": "tuned network",
    "ensemble": "five networks",
}  # fmt: skip
_SHOWN = "kin40k"
_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_LABEL_HEIGHT = 0.035  # of the axes


def draw_figure(cells: pandas.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draws error and log density of kin40k's test rows against seconds, a point for each method.

    Args:
        cells: Finished cells.
        path: The image file.

    Raises:
        DataError: The file cannot be written, or there are no cells of kin40k.
    """
    shown = cells[(cells["table"] == _SHOWN) & cells["method"].isin(_LABELS)]
    shown = shown[shown["failure"] == ""]
    if shown.empty:
        raise DataError(f"The figure needs cells of {_SHOWN}. Run them, or leave it out.")
    means = shown.assign(cpu=shown["fit_cpu"] + shown["predict_cpu"]).groupby("method")
    means = means[["cpu", "rmse", "nll"]].mean()
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = new_figure(10.5, 4.6, layout="constrained")
    panels: Any = figure.subplots(1, 2)
    panels[0].set_yscale("log")
    for axes, metric, label in zip(
        panels, ("rmse", "nll"), ("test RMSE", "test negative log density"), strict=True
    ):
        axes.set_xscale("log")
        axes.set_xlim(8, 1200)
        axes.margins(y=0.1)
        for method, row in means.iterrows():
            color, marker = (PALETTE[0], "o") if method in OURS else ("#5f5f5f", "s")
            axes.plot(row["cpu"], row[metric], marker, color=color)
        axes.autoscale_view()  # so that heights are those of the picture
        above, is_below = {}, False  # of ours to the left of points, of others to the right
        for method, row in means.sort_values(metric, ascending=False).iterrows():
            point = row["cpu"], row[metric]
            height = axes.transAxes.inverted().transform(axes.transData.transform(point))[1]
            # Of points close to each other every other label is below its point.
            is_ours = method in OURS
            is_below = above.get(is_ours, np.inf) - height < _LABEL_HEIGHT and not is_below
            axes.annotate(
                _LABELS[str(method)], point, xytext=(-6 if is_ours else 6, -9 if is_below else 3),
                textcoords="offset points", fontsize=9, ha="right" if is_ours else "left",
                color=PALETTE[0] if is_ours else "#5f5f5f",
            )  # fmt: skip
            above[is_ours] = height
        for axis, ticks in ((axes.xaxis, (10, 30, 100, 300, 1000)), (axes.yaxis, _ERRORS)):
            if axis is axes.xaxis or metric == "rmse":
                axis.set_major_locator(FixedLocator(ticks))
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter("{x:g}")
        axes.set_xlabel("processor seconds of fitting and predicting")
        axes.set_title(label, loc="left", fontsize=10)
        bare(axes)
    save_figure(figure, path)


LARGE = Study(
    name="tables large",
    about="This library's models of tables of tens of thousands of rows, beside other methods.",
    title="Large tables",
    running="Fits each method to 90 % of the rows of each table, with one thread, and tests its "
    "predictive densities on the others, once a split.",
    reporting="ranks, scores, costs, failures.",
    grid=make_large_grid,
    cell=run_large_cell,
    needed=("table", "split", "method", "failure", "coverage_90", *METRICS),
    label="{table} split {split} {method}",
    stand_in="Without files: --tables diabetes, which comes with scikit-learn.",
    tables=_sections,
    figure=draw_figure,
    caption="kin40k, 36,000 training rows: error and negative log density of new rows against the "
    "seconds of one processor core; the lower the better.",
    apart=("method", "table", "split", "n", "effort", "steps", "limit"),
)
