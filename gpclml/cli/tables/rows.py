"""The targets of a table, and which of its rows are trained and tested on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.datasets import TrainTestSplit, split, subset
from gpclml.datasets.columns import column_of, kind_of, numbers_of
from gpclml.errors import ArgumentError, UnknownNameError

if TYPE_CHECKING:
    import pandas

__all__ = ["num_test_rows", "read_targets", "split_rows", "subset_rows"]

_LEAST_ROWS = 25  # with a target: 20 to train on and 5 to test on


def read_targets(table: pandas.DataFrame, target: str) -> Tensor:
    """The targets of all rows, NaN where missing, in float64; checks that they can be modelled."""
    if target not in table.columns:
        raise UnknownNameError("target", target, map(str, table.columns))
    column = column_of(table, target)
    kind = kind_of(column)
    argument = f"target {target!r}"
    if kind == "empty":
        raise ArgumentError(argument, "no value at all", "numbers", "Name another column.")
    if kind != "number":
        suggestion = f"{_columns_of_numbers(table)} Name another, or write its values as numbers."
        if kind == "boolean":
            suggestion = "Write 0 and 1 to predict them as numbers; classes are not modelled here."
        raise ArgumentError(argument, _PLURALS[kind], "numbers", suggestion)
    numbers = torch.from_numpy(np.array(numbers_of(column, "number")))
    observed = numbers[~numbers.isnan()]
    if len(observed) < _LEAST_ROWS:
        got = f"{len(observed)} rows with a value, of {len(table)}"
        expected = f"at least {_LEAST_ROWS}, 20 to train on and 5 to test on"
        raise ArgumentError(argument, got, expected, "Collect more rows.")
    if bool((observed == observed[0]).all()):
        got = f"the same value {float(observed[0]):g} in all {len(observed)} rows"
        raise ArgumentError(argument, got, "a column that varies", "Name another column.")
    return numbers


def _columns_of_numbers(table: pandas.DataFrame) -> str:
    names = list(map(str, table.select_dtypes("number", exclude="timedelta").columns))
    if not names:
        return "The table has no column of numbers."
    return f"Columns of numbers: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."


_PLURALS = {
    "boolean": "true and false", "date": "dates", "category": "texts", "other": "lists or objects",
}  # fmt: skip


_SHARE, _MOST_TESTED = 0.2, 1000


def num_test_rows(count: int) -> int:
    """Number of test rows among those with a target: a fifth of them, and 1000 at most."""
    return min(round(_SHARE * count), _MOST_TESTED)


@checked(targets="float (n,)")
def split_rows(targets: Tensor, seed: int = 0, most_rows: int = 4000) -> TrainTestSplit:
    """Splits the rows that have a target at random into training and test rows.

    A fifth of the rows, and 1000 at most, are test rows; the others are training rows. If that
    makes more than ``most_rows`` training rows, there are ``most_rows`` of them and all others are
    test rows.

    Args:
        targets: Targets of all rows, NaN where missing, ``(n,)``.
        seed: Seed of the split.
        most_rows: Largest number of training rows.

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


def subset_rows(targets: Tensor, seed: int = 0, most_rows: int = 4000) -> Tensor:
    """All rows that have a target, or a random choice if there are more than ``most_rows``."""
    observed = (~targets.isnan()).nonzero()[:, 0]
    if len(observed) <= most_rows:
        return observed
    return subset(observed, most_rows, seed).sort().values
