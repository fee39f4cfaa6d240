"""Timings as a study: what is measured, its grid, and the tables of its report."""

from __future__ import annotations

import ast
import gc
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import pandas
import threadpoolctl
import torch
from typer import Option

from benchmarks._options import check_device, check_known, check_positive, names
from benchmarks._tables import section, spread_rows, table
from benchmarks.speed import accuracy, fits, neighbours, networks, steps
from benchmarks.speed.timing import Row, machine_name
from benchmarks.study import Study
from gpclml.errors import ArgumentError


class Measurement(NamedTuple):
    """One kind of timing cell.

    Args:
        measure: Gives rows; its arguments by keyword, but ``device`` and ``seconds`` where it has
            these, are settings.
        settings: Their usual values, every combination of which is a cell.
        heading: Of its tables.
        about: What their columns are.
    """

    measure: Callable[..., list[Row]]
    settings: Mapping[str, Sequence[Any]]
    heading: str
    about: str


_TIMES = "`ratio`: median over rounds of the time over the first method's in the same round."

MEASUREMENTS: Mapping[str, Measurement] = {
    "steps": Measurement(
        steps.measure_steps,
        {"n": (250, 500, 1000, 2000, 4000), "dtype": ("float64", "float32")},
        "Gradient steps",
        "Value and gradient of one objective of an ARD RBF GP of 8 inputs, kernel included; "
        "`dense`: the kernel is evaluated by GPyTorch, as those whose derivatives are not in "
        "closed form. `ratio`: to GPyTorch's `ExactMarginalLogLikelihood` by Cholesky in the same "
        "round. `of product`: the time of the least operations (LML n³, a held-out tenth .48 n³, "
        "ten folds and leave-one-out 2 n³) at the rate of a matrix product in the same type, over "
        "the step's. `GiB`: at the peak, beyond data and parameters; `predicted GiB`: what the "
        "library expects, and refuses by.",
    ),
    "rates": Measurement(
        steps.measure_rates, {"n": (4000,), "dtype": ("float64", "float32")},
        "Rates of the machine",
        "`Gflop/s`: a product counts 2 n³ operations, a factor n³/3, its inverse 2 n³/3 more, a "
        "triangular solve with n columns n³; sums and kernel entries count one each.",
    ),
    "searches": Measurement(
        fits.measure_searches,
        {"n": (20, 50, 100, 200, 400, 800), "dimensions": (8,), "seed": (0, 1, 2)},
        "Whole fits by a line search",
        f"BoTorch's `SingleTaskGP` with its default priors, by L-BFGS-B. {_TIMES} `LML a point`: "
        "at the end, with the priors' share; `gain`: above that of BoTorch's fit.",
    ),
    "class-fits": Measurement(
        fits.measure_class_fits,
        {"data": ("breast-cancer", "spam", "drawn"), "n": (100, 200, 400, 800)},
        "Whole fits of two classes",
        f"{_TIMES} `evidence`: log evidence a point at the end, of the first two methods that of "
        "one model; `predict s`: seconds of 100,000 new points.",
    ),
    "batches": Measurement(
        fits.measure_batches, {"n": (100, 300, 700), "objective": ("clml", "lml")},
        "Many models at once",
        f"Deep kernels with a bottleneck, built and fitted by 20 steps of Adam. {_TIMES}",
    ),
    "large-fits": Measurement(
        fits.measure_large_fits,
        {"n": (10_000,), "kernel": ("matern 5/2",), "method": ("LML", "GPyTorch's LML")},
        "Exact fits of many points",
        "`GPRegression` by a line search; `seconds` of the fit. LML and leave-one-out are per "
        "training point, test scores of up to 5000 other rows; all in standardized units.",
    ),
    "predictions": Measurement(
        fits.measure_predictions,
        {"table": fits.TABLES, "n": (20, 50, 100, 200), "subset": (0, 1, 2, 3)},
        "What the fits predict",
        "Fits by `fit_gpytorch_mll_fused` less BoTorch's own, paired: `nll` in nats a row, `worse` "
        "and `better` by more than .02, `p` of the sign test, `rmse` and `time` as ratios.",
    ),
    "loops": Measurement(
        fits.measure_loops, {"function": ("branin", "hartmann-6"), "start": (0, 1, 2)},
        "Bayesian optimization from end to end", "Seconds of 50 evaluations, one after the other.",
    ),
    "acquisitions": Measurement(
        fits.measure_acquisitions, {"n": (100, 300, 1000)},
        "Posteriors of models that stay as they are",
        f"Mean and variance of 256 single points and their gradient; predictions of ten. {_TIMES}",
    ),
    "few-shot": Measurement(
        networks.measure_few_shot,
        {"kernel": ("linear", "cosine", "rbf", "polynomial_1"), "tasks": (1,)},
        "The GP part of a few-shot step",
        f"5 ways of 17 images, 64 features: value and gradient. {_TIMES}",
    ),
    "training-steps": Measurement(
        networks.measure_training_steps,
        {"kernel": ("linear", "cosine", "rbf"), "shots": (1, 5)},
        "Steps of few-shot training", f"Conv4 on one 5-way task, Adam's step included. {_TIMES}",
    ),
    "evidence": Measurement(
        networks.measure_evidence,
        {"network": ("mlp-512x2", "cnn-8x2", "resnet-16x1"), "n": (1000,)},
        "The evidence of networks",
        f"Value and gradient in the precisions of all parameter tensors, images in ten classes. "
        f"{_TIMES}",
    ),
    "posteriors": Measurement(
        networks.measure_posteriors, {"problem": ("prediction", "10 x 64", "100 x 100")},
        "Laplace posteriors of last layers",
        "A prediction of a network of 2.4e7 weights; fits with the full curvature of a linear "
        "layer, classes x features, of 1,000 points; laplace-torch without its search of "
        f"precisions. {_TIMES}",
    ),
    "neighbours": Measurement(
        neighbours.measure_neighbors,
        {"n": (10_000, 100_000, 1_000_000), "dimensions": (4, 8, 20), "memory": (True,)},
        "Many points given their nearest neighbours",
        "A Matern kernel fitted by 100 steps of Adam, float32. `ms`: processor time of a step "
        "without the lookup of neighbours; `lookup ms`: of that, the median; `refresh s`: looking "
        "them up in new metrics, in all. Memory at the peak is in multiples of inputs and targets, "
        "themselves included.",
    ),
    "neighbours-accuracy": Measurement(
        neighbours.measure_accuracy_given,
        {"data": ("kin40k", "protein", "pol"), "kernel": ("matern",), "k": (32,), "batch": (128,),
         "steps": (300,), "given": (64,)},
        "What more neighbours, rows a step and steps are worth",
        "Models trained with `k` neighbours of each of the rows of a `batch`, and predictions "
        "`given` so many; errors of up to 2,000 test rows, in deviations of the targets.",
    ),
    "accuracy": Measurement(
        accuracy.measure_accuracy,
        {"data": ("kin8nm", "power", "protein"), "n": (2000, 8000), "noise": (0.1, 0.01, 0.001),
         "fitted": (False, True)},
        "Errors of conjugate gradients",
        "Values and gradients against Cholesky factors in float64; `bound`: of the value's error.",
    ),
}  # fmt: skip
"""The kinds by name."""

