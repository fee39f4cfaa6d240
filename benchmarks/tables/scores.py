"""Predictive densities of test rows, and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr
from scipy.stats import norm

from gpclml.errors import NonFiniteError

__all__ = ["METRICS", "MixtureOfNormals", "Prediction", "normal", "score"]

METRICS = ("rmse", "nll", "crps", "coverage_50", "coverage_95")
"""The scores of a prediction."""

Array = NDArray[np.float64]


class Prediction(Protocol):
    """One density for each of m test rows; what it gives is an array, or a tensor on the CPU."""

    @property
    def mean(self) -> Any:
        """Their means, ``(m,)``."""
        ...

    def log_density(self, y: Array) -> Any:
        """Log densities at these targets, nats, ``(m,)``."""
        ...

    def cdf(self, y: Array) -> Any:
        """Probabilities of targets up to these, ``(m,)``."""
        ...

    def crps(self, y: Array) -> Any:
        """Continuous ranked probability scores, in units of the targets, ``(m,)``."""
        ...


@dataclass(frozen=True)
class MixtureOfNormals:
    """Mixtures of K normals, one for each of m rows; with K = 1 normals.

    Args:
        weights: With sum one, ``(K,)``.
        means: ``(K, m)``.
        deviations: Standard deviations, ``(K, m)``.
    """

    weights: Array
    means: Array
    deviations: Array

    @property
    def mean(self) -> Array:
        """Their means, ``(m,)``."""
        return self.weights @ self.means

    def log_density(self, y: Array) -> Array:
        """Log densities at these targets, nats, ``(m,)``."""
        logs = norm.logpdf(y, self.means, self.deviations)
        return logsumexp(logs, axis=0, b=self.weights[:, None])

    def cdf(self, y: Array) -> Array:
        """Probabilities of targets up to these, ``(m,)``."""
        return self.weights @ ndtr((y - self.means) / self.deviations)

    def crps(self, y: Array) -> Array:
        """Continuous ranked probability scores in closed form (Grimit et al. 2006, Eq. 5)."""
        variances = self.deviations**2
        to_target = self.weights @ _mean_distance(y - self.means, variances)
        between = _mean_distance(
            self.means[:, None] - self.means, variances[:, None] + variances
        )  # (K, K, m)
        return to_target - 0.5 * np.einsum("k,l,klm->m", self.weights, self.weights, between)


def _mean_distance(mean: Array, variance: Array) -> Array:
    """The mean of the absolute value of a normal."""
    deviation = np.sqrt(variance)
    z = mean / deviation
    return deviation * (2 * norm.pdf(z) + z * (2 * ndtr(z) - 1))


def normal(mean: Array, deviation: Array | float) -> MixtureOfNormals:
    """Normals of these means and standard deviations, ``(m,)``."""
    deviations = np.broadcast_to(deviation, np.shape(mean))
    return MixtureOfNormals(np.ones(1), np.asarray(mean)[None], deviations[None])


def score(prediction: Prediction, y: Array, unit: float) -> dict[str, float]:
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
    mean, logs, below, crps = map(
        np.asarray,
        (prediction.mean, prediction.log_density(y), prediction.cdf(y), prediction.crps(y)),
    )
    found: dict[str, Any] = {
        "rmse": np.sqrt(np.mean((mean - y) ** 2)) / unit,
        "nll": -np.mean(logs) - np.log(unit),
        "crps": np.mean(crps) / unit,
        "coverage_50": np.mean((below >= 0.25) & (below <= 0.75)),
        "coverage_95": np.mean((below >= 0.025) & (below <= 0.975)),
    }
    for name, value in found.items():
        if not np.isfinite(value):
            raise NonFiniteError(name, value, "a finite score", "Its predictions are not finite.")
    return {name: float(value) for name, value in found.items()}
