"""Regression on UCI data sets as a study: the options of its grid, its tables, its figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pandas
import typer
from typer import Option

from benchmarks._options import Device, names, real_numbers, whole_numbers
from benchmarks._tables import section, table
from benchmarks.data import load
from benchmarks.runner import Batches
from benchmarks.study import Study
from benchmarks.uci.cells import CONFIGURATION, batch_label, most_in_batch, run_cell, run_cells
from benchmarks.uci.figure import draw_figure
from benchmarks.uci.grid import Product, left_out_sizes, make_grid, named_products
from benchmarks.uci.tables import (
    METRICS,
    SETTINGS,
    difference_table,
    labels,
    less_lml,
    less_plain,
    mean_table,
    published_table,
    seconds_table,
    turning_table,
    win_table,
)
from gpclml.errors import ArgumentError

_ABOUT_DIFFERENCES = (
    "Mean paired difference ± standard error. In bold: beyond two standard errors. `below 0 (p)`: "
    "data sets whose mean difference is below zero, of those where it is not zero, and the "
    "two-sided p-value of the sign test. `wins / losses / ties`: data sets with a difference "
    "beyond two standard errors below and above zero, and the others."
)
_ABOUT_WINS = (
    "Data sets and n at which the mean paired difference to the ARD GP (rbf, lml, constant mean) "
    "is beyond two standard errors below zero (wins) and above (losses), and the others (ties); "
    "and the difference that is most standard errors above zero."
)
_ABOUT_MEDIANS = (
    "RMSE, medians over trials, CLML with m = 0.9 n. The paper's: Lotfi et al. (2022), Figures "
    "9(a) and 24, read off to about 0.01, in its normalised units; its code differs from its text "
    "([d, 50, 2] network, KISS-GP, the same first n rows in all trials)."
)
_ABOUT_TURNS = (
    "The first n at which the mean paired difference in RMSE to the LML is zero or above; `> n` "
    "where there is none up to n."
)


def labelled(done: pandas.DataFrame) -> pandas.DataFrame:
    """Finished cells with the columns ``kernel_label`` and ``objective_label``.

    A file of the user's of which there are several versions, or places, is a data set for each.
    """
    if "file" in done:
        done = done.assign(dataset=labels(done, "dataset", ["file", "sha256"]))
    done = done.assign(steps=done["steps"].astype("Int64"))  # whole numbers beside missing ones
    return done.assign(
        kernel_label=labels(done, "kernel", SETTINGS),
        objective_label=labels(done, "objective", ["held_out"]),
    )


def sections(done: pandas.DataFrame) -> Iterator[str]:
    """The sections of the report.

    Args:
        done: Finished cells as :func:`labelled` gives them.
    """
    verdicts = (
        ("Wins and losses against the plain ARD GP", _ABOUT_WINS, win_table(done)),
        ("Where the order turns", _ABOUT_TURNS, turning_table(done)),
        ("Beside the published medians", _ABOUT_MEDIANS, published_table(done)),
    )
    for heading, about, shown in verdicts:
        if len(shown):
            yield section(heading, about, table(shown))
    seeds = done["seed"].nunique()
    about = f"Mean ± standard error over {seeds} seeds (in brackets: fewer)."
    for metric, heading in METRICS.items():
        yield section(heading, about, table(mean_table(done, metric)))
    yield section("Paired differences", _ABOUT_DIFFERENCES)
    for metric, heading in METRICS.items():
        for name, differences in (
            ("less that of the LML, same kernel", less_lml(done, metric)),
            ("less that of the ARD GP (rbf, lml)", less_plain(done, metric)),
        ):
            if len(differences):
                shown = table(difference_table(differences, metric))
                yield section(f"{heading.partition(' (')[0]} {name}", shown)
    about = "Median over seeds; a first impression, as other processes ran beside."
    yield section("Seconds to train a model", about, table(seconds_table(done)))
    early = int(done["ended_early"].sum())
    if early:
        yield f"{early} fits ended early; they count with the parameters they kept."


def _grid(
    grid: Annotated[
        str | None,
        Option(
            help="A named grid: paper, baselines, deep, large, ablation. Options beside it "
            "replace its settings; an n above a data set's training rows is left out."
        ),
    ] = None,
    datasets: Annotated[
        tuple[str, ...] | None, Option(help="Data sets, comma-separated."), names
    ] = None,
    csv: Annotated[
        tuple[str, ...] | None,
        Option(
            help="Files of yours and their target columns, file:target, comma-separated: CSV or "
            "Parquet, read as the command gpclml reads them."
        ),
        names,
    ] = None,
    n: Annotated[
        tuple[int, ...] | None,
        Option(help="Numbers of training rows, comma-separated; 100."),
        whole_numbers,
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="Number of seeds, 0, 1, ...; 10 of them.")
    ] = None,
    objectives: Annotated[
        tuple[str, ...] | None,
        Option(
            help="Objectives, comma-separated: lml, clml, loo, clml-fixed, clml-folds, "
            "clml-orderings, lml-subset; lml,clml."
        ),
        names,
    ] = None,
    kernel: Annotated[
        tuple[str, ...] | None,
        Option(
            help="Kernels, comma-separated: rbf, rq, matern, spectral_mixture (trained by "
            "L-BFGS), deep, deep-bottleneck (by Adam); rbf,deep,deep-bottleneck."
        ),
        names,
    ] = None,
    mean: Annotated[
        tuple[str, ...] | None,
        Option(help="Means, comma-separated: constant, zero, or mlp (trained by Adam); constant."),
        names,
    ] = None,
    steps: Annotated[
        tuple[int, ...] | None,
        Option(help="Numbers of Adam steps, comma-separated; 300."),
        whole_numbers,
    ] = None,
    lr: Annotated[float | None, Option(help="Learning rate of Adam; 0.01.")] = None,
    held_out: Annotated[
        tuple[float, ...] | None,
        Option(
            help="Shares of the training rows that an objective such as the CLML holds out, "
            "1 - m/n, comma-separated; 0.1. The CLML redraws them at each Adam step and has "
            "them fixed under L-BFGS (ten folds at 0.1)."
        ),
        real_numbers,
    ] = None,
    dtype: Annotated[
        str | None,
        Option(
            help="Type of all numbers: float64 or float32; float64. Matrices up to "
            "n = 512 are factored in float64 either way."
        ),
    ] = None,
    device: Device = "cpu",
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """The cells of what a command asks for; settings that it leaves out are the grid's or usual."""
    given = {
        "datasets": (*(datasets or ()), *(csv or ())) or None, "sizes": n, "seeds": seeds,
        "objectives": objectives, "kernels": kernel, "means": mean, "steps": steps, "lr": lr,
        "held_out": held_out, "dtype": dtype,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    for name in csv or ():
        if ":" not in name:
            fix = f"Write e.g. --csv {name}:price."
            raise ArgumentError("csv", repr(name), "file:target, a file and a column of it", fix)
    if grid is None and not given["datasets"]:
        fix = "Or name a --grid, or a --csv."
        raise ArgumentError("datasets", "none", "names separated by commas", fix)
    products = (Product(**settings),) if grid is None else named_products(grid, **settings)
    leave_out = grid is not None and n is None
    cells = make_grid(products, device=device, leave_out=leave_out)
    said = [
        f"Left out, too few rows: {name} n = {sizes}"
        for name, sizes in left_out_sizes(products, cells).items()
    ]
    said += [note for name in csv or () for note in load(name).notes]
    if grid is not None:
        precisions = " and ".join(sorted({cell["dtype"] for cell in cells}))
        said.append(f"{len(cells)} models in {precisions}.")
    for line in [] if quiet else said:
        typer.echo(line, err=True)
    return cells


STUDY = Study(
    name="uci",
    about="Gaussian process regression on UCI data sets under several objectives.",
    title="UCI regression",
    running="Trains a model for each data set, n, kernel, mean, objective and seed on n random "
    "rows of a random 90%, and tests it on the other 10%.",
    reporting="means over seeds, differences paired by seed, sign tests.",
    grid=_grid,
    cell=run_cell,
    batches=Batches(run_cells, batch_label, most_in_batch),
    needed=(*CONFIGURATION, *METRICS),
    label="{dataset} n={n} {kernel} {objective} seed {seed}",
    prepare=labelled,
    tables=sections,
    figure=draw_figure,
    caption="RMSE and NLL against n",
    stand_in="Without files: --datasets diabetes, a table that comes with scikit-learn.",
)
