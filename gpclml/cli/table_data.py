"""The table of a command: read, split, encoded, and what is to be said of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpclml.cli.options import TableOptions
from gpclml.cli.table_notes import notes_on_columns, notes_on_rows
from gpclml.cli.tables import (
    TableEncoding,
    check_columns,
    fit_encoding,
    read_table,
    read_targets,
    split_rows,
    subset_rows,
)
from gpclml.datasets import TrainTestSplit
from gpclml.errors import ArgumentError, DataError

__all__ = ["TableData", "read_table_data"]

_LEAST_TRAINED, _LEAST_TESTED = 20, 5


@dataclass(frozen=True, eq=False)
class TableData:
    """Rows to train on and to test on, and what is to be said of them.

    Attributes:
        options: What it was read by.
        sha256: Of the file.
        encoding: How columns became inputs.
        train: Inputs ``(n, d)`` and targets ``(n,)``.
        test: The same of the test rows, of which there may be none.
        notes: Sentences on rows and columns.
    """

    options: TableOptions
    sha256: str
    encoding: TableEncoding
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    notes: tuple[str, ...]

    @property
    def made_from(self) -> Mapping[str, Any]:
        """What decides the training rows: the bytes of the table and the options."""
        options = self.options
        return {
            "sha256": self.sha256,
            "target": options.target,
            "rows": options.rows,
            "seed": options.seed,
            "drop": list(options.drop),
            "categories": list(options.categories),
            "missing": list(options.missing),
        }


def read_table_data(options: TableOptions, tests: bool) -> TableData:
    """Reads a table, parts its rows and encodes its columns.

    Args:
        options: What to read, and how.
        tests: Whether rows are set apart to test on.

    Raises:
        DataError: The file is no table.
        ArgumentError: A column cannot be used, or there are too few rows.
    """
    if not options.data.is_file() and options.data.exists() and not options.data.is_dir():
        # It is read again: for its hash, and by the Python file of a report.
        raise DataError(f"{options.data} is no plain file. Save the table to a file first.")
    table = read_table(options.data, options.missing)
    if len(table.columns) < 2:
        name = table.columns[0]
        raise DataError(
            f"{options.data} has one column only, {name!r}. Give a table of a target and inputs, "
            "their names and values separated by comma, semicolon, tab or bar."
        )
    targets = read_targets(table, options.target)
    check_columns(table, options.target, drop=options.drop, categories=options.categories)
    if tests:
        rows = split_rows(targets, options.seed, options.rows)
    else:
        none = torch.empty(0, dtype=torch.long)
        rows = TrainTestSplit(subset_rows(targets, options.seed, options.rows), none)
    training = table.iloc[rows.train.numpy()]
    encoding = fit_encoding(
        training, options.target, drop=options.drop, categories=options.categories,
        missing=options.missing,
    )  # fmt: skip
    train, test = (encoding.tensors(table.iloc[part.numpy()]) for part in (rows.train, rows.test))
    _check_enough(train, test, tests, options.target)
    x, y = (torch.cat(parts) for parts in zip(train, test, strict=True))
    _check_sizes(y, f"target {options.target!r}", power=2)
    for name, values in zip(encoding.inputs, x.T, strict=True):
        _check_sizes(values, f"column {name!r}", power=1)
    incomplete = len(rows.train) - len(train[1]), len(rows.test) - len(test[1])
    notes = (
        *notes_on_rows(options, targets, rows, incomplete),
        *notes_on_columns(encoding, table.iloc[rows.test.numpy()]),
    )
    return TableData(
        options=options,
        sha256=hashlib.sha256(options.data.read_bytes()).hexdigest(),
        encoding=encoding,
        train=train,
        test=test,
        notes=notes,
    )


def _check_enough(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], tests: bool, target: str
) -> None:
    for (_, y), least, what in ((train, _LEAST_TRAINED, "train"), (test, _LEAST_TESTED, "test")):
        if len(y) < least and (tests or what == "train"):
            got = f"{len(y)} rows to {what} on that have all values"
            raise ArgumentError("rows", got, f"at least {least}", "Collect more rows.")
    y = train[1]
    if bool((y == y[0]).all()):
        got = f"the same value {float(y[0]):g} in all rows to train on"
        mend = "Name another column, or another --seed."
        raise ArgumentError(f"target {target!r}", got, "a column that varies", mend)


def _check_sizes(values: Tensor, column: str, power: int) -> None:
    """Raises where values are so large, or so close together, that no model can be computed.

    Args:
        values: Of the column.
        column: What it is to be called.
        power: Which of their powers has to be a number: the second of targets, for variances.
    """
    limit = 10.0 ** (300 / power)
    largest = float(values.abs().max())
    spread = float((values / largest).std()) * largest if largest else 0.0
    mend = "Multiply or divide the column by a power of ten."
    if largest > limit:
        got, expected = f"a value of size {largest:.3g}", f"sizes of at most {limit:g}"
        raise ArgumentError(column, got, expected, mend)
    if 0 < spread < 1 / limit:
        got, expected = f"a standard deviation of {spread:.3g}", f"at least {1 / limit:g}"
        raise ArgumentError(column, got, expected, mend)
