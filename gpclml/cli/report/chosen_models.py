"""Which model each criterion chooses, and how well it then predicts the test part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpclml._utils.arguments import checked
from gpclml.cli.report.predictions import PredictionScores
from gpclml.errors import ArgumentError
from gpclml.evaluation import Comparison, PairedDifference, paired_difference

__all__ = [
    "ChosenModel",
    "best_on_test",
    "chosen_models",
    "is_clear",
    "lead_of_best",
]

_CLEAR = 2.0  # standard errors


@dataclass(frozen=True)
class ChosenModel:
    """What a criterion chooses, beside the best model on the test part.

    Attributes:
        criterion: Which.
        model: The model it prefers.
        best: The model of the highest log density of the test part.
        lead: By how much the best one's log density of the test part exceeds that of this one.
    """

    criterion: str
    model: str
    best: str
    lead: PairedDifference

    @property
    def agrees(self) -> bool:
        """Whether criterion and test part choose the same model."""
        return self.model == self.best


@checked
def best_on_test(predictions: Mapping[str, PredictionScores]) -> str:
    """The model of the highest log density of the test part; of equal ones the first.

    Args:
        predictions: Scores by model, at least one of them not missing.

    Raises:
        ArgumentError: All are missing.
    """
    there = [name for name, scores in predictions.items() if not scores.is_missing]
    if not there:
        raise ArgumentError("predictions", "none", "scores of at least one model")
    return min(there, key=lambda name: predictions[name].nll)


def lead_of_best(predictions: Mapping[str, PredictionScores], model: str) -> PairedDifference:
    """Log density of the test part under the model that is best there less that under this one.

    Args:
        predictions: Scores by model.
        model: Name of this one.
    """
    best = predictions[best_on_test(predictions)]
    return paired_difference(best.log_densities, predictions[model].log_densities)


def is_clear(lead: PairedDifference) -> bool:
    """Whether a lead is more than two standard errors."""
    return lead.value > _CLEAR * lead.standard_error


def chosen_models(
    comparison: Comparison, predictions: Mapping[str, PredictionScores]
) -> tuple[ChosenModel, ...]:
    """What LML, CLML and LOO choose, each beside the test part.

    Args:
        comparison: Of the models.
        predictions: Their scores on the test part, by name.
    """
    best = best_on_test(predictions)
    return tuple(
        ChosenModel(criterion, model, best, lead_of_best(predictions, model))
        for criterion, model in comparison.favourites.items()
    )
