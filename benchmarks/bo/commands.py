"""The commands ``run`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._commands import errors_as_text, listed, names
from benchmarks._options import (
    Address,
    Backend,
    CsvFile,
    Device,
    Jobs,
    Quiet,
    ResultsFile,
    RetryFailed,
    end_run,
    make_app,
)

__all__ = ["app"]

app = make_app("Bayesian optimization with surrogates fitted under several objectives.")


@app.command()
def run(
    results: ResultsFile,
    functions: Annotated[
        str | None,
        typer.Option(
            help="Test functions, comma-separated: branin, hartmann-6, ackley-10, levy-10; all."
        ),
    ] = None,
    surrogates: Annotated[
        str | None,
        typer.Option(
            help="Surrogates, comma-separated: single-task (BoTorch's SingleTaskGP), deep "
            "(DeepKernelGP); both."
        ),
    ] = None,
    objectives: Annotated[
        str | None, typer.Option(help="Objectives, comma-separated: lml, clml, loo; all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, 0, 1, ...; 20 of them.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Evaluations after the 2 (d + 1) initial ones; 20.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Adam steps of a network at each fit; 15.")
    ] = None,
    jobs: Jobs = 1,
    backend: Backend = "loky",
    address: Address = None,
    device: Device = "cpu",
    retry_failed: RetryFailed = False,
    quiet: Quiet = False,
) -> None:
    """Compute the cells that the results file lacks.

    Maximizes each test function with each surrogate, fitted under each objective, one evaluation
    at a time by LogExpectedImprovement, once a seed. Each result is saved as it comes: after an
    interruption the same command goes on. Exit code 1 if cells failed, 2 if nothing could run.
    """
    from benchmarks.bo.cells import SOURCES, run_cell
    from benchmarks.bo.grid import make_grid
    from benchmarks.runner import run_grid

    with errors_as_text():
        cells = make_grid(
            functions=listed(functions, names, "functions"),
            surrogates=listed(surrogates, names, "surrogates"),
            objectives=listed(objectives, names, "objectives"),
            seeds=seeds, iterations=iterations, steps=steps, device=device,
        )  # fmt: skip
        summary = run_grid(
            cells, run_cell, results, jobs=jobs, backend=backend, address=address,
            retry_failed=retry_failed, progress=not quiet, sources=SOURCES,
        )  # fmt: skip
    end_run(summary, quiet=quiet)


@app.command()
def report(
    results: ResultsFile,
    csv: CsvFile = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw regrets against evaluations in this PNG file.")
    ] = None,
) -> None:
    """Print the report in Markdown: regrets over seeds, differences paired by seed."""
    from benchmarks.bo.report import make_report

    with errors_as_text():
        typer.echo(make_report(results, csv, figure))
