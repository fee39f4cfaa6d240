"""The posterior of more weights than there are points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.linalg.gaussians._products import column_square_sums, row_square_sums, scaled_product
from gpclml.linalg.gaussians.distribution import WeightDistribution

__all__ = ["DualGaussian"]

_COLUMNS_AT_ONCE = 4096  # weights whose covariance with the points is held at a time


@dataclass(frozen=True)
class DualGaussian(WeightDistribution):
    r"""The posterior of more weights than points, :math:`S - S \Phi^\top K^{-1} \Phi S`.

    Nothing R x R is formed: :math:`K = \Phi S \Phi^\top + D` is n x n.

    Attributes:
        mean: ``(R,)``.
        prior_variance: S, ``(R,)``.
        features: Of the points seen, ``(n, R)``.
        noise: Their noise variances D, ``(n,)``.
        factor: Cholesky factor of K, ``(n, n)``.
    """

    mean: Tensor
    prior_variance: Tensor
    features: Tensor
    noise: Tensor
    factor: Tensor

    def variance(self) -> Tensor:
        """Of each weight, ``(R,)``; n² R operations, some thousand weights at a time."""
        parts = []
        for columns, prior in zip(
            self.features.split(_COLUMNS_AT_ONCE, dim=-1),
            self.prior_variance.split(_COLUMNS_AT_ONCE),
            strict=True,
        ):
            whitened = torch.linalg.solve_triangular(self.factor, columns, upper=False)
            parts.append(prior - prior.square() * whitened.square().sum(0))
        return torch.cat(parts)

    def log_det(self) -> Tensor:
        """Of the covariance."""
        log_K = 2 * self.factor.diagonal().log().sum()
        return self.prior_variance.log().sum() + self.noise.log().sum() - log_K

    def predictive_variance(self, features: Tensor) -> Tensor:
        """At points, ``(m, R)`` to ``(m,)``."""
        cross = scaled_product(self.features, features, self.prior_variance)
        whitened = torch.linalg.solve_triangular(self.factor, cross, upper=False)
        prior = row_square_sums(features, self.prior_variance)
        return prior - whitened.square().sum(0)

    def precision_times(self, columns: Tensor) -> Tensor:
        """From the prior's precision and the points', ``(R, k)`` to ``(R, k)``."""
        of_points = self.features.mT @ ((self.features @ columns) / self.noise.unsqueeze(-1))
        return columns / self.prior_variance.unsqueeze(-1) + of_points

    def precision_diagonal(self) -> Tensor:
        """Of the inverse, ``(R,)``."""
        of_points = column_square_sums(self.features, 1 / self.noise)
        return 1 / self.prior_variance + of_points

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The prior variances, less a factor with n columns."""
        columns = torch.linalg.solve_triangular(self.factor, self.features, upper=False)
        return self.prior_variance, self.prior_variance.unsqueeze(-1) * columns.mT, -1.0

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        n, R = self.features.shape
        start = self.prior_variance.sqrt() * self._normals((num_draws, R), generator)
        noise = self.noise.sqrt() * self._normals((num_draws, n), generator)
        seen = (start @ self.features.mT + noise).mT
        solved = torch.cholesky_solve(seen, self.factor)
        return start - self.prior_variance * (solved.mT @ self.features)
