"""Predictive densities of test rows, and how they are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from gpclml.errors import NonFiniteError
from gpclml.tables import StackedPrediction

METRICS = ("rmse", "nll", "crps", "coverage_50", "coverage_95")
"""The scores of a prediction."""

Array = NDArray[np.float64]
T = TypeVar("T")


def normal(mean: ArrayLike, deviation: ArrayLike, weights: ArrayLike = 1.0) -> StackedPrediction:
    """Normals of these means and standard deviations, ``(m,)``, or mixtures of K, ``(K, m)``."""
    means = np.atleast_2d(np.asarray(mean))
    deviations = np.broadcast_to(deviation, means.shape)
    shares = torch.as_tensor(np.atleast_1d(weights)).double()
    infinite = torch.full(shares.shape, torch.inf, dtype=torch.float64)
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (means, deviations))
    return StackedPrediction(shares, *tensors, infinite)


def score(prediction: StackedPrediction, y: Array, unit: float) -> dict[str, float]:
    """Scores of predictions of m targets, means over the rows.

    Args:
        prediction: In the units of the targets.
        y: The targets, ``(m,)``.
        unit: What errors are measured in: the standard deviation of the training targets.

    Returns:
        - ``rmse``: root mean squared error of the mean;
        - ``nll``: negative log density, nats a row;
        - ``crps``: continuous ranked probability score;
        - ``coverage_50``, ``coverage_95``: share of targets in the central intervals.

    Raises:
        NonFiniteError: A score is not finite.
    """
    # Tensors and arrays alike become arrays.
    mean, logs, below, crps = map(
        np.asarray,
        (prediction.mean, prediction.log_density(y), prediction.cdf(y), prediction.crps(y)),
    )
    scores: dict[str, Any] = {
        "rmse": np.sqrt(np.mean((mean - y) ** 2)) / unit,
        "nll": -np.mean(logs) - np.log(unit),
        "crps": np.mean(crps) / unit,
        "coverage_50": np.mean((below >= 0.25) & (below <= 0.75)),
        "coverage_95": np.mean((below >= 0.025) & (below <= 0.975)),
    }
    return check_finite(scores)


def check_finite(scores: Mapping[str, Any]) -> dict[str, float]:
    """The scores as numbers of Python.

    Raises:
        NonFiniteError: A score is not finite.
    """
    for name, value in scores.items():
        if not np.isfinite(value):
            raise NonFiniteError(name, value, "a finite score", "Its predictions are not finite.")
    return {name: float(value) for name, value in scores.items()}


def attempt(function: Callable[..., T], *arguments: Any) -> T | Exception:
    """A result, or the error in its place."""
    try:
        return function(*arguments)
    except Exception as error:
        return error
