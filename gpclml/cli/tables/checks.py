"""Checks of a table, each a sentence on values or rows that make scores of models misleading.

A check only tells what it found; no value or row is changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpclml.cli.tables.encoding import TableEncoding
from gpclml.datasets.columns import NumberColumn

__all__ = ["data_notes", "repeated_rows"]

_FAR = 5.0  # ranges of the other values that a code for missing values is away from them
_EXTREME = 10.0  # robust standard deviations of a target that may decide scores by itself
_LIKE_THE_ROW_BEFORE = 0.3  # least correlation of targets of neighbouring rows
_CLEAR = 5.0  # standard errors of a correlation of zero
_AT_A_BOUND = 0.01  # least share of targets that are equal to the least or the greatest of all
_MOST_COMPARED = 300  # inputs, of which every pair is compared
_MOST_TOLD = 5
_ROBUST = 1.349  # standard deviations between the quartiles of a normal distribution


def data_notes(
    encoding: TableEncoding, train: tuple[Tensor, Tensor], repeated: Tensor, all_y: Tensor
) -> list[str]:
    """Sentences on values, targets and rows that a user may want to look at.

    ``all_y`` are the targets of all rows in the order of the file, NaN where missing; none where
    the test rows are the latest.
    """
    said: list[str] = []
    if encoding.left_out:
        names = [f"{name!r} ({reason})" for name, reason in encoding.left_out.items()]
        said.append(f"Columns left out: {_listed(names)}.")
    if count := int(repeated.sum()):
        said.append(
            f"{count} of {len(repeated)} test rows are equal to a training row in all inputs and "
            "the target. A model that has seen them predicts them better than new rows."
        )
    said += _codes(encoding, train[0])
    said += _same_columns(encoding, train[0])
    said += _target_notes(encoding.target, train[1])
    said += _order_notes(encoding.target, all_y[~all_y.isnan()])
    return said


def repeated_rows(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
    """Which test rows are equal to a training row in inputs and target, ``(t,)``."""
    known = {row.numpy().tobytes() for row in _rows(train)}
    return torch.tensor([row.numpy().tobytes() in known for row in _rows(test)], dtype=torch.bool)


def _rows(part: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([part[0], part[1].unsqueeze(-1)], dim=-1) + 0.0  # -0 is 0


def _codes(encoding: TableEncoding, x: Tensor) -> Iterator[str]:
    """Numbers, several times in a column, that are far from all others in it."""
    places = {name: place for place, name in enumerate(encoding.inputs)}
    for column in encoding.columns:
        if not isinstance(column, NumberColumn):
            continue
        values = x[:, places[column.inputs[0]]]
        for code in (values.min(), values.max()):
            others = values[values != code]
            if not len(others) or (count := len(values) - len(others)) < 2:
                continue
            spread = float(others.max() - others.min())
            away = float((others - code).abs().min())
            if spread > 0 and away > _FAR * spread:
                yield (
                    f"Column {column.name!r}: {count} values are {float(code):g}, all others lie "
                    f"from {float(others.min()):g} to {float(others.max()):g}. If it stands for a "
                    f"missing value, give --missing {float(code):g}."
                )


def _same_columns(encoding: TableEncoding, x: Tensor) -> Iterator[str]:
    """Columns that are others, up to an offset and a factor."""
    owner = [column.name for column in encoding.columns for _ in column.inputs]
    if len(owner) > _MOST_COMPARED:
        return
    z = x - x.mean(0)
    z = z / z.norm(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    same = ((z.T @ z).abs() > 1 - 1e-10).triu(1).nonzero().tolist()
    pairs = dict.fromkeys((owner[i], owner[j]) for i, j in same if owner[i] != owner[j])
    for one, other in list(pairs)[:_MOST_TOLD]:
        yield (
            f"Columns {one!r} and {other!r} carry the same information, up to a constant and a "
            f"factor. One of them is enough: --drop {other!r}."
        )


def _target_notes(target: str, y: Tensor) -> Iterator[str]:
    values, counts = y.unique(return_counts=True)
    if len(values) == 2:
        yield (
            f"The target {target!r} has two values only, {float(values[0]):g} and "
            f"{float(values[1]):g}. A regression predicts numbers between and beyond them; for "
            "classes use a classifier."
        )
        return
    quartiles = torch.quantile(y, torch.tensor([0.25, 0.5, 0.75], dtype=y.dtype))
    scale = float(quartiles[2] - quartiles[0]) / _ROBUST
    extreme = (y - quartiles[1]).abs() > _EXTREME * scale
    if scale > 0 and bool(extreme.any()):
        largest = float(y[(y - quartiles[1]).abs().argmax()])
        yield (
            f"{int(extreme.sum())} of {len(y)} targets are far from all others (more than "
            f"{_EXTREME:g} robust standard deviations from the median); the farthest is "
            f"{largest:g}. A few such rows can decide the scores: check whether they are errors, "
            "or predict the logarithm."
        )
    if bool((y == y.round()).all()) and len(values) <= len(y) // 4:
        below = " and, near zero, below it" if float(values[0]) >= 0 else ""
        yield (
            f"The target {target!r} has whole numbers only, {len(values)} different ones. "
            f"Intervals of single Gaussian processes end between them{below}."
        )
        return
    ends = [
        f"{float(value):g} ({int(count)} rows)"
        for value, count in ((values[0], counts[0]), (values[-1], counts[-1]))
        if int(count) > max(2.0, _AT_A_BOUND * len(y)) and int(count) > 3 * int(counts.median())
    ]
    if ends:
        yield (
            f"The target {target!r} seems to be bounded: its extreme value {' and '.join(ends)} is "
            "repeated. Intervals may reach beyond a bound."
        )


def _order_notes(target: str, y: Tensor) -> Iterator[str]:
    """Whether a row's target is like that of the row before it in the file."""
    steps = y.diff()
    if len(y) < 20 or bool((steps >= 0).all()) or bool((steps <= 0).all()):
        return  # a table sorted by its target
    one, other = y[:-1] - y.mean(), y[1:] - y.mean()
    size = float(y.var(correction=0)) * len(y)
    correlation = float((one * other).sum()) / size if size > 0 else 0.0
    if correlation > max(_LIKE_THE_ROW_BEFORE, _CLEAR / math.sqrt(len(y))):
        yield (
            f"Neighbouring rows have similar targets (correlation {correlation:.2f} of {target!r} "
            "with the row before). If rows are in order of time or in groups, test rows drawn at "
            "random are easier than rows to come: name a column that orders them, --time-column."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_TOLD])
    more = len(names) - _MOST_TOLD
    return f"{shown} and {more} others" if more > 0 else shown
