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

__all__ = ["num_test_rows", "read_targets", "read_times", "split_rows", "subset_rows"]

_LEAST_TRAINED, _LEAST_TESTED = 20, 5
_LEAST_ROWS = _LEAST_TRAINED + _LEAST_TESTED


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


@checked
def read_times(table: pandas.DataFrame, column: str | None) -> Tensor | None:
    """When each row was: dates as days since 1970, numbers as they are, NaN where missing.

    Args:
        table: The rows.
        column: Name of a column of dates or numbers; None gives None.

    Raises:
        UnknownNameError: There is no such column.
        ArgumentError: The column has other values.
    """
    if column is None:
        return None
    if column not in table.columns:
        raise UnknownNameError("--time-column", column, map(str, table.columns))
    values = column_of(table, column)
    kind = kind_of(values)
    if kind not in ("date", "number"):
        got = f"{column!r}, a column of {_PLURALS.get(kind, 'no values')}"
        suggestion = "Write dates as 2024-05-31, or name a column of years or of numbered days."
        raise ArgumentError("--time-column", got, "a column of dates or numbers", suggestion)
    return torch.from_numpy(np.array(numbers_of(values, kind)))


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


@checked(targets="float (n,)", times="float (n,)")
def split_rows(
    targets: Tensor, seed: int = 0, most_rows: int = 4000, times: Tensor | None = None
) -> TrainTestSplit:
    """Splits the rows that have a target into training and test rows, at random or by time.

    A fifth of the rows, and 1000 at most, are test rows; the others are training rows. If that
    makes more than ``most_rows`` training rows, there are ``most_rows`` of them and all others are
    test rows.

    With times the test rows are the latest, with all that are as late as the first of them. The
    training rows are earlier, the latest ``most_rows`` of those if there are more.

    Args:
        targets: Targets of all rows, NaN where missing, ``(n,)``.
        seed: Seed of a random split.
        most_rows: Largest number of training rows.
        times: Times of all rows, NaN where missing, ``(n,)``; None for a random split.

    Returns:
        Row numbers, each part in ascending order.

    Raises:
        ArgumentError: ``most_rows`` is below 20, every target is missing, or the times leave
            fewer than 20 rows to train on or five to test on.
    """
    if most_rows < _LEAST_TRAINED:
        raise ArgumentError("most_rows", most_rows, f"at least {_LEAST_TRAINED}")
    observed = _observed(targets, times)
    count = len(observed)
    if count == 0:
        raise ArgumentError("targets", "none that is not missing", "at least one")
    if times is not None:
        return _latest_apart(observed, times[observed], most_rows)
    tested = max(num_test_rows(count), count - most_rows)
    parts = split(count, seed, tested / count)
    return TrainTestSplit(
        train=observed[parts.train.sort().values], test=observed[parts.test.sort().values]
    )


def _latest_apart(rows: Tensor, times: Tensor, most_rows: int) -> TrainTestSplit:
    first = times.sort().values[-num_test_rows(len(rows)) :][0]
    for is_late in (times >= first, times > first):
        early, late = rows[~is_late], rows[is_late]
        if len(early) >= _LEAST_TRAINED and len(late) >= _LEAST_TESTED:
            return TrainTestSplit(train=_latest(early, times[~is_late], most_rows), test=late)
    got = f"{len(times.unique())} different times in {len(rows)} rows"
    expected = f"{_LEAST_TRAINED} rows before the latest {_LEAST_TESTED}"
    raise ArgumentError("--time-column", got, expected, "Name a finer one, or leave it out.")


def _latest(rows: Tensor, times: Tensor, most_rows: int) -> Tensor:
    return rows[times.argsort(stable=True)[-most_rows:].sort().values]


def _observed(targets: Tensor, times: Tensor | None) -> Tensor:
    """Numbers of the rows that have a target, and a time if there are times."""
    lacking = targets.isnan() if times is None else targets.isnan() | times.isnan()
    return (~lacking).nonzero()[:, 0]


def subset_rows(
    targets: Tensor, seed: int = 0, most_rows: int = 4000, times: Tensor | None = None
) -> Tensor:
    """All rows that have a target; of more than ``most_rows`` a random choice or the latest."""
    observed = _observed(targets, times)
    if len(observed) <= most_rows:
        return observed
    if times is not None:
        return _latest(observed, times[observed], most_rows)
    return subset(observed, most_rows, seed).sort().values
