"""The commands ``run``, ``report`` and ``examples``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks._commands import errors_as_text, listed, names, numbers
from benchmarks._environment import variables
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
    end_run,
    make_app,
)

__all__ = ["app"]

app = make_app("Deep Kernel Transfer on few-shot tasks under the LML and the CLML.")


@app.command()
def run(
    results: ResultsFile,
    study: Annotated[
        str,
        typer.Option(
            help="Studies, comma-separated: digits, omniglot, omniglot-part, "
            "omniglot-part-to-cyrillic, omniglot-part-to-mnist, omniglot-to-emnist, periodic, "
            "periodic-out-of-range, qmul, qmul-out-of-range, rotation."
        ),
    ],
    shots: Annotated[
        str | None,
        typer.Option(help="Images a class or points to learn from, comma-separated; the study's."),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="Kernels on features, comma-separated; pixels: the baseline.")
    ] = "cosine,batch-norm-cosine,linear,pixels",
    objectives: Annotated[str, typer.Option(help="lml, clml, comma-separated.")] = "lml,clml",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, 0, 1, ....")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Adam steps.")] = 2500,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Tasks of a step.")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    test_tasks: Annotated[int, typer.Option(min=1, help="Tasks to test on.")] = 600,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="A folder to keep trainings in: an interrupted one goes on, and studies that "
            "learn from the same tasks share one."
        ),
    ] = None,
    jobs: Jobs = 1,
    backend: Backend = "loky",
    address: Address = None,
    folder: DataFolder = None,
    device: Device = "cpu",
    retry_failed: RetryFailed = False,
    quiet: Quiet = False,
) -> None:
    """Compute the cells that the results file lacks.

    Trains a model for each study, number of shots, kernel, objective and seed on tasks of some
    classes, and tests it on tasks of others. Each result is saved as it comes: after an
    interruption the same command goes on. Exit code 1 if cells failed, 2 if nothing could run.
    """
    from benchmarks.dkt.cells import CHECKPOINTS, SOURCES, run_cell
    from benchmarks.dkt.grid import make_grid
    from benchmarks.runner import run_grid

    folders = {"GPCLML_DATA": folder, CHECKPOINTS: checkpoints}
    environment = {name: str(path.absolute()) for name, path in folders.items() if path}
    with errors_as_text(), variables(environment):
        if checkpoints is not None:
            checkpoints.mkdir(parents=True, exist_ok=True)
        cells = make_grid(
            names(study, "study"), shots=listed(shots, numbers, "shots", int),
            kernels=names(kernels, "kernels"), objectives=names(objectives, "objectives"),
            seeds=seeds, steps=steps, tasks_per_step=tasks_per_step, lr=lr,
            test_tasks=test_tasks, device=device,
        )  # fmt: skip
        summary = run_grid(
            cells, run_cell, results, jobs=jobs, backend=backend, address=address,
            environment=environment, retry_failed=retry_failed, progress=not quiet,
            sources=SOURCES,
        )  # fmt: skip
    end_run(summary, quiet=quiet)


@app.command()
def report(
    results: ResultsFile,
    csv: CsvFile = None,
) -> None:
    """Print the report in Markdown: means over seeds, and the CLML less the LML by seed."""
    from benchmarks.dkt.report import make_report

    with errors_as_text():
        typer.echo(make_report(results, csv))


@app.command()
def examples(
    figure: Annotated[Path, typer.Option(help="The PNG file to draw.")],
    study: Annotated[str, typer.Option(help="Studies of images, comma-separated.")],
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the tasks.")] = 0,
) -> None:
    """Draw a test task of each study: the images to learn from and some to predict."""
    from benchmarks.dkt.examples import draw_examples

    with errors_as_text():
        draw_examples(names(study, "study"), figure, seed)
