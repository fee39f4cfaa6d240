"""How well predictions of rows that a model has not seen turn out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import all_finite, checked
from gpclml.errors import ArgumentError, NonFiniteError
from gpclml.models import GPRegression

__all__ = ["PREDICTED_SHARE", "PredictionScores", "half_width", "predicted", "prediction_scores"]

PREDICTED_SHARE = 0.9
"""Share of new observations that a predicted interval is to hold."""


@dataclass(frozen=True, eq=False)
class PredictionScores:
    """Scores of predictions, in the units of the target, with standard errors over rows.

    Attributes:
        rmse: Root mean squared error.
        rmse_se: Its error, by the delta method.
        nll: Mean negative log density of the targets, nats a row.
        nll_se: Its error.
        coverage: Share of targets in the central intervals that are to hold nine tenths.
        coverage_se: Its error.
        log_densities: Of the targets, ``(t,)``.
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
        """NaN throughout, for a model that cannot predict these rows.

        Args:
            count: How many rows there are.
        """
        nan = math.nan
        densities = torch.full((count,), nan, dtype=torch.float64)
        return PredictionScores(nan, nan, nan, nan, nan, nan, densities)

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
        One factorization, n³/3 operations, whatever t, and n² t for the rows; memory for n² numbers
        and a chunk of rows.
    """
    if len(x) == 0:
        return x.new_zeros(0), x.new_zeros(0)
    normal = model.predict(x, marginal=True, progress=progress)
    return normal.mean, normal.stddev


@checked(targets="float (t,)", mean="float (t,)", deviation="float (t,)")
def prediction_scores(targets: Tensor, mean: Tensor, deviation: Tensor) -> PredictionScores:
    """Scores of Gaussian predictions.

    Args:
        targets: What was observed, ``(t,)``.
        mean: What was predicted, ``(t,)``.
        deviation: Standard deviations of the predictions, noise included, ``(t,)``.

    Raises:
        ShapeError: The shapes are others.
        NonFiniteError: A number is not finite.
        ArgumentError: A deviation is not positive.
    """
    for name, values in (("targets", targets), ("mean", mean), ("deviation", deviation)):
        if not all_finite(values):
            raise NonFiniteError(name, "NaN or infinite values", "finite ones")
    if not bool((deviation > 0).all()):
        raise ArgumentError("deviation", "a deviation of zero or less", "positive numbers")
    squares = (targets - mean).square()
    densities = Normal(mean, deviation).log_prob(targets)
    inside = ((targets - mean).abs() <= half_width(deviation)).to(mean)
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
    """Half the width of the central interval that is to hold nine tenths of observations."""
    quantile = torch.special.ndtri(torch.tensor(0.5 + PREDICTED_SHARE / 2, dtype=torch.float64))
    return deviation * float(quantile)


def _error_of_mean(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
