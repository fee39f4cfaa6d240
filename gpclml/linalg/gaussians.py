r"""Gaussian distributions of the weights of a linear model, and families of them.

Every covariance is a diagonal plus or minus a product of low rank, so that costs are linear in the
number of weights, except for the full form. The best member of a family maximizes the evidence
lower bound :math:`E_q[\log p(y \mid w)] - KL(q \| p)`. Its mean is the posterior's in every family;
its covariance minimizes :math:`tr(\Sigma A) - \log |\Sigma|`,
:math:`A = \Phi^\top D^{-1} \Phi + S^{-1}` (Harvey and Hughes 2026, Appendix C).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_positive, checked, seeded
from gpclml._utils.environment import check_memory
from gpclml.errors import ArgumentError
from gpclml.linalg.low_rank import LowRankPlusDiagonal
from gpclml.linalg.matrices import safe_cholesky

__all__ = [
    "DiagonalFamily",
    "DiagonalGaussian",
    "DiagonalPlusLowRank",
    "DualGaussian",
    "FullFamily",
    "FullGaussian",
    "GaussianFamily",
    "LowRankFamily",
    "LowRankGaussian",
    "WeightDistribution",
    "gaussian_kl",
    "linear_posterior",
]


class DiagonalPlusLowRank(NamedTuple):
    r"""A matrix :math:`diag(d) \pm V V^\top`, as d ``(R,)``, V ``(R, k)`` and the sign."""

    diagonal: Tensor
    factor: Tensor
    sign: float = 1.0

    def times(self, columns: Tensor) -> Tensor:
        """Its products with columns, ``(R, k)`` to ``(R, k)``."""
        product = self.factor @ (self.factor.mT @ columns)
        return columns * self.diagonal.unsqueeze(-1) + self.sign * product


class WeightDistribution(ABC):
    """Base class of Gaussian distributions over R weights.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
    """

    mean: Tensor

    @abstractmethod
    def covariance(self) -> DiagonalPlusLowRank:
        """The covariance of the weights."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Log-determinant of the covariance, a number."""

    def variance(self) -> Tensor:
        """Variance of each weight, ``(R,)``."""
        diagonal, factor, sign = self.covariance()
        return diagonal + sign * factor.square().sum(-1)

    def predictive_variance(self, features: Tensor) -> Tensor:
        r"""Variances :math:`\phi^\top \Sigma \phi` at points, ``(n, R)`` to ``(n,)``."""
        diagonal, factor, sign = self.covariance()
        return features.square() @ diagonal + sign * (features @ factor).square().sum(-1)

    def predictive_covariance(self, features: Tensor) -> Tensor:
        r"""Covariances :math:`\Phi \Sigma \Phi^\top` of points, ``(n, R)`` to ``(n, n)``."""
        return features @ self.covariance().times(features.mT)

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

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draws less the mean, ``(S, R)``."""
        diagonal, factor, _ = self.covariance()
        R, k = factor.shape
        draws = self._normals((num_draws, R), generator) * diagonal.sqrt()
        return draws + self._normals((num_draws, k), generator) @ factor.mT

    def _normals(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.mean)


@dataclass(frozen=True)
class DiagonalGaussian(WeightDistribution):
    """Independent weights: a diagonal covariance.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
        variances: Variance of each weight, ``(R,)``.
    """

    mean: Tensor
    variances: Tensor

    def covariance(self) -> DiagonalPlusLowRank:
        """The variances."""
        return DiagonalPlusLowRank(self.variances, self.mean.new_empty(len(self.mean), 0))

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance."""
        return self.variances.log().sum()


