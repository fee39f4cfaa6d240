"""The commands ``run`` and ``report``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._commands import errors_as_text, listed, names, numbers, refuse_options
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

__all__ = ["app"]

app = make_app("Laplace evidence, its bounds, and conditional evidence of networks.")


@app.command()
def run(
    study: Annotated[
        str,
        typer.Argument(
            help="architectures, bounds, invariance, online, training-speed; an experiment of "
            "the ledger; or ledger for all of those."
        ),
    ],
    results: ResultsFile,
    data: Annotated[
        str | None, typer.Option(help="Images: digits (embedded), mnist-test, cifar10-part.")
    ] = None,
    architectures: Annotated[
        str | None,
        typer.Option(help="Networks, comma-separated, e.g. mlp-32x2,cnn-8x3,resnet-8x1."),
    ] = None,
    precisions: Annotated[
        str | None, typer.Option(help="Prior precisions of weights, comma-separated.")
    ] = None,
    num_train: Annotated[int | None, typer.Option(min=1, help="Images to train on.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over them.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, 0, 1, ....")] = None,
    jobs: Jobs = 1,
    backend: Backend = "loky",
    address: Address = None,
    folder: DataFolder = None,
    device: Device = "cpu",
    retry_failed: RetryFailed = False,
    quiet: Quiet = False,
) -> None:
    """Compute the cells of a study that the results file lacks; options replace its settings.

    - architectures: which score of a network says how it generalizes;
    - bounds: tightness and cost of every estimate of the evidence; use --jobs 1 for its times;
    - invariance: a rotation learned from turned images and from upright ones;
    - online: precisions learned in training beside a grid of them, and UCI networks;
    - training-speed: architectures against the number of points;
    - ledger, or the name of one of its experiments: claims of papers, one after the other; they
      take no options but those of any run.

    Each result is saved as it comes: after an interruption the same command goes on. Exit code 1
    if cells failed, 2 if nothing could run.
    """
    from benchmarks._environment import variables
    from benchmarks.evidence.cells import SOURCES, run_cell
    from benchmarks.evidence.grid import STUDIES, make_grid
    from benchmarks.evidence.ledger.experiments import chosen_experiments
    from benchmarks.runner import run_grid

    environment = data_variables(folder)
    sweep = partial(
        run_grid, results_path=results, jobs=jobs, backend=backend, address=address,
        environment=environment, retry_failed=retry_failed, progress=not quiet,
    )  # fmt: skip
    given = {
        "data": data, "architectures": listed(architectures, names, "architectures"),
        "precisions": listed(precisions, numbers, "precisions", float), "num_train": num_train,
        "epochs": epochs, "seeds": seeds,
    }  # fmt: skip
    with errors_as_text(), variables(environment):
        if study in STUDIES:
            cells = make_grid(study, **given, device=device)
            summaries = [sweep(cells, run_cell, sources=SOURCES)]
        else:
            refuse_options(study, given)
            summaries = [
                sweep(one.cells(), one.run, sources=one.modules)
                for one in chosen_experiments(study, STUDIES)
            ]
    end_run(*summaries, quiet=quiet)


@app.command()
def report(
    results: ResultsFile,
    csv: CsvFile = None,
    page: Annotated[
        Path, typer.Option(help="The page of the ledger; its pictures go beside it.")
    ] = Path("benchmarks/evidence/RESULTS.md"),
) -> None:
    """Print the report: tables of studies in Markdown; of the ledger its claims.

    Where the file has experiments of the ledger their page is written, with a picture each.
    """
    from benchmarks.evidence.ledger.page import ledger_cells, write_page
    from benchmarks.evidence.report import make_report, study_cells

    with errors_as_text():
        has_ledger = bool(ledger_cells(results))
        if has_ledger:
            typer.echo(write_page(results, page))
        if not has_ledger or len(study_cells(results)):
            typer.echo(make_report(results, csv))
