"""The commands ``run`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks._commands import errors_as_text, listed, names, numbers
from benchmarks._options import (
    Address,
    Backend,
    CsvFile,
    DataFolder,
    Device,
    Jobs,
    Quiet,
    ResultsFile,
    RetryFailed,
    data_variables,
    end_run,
    make_app,
)
from gpclml.errors import ArgumentError

if TYPE_CHECKING:
    from benchmarks.uci.studies import Product

__all__ = ["app"]

app = make_app("Gaussian process regression on UCI data sets under several objectives.")


@app.command()
def run(
    results: ResultsFile,
    grid: Annotated[
        str | None,
        typer.Option(
            help="A named grid: paper, baselines, deep, large, ablation. Options beside it "
            "replace its settings; an n above a data set's training rows is left out."
        ),
    ] = None,
    datasets: Annotated[str | None, typer.Option(help="Data sets, comma-separated.")] = None,
    n: Annotated[
        str | None, typer.Option(help="Numbers of training rows, comma-separated; 100.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, 0, 1, ...; 10 of them.")
    ] = None,
    objectives: Annotated[
        str | None,
        typer.Option(
            help="Objectives, comma-separated: lml, clml, loo, clml-fixed, clml-folds, "
            "clml-orderings, lml-subset; lml,clml."
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Kernels, comma-separated: rbf, rq, matern, spectral_mixture (trained by "
            "L-BFGS), deep, deep-bottleneck (by Adam); rbf,deep,deep-bottleneck."
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="Means, comma-separated: constant, zero, or mlp (trained by Adam); constant."
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Numbers of Adam steps, comma-separated; 300.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of Adam; 0.01.")] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Shares of the training rows that an objective such as the CLML holds out, "
            "1 - m/n, comma-separated; 0.1. The CLML redraws them at each Adam step and has "
            "them fixed under L-BFGS (ten folds at 0.1)."
        ),
    ] = None,
    trace: Annotated[
        bool | None,
        typer.Option("--trace", help="Also record the test RMSE in the course of training."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of all numbers: float64 or float32; float64.")
    ] = None,
    jobs: Jobs = 1,
    backend: Backend = "loky",
    address: Address = None,
    device: Device = "cpu",
    folder: DataFolder = None,
    retry_failed: RetryFailed = False,
    quiet: Quiet = False,
) -> None:
    """Compute the cells that the results file lacks.

    Trains a model for each data set, n, kernel, mean, objective and seed on n random rows of a
    random 90%, and tests it on the other 10%. Each result is saved as it comes: after an
    interruption the same command goes on. Exit code 1 if cells failed, 2 if nothing could run.
    """
    from benchmarks.runner import Batches, run_grid
    from benchmarks.uci.batches import batch_label, most_in_batch, run_cells
    from benchmarks.uci.cells import SOURCES, run_cell
    from benchmarks.uci.grid import left_out_sizes, make_grid

    with errors_as_text():
        products = _products(
            grid,
            datasets=listed(datasets, names, "datasets"),
            sizes=listed(n, numbers, "n", int),
            seeds=seeds,
            objectives=listed(objectives, names, "objectives"),
            kernels=listed(kernel, names, "kernel"),
            means=listed(mean, names, "mean"),
            steps=listed(steps, numbers, "steps", int),
            lr=lr,
            held_out=listed(held_out, numbers, "held_out", float),
            trace=trace,
            dtype=dtype,
        )
        cells = make_grid(
            products, device=device, folder=folder, progress=not quiet,
            leave_out=grid is not None and n is None,
        )  # fmt: skip
        for name, sizes in left_out_sizes(products, cells).items():
            if not quiet:
                typer.echo(f"Left out, too few rows: {name} n = {sizes}", err=True)
        environment = data_variables(folder)
        summary = run_grid(
            cells, run_cell, results, jobs=jobs, backend=backend, address=address,
            environment=environment, retry_failed=retry_failed, progress=not quiet,
            sources=(*SOURCES, "benchmarks.uci.batches"),
            batches=Batches(run_cells, batch_label, most_in_batch),
        )  # fmt: skip
    end_run(summary, quiet=quiet)


@app.command()
def report(
    results: ResultsFile,
    csv: CsvFile = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw RMSE and NLL against n in this PNG file.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Only these kernels in all of it, comma-separated.")
    ] = None,
    figure_kernels: Annotated[
        str | None, typer.Option(help="Only these kernels in the figure, comma-separated.")
    ] = None,
    figure_objectives: Annotated[
        str | None, typer.Option(help="Only these objectives in the figure, comma-separated.")
    ] = None,
) -> None:
    """Print the report in Markdown: means over seeds, differences paired by seed, sign tests."""
    from benchmarks.uci.figure import draw_figure
    from benchmarks.uci.report import load, make_report, write_csv

    with errors_as_text():
        loaded = load(results, listed(kernel, names, "kernel"))
        if csv is not None:
            write_csv(loaded, csv)
        if figure is not None:
            draw_figure(
                loaded.done,
                figure,
                listed(figure_kernels, names, "figure_kernels"),
                listed(figure_objectives, names, "figure_objectives"),
            )
        typer.echo(make_report(loaded, figure))


def _products(grid: str | None, **given: Any) -> tuple[Product, ...]:
    """What a command asks for; settings that it does not give are the grid's or the usual ones."""
    from benchmarks.uci.grid import named_products
    from benchmarks.uci.studies import Product

    settings = {name: value for name, value in given.items() if value is not None}
    if grid is not None:
        return named_products(grid, **settings)
    if "datasets" not in settings:
        raise ArgumentError("datasets", "none", "names separated by commas", "Or name a --grid.")
    return (Product(**settings),)