@dataclass(frozen=True)
class LowRankGaussian(WeightDistribution):
    r"""Covariance :math:`V V^\top + \varepsilon I`.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
        factor: V, ``(R, k)``.
        epsilon: A positive number.
    """

    mean: Tensor
    factor: Tensor
    epsilon: float

    def covariance(self) -> DiagonalPlusLowRank:
        """Epsilon, and the factor."""
        return DiagonalPlusLowRank(torch.full_like(self.mean, self.epsilon), self.factor)

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance, from that of a k x k matrix."""
        R, k = self.factor.shape
        identity = torch.eye(k, dtype=self.mean.dtype, device=self.mean.device)
        inner = safe_cholesky(self.factor.mT @ self.factor + self.epsilon * identity)
        log_epsilon = self.mean.new_tensor(self.epsilon).log()
        return 2 * inner.to(self.mean).diagonal().log().sum() + (R - k) * log_epsilon


@dataclass(frozen=True)
class FullGaussian(WeightDistribution):
    r"""Weights of any covariance, given by a square root :math:`\Sigma = A A^\top`.

    Attributes:
        mean: Mean of each weight, ``(R,)``.
        root: A, ``(R, R)``, not singular.
    """

    mean: Tensor
    root: Tensor

    def covariance(self) -> DiagonalPlusLowRank:
        """The root as factor."""
        return DiagonalPlusLowRank(torch.zeros_like(self.mean), self.root)

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance; R³ operations."""
        return 2 * torch.linalg.slogdet(self.root)[1]

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        return self._normals((num_draws, len(self.mean)), generator) @ self.root.mT


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

    def covariance(self) -> DiagonalPlusLowRank:
        """The prior variances, less a factor with n columns."""
        columns = torch.linalg.solve_triangular(self.factor, self.features, upper=False)
        factor = self.prior_variance.unsqueeze(-1) * columns.mT
        return DiagonalPlusLowRank(self.prior_variance, factor, -1.0)

    def log_det(self) -> Tensor:
        """Log-determinant of the covariance."""
        log_K = 2 * self.factor.diagonal().log().sum()
        return self.prior_variance.log().sum() + self.noise.log().sum() - log_K

    def predictive_variance(self, features: Tensor) -> Tensor:
        """Variances at points, ``(m, R)`` to ``(m,)``, from their covariance with the others."""
        cross = (self.features * self.prior_variance) @ features.mT
        whitened = torch.linalg.solve_triangular(self.factor, cross, upper=False)
        return features.square() @ self.prior_variance - whitened.square().sum(0)

    def _centered(self, num_draws: int, generator: torch.Generator) -> Tensor:
        # Draws of the prior, moved by the posterior mean of their own errors (Matheron's rule).
        n, R = self.features.shape
        start = self.prior_variance.sqrt() * self._normals((num_draws, R), generator)
        noise = self.noise.sqrt() * self._normals((num_draws, n), generator)
        solved = torch.cholesky_solve((start @ self.features.mT + noise).mT, self.factor)
        return start - self.prior_variance * (solved.mT @ self.features)


def linear_posterior(
    features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
) -> FullGaussian | DualGaussian:
    r"""The posterior of weights :math:`w \sim N(0, S)` given :math:`r = \Phi w + \epsilon`.

    Args:
        features: ``(n, R)``.
        residual: Targets less the prior mean, ``(n,)``.
        prior_variance: S, ``(R,)``.
        noise: Noise variances, ``(n,)``.

    Returns:
        A :class:`FullGaussian` for at most n weights, else a :class:`DualGaussian`.

    Raises:
        ArgumentError: Memory does not suffice, or a variance is not positive.

    Note:
        n R² + R³ operations, or n² R + n³/3.
    """
    check_positive(prior_variance=prior_variance, noise=noise)
    n, R = features.shape
    suggestion = "Use fewer points at a time, or fewer features."
    check_memory(
        "features", (n, R), min(n, R) ** 2 * 3, features.dtype, features.device, suggestion
    )
    if n >= R:
        scale = prior_variance.sqrt()
        weights = LowRankPlusDiagonal(features * scale, noise).weights()
        L, mean = weights.factor, weights.mean(residual.unsqueeze(-1)).squeeze(-1)
        identity = torch.eye(R, dtype=L.dtype, device=L.device)
        root = torch.linalg.solve_triangular(L.mT, identity, upper=True).to(features)
        return FullGaussian(scale * mean.to(features), scale.unsqueeze(-1) * root)
    K = (features * prior_variance) @ features.mT + torch.diag_embed(noise)
    factor = safe_cholesky(K).to(features)
    solved = torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1)
    return DualGaussian(
        prior_variance * (solved @ features), prior_variance, features, noise, factor
    )


class GaussianFamily(ABC):
    """Base class of families, each of one form of covariance."""

    @abstractmethod
    def best(
        self, features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
    ) -> WeightDistribution:
        """The member with the largest evidence lower bound.

        The arguments are those of :func:`linear_posterior`, and so are the errors.
        """


@dataclass(frozen=True)
class DiagonalFamily(GaussianFamily):
    """Independent weights (mean field): variances are the inverse diagonal of A."""

    def best(
        self, features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
    ) -> DiagonalGaussian:
        """The best independent weights; linear in R. See :meth:`GaussianFamily.best`."""
        mean = linear_posterior(features, residual, prior_variance, noise).mean
        precision = (1 / noise) @ features.square() + 1 / prior_variance
        return DiagonalGaussian(mean, 1 / precision)


