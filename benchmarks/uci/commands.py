"""The commands ``run`` and ``report``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from gpclml.errors import ArgumentError, DataError

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Gaussian process regression on UCI data sets under several objectives.",
)

ResultsFile = Annotated[Path, typer.Option("--results", help="The SQLite file of results.")]


@app.command()
def run(
    results: ResultsFile,
    datasets: Annotated[str, typer.Option(help="Data sets, comma-separated.")],
    n: Annotated[str, typer.Option(help="Numbers of training rows, comma-separated.")] = "100",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, ...")] = 10,
    objectives: Annotated[
        str, typer.Option(help="Objectives, comma-separated: lml, clml, loo.")
    ] = "lml,clml",
    kernel: Annotated[
        str,
        typer.Option(
            help="Kernels, comma-separated: rbf, rq, matern, spectral_mixture (trained by "
            "L-BFGS), deep, deep-bottleneck (by Adam)."
        ),
    ] = "rbf,deep,deep-bottleneck",
    mean: Annotated[
        str, typer.Option(help="The mean: constant, zero, or mlp (trained by Adam).")
    ] = "constant",
    steps: Annotated[int, typer.Option(min=1, help="Number of Adam steps.")] = 300,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 0.01,
    held_out: Annotated[
        float,
        typer.Option(
            help="Share of the training rows that the CLML holds out: redrawn at each Adam "
            "step, fixed under L-BFGS (ten folds at 0.1)."
        ),
    ] = 0.1,
    jobs: Annotated[int, typer.Option(help="Worker processes; -1 for one a core.")] = 1,
    backend: Annotated[
        str, typer.Option(help="The joblib backend of several workers: loky, dask, ray.")
    ] = "loky",
    device: Annotated[str, typer.Option(help="Where models are trained: cpu, cuda.")] = "cpu",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="The data folder of this machine; else $GPCLML_DATA, else the user's cache."
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Compute failed cells again.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no summary.")] = False,
) -> None:
    """Compute the cells that the results file lacks.

    Trains a model for each data set, n, kernel, objective and seed on n random rows of a
    random 90%, and tests it on the other 10%. Each result is saved as it comes: after an
    interruption the same command goes on. Exit code 1 if cells failed, 2 if nothing could run.
    """
    from benchmarks.runner import run_grid
    from benchmarks.uci.cells import run_cell
    from benchmarks.uci.grid import make_grid

    with _errors_as_text(), _data_folder(folder):
        cells = make_grid(
            _names("datasets", datasets), _numbers("n", n), seeds,
            _names("objectives", objectives), _names("kernel", kernel),
            mean=mean, steps=steps, lr=lr, held_out=held_out, device=device,
            progress=not quiet,
        )  # fmt: skip
        summary = run_grid(
            cells, run_cell, results, jobs=jobs, backend=backend, retry_failed=retry_failed,
            progress=not quiet, sources=("benchmarks.uci.objectives", "benchmarks.uci.training"),
        )  # fmt: skip
    if not quiet:
        typer.echo(summary)
    failed = summary.failed + summary.failed_before
    if failed:
        typer.echo(f"{failed} cells failed: the report lists them.", err=True)
        raise typer.Exit(1)


@app.command()
def report(
    results: ResultsFile,
    csv: Annotated[
        Path | None, typer.Option(help="Also write all metrics of all cells to this CSV file.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw RMSE and NLL against n in this PNG file.")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="Only these kernels, comma-separated.")] = None,
) -> None:
    """Print the tables: means over seeds, differences paired by seed, standard errors."""
    from benchmarks.uci.figure import draw_figure
    from benchmarks.uci.report import load, make_report, write_csv

    with _errors_as_text():
        loaded = load(results, None if kernel is None else _names("kernel", kernel))
        typer.echo(make_report(loaded))
        if csv is not None:
            write_csv(loaded, csv)
        if figure is not None:
            draw_figure(loaded.done, figure)


@contextlib.contextmanager
def _errors_as_text() -> Iterator[None]:
    """Within the block an error that names its mend is printed alone, with exit code 2."""
    try:
        yield
    except (ArgumentError, DataError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _data_folder(folder: Path | None) -> Iterator[None]:
    """Within the block GPCLML_DATA names the folder: worker processes inherit it."""
    before = os.environ.get("GPCLML_DATA")
    if folder is not None:
        os.environ["GPCLML_DATA"] = str(folder.absolute())
    try:
        yield
    finally:
        if before is not None:
            os.environ["GPCLML_DATA"] = before
        elif folder is not None:
            del os.environ["GPCLML_DATA"]


def _names(argument: str, text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ArgumentError(argument, repr(text), "names separated by commas")
    return list(dict.fromkeys(names))


def _numbers(argument: str, text: str) -> list[int]:
    try:
        return [int(name) for name in _names(argument, text)]
    except ValueError:
        expected = "whole numbers separated by commas"
        raise ArgumentError(argument, repr(text), expected, "Write e.g. 100,200.") from None
