"""Evidence of networks as a study: the options of its grid, its tables, the page of its ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pandas
import typer
from typer import Argument, Option

from benchmarks._options import CsvFile, Device, ResultsFile, errors_as_text, names, real_numbers
from benchmarks.evidence.cells import SOURCES, run_cell
from benchmarks.evidence.grid import STUDIES, make_grid
from benchmarks.evidence.ledger.page import (
    EXPERIMENTS,
    chosen_experiments,
    ledger_cells,
    write_page,
)
from benchmarks.evidence.tables import sections
from benchmarks.runner import load_results
from benchmarks.study import Study, Sweep
from gpclml.errors import ArgumentError

__all__ = ["STUDY", "report"]


def _grid(
    study: Annotated[
        str,
        Argument(
            help="architectures, bounds, invariance, online, training-speed; an experiment of "
            "the ledger; or ledger for all of those."
        ),
    ],
    data: Annotated[
        str | None, Option(help="Images: digits (embedded), mnist-test, cifar10-part.")
    ] = None,
    architectures: Annotated[
        tuple[str, ...] | None,
        Option(help="Networks, comma-separated, e.g. mlp-32x2,cnn-8x3,resnet-8x1."),
        names,
    ] = None,
    precisions: Annotated[
        tuple[float, ...] | None,
        Option(help="Prior precisions of weights, comma-separated."),
        real_numbers,
    ] = None,
    num_train: Annotated[int | None, Option(min=1, help="Images to train on.")] = None,
    epochs: Annotated[int | None, Option(min=1, help="Passes over them.")] = None,
    seeds: Annotated[int | None, Option(min=1, help="Number of seeds, 0, 1, ....")] = None,
    device: Device = "cpu",
) -> list[dict[str, Any]]:
    """The cells of a study, whose settings options replace, or of experiments of the ledger."""
    given = {
        "data": data, "architectures": architectures, "precisions": precisions,
        "num_train": num_train, "epochs": epochs, "seeds": seeds,
    }  # fmt: skip
    if study in STUDIES:
        return make_grid(study, **given, device=device)
    for name, value in given.items():
        if value is not None:
            fix = f"Leave out --{name.replace('_', '-')}."
            raise ArgumentError(name, value, f"nothing: {study} has its own", fix)
    return [dict(cell) for one in chosen_experiments(study, STUDIES) for cell in one.cells()]


def _sweeps(cells: list[dict[str, Any]]) -> Iterator[Sweep]:
    for name, some in itertools.groupby(cells, lambda cell: cell.get("experiment")):
        if name is None:
            yield Sweep(list(some), run_cell, SOURCES)
        else:
            yield Sweep(list(some), EXPERIMENTS[name].run, EXPERIMENTS[name].modules)


def _of_studies(cells: pandas.DataFrame) -> pandas.DataFrame:
    return cells[cells["study"].notna()] if "study" in cells else cells[:0]


STUDY = Study(
    name="evidence",
    about="Laplace evidence, its bounds, and conditional evidence of networks.",
    title="Evidence of networks",
    running="Options replace the settings of a study.\n\n"
    "- architectures: which score of a network says how it generalizes;\n"
    "- bounds: tightness and cost of every estimate of the evidence; use --jobs 1 for its times;\n"
    "- invariance: a rotation learned from turned images and from upright ones;\n"
    "- online: precisions learned in training beside a grid of them, and UCI networks;\n"
    "- training-speed: architectures against the number of points;\n"
    "- ledger, or the name of one of its experiments: claims of papers, one after the other; "
    "they take no options but those of any run.",
    reporting="tables of studies; of the ledger its claims.",
    grid=_grid,
    cell=run_cell,
    sweeps=_sweeps,
    choose=_of_studies,
    needed=("study",),
    label="{study} {data} seed {seed}",
    tables=sections,
)


def report(
    results: ResultsFile,
    csv: CsvFile = None,
    page: Annotated[Path, Option(help="The page of the ledger; its pictures go beside it.")] = Path(
        "benchmarks/evidence/RESULTS.md"
    ),
) -> None:
    """Print the report: tables of studies in Markdown; of the ledger its claims.

    Where the file has experiments of the ledger their page is written, with a picture each.
    """
    with errors_as_text():
        ledger = ledger_cells(results)
        if ledger:
            typer.echo(write_page(results, page))
        if not ledger or len(_of_studies(load_results(results))):
            typer.echo(STUDY.sections(results, csv))
