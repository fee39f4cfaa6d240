"""Which columns of a table matter to predictions, and how much noise there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpclml.cli.tables import TableEncoding
from gpclml.models import GPRegression

__all__ = ["ColumnEffect", "column_effects", "noise_of"]

_LEAST_ROWS, _MOST_ROWS, _MOST_POINTS, _MOST_SHUFFLES = 25, 250, 10_000, 10
_CLEAR = 2.0  # standard errors
_ROUNDING = 1e-9


class ColumnEffect(NamedTuple):
    """How much the typical error rises if a column's values are shuffled among the test rows.

    ``error`` is the standard error of the rise over the test rows.
    """

    column: str
    rise: float
    error: float

    @property
    def is_clear(self) -> bool:
        """Whether the rise is more than two standard errors."""
        return self.rise > _CLEAR * self.error


@torch.no_grad()
def column_effects(
    predict: Callable[[Tensor], Tensor], encoding: TableEncoding, test: tuple[Tensor, Tensor],
    seed: int,
) -> tuple[ColumnEffect, ...]:  # fmt: skip
    """The effect of each column on the error of a fitted model, the largest first.

    The model is not fitted again: it is given the values of other rows. All inputs of a column,
    such as the levels of a category, are shuffled together, up to ten times. At most 250 of the
    test rows are taken, fewer with many columns: about 10,000 points are predicted, or 25 for each
    column if these are more.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = encoding.columns
    most = min(_MOST_ROWS, max(_LEAST_ROWS, _MOST_POINTS // len(columns)))
    count = min(len(test[1]), most)
    rows = torch.linspace(0, len(test[1]) - 1, count).round().long()
    x, y = (part[rows] for part in test)
    shuffles = max(1, min(_MOST_SHUFFLES, _MOST_POINTS // (count * len(columns))))
    points, first = [], 0
    for column in columns:
        inputs = slice(first, first + len(column.inputs))
        first = inputs.stop
        for _ in range(shuffles):
            order = torch.randperm(count, generator=generator)
            changed = x.clone()
            changed[:, inputs] = x[order, inputs]
            points.append(changed)
    squares = (predict(torch.cat([x, *points])).reshape(-1, count) - y).square()
    true, shuffled = squares[0], squares[1:].reshape(len(columns), shuffles, count).mean(1)
    effects = []
    for column, own in zip(columns, shuffled, strict=True):
        rmse = math.sqrt(float(own.mean()))
        spread = float((own - true).std()) / math.sqrt(count)
        rise = rmse - math.sqrt(float(true.mean()))
        rise = 0.0 if abs(rise) < _ROUNDING * rmse else rise
        effects.append(ColumnEffect(column.name, rise, spread / (2 * rmse) if rmse else 0.0))
    return tuple(sorted(effects, key=lambda effect: -effect.rise))


def noise_of(model: GPRegression) -> float:
    """Standard deviation of the noise of a model, in the units of the target."""
    summary = model.summary()["original"]
    return math.sqrt(float(summary.filter(regex=r"Likelihood\.noise").iloc[0]))
