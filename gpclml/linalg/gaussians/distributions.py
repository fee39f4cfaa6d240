"""Gaussian distributions over the weights of a linear model, by the form of their covariance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_positive, checked, seeded
from gpclml.errors import ArgumentError, ShapeError
from gpclml.linalg import safe_cholesky

__all__ = [
    "DiagonalGaussian",
    "DualGaussian",
    "FullGaussian",
    "LowRankGaussian",
    "WeightDistribution",
    "check_rank",
    "column_square_sums",
    "row_square_sums",
    "scaled_product",
]

_COLUMNS_AT_ONCE = 4096  # features are taken in parts, so that no array is copied whole


class WeightDistribution(ABC):
    """Base class of Gaussian distributions over R weights.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
    """

    mean: Tensor

    @abstractmethod
    def variance(self) -> Tensor:
        """Variance of each weight, ``(R,)``."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Log-determinant of the covariance, a number."""

    @abstractmethod
    def predictive_variance(self, features: Tensor) -> Tensor:
        r"""Variances :math:`\phi^\top \Sigma \phi` at points, ``(n, R)`` to ``(n,)``."""

    @abstractmethod
    def precision_times(self, columns: Tensor) -> Tensor:
        r"""Products :math:`\Sigma^{-1} V`, ``(R, k)`` to ``(R, k)``."""

    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        r"""The diagonal of :math:`\Sigma^{-1}`, ``(R,)``."""

    @abstractmethod
    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        r"""A diagonal d, a factor V and a sign with :math:`\Sigma = diag(d) \pm V V^\top`."""

    def predictive_covariance(self, features: Tensor) -> Tensor:
        r"""Covariances :math:`\Phi \Sigma \Phi^\top` of points, ``(n, R)`` to ``(n, n)``."""
        diagonal, factor, sign = self.parts()
        total = features.new_zeros(len(features), len(features))
        if diagonal is not None:
            total = total + (features * diagonal) @ features.mT
        if factor is not None:
            under = features @ factor
            total = total + sign * (under @ under.mT)
        return total

    @abstractmethod
    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draws less the mean, ``(S, R)``."""

    @torch.no_grad()
    def sample(self, num_draws: int, seed: int | torch.Generator = 0) -> Tensor:
        """Draws weights.

        Args:
            num_draws: Number S of draws.
            seed: Seed, or a generator on the CPU.

        Returns:
            Draws, ``(S, R)``.
        """
        check_counts(num_draws=num_draws)
        return self.mean + self._centered(num_draws, seeded(seed))

    def _normals(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.mean)


@checked(mean="float (R,)", variances="float (R,)")
@dataclass(frozen=True)
class DiagonalGaussian(WeightDistribution):
    """Independent weights: a diagonal covariance.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
        variances: Variance of each weight, ``(R,)``.

    Raises:
        ShapeError: Mean and variances differ in shape.
        ArgumentError: A variance is not positive.
    """

    mean: Tensor
    variances: Tensor

    def __post_init__(self) -> None:
        check_positive(variances=self.variances)

    def variance(self) -> Tensor:
        """Variance of each weight, ``(R,)``."""
        return self.variances

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance."""
        return self.variances.log().sum()

    def predictive_variance(self, features: Tensor) -> Tensor:
        """Variances at points, ``(n, R)`` to ``(n,)``, without a second array of the features."""
        return row_square_sums(features, self.variances)

    def precision_times(self, columns: Tensor) -> Tensor:
        """Columns divided by the variances, ``(R, k)`` to ``(R, k)``."""
        return columns / self.variances.unsqueeze(-1)

    def precision_diagonal(self) -> Tensor:
        """Inverse variances, ``(R,)``."""
        return 1 / self.variances

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The variances as diagonal."""
        return self.variances, None, 1.0

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        shape = (num_draws, len(self.mean))
        return self.variances.sqrt() * self._normals(shape, generator)


@checked(mean="float (R,)", factor="float (R, k)")
@dataclass(frozen=True)
class LowRankGaussian(WeightDistribution):
    r"""Covariance :math:`V V^\top + \varepsilon I`.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
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
        check_rank(self.factor.shape[1], len(self.mean))
        check_positive(epsilon=self.epsilon)

    def variance(self) -> Tensor:
        """Variance of each weight, ``(R,)``."""
        return self.factor.square().sum(-1) + self.epsilon

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance, from that of a k x k matrix."""
        R, k = self.factor.shape
        log_epsilon = self.mean.new_tensor(self.epsilon).log()
        logs = self._inner_factor().diagonal().log()
        return 2 * logs.sum() + (R - k) * log_epsilon

    def predictive_variance(self, features: Tensor) -> Tensor:
        """Variances at points, ``(n, R)`` to ``(n,)``, without a second array of the features."""
        own = row_square_sums(features, torch.full_like(self.mean, self.epsilon))
        return (features @ self.factor).square().sum(-1) + own

    def precision_times(self, columns: Tensor) -> Tensor:
        """Products with the inverse, by that of a k x k matrix, ``(R, k)`` to ``(R, k)``."""
        inner = torch.cholesky_solve(self.factor.mT @ columns, self._inner_factor())
        return (columns - self.factor @ inner) / self.epsilon

    def precision_diagonal(self) -> Tensor:
        """Diagonal of the inverse covariance, ``(R,)``."""
        rows = torch.linalg.solve_triangular(self._inner_factor(), self.factor.mT, upper=False)
        return (1 - rows.square().sum(0)) / self.epsilon

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Epsilon as diagonal, and the factor."""
        return torch.full_like(self.mean, self.epsilon), self.factor, 1.0

    def _inner_factor(self) -> Tensor:
        k = self.factor.shape[1]
        one = torch.eye(k, dtype=self.mean.dtype, device=self.mean.device)
        return safe_cholesky(self.factor.mT @ self.factor + self.epsilon * one).to(self.mean)

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        R, k = self.factor.shape
        own = self._normals((num_draws, R), generator) * self.epsilon**0.5
        return own + self._normals((num_draws, k), generator) @ self.factor.mT


