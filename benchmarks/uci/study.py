"""Regression on UCI data sets as a study: the options of its grid, its tables, its figure."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option

from benchmarks._options import Device, names, real_numbers, whole_numbers
from benchmarks.runner import Batches
from benchmarks.study import Study
from benchmarks.uci.cells import (
    CONFIGURATION,
    SOURCES,
    batch_label,
    most_in_batch,
    run_cell,
    run_cells,
)
from benchmarks.uci.figure import draw_figure
from benchmarks.uci.grid import Product, left_out_sizes, make_grid, named_products
from benchmarks.uci.report import labelled, of_kernels, sections
from benchmarks.uci.tables import METRICS
from gpclml.errors import ArgumentError

__all__ = ["STUDY"]


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
    trace: Annotated[
        bool | None, Option("--trace", help="Also record the test RMSE in the course of training.")
    ] = None,
    dtype: Annotated[
        str | None, Option(help="Type of all numbers: float64 or float32; float64.")
    ] = None,
    device: Device = "cpu",
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """The cells of what a command asks for; settings that it leaves out are the grid's or usual."""
    given = {
        "datasets": datasets, "sizes": n, "seeds": seeds, "objectives": objectives,
        "kernels": kernel, "means": mean, "steps": steps, "lr": lr, "held_out": held_out,
        "trace": trace, "dtype": dtype,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    if grid is None and datasets is None:
        raise ArgumentError("datasets", "none", "names separated by commas", "Or name a --grid.")
    products = (Product(**settings),) if grid is None else named_products(grid, **settings)
    leave_out = grid is not None and n is None
    cells = make_grid(products, device=device, progress=not quiet, leave_out=leave_out)
    for name, sizes in left_out_sizes(products, cells).items():
        if not quiet:
            typer.echo(f"Left out, too few rows: {name} n = {sizes}", err=True)
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
    sources=SOURCES,
    batches=Batches(run_cells, batch_label, most_in_batch),
    needed=(*CONFIGURATION, *METRICS),
    label="{dataset} n={n} {kernel} {objective} seed {seed}",
    choose=of_kernels,
    prepare=labelled,
    tables=sections,
    figure=draw_figure,
    caption="RMSE and NLL against n",
)
