r"""Families of Gaussians: the member that best approximates the posterior of a linear model.

The best one maximizes the evidence lower bound
:math:`E_q[\log p(y \mid w)] - KL(q \| p)`. Its mean is the posterior's in every family; its
covariance minimizes :math:`tr(\Sigma A) - \log |\Sigma|`,
:math:`A = \Phi^\top D^{-1} \Phi + S^{-1}` (Harvey and Hughes 2026, Appendix C).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.memory import check_memory
from gpclml.errors import ArgumentError
from gpclml.linalg.gaussians._products import column_square_sums
from gpclml.linalg.gaussians.diagonal import DiagonalGaussian
from gpclml.linalg.gaussians.distribution import WeightDistribution
from gpclml.linalg.gaussians.low_rank import LowRankGaussian
from gpclml.linalg.gaussians.posterior import linear_posterior

__all__ = ["DiagonalFamily", "FullFamily", "GaussianFamily", "LowRankFamily"]


class GaussianFamily(ABC):
    """A form of covariance."""

    @abstractmethod
    def best(
        self, features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
    ) -> WeightDistribution:
        r"""The member with the largest evidence lower bound.

        Args:
            features: ``(n, R)``.
            residual: Targets less the prior mean, ``(n,)``.
            prior_variance: S, ``(R,)``.
            noise: Noise variances D, ``(n,)``.

        Returns:
            The distribution.

        Raises:
            ArgumentError: A variance is not positive, or memory does not hold it.
        """


@dataclass(frozen=True)
class DiagonalFamily(GaussianFamily):
    """Independent weights (mean field): variances are the inverse diagonal of A."""

    def best(
        self, features: Tensor, residual: Tensor, prior_variance: Tensor, noise: Tensor
    ) -> DiagonalGaussian:
        """The best independent weights; linear in R. See :meth:`GaussianFamily.best`."""
        mean = linear_posterior(features, residual, prior_variance, noise).mean
        precision = column_square_sums(features, 1 / noise) + 1 / prior_variance
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
    r"""Covariance :math:`V V^\top + \varepsilon I` with V of some columns.

    The best V lies along the eigenvectors of A with the smallest eigenvalues
    :math:`\lambda_i`, where the posterior is widest, with squared lengths
    :math:`1 / \lambda_i - \varepsilon`. With many more features than points these are directions
    that no point sees, found by projection at a cost linear in R; a family that keeps every other
    direction at :math:`\varepsilon` pays for it in the KL, which is why its bound favours tiny
    noise (Harvey and Hughes 2026, Section 3).

    Attributes:
        rank: Number k of columns.
        epsilon: A positive number.

    Raises:
        ArgumentError: The rank is below one, or epsilon not positive.
    """

    rank: int = 1
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.rank < 1:
            mend = "Use DiagonalFamily for independent weights."
            raise ArgumentError("rank", self.rank, "at least 1", mend)
        if not 0 < self.epsilon < float("inf"):
            raise ArgumentError("epsilon", self.epsilon, "a positive number")

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
        lengths = (1 / eigenvalues - self.epsilon).clamp_min(0.0).sqrt()
        return LowRankGaussian(mean, vectors * lengths, self.epsilon)


def _unseen_directions(features: Tensor, rank: int) -> Tensor:
    """Orthonormal columns on which all points have features zero, ``(R, k)``."""
    generator = torch.Generator().manual_seed(0)
    shape = (features.shape[-1], rank)
    columns = torch.randn(shape, generator=generator, dtype=torch.float64).to(features)
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
    mend = "Use fewer features, or one prior variance for all with at least n + rank features."
    check_memory("features", R, 3 * R * R, features.dtype, features.device, mend)
    scaled = features / noise.unsqueeze(-1)
    values, vectors = torch.linalg.eigh(scaled.mT @ features + torch.diag(1 / prior_variance))
    return vectors[:, :rank], values[:rank]
