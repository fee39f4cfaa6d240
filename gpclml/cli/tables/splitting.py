"""Rows to train on and rows to test on."""

from __future__ import annotations

from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.datasets import TrainTestSplit, split, subset
from gpclml.errors import ArgumentError

__all__ = ["MOST_ROWS", "num_test_rows", "split_rows", "subset_rows"]

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
