"""How exact what came of conjugate gradients is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpclml.inference.posterior_normal import PosteriorNormal

__all__ = ["IterativePrediction", "SolveReport"]


@dataclass(frozen=True)
class SolveReport:
    """How well the training targets were solved for.

    Attributes:
        iterations: Products with the covariance.
        residual: Norm of what was left unsolved, as a share of the right-hand side's.
        mean_error: Upper bound of the error of :meth:`IterativePosterior.mean`, in prior standard
            deviations of the function at the point. Infinite where noise is not independent, or
            lost in the rounding of the covariance.
    """

    iterations: int
    residual: float
    mean_error: float


@dataclass(frozen=True)
class IterativePrediction:
    """A posterior at points, and how exact it is.

    Attributes:
        distribution: Mean ``(*batch, m)`` and covariance ``(*batch, m, m)``.
        mean_error: Upper bound of the distance of the mean from the exact one, ``(*batch, m)``, in
            the units of the targets.
        variance_excess: Upper bound of what a variance is above the exact one, ``(*batch, m)``, in
            those units squared; it is below by rounding only. Both bounds are for the covariance as
            its kernel evaluates it, with an allowance for the rounding of products.
        residual: Largest norm of a residual as a share of that of its right-hand side.
        iterations: Products with the covariance, of up to as many vectors as points at once.
    """

    distribution: PosteriorNormal
    mean_error: Tensor
    variance_excess: Tensor
    residual: float
    iterations: int
