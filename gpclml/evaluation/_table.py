"""The table of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpclml.evaluation._criteria import Criterion, Scores, difference_in, scored_in, value_of
from gpclml.evaluation.findings import Finding, failures_in_words
from gpclml.evaluation.stacking import stacking_weights

if TYPE_CHECKING:
    import pandas

__all__ = ["for_display", "make_table"]


def make_table(scores: Scores, rank_by: Criterion, findings: Sequence[Finding]) -> pandas.DataFrame:
    """A row a model, in their order."""
    import pandas

    first = next(iter(scores.values()))
    weights = _weights(scores)
    rows = []
    for rank, (name, model) in enumerate(scores.items()):
        difference = difference_in(rank_by, model, first)
        in_loo = difference_in("loo", model, first)
        rows.append(
            {
                "rank": rank,
                "lml": model.lml,
                "clml": value_of("clml", model),
                "clml_se": _deviation(model.clml) / math.sqrt(len(model.clml)),
                "loo": value_of("loo", model),
                "loo_se": _deviation(model.loo) * math.sqrt(len(model.loo)),
                "difference": difference.value,
                "difference_se": difference.standard_error,
                "p_worse": in_loo.p_worse if rank else math.nan,
                "weight": weights.get(name, math.nan),
                "findings": tuple(one.name for one in findings if name in one.models),
                "failure": "; ".join(failures_in_words(model)),
            }
        )
    return pandas.DataFrame(rows, index=pandas.Index(list(scores), name="model"))


def _weights(scores: Scores) -> dict[str, float]:
    """Stacking weights of the models that have LOO."""
    names = scored_in("loo", scores)
    if not names:
        return {}
    weights = stacking_weights(torch.stack([scores[name].loo for name in names]))
    return dict(zip(names, weights.tolist(), strict=True))


def for_display(table: pandas.DataFrame) -> pandas.DataFrame:
    """The table with numbers as short texts; why a score is missing is said below it."""
    shown = table.drop(columns="failure")
    for column in shown.columns:
        if column == "findings":
            shown[column] = [", ".join(names) for names in table[column]]
        elif column != "rank":
            digits = 3 if column == "p_worse" else 2
            shown[column] = [_short(value, digits) for value in table[column]]
    return shown


def _short(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _deviation(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else math.nan
