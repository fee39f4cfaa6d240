"""The three criteria: their values, differences and favourites."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from gpclml.evaluation.differences import ROUNDING, PairedDifference, paired_difference
from gpclml.evaluation.model_scores import ModelScores

__all__ = [
    "CRITERIA",
    "Criterion",
    "Scores",
    "difference_in",
    "favourites",
    "scored_in",
    "value_of",
]

Criterion = Literal["loo", "clml", "lml"]
Scores = Mapping[str, ModelScores]

CRITERIA: tuple[Criterion, ...] = ("lml", "clml", "loo")
"""Names of the criteria that models are compared by."""

_VALUES: dict[Criterion, Callable[[ModelScores], float]] = {
    "lml": lambda scores: scores.lml,
    "clml": lambda scores: float(scores.clml.mean()),
    "loo": lambda scores: float(scores.loo.sum()),
}


def value_of(criterion: Criterion, scores: ModelScores) -> float:
    """A criterion of a model; NaN where it could not be computed."""
    return _VALUES[criterion](scores)


def scored_in(criterion: Criterion, scores: Scores) -> list[str]:
    """The models that have a criterion, in their order."""
    return [name for name in scores if not math.isnan(value_of(criterion, scores[name]))]


def favourites(scores: Scores) -> dict[Criterion, str]:
    """The best model by each criterion; of equal ones the first in their order.

    A criterion that no model has is left out.

    Args:
        scores: Of the models, the first-ranked first.
    """
    found: dict[Criterion, str] = {}
    for criterion in CRITERIA:
        values = {name: value_of(criterion, scores[name]) for name in scored_in(criterion, scores)}
        if values:
            least = max(values.values()) - ROUNDING
            found[criterion] = next(name for name, value in values.items() if value >= least)
    return found


def difference_in(
    criterion: Criterion, scores: ModelScores, reference: ModelScores
) -> PairedDifference:
    """Paired over points for LOO, over orderings for the CLML; the LML has no error."""
    if criterion == "loo":
        return paired_difference(scores.loo, reference.loo)
    if criterion == "lml":
        return PairedDifference(scores.lml - reference.lml, math.nan)
    total, count = paired_difference(scores.clml, reference.clml), len(scores.clml)
    return PairedDifference(total.value / count, total.standard_error / count)