@checked(mean="float (R,)", root="float (R, R)")
@dataclass(frozen=True)
class FullGaussian(WeightDistribution):
    r"""Weights of any covariance, given by a square root :math:`\Sigma = A A^\top`.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
        root: A, ``(R, R)``, not singular.

    Raises:
        ShapeError: The root has another shape.
    """

    mean: Tensor
    root: Tensor

    def variance(self) -> Tensor:
        """Variance of each weight, ``(R,)``."""
        return self.root.square().sum(-1)

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance; R³ operations."""
        return 2 * torch.linalg.slogdet(self.root)[1]

    def predictive_variance(self, features: Tensor) -> Tensor:
        """Variances at points, ``(n, R)`` to ``(n,)``."""
        return (features @ self.root).square().sum(-1)

    def precision_times(self, columns: Tensor) -> Tensor:
        """Products with the inverse, by two solves, ``(R, k)`` to ``(R, k)``."""
        return torch.linalg.solve(self.root.mT, torch.linalg.solve(self.root, columns))

    def precision_diagonal(self) -> Tensor:
        """Diagonal of the inverse covariance, ``(R,)``."""
        return torch.linalg.inv(self.root).square().sum(0)

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The root as factor."""
        return None, self.root, 1.0

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        return self._normals((num_draws, len(self.mean)), generator) @ self.root.mT

    def updated(
        self, features: Tensor, residual: float | Tensor, noise: float | Tensor
    ) -> FullGaussian:
        r"""The posterior given further points, which are added one after the other.

        Potter's form of the update keeps the covariance positive: with
        :math:`v = A^\top \phi`, :math:`s = \sigma^2 + v^\top v` and
        :math:`\gamma = 1 / (s + \sigma \sqrt{s})`,
        :math:`A \leftarrow A - \gamma A v v^\top` (Bierman 1977, Section II.3).

        Args:
            features: Features of the new points, ``(R,)`` or ``(m, R)``.
            residual: Their targets less the prior mean, a number or ``(m,)``.
            noise: Noise variance, one or ``(m,)``.

        Returns:
            A new distribution; this one is not changed.

        Raises:
            ShapeError: The features have another number of columns, or the numbers of targets and
                points differ.
            ArgumentError: The noise is not positive.

        Note:
            4 R² operations a point.
        """
        R = len(self.mean)
        if features.shape[-1] != R:
            raise ShapeError(
                "features", tuple(features.shape), f"(m, {R}), one column for each weight"
            )
        rows = features.reshape(-1, R)
        # In the type of the mean at once: a float would pass through float32.
        residual, noise = (
            torch.as_tensor(given, dtype=self.mean.dtype, device=self.mean.device).reshape(-1)
            for given in (residual, noise)
        )
        noise = noise.expand(len(rows)) if len(noise) == 1 else noise
        for name, values in (("residual", residual), ("noise", noise)):
            if len(values) != len(rows):
                raise ShapeError(name, f"{len(values)} numbers", f"{len(rows)}, one for each point")
        check_positive(noise=noise)
        mean, root = self.mean, self.root
        for phi, target, variance in zip(rows, residual, noise, strict=True):
            v = root.mT @ phi
            s = variance + v @ v
            gain = root @ v
            mean = mean + gain * ((target - phi @ mean) / s)
            root = root - torch.outer(gain / (s + (variance * s).sqrt()), v)
        return FullGaussian(mean, root)