_CARD = {"methods": ("all",), "memory": (True,)}
_GPU: tuple[tuple[str, Mapping[str, Sequence[Any]]], ...] = (
    ("rates", {"n": (8192,)}),
    ("steps", {"n": (500, 1000, 2000, 5000, 10_000, 20_000), **_CARD}),
    ("searches", {"n": (100, 500, 2000), "seed": (0,)}),
    ("large-fits", {"n": (2000, 10_000), "kernel": ("matern 5/2", "rbf", "matern 3/2"),
                    "method": ("LML", "leave-one-out")}),
    ("large-fits", {"n": (10_000, 20_000), "method": ("LML", "GPyTorch's LML")}),
    ("batches", {"n": (100,), "objective": ("clml",), "size": (10, 100, 256)}),
    ("few-shot", {"kernel": ("rbf", "cosine"), "tasks": (1, 16, 64)}),
    ("evidence", {"memory": (True,)}),
    ("rates", {"n": (100, 300), "matrices": (100,), "dtype": ("float64",)}),
    ("steps", {"n": (20_000, 50_000), "dtype": ("float32",), "methods": ("scale",),
               "memory": (True,)}),
    ("steps", {"n": (40_000, 50_000), "dtype": ("float32",), "methods": ("block",),
               "memory": (True,)}),
)  # fmt: skip
_BESIDE: tuple[tuple[str, Mapping[str, Sequence[Any]]], ...] = (
    ("rates", {"dtype": ("float64",)}),
    ("steps", {"n": (500, 1000, 2000, 5000), "dtype": ("float64",), "methods": ("few",)}),
    ("searches", {"n": (100, 500, 2000), "seed": (0,)}),
    ("few-shot", {"kernel": ("rbf",), "tasks": (1, 16)}),
    ("evidence", {}),
)
_SMALL: tuple[tuple[str, Mapping[str, Sequence[Any]]], ...] = (
    ("rates", {"n": (40,)}),
    ("steps", {"n": (40,), "dtype": ("float64",)}),
    ("searches", {"n": (20,), "seed": (0,)}),
    ("class-fits", {"data": ("drawn",), "n": (20,), "new": (30,)}),
    ("batches", {"n": (15,), "objective": ("clml",), "size": (2,), "steps": (1,)}),
    ("large-fits", {"n": (40,), "method": ("LML", "GPyTorch's LML"), "data": ("drawn",)}),
    ("few-shot", {"kernel": ("rbf",), "ways": (2,), "images": (3,)}),
    ("evidence", {"network": ("cnn-4x1",), "n": (20,)}),
)


