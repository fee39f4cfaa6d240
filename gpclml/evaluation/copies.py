"""Rows of a table that are copies of others, and not observations of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SPREAD = 1e-3  # of a column's largest value, from which on single precision tells its values apart
_FREQUENT = 0.1  # share of the rows above which a target, such as no sales, says nothing of copies
_LEAST_TELLING = 0.2  # share of rows with less frequent targets; below it all are ratings
_SURELY = 20  # pairs of equal inputs, none of which has two different ratings
_CLOSER = 10.0  # times as often as any two rows may two with equal inputs have equal targets


def copied_rows(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows repeat an earlier one in inputs and target without being measured anew, ``(n,)``.

    Rows are equal if they are so in single precision. Measured again at the same inputs, a
    continuous target would be another; a rating or a count may well be the same. So equal rows are
    copies only if there are more of them than new measurements would give:

    - Where some rows of equal inputs differ in their targets, chance makes two targets equal at
      most ten times as often as those of any two rows.
    - Where none differ, the targets follow from the inputs, or the rows are copies. They are copies
      if inputs are equal more often than columns that are drawn independently would be, and, of
      ratings, if there are at least 20 pairs.

    Inputs are ``(n, d)``, and NaN is a value like others. It is False for the first row of each
    kind, and everywhere if equal rows may be observations of their own.
    """
    columns = np.column_stack([_codes(column) for column in (*x.T, y)])
    _, inputs = np.unique(columns[:, :-1], axis=0, return_inverse=True)
    pairs_of_both = np.column_stack([inputs.ravel(), columns[:, -1]])
    _, first, rows = np.unique(pairs_of_both, axis=0, return_index=True, return_inverse=True)
    copied = np.ones(len(y), dtype=bool)
    copied[first] = False
    if not copied.any():
        return copied
    inputs, targets = inputs.ravel(), columns[:, -1]
    shares = np.bincount(targets[~copied]) / len(first)
    telling = shares[targets] <= _FREQUENT
    if telling[first].mean() < _LEAST_TELLING:
        telling[:] = True  # ratings
    count, other = int((telling & ~copied).sum()), _num_pairs(targets[telling & ~copied])
    chance = min(1.0, _CLOSER * other / max(1, count * (count - 1) // 2))
    equal, equal_inputs = _num_pairs(rows[telling]), _num_pairs(inputs[telling])
    expected = chance * equal_inputs
    if equal == equal_inputs:
        equal = _num_pairs(rows) if chance < 1 or equal >= _SURELY else 0
        counts = [np.bincount(column[~copied]) for column in columns[:, :-1].T]
        # Of a column whose values are all different none is expected twice.
        same = [((times[times > 1] / len(first)) ** 2).sum() for times in counts]
        expected = float(np.prod(same)) * len(y) * (len(y) - 1) / 2
    return copied if equal > expected + 3 * expected**0.5 else np.zeros_like(copied)


def _codes(column: NDArray[np.float64]) -> NDArray[np.intp]:
    """A whole number for each value: the same for values that are equal in single precision."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = column.astype(np.float32)
        finite = column[np.isfinite(column)]
        fine = len(finite) and finite.std() > _SPREAD * np.abs(finite).max()
    if fine and np.isinf(single).sum() == np.isinf(column).sum():
        column = single.astype(np.float64)
    return np.unique(column, return_inverse=True)[1].ravel()


def _num_pairs(codes: NDArray[np.intp]) -> int:
    counts = np.bincount(codes)
    return int((counts * (counts - 1)).sum()) // 2
