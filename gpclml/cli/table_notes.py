"""What is to be said of the rows and columns of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gpclml.cli.options import TableOptions
from gpclml.cli.report.headline import percent
from gpclml.cli.tables import (
    FEW_MISSING,
    CategoryColumn,
    NumberColumn,
    TableEncoding,
    num_test_rows,
)
from gpclml.datasets import TrainTestSplit

if TYPE_CHECKING:
    import pandas

__all__ = ["notes_on_columns", "notes_on_rows"]


def notes_on_rows(
    options: TableOptions, targets: Tensor, rows: TrainTestSplit, incomplete: tuple[int, int]
) -> list[str]:
    """How many rows there are, and which are left out.

    Args:
        options: What the table was read by.
        targets: Of all rows, NaN where missing.
        rows: Those to train on, and those to test on, if any.
        incomplete: How many of each lack values and are left out.
    """
    tests = len(rows.test) > 0
    lacking = int(targets.isnan().sum())
    count = len(targets) - lacking
    said = [f"{options.data.name} has {_rows(len(targets))}."]
    if lacking:
        said.append(f"Left out: {_rows(lacking)} without {options.target}.")
    if tests and count - num_test_rows(count) > options.rows:
        said.append(
            f"{options.rows} random rows are compared and fitted, the limit of --rows; all "
            f"{len(rows.test)} others are test rows."
        )
    elif not tests and count > options.rows:
        said.append(f"{options.rows} random rows of {count} are fitted, the limit of --rows.")
    if any(incomplete):
        parts = f", {incomplete[0]} to train on and {incomplete[1]} to test on" if tests else ""
        said.append(f"Left out: {_rows(sum(incomplete))} with missing values{parts}.")
    return said


def notes_on_columns(encoding: TableEncoding, test: pandas.DataFrame) -> list[str]:
    """Which columns are filled, have new levels in test rows, or only number the rows.

    Args:
        encoding: Of the columns.
        test: Rows to test on.
    """
    return [*_notes_on_filled(encoding), *_notes_on_unknown(encoding, test), *encoding.notes]


def _notes_on_filled(encoding: TableEncoding) -> list[str]:
    filled = [one.name for one in encoding.columns if _is_filled(one)]
    if not filled:
        return []
    return [
        f"Missing values are filled, beside an input that says where, in {', '.join(filled)}: at "
        f"least {percent(FEW_MISSING)} of the training rows have some."
    ]


def _is_filled(column: NumberColumn | CategoryColumn) -> bool:
    return column.has_missing if isinstance(column, CategoryColumn) else column.fill is not None


def _notes_on_unknown(encoding: TableEncoding, test: pandas.DataFrame) -> list[str]:
    """Levels of categories that only test rows have."""
    unknown = encoding.encode(test).unknown
    return [
        f"Column {name!r}: {_rows(sum(levels.values()), 'test row')} of levels that no training "
        f"row has: {', '.join(levels)}."
        for name, levels in unknown.items()
    ]


def _rows(count: int, what: str = "row") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