@dataclass(frozen=True)
class DualGaussian(WeightDistribution):
    r"""The posterior of more weights than points, :math:`S - S \Phi^\top K^{-1} \Phi S`.

    Nothing R x R is formed: :math:`K = \Phi S \Phi^\top + D` is n x n.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
        prior_variance: S, ``(R,)``.
        features: Features of the training points, ``(n, R)``.
        noise: Their noise variances D, ``(n,)``.
        factor: Cholesky factor of K, ``(n, n)``.
    """

    mean: Tensor
    prior_variance: Tensor
    features: Tensor
    noise: Tensor
    factor: Tensor

    def variance(self) -> Tensor:
        """Variance of each weight, ``(R,)``; n² R operations, some thousand weights at a time."""
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
        """Log-determinant of the covariance."""
        log_K = 2 * self.factor.diagonal().log().sum()
        return self.prior_variance.log().sum() + self.noise.log().sum() - log_K

    def predictive_variance(self, features: Tensor) -> Tensor:
        """Variances at points, ``(m, R)`` to ``(m,)``."""
        cross = scaled_product(self.features, features, self.prior_variance)
        whitened = torch.linalg.solve_triangular(self.factor, cross, upper=False)
        prior = row_square_sums(features, self.prior_variance)
        return prior - whitened.square().sum(0)

    def precision_times(self, columns: Tensor) -> Tensor:
        """Products with the sum of the precisions of prior and points, ``(R, k)`` to ``(R, k)``."""
        of_points = self.features.mT @ ((self.features @ columns) / self.noise.unsqueeze(-1))
        return columns / self.prior_variance.unsqueeze(-1) + of_points

    def precision_diagonal(self) -> Tensor:
        """Diagonal of the inverse covariance, ``(R,)``."""
        of_points = column_square_sums(self.features, 1 / self.noise)
        return 1 / self.prior_variance + of_points

    def parts(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The prior variances as diagonal, less a factor with n columns."""
        columns = torch.linalg.solve_triangular(self.factor, self.features, upper=False)
        return self.prior_variance, self.prior_variance.unsqueeze(-1) * columns.mT, -1.0

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        n, R = self.features.shape
        start = self.prior_variance.sqrt() * self._normals((num_draws, R), generator)
        noise = self.noise.sqrt() * self._normals((num_draws, n), generator)
        seen = (start @ self.features.mT + noise).mT
        solved = torch.cholesky_solve(seen, self.factor)
        return start - self.prior_variance * (solved.mT @ self.features)


def check_rank(rank: int, R: int) -> None:
    """Raises an ArgumentError where a rank exceeds the number of weights."""
    if rank > R:
        raise ArgumentError("rank", rank, f"at most {R}, the number of weights")


def scaled_product(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    """First diag(scale) secondᵀ, ``(n, R)``, ``(m, R)`` and ``(R,)`` to ``(n, m)``."""
    total = first.new_zeros(len(first), len(second))
    pieces = (first.split(_COLUMNS_AT_ONCE, -1), second.split(_COLUMNS_AT_ONCE, -1))
    for left, right, weights in zip(*pieces, scale.split(_COLUMNS_AT_ONCE), strict=True):
        total = torch.addmm(total, left * weights, right.mT)
    return total


def row_square_sums(features: Tensor, scale: Tensor) -> Tensor:
    """The diagonal of features diag(scale) featuresᵀ, ``(n, R)`` and ``(R,)`` to ``(n,)``."""
    total = features.new_zeros(len(features))
    for part, weights in zip(
        features.split(_COLUMNS_AT_ONCE, -1), scale.split(_COLUMNS_AT_ONCE), strict=True
    ):
        total = total + part.square() @ weights
    return total


def column_square_sums(features: Tensor, scale: Tensor) -> Tensor:
    """The diagonal of featuresᵀ diag(scale) features, ``(n, R)`` and ``(n,)`` to ``(R,)``."""
    parts = [scale @ part.square() for part in features.split(_COLUMNS_AT_ONCE, -1)]
    return torch.cat(parts)
