r"""Solves with one covariance, again and again, each with a bound of what it left unsolved.

The errors of what is made of a solve of :math:`K V = B` are made of the norms
:math:`(R_j^\top K^{-1} R_j)^{1/2}` of the columns of its residual :math:`R = B - K V`. With noise D
and a pivoted Cholesky factor L of the kernel, :math:`L L^\top + D \preceq K`, so that it is at most
:math:`(R_j^\top (L L^\top + D)^{-1} R_j)^{1/2}` (Artemev, Burt and van der Wilk 2021): one
application of the preconditioner. Without one it is at most :math:`(R_j^\top D^{-1} R_j)^{1/2}`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.linalg.conjugate_gradients import (
    ConjugateGradients,
    Solution,
    check_finite,
    column_norms,
)
from gpclml.linalg.covariance_products import NoisyCovariance
from gpclml.linalg.preconditioner import woodbury_preconditioner

__all__ = ["CovarianceSolver", "Solved"]

_ROUNDING = 10  # units of it that a bound allows for the cancellation within it


@dataclass(frozen=True)
class Solved:
    r"""Columns that were solved for.

    Attributes:
        values: V, ``(*batch, n, k)``.
        unsolved: :math:`R = B - K V`, ``(*batch, n, k)``.
        errors: Upper bounds of :math:`(R_j^\top K^{-1} R_j)^{1/2}`, in exact arithmetic,
            ``(*batch, k)``, float64; infinite where the noise is not independent.
        residual: Largest norm of a column of R, as a share of that of B.
        iterations: Products with the covariance.
    """

    values: Tensor
    unsolved: Tensor
    errors: Tensor
    residual: float
    iterations: int


class CovarianceSolver:
    """Conjugate gradients with a covariance and a preconditioner that are kept. Without gradients.

    Args:
        covariance: K, ``(*batch, n, n)``.
        settings: Tolerance, iterations, preconditioner, and what happens on failure.

    Raises:
        NonFiniteError: A variance is not finite; before any row of the covariance is evaluated.
    """

    def __init__(self, covariance: NoisyCovariance, settings: ConjugateGradients) -> None:
        self.covariance, self.settings = covariance, settings
        check_finite(covariance.latent.diagonal(), "variances")
        self._precondition = woodbury_preconditioner(covariance, settings.preconditioner_rank)

    def solution(
        self, right: Tensor, tolerance: float | None = None, start: Solution | None = None
    ) -> Solution:
        """Solves for all columns together; what was reached is for the caller to look at.

        Args:
            right: B, ``(*batch, n, k)``; zero where observations are missing.
            tolerance: Of relative residuals; the settings' if None.
            start: Where to go on from, which is changed in place.
        """
        return self.settings.solve(
            self.covariance.fixed_matmul, right, self._precondition, start, tolerance
        )

    @torch.no_grad()
    def bounding_inverse(self, vectors: Tensor) -> Tensor | None:
        r"""The product with :math:`(L L^\top + D)^{-1} \succeq K^{-1}`, or with :math:`D^{-1}`.

        Args:
            vectors: ``(*batch, n, k)``; zero where observations are missing.

        Returns:
            The same shape; None where the noise is not independent.
        """
        noise, missing = self.covariance.noise, self.covariance.missing
        if noise is None:
            return None
        if self._precondition is not None:
            return self._precondition(vectors)
        noise = noise if missing is None else torch.where(missing, 1.0, noise)
        return vectors / noise.unsqueeze(-1)

    @torch.no_grad()
    def solve(self, right: Tensor, tolerance: float | None = None) -> Solved:
        """Solves for all columns together.

        Args:
            right: B, ``(*batch, n, k)``; zero where observations are missing.
            tolerance: What is sought, as far as rounding permits; what is demanded is the
                settings', which is sought too if None.

        Raises:
            NonFiniteError: The covariance is not finite.
            NotConvergedError: A residual is above the tolerance demanded, unless the settings only
                warn.

        Note:
            2 n² k floating-point operations an iteration, beside the evaluation of the covariance
            where it is not kept; memory for about twelve arrays n x k.
        """
        solution = self.solution(right, tolerance)
        norms = column_norms(right).clamp_min(torch.finfo(right.dtype).tiny)
        residual = float((column_norms(solution.unsolved) / norms).max())
        self.settings.check(residual, solution.iterations)
        errors = self._errors(solution.unsolved)
        return Solved(solution.values, solution.unsolved, errors, residual, solution.iterations)

    def _errors(self, unsolved: Tensor) -> Tensor:
        noise = self.covariance.noise
        if noise is None:
            shape = unsolved.mT.shape[:-1]
            return torch.full(shape, torch.inf, dtype=torch.float64, device=unsolved.device)
        unsolved = unsolved.double()
        plain = (unsolved.square() / noise.unsqueeze(-1)).sum(-2)
        plain = torch.where(plain.isnan(), torch.inf, plain)  # nil unsolved where noise is nil
        if self._precondition is None:
            return plain.sqrt()
        bound = (unsolved * self._precondition(unsolved)).sum(-2)
        least = _ROUNDING * torch.finfo(unsolved.dtype).eps * plain
        return torch.minimum(bound.clamp_min(0.0) + least, plain).sqrt()
