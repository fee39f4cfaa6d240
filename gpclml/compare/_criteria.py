"""The three criteria: their values, differences and favourites."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from gpclml.compare.differences import PairedDifference, paired_difference
from gpclml.compare.model_scores import ModelScores

__all__ = ["CRITERIA", "Criterion", "Scores", "difference_in", "favourites", "value_of"]

Criterion = Literal["loo", "clml", "lml"]
Scores = Mapping[str, ModelScores]

CRITERIA: tuple[Criterion, ...] = ("lml", "clml", "loo")

_VALUES: dict[Criterion, Callable[[ModelScores], float]] = {
    "lml": lambda scores: scores.lml,
    "clml": lambda scores: float(scores.clml.mean()),
    "loo": lambda scores: float(scores.loo.sum()),
}


def value_of(criterion: Criterion, scores: ModelScores) -> float:
    """A criterion of a model."""
    return _VALUES[criterion](scores)


def favourites(scores: Scores) -> dict[Criterion, str]:
    """The best model by each criterion; of equal ones the first by name."""
    return {
        criterion: max(sorted(scores), key=lambda name: value_of(criterion, scores[name]))
        for criterion in CRITERIA
    }


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
