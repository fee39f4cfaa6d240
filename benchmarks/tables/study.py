"""The study of tables: its grid, and what the report chooses."""

from __future__ import annotations

from typing import Annotated, Any

import pandas
from typer import Option

from benchmarks import data
from benchmarks._options import check_known, check_positive, names, whole_numbers
from benchmarks.runner import Batches
from benchmarks.study import Study
from benchmarks.tables.cells import (
    DEVELOPMENT,
    JUDGED,
    METHODS,
    balanced,
    batch_label,
    most_in_batch,
    run_cell,
    run_cells,
    sizes_of,
)
from benchmarks.tables.peers import PEERS, installed
from benchmarks.tables.report import draw_figure, sections
from benchmarks.tables.scores import METRICS
from gpclml.errors import ArgumentError

_HALVES = {"development": DEVELOPMENT, "judged": JUDGED, "all": (*DEVELOPMENT, *JUDGED)}

Sizes = Annotated[
    tuple[int, ...],
    Option(help="Numbers of training rows, comma-separated, cut to what a table has."),
    whole_numbers,
]
Splits = Annotated[int, Option(min=1, help="Number of random splits, 0, 1, ....")]
Methods = Annotated[
    tuple[str, ...] | None,
    Option(help="Methods, comma-separated; all whose packages are installed."),
    names,
]
MostTest = Annotated[int, Option(min=1, help="Most test rows.")]


def make_grid(
    tables: Annotated[
        tuple[str, ...], Option(help="Tables, comma-separated; or development, judged, all."), names
    ] = ("all",),
    n: Sizes = (50, 100, 200, 400, 1000),
    splits: Splits = 10,
    first_split: Annotated[
        int, Option(min=0, help="Start at this split: the earlier ones are in another file.")
    ] = 0,
    methods: Methods = None,
    most_test: MostTest = 1000,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Every combination of these settings, splits and sizes first.

    Raises:
        UnknownNameError: No such table or method.
        ArgumentError: A number is below 1, no split is left, or the package of a method that was
            named is missing.
    """
    chosen = [table for name in tables for table in _HALVES.get(name, (name,))]
    check_known("tables", chosen, data.names())
    check_positive(splits=splits, most_test=most_test, **{f"n {size}": size for size in n})
    if not 0 <= first_split < splits:
        raise ArgumentError("first_split", first_split, f"0 to {splits - 1}, one of the splits")
    packages = dict.fromkeys(METHODS, "") | {name: peer.package for name, peer in PEERS.items()}
    present = installed(packages, methods, quiet)
    sizes = {table: sizes_of(data.load(table).num_data, n) for table in chosen}
    return [
        case | {"method": method, "most_test": most_test}
        for case in balanced(range(first_split, splits), sizes)
        for method in present
    ]


def choose(
    cells: pandas.DataFrame,
    half: Annotated[str, Option(help="Of which tables: development, judged, all.")] = "all",
    without: Annotated[
        tuple[str, ...] | None, Option(help="Methods to leave out, comma-separated."), names
    ] = None,
) -> pandas.DataFrame:
    """The cells of one half of the tables, or all.

    Raises:
        UnknownNameError: There is no such half or method.
    """
    check_known("half", [half], _HALVES)
    check_known("without", without or (), METHODS)
    if cells.empty:
        return cells
    kept = cells["table"].isin(_HALVES[half]) | (half == "all")
    return cells[kept & ~cells["method"].isin(without or ())]


STUDY = Study(
    name="tables",
    about="This library's models of tables of 50 to 1,000 rows, beside other ways to predict them.",
    title="Tables",
    running="Fits each method to random training rows of each table and tests its predictive "
    "densities on other rows, once a split.",
    reporting="ranks, wins, regret of choosing one model, failures.",
    grid=make_grid,
    cell=run_cell,
    batches=Batches(run_cells, batch_label, most_in_batch),
    needed=("table", "n", "split", "method", "failure", *METRICS),
    label="{table} n={n} split {split} {method}",
    choose=choose,
    tables=sections,
    figure=draw_figure,
    caption="Regret of choosing one model, against n",
    stand_in="Without files: --tables diabetes, which comes with scikit-learn.",
    apart=("method", "table", "n", "split", "most_test"),
)