@dataclass(frozen=True)
class FullFamily(GaussianFamily):
    """Any covariance: the exact posterior, whose lower bound is the evidence."""

    def best(
        self, features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
    ) -> WeightDistribution:
        """The posterior; min(n, R)² memory. See :meth:`GaussianFamily.best`."""
        return linear_posterior(features, residual, prior_variance, noise)


@checked
@dataclass(frozen=True)
class LowRankFamily(GaussianFamily):
    r"""Covariances :math:`V V^\top + \varepsilon I` with V of a few columns.

    The best V lies along the eigenvectors of A with the smallest eigenvalues
    :math:`\lambda_i`, where the posterior is widest, with squared lengths
    :math:`1 / \lambda_i - \varepsilon`. With many more features than points these are directions
    in which all features are zero, found by projection at a cost linear in R. The variance
    :math:`\varepsilon` in every other direction costs much KL divergence, which is why this bound
    favours tiny noise (Harvey and Hughes 2026, Section 3).

    Attributes:
        rank: Number k of columns.
        epsilon: A positive number.

    Raises:
        ArgumentError: The rank is below one, or epsilon not positive.
    """

    rank: int = 1
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_counts(1, "Use DiagonalFamily for independent weights.", rank=self.rank)
        check_positive(epsilon=self.epsilon)

    def best(
        self, features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
    ) -> LowRankGaussian:
        """The best covariance of that rank. See :meth:`GaussianFamily.best`.

        Raises:
            ArgumentError: The rank exceeds the number of weights as well.

        Note:
            n² R + n³ operations with at least n + k features of one prior variance, else R³.
        """
        n, R = features.shape
        if self.rank > R:
            raise ArgumentError("rank", self.rank, f"at most {R}, the number of weights")
        mean = linear_posterior(features, residual, prior_variance, noise).mean
        if n + self.rank <= R and bool((prior_variance == prior_variance[0]).all()):
            vectors = _unseen_directions(features, self.rank)
            eigenvalues = 1 / prior_variance[: self.rank]
        else:
            vectors, eigenvalues = _smallest(features, prior_variance, noise, self.rank)
        # Where the posterior is narrower than epsilon a direction is left out.
        lengths = (1 / eigenvalues - self.epsilon).clamp_min(0.0).sqrt()
        return LowRankGaussian(mean, vectors * lengths, self.epsilon)


def gaussian_kl(q: WeightDistribution, prior_variance: Tensor) -> Tensor:
    r"""The Kullback-Leibler divergence of q from :math:`N(0, S)`, in nats.

    .. math:: \tfrac12 \Big( \sum_r \Big[ \frac{\Sigma_{rr} + \mu_r^2}{S_r} + \log S_r - 1 \Big]
        - \log |\Sigma| \Big)

    Args:
        q: A distribution of any form.
        prior_variance: S, the variances of a prior of independent weights, ``(R,)``.

    Returns:
        A number, not negative.

    Note:
        Linear in R except for full covariances.
    """
    terms = (q.variance() + q.mean.square()) / prior_variance + prior_variance.log() - 1
    return 0.5 * (terms.sum() - q.log_det())


def _unseen_directions(features: Tensor, rank: int) -> Tensor:
    """Orthonormal columns, ``(R, k)``, to which the features of all points are orthogonal."""
    generator = torch.Generator().manual_seed(0)
    shape = (features.shape[-1], rank)
    columns = torch.randn(shape, generator=generator, dtype=torch.float64).to(features)
    # Through the n x n matrix of inner products: no array is R x R.
    values, basis = torch.linalg.eigh((features @ features.mT).double())
    smallest = values[-1] * len(values) * torch.finfo(features.dtype).eps
    inverse = torch.where(values > smallest, 1 / values, 0.0)
    for _ in range(2):  # once more for what rounding left of the first
        seen = (basis.mT @ (features @ columns).double()) * inverse.unsqueeze(-1)
        columns = columns - features.mT @ (basis @ seen).to(features)
        columns = torch.linalg.qr(columns).Q
    return columns


def _smallest(
    features: Tensor, prior_variance: Tensor, noise: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Eigenvectors ``(R, k)`` of A with the smallest eigenvalues ``(k,)``."""
    R = features.shape[-1]
    suggestion = (
        "Use fewer features, or one prior variance for all with at least n + rank features."
    )
    check_memory("features", R, 3 * R * R, features.dtype, features.device, suggestion)
    scaled = features / noise.unsqueeze(-1)
    values, vectors = torch.linalg.eigh(scaled.mT @ features + torch.diag(1 / prior_variance))
    return vectors[:, :rank], values[:rank]