def make_grid(
    study: Annotated[
        tuple[str, ...],
        Option(help=f"Kinds of cells, comma-separated: {', '.join(MEASUREMENTS)}; or gpu, what a "
               "machine with a GPU is asked, or small, to try that."),
        names,
    ] = ("steps",),
    set: Annotated[
        tuple[str, ...] | None,
        Option(help="Settings in place of the usual ones, such as n=20+50+100,tasks=1+2. Those "
               "that no kind has are refused."),
        names,
    ] = None,
    device: Annotated[str, Option(help="cpu, cuda or cuda:1.")] = "cpu",
    beside_cpu: Annotated[
        bool, Option("--beside-cpu", help="With gpu: some cells on the CPU as well.")
    ] = False,
    seconds: Annotated[float, Option(min=0, help="That the rounds of a cell may take.")] = 2.0,
    threads: Annotated[int, Option(min=1, help="CPU threads.")] = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every combination of the settings of each kind of cell.

    Raises:
        UnknownNameError: No such kind, or no kind that has a setting.
        ArgumentError: A setting has no value, or the device is not at hand.
    """
    check_device(device)
    check_positive(threads=threads)
    check_known("study", study, [*MEASUREMENTS, "gpu", "small"])
    # Settings that one kind takes are ignored by the others, and refused if none does.
    given = dict(_values(text) for text in set or ())
    asked: list[tuple[str, str, Mapping[str, Sequence[Any]]]] = []
    for name in study:
        plans = {"gpu": _GPU, "small": _SMALL}.get(name, [(name, {})])
        asked += [(device, kind, settings) for kind, settings in plans]
        if name == "gpu" and beside_cpu:
            asked += [("cpu", kind, settings) for kind, settings in _BESIDE]
    takes = {kind: inspect.signature(MEASUREMENTS[kind].measure).parameters for _, kind, _ in asked}
    check_known("set", given, dict.fromkeys(name for kind in takes for name in takes[kind]))
    cells = []
    for location, kind, settings in asked:
        values = {**MEASUREMENTS[kind].settings, **settings}
        values |= {name: given[name] for name in given if name in takes[kind]}
        common = {
            "study": kind, "device": location, "machine": machine_name(location),
            "threads": threads, "time": seconds,
        }  # fmt: skip
        for combination in itertools.product(*values.values()):
            cells.append(common | dict(zip(values, combination, strict=True)))
    return cells


def _values(text: str) -> tuple[str, list[Any]]:
    """A setting and its values, numbers where they look like numbers, true and false."""
    name, _, values = text.partition("=")
    if not name or not values:
        raise ArgumentError("set", repr(text), "NAME=VALUE or NAME=VALUE+VALUE")
    return name, [_value(value) for value in values.split("+")]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.title() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of a measurement, on the threads that its cell names."""
    settings = {name: value for name, value in cell.items() if name not in _COMMON}
    device, threads = cell["device"], cell["threads"]
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("highest")  # no TF32, in convolutions neither
        torch.backends.cudnn.allow_tf32 = False
        gc.collect()
        torch.cuda.empty_cache()
    # The runner has set one thread; a timing cell says its own number.
    with threadpoolctl.threadpool_limits(threads):
        torch.set_num_threads(threads)  # the runner sets it back
        measure = MEASUREMENTS[cell["study"]].measure
        taken = inspect.signature(measure).parameters
        # Not everything runs on a card, or in rounds.
        given = {"device": device, "seconds": cell["time"]}
        settings |= {name: value for name, value in given.items() if name in taken}
        return {"rows": measure(**settings)}


_COMMON = ("study", "device", "machine", "threads", "time")
_FIXED = ("machine", "device", "threads", "dtype")
_FIRST = (*_FIXED, "n", "data", "kernel", "network", "tasks", "matrices", "method")


def sections(cells: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report, one for each kind of cell."""
    yield from _beside_the_cpu(cells)
    for kind, measurement in MEASUREMENTS.items():
        rows = cells[cells["study"] == kind].dropna(axis="columns", how="all")
        if rows.empty:
            continue
        if kind == "predictions":
            rows = fits.summarize_predictions(rows).map(_shown)
            yield section(measurement.heading, measurement.about, table(rows))
            continue
        shown = _averaged(rows) if "seed" in rows or "start" in rows else rows
        groups = shown.groupby([name for name in _FIXED if name in shown], sort=False)
        texts = [_group_table(group) for _, group in groups]
        yield section(measurement.heading, measurement.about, *texts)


def prepared(done: pandas.DataFrame) -> pandas.DataFrame:
    """A row a method; steps with the rate of a product that they reach."""
    rows = spread_rows(done.drop(columns=[name for name in done if name.startswith("_")]))
    keys = ["device", "machine", "threads", "dtype"]
    if "Gflop" in rows and "Gflop/s" in rows:
        products = rows[(rows["method"] == "product") & (rows["study"] == "rates")]
        # The best rate: other programs can only lower it.
        rate = products.groupby(keys)["Gflop/s"].max().rename("rate")
        rows = rows.join(rate, on=keys)
        rows["of product"] = rows["Gflop"] / rows.pop("rate") / (1e-3 * rows["ms"])
    first = [name for name in ("study", *_FIRST) if name in rows]
    return rows[first + [name for name in rows if name not in first]]


def _averaged(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Medians over seeds."""
    rows = rows.drop(columns=["seed", "start"], errors="ignore")
    known = [*MEASUREMENTS[rows["study"].iloc[0]].settings, *_COMMON, "dtype", "method"]
    keys = [name for name in known if name in rows]
    return rows.groupby(keys, sort=False).median(numeric_only=True).reset_index()


def _group_table(rows: pandas.DataFrame) -> str:
    """A table of what was measured in one place, what is the same everywhere above it."""
    rows = rows.drop(columns=["study", "time", "low", "high", "Gflop"], errors="ignore")
    rows = rows.dropna(axis="columns", how="all")
    fixed = {name: rows.pop(name).iloc[0] for name in _FIXED if name in rows}
    caption = ", ".join(
        f"{v} threads" if name == "threads" else f"{v}" for name, v in fixed.items()
    )
    rows = rows.map(_shown)
    return f"{caption}\n\n{table(rows.set_index(rows.columns[0]))}"


def _shown(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    whole = value == int(value) or abs(value) >= 100
    return f"{value:.0f}" if whole and abs(value) < 1e9 else f"{value:.3g}"


def _beside_the_cpu(cells: pandas.DataFrame) -> Iterator[str]:
    """What was measured on both devices."""
    if "ms" not in cells:
        return
    keys = [name for name in ("study", *_FIRST[3:]) if name in cells]
    times = cells[cells["ms"].notna() & (cells["study"] != "rates")]
    # cuda:1 is a card as cuda is.
    times = times.assign(kind=times["device"].str.partition(":")[0])
    times[keys] = times[keys].astype(object).where(times[keys].notna(), "")
    wide = times.pivot_table("ms", keys, "kind", "first", sort=False)
    if {"cpu", "cuda"} <= {*wide}:
        both = wide[["cuda", "cpu"]].dropna().assign(ratio=wide["cpu"] / wide["cuda"])
        both.columns = ["cuda, ms", "cpu, ms", "cpu over cuda"]
        about = "The same steps and fits on the card and on this machine's CPU."
        yield section("Where a card begins to pay", about, table(both.map(_shown)))


STUDY = Study(
    name="speed",
    about="Steps, fits and their memory beside those of other libraries, on a CPU or a GPU.",
    title="Speed",
    running="Measures every combination of the settings of each kind of cell, methods in turn.",
    reporting="times, ratios in the same rounds, memory.",
    grid=make_grid,
    cell=run_cell,
    needed=("study", "machine"),
    label="{study} on {device}",
    prepare=prepared,
    tables=sections,
)
