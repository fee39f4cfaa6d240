"""The targets of a table, and which of its rows are trained and tested on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.cli.tables.columns import column_of, kind_of, numbers_of
from gpclml.datasets import TrainTestSplit, split, subset
from gpclml.errors import ArgumentError, UnknownNameError

if TYPE_CHECKING:
    import pandas

__all__ = ["LEAST_ROWS", "MOST_ROWS", "num_test_rows", "read_targets", "split_rows", "subset_rows"]

LEAST_ROWS = 25
"""Rows with a target below which models are not compared: 20 to train on, 5 to test on."""


@checked
def read_targets(table: pandas.DataFrame, target: str) -> Tensor:
    """The targets of all rows, NaN where missing, in float64.

    Args:
        table: The table.
        target: Name of the column.

    Returns:
        Shape ``(n,)``.

    Raises:
        UnknownNameError: There is no such column; the message lists the nearest names.
        ArgumentError: The column is no column of numbers, has fewer than 25, or one value only.
    """
    if target not in table.columns:
        raise UnknownNameError("target", target, map(str, table.columns))
    column = column_of(table, target)
    kind = kind_of(column)
    argument = f"target {target!r}"
    if kind == "empty":
        raise ArgumentError(argument, "no value at all", "numbers", "Name another column.")
    if kind != "number":
        mend = f"{_columns_of_numbers(table)} Name another, or write its values as numbers."
        if kind == "boolean":
            mend = "Write 0 and 1 to predict them as numbers; classes are not modelled here."
        raise ArgumentError(argument, _PLURALS[kind], "numbers", mend)
    numbers = torch.from_numpy(np.array(numbers_of(column, "number")))
    observed = numbers[~numbers.isnan()]
    if len(observed) < LEAST_ROWS:
        got = f"{len(observed)} rows with a value, of {len(table)}"
        expected = f"at least {LEAST_ROWS}, 20 to train on and 5 to test on"
        raise ArgumentError(argument, got, expected, "Collect more rows.")
    if bool((observed == observed[0]).all()):
        got = f"the same value {float(observed[0]):g} in all {len(observed)} rows"
        raise ArgumentError(argument, got, "a column that varies", "Name another column.")
    return numbers


def _columns_of_numbers(table: pandas.DataFrame) -> str:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    columns = [(str(name), table[name].dtype) for name in table.columns]
    names = [
        name for name, dtype in columns if is_numeric_dtype(dtype) and not is_bool_dtype(dtype)
    ]
    if not names:
        return "The table has no column of numbers."
    return f"Columns of numbers: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."


_PLURALS = {
    "boolean": "true and false", "date": "dates", "category": "texts", "other": "lists or such",
}  # fmt: skip


MOST_ROWS = 4000
"""Rows to train on, at most, where no other number is given."""

_SHARE, _MOST_TESTED = 0.2, 1000


@checked
def num_test_rows(count: int) -> int:
    """How many of so many rows are to test on: a fifth, and 1000 at most."""
    return min(round(_SHARE * count), _MOST_TESTED)


@checked(targets="float (n,)")
def split_rows(targets: Tensor, seed: int = 0, most_rows: int = MOST_ROWS) -> TrainTestSplit:
    """A random split of the rows that have a target.

    A fifth of them, and 1000 at most, is to test on, the rest to train on; where that is more
    than ``most_rows``, so many are to train on and all others to test on.

    Args:
        targets: Of all rows, NaN where missing, ``(n,)``.
        seed: Of the split.
        most_rows: Rows to train on, at most.

    Returns:
        Row numbers, each part in ascending order.

    Raises:
        ArgumentError: ``most_rows`` is below 20, or every target is missing.
    """
    if most_rows < 20:
        raise ArgumentError("most_rows", most_rows, "at least 20")
    observed = (~targets.isnan()).nonzero()[:, 0]
    count = len(observed)
    if count == 0:
        raise ArgumentError("targets", "none that is not missing", "at least one")
    tested = max(num_test_rows(count), count - most_rows)
    parts = split(count, seed, tested / count)
    return TrainTestSplit(
        train=observed[parts.train.sort().values], test=observed[parts.test.sort().values]
    )


@checked(targets="float (n,)")
def subset_rows(targets: Tensor, seed: int = 0, most_rows: int = MOST_ROWS) -> Tensor:
    """All rows that have a target, or random ones of them where they are more than ``most_rows``.

    Args:
        targets: Of all rows, NaN where missing, ``(n,)``.
        seed: Of the choice.
        most_rows: Rows, at most.

    Returns:
        Row numbers in ascending order.
    """
    observed = (~targets.isnan()).nonzero()[:, 0]
    if len(observed) <= most_rows:
        return observed
    return subset(observed, most_rows, seed).sort().values
