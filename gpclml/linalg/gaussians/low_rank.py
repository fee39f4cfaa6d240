"""Weights whose covariance is of low rank plus a multiple of the identity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError
from gpclml.linalg import safe_cholesky
from gpclml.linalg.gaussians._products import row_square_sums
from gpclml.linalg.gaussians.distribution import WeightDistribution

__all__ = ["LowRankGaussian"]


@checked(mean="float (R,)", factor="float (R, k)")
@dataclass(frozen=True)
class LowRankGaussian(WeightDistribution):
    r"""Covariance :math:`V V^\top + \varepsilon I`.

    Attributes:
        mean: ``(R,)``.
        factor: V, ``(R, k)``.
        epsilon: A positive number.

    Raises:
        ShapeError: The factor has another number of rows.
        ArgumentError: Epsilon is not positive, or the rank exceeds R.
    """

    mean: Tensor
    factor: Tensor
    epsilon: float

    def __post_init__(self) -> None:
        R = len(self.mean)
        if self.factor.ndim != 2 or len(self.factor) != R:
            raise ShapeError("factor", tuple(self.factor.shape), f"({R}, k), as the mean")
        if self.factor.shape[1] > R:
            raise ArgumentError("rank", self.factor.shape[1], f"at most {R}, the weights")
        if not 0 < self.epsilon < float("inf"):
            raise ArgumentError("epsilon", self.epsilon, "a positive number")

    def variance(self) -> Tensor:
        """Of each weight, ``(R,)``."""
        return self.factor.square().sum(-1) + self.epsilon

    def log_det(self) -> Tensor:
        """Of the covariance, from that of a k x k matrix."""
        R, k = self.factor.shape
        log_epsilon = self.mean.new_tensor(self.epsilon).log()
        logs = self._inner_factor().diagonal().log()
        return 2 * logs.sum() + (R - k) * log_epsilon

    def predictive_variance(self, features: Tensor) -> Tensor:
        """At points, ``(n, R)`` to ``(n,)``; without a second array of that size."""
        own = row_square_sums(features, torch.full_like(self.mean, self.epsilon))
        return (features @ self.factor).square().sum(-1) + own

    def precision_times(self, columns: Tensor) -> Tensor:
        """By the inverse of a k x k matrix, ``(R, k)`` to ``(R, k)``."""
        inner = torch.cholesky_solve(self.factor.mT @ columns, self._inner_factor())
        return (columns - self.factor @ inner) / self.epsilon

    def precision_diagonal(self) -> Tensor:
        """Of the inverse, ``(R,)``."""
        rows = torch.linalg.solve_triangular(self._inner_factor(), self.factor.mT, upper=False)
        return (1 - rows.square().sum(0)) / self.epsilon

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Epsilon and the factor."""
        return torch.full_like(self.mean, self.epsilon), self.factor, 1.0

    def _inner_factor(self) -> Tensor:
        k = self.factor.shape[1]
        one = torch.eye(k, dtype=self.mean.dtype, device=self.mean.device)
        return safe_cholesky(self.factor.mT @ self.factor + self.epsilon * one).to(self.mean)

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        R, k = self.factor.shape
        own = self._normals((num_draws, R), generator) * self.epsilon**0.5
        return own + self._normals((num_draws, k), generator) @ self.factor.mT
