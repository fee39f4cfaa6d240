"""Scores of predictions of the test rows, and the best model there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import check_finite, checked
from gpclml.errors import ArgumentError
from gpclml.evaluation import PairedDifference, paired_difference
from gpclml.models import GPRegression

__all__ = [
    "PREDICTED_SHARE",
    "PredictionScores",
    "best_on_test",
    "half_width",
    "lead_of_best",
    "predicted",
    "prediction_scores",
    "scores_of",
]

PREDICTED_SHARE = 0.9
"""Share of new observations that should lie in a predicted interval."""


@dataclass(frozen=True, eq=False)
class PredictionScores:
    """Scores of predictions, in the units of the target, with standard errors over rows.

    Attributes:
        rmse: Root mean squared error.
        rmse_se: Its standard error, by the delta method.
        nll: Mean negative log density of the targets, in nats per row.
        nll_se: Its standard error.
        coverage: Share of targets in their central 90 % intervals.
        coverage_se: Its standard error.
        log_densities: Log densities of the targets, ``(t,)``.
    """

    rmse: float
    rmse_se: float
    nll: float
    nll_se: float
    coverage: float
    coverage_se: float
    log_densities: Tensor

    @staticmethod
    def missing(count: int) -> PredictionScores:
        """Scores of ``count`` rows that are all NaN, for a model that cannot predict them."""
        densities = torch.full((count,), math.nan, dtype=torch.float64)
        return PredictionScores(*[math.nan] * 6, log_densities=densities)

    @property
    def is_missing(self) -> bool:
        """Whether there are no predictions."""
        return math.isnan(self.nll)


@torch.no_grad()
@checked(x="float (t?, d)")
def predicted(model: GPRegression, x: Tensor, progress: bool = False) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of new observations, each ``(t,)``.

    Args:
        model: The model.
        x: Inputs in original units, ``(t, d)``.
        progress: Whether to show a progress bar on standard error.

    Note:
        The cost is one factorization of n³/3 operations for any number of rows t, and n² t
        operations for the rows; the memory is that of n² numbers and a chunk of rows.
    """
    if len(x) == 0:
        return x.new_zeros(0), x.new_zeros(0)
    normal = model.predict(x, marginal=True, progress=progress)
    return normal.mean, normal.stddev


@checked(targets="float (t,)", mean="float (t,)", deviation="float (t,)")
def prediction_scores(targets: Tensor, mean: Tensor, deviation: Tensor) -> PredictionScores:
    """Scores of Gaussian predictions.

    Args:
        targets: Observed targets, ``(t,)``.
        mean: Predicted means, ``(t,)``.
        deviation: Predicted standard deviations, with the noise, ``(t,)``.

    Raises:
        ShapeError: The shapes differ.
        NonFiniteError: A number is not finite.
        ArgumentError: A deviation is not positive.
    """
    for name, values in (("targets", targets), ("mean", mean), ("deviation", deviation)):
        check_finite(name, values)
    if not bool((deviation > 0).all()):
        raise ArgumentError("deviation", "a deviation of zero or less", "positive numbers")
    inside = ((targets - mean).abs() <= half_width(deviation)).to(mean)
    return scores_of((targets - mean).square(), Normal(mean, deviation).log_prob(targets), inside)


def scores_of(
    squares: Tensor, densities: Tensor | None = None, inside: Tensor | None = None
) -> PredictionScores:
    """Scores of squared errors, log densities and whether targets are in their intervals.

    What is None has no score, which is NaN.
    """
    none = torch.full_like(squares, math.nan)
    densities, inside = (none if one is None else one for one in (densities, inside))
    rmse = math.sqrt(float(squares.mean()))
    return PredictionScores(
        rmse=rmse,
        rmse_se=_error_of_mean(squares) / (2 * rmse) if rmse else 0.0,
        nll=-float(densities.mean()),
        nll_se=_error_of_mean(densities),
        coverage=float(inside.mean()),
        coverage_se=_error_of_mean(inside),
        log_densities=densities,
    )


def half_width(deviation: Tensor) -> Tensor:
    """Half the width of the central 90 % interval of a Gaussian of these standard deviations."""
    quantile = torch.special.ndtri(torch.tensor(0.5 + PREDICTED_SHARE / 2, dtype=torch.float64))
    return deviation * float(quantile)


def _error_of_mean(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def best_on_test(predictions: Mapping[str, PredictionScores]) -> str:
    """The model with the highest log density of the test rows; the first of equal ones."""
    there = [name for name, scores in predictions.items() if not scores.is_missing]
    return min(there, key=lambda name: predictions[name].nll)


def lead_of_best(predictions: Mapping[str, PredictionScores], model: str) -> PairedDifference:
    """Log density of the test rows under the best model, minus that under a given one."""
    best = predictions[best_on_test(predictions)]
    return paired_difference(best.log_densities, predictions[model].log_densities)
