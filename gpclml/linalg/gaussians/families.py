r"""The posterior of a linear model's weights, families that approximate it, and divergences.

The best member of a family maximizes the evidence lower bound
:math:`E_q[\log p(y \mid w)] - KL(q \| p)`. Its mean is the posterior's in every family; its
covariance minimizes :math:`tr(\Sigma A) - \log |\Sigma|`,
:math:`A = \Phi^\top D^{-1} \Phi + S^{-1}` (Harvey and Hughes 2026, Appendix C).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_positive, checked, seeded
from gpclml._utils.environment import check_memory
from gpclml.errors import ShapeError, UnsupportedError
from gpclml.linalg import LowRankPlusDiagonal, refuse_double_backward, safe_cholesky
from gpclml.linalg.gaussians.distributions import (
    DiagonalGaussian,
    DualGaussian,
    FullGaussian,
    LowRankGaussian,
    WeightDistribution,
    check_rank,
    column_square_sums,
    row_square_sums,
    scaled_product,
)

__all__ = [
    "DiagonalFamily",
    "FullFamily",
    "GaussianFamily",
    "LowRankFamily",
    "TrainableGaussian",
    "expected_square",
    "gaussian_kl",
    "linear_posterior",
]


@checked(
    features="float (n, R)",
    residual="float (n,)",
    prior_variance="float (R,)",
    noise="float (n,)",
)
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
        L, mean = LowRankPlusDiagonal(features * scale, noise).posterior(residual)
        one = torch.eye(R, dtype=L.dtype, device=L.device)
        root = torch.linalg.solve_triangular(L.mT, one, upper=True).to(features)
        return FullGaussian(scale * mean.to(features), scale.unsqueeze(-1) * root)
    K = scaled_product(features, features, prior_variance) + torch.diag_embed(noise)
    factor = safe_cholesky(K).to(features)
    solved = torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1)
    mean = prior_variance * (solved @ features)
    return DualGaussian(mean, prior_variance, features, noise, factor)


class GaussianFamily(ABC):
    """Base class of families, each of one form of covariance."""

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
            ArgumentError: A variance is not positive, or memory does not suffice.
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
        check_rank(self.rank, R)
        mean = linear_posterior(features, residual, prior_variance, noise).mean
        if n + self.rank <= R and bool((prior_variance == prior_variance[0]).all()):
            vectors = _unseen_directions(features, self.rank)
            eigenvalues = 1 / prior_variance[: self.rank]
        else:
            vectors, eigenvalues = _smallest(features, prior_variance, noise, self.rank)
        lengths = (1 / eigenvalues - self.epsilon).clamp_min(0.0).sqrt()
        return LowRankGaussian(mean, vectors * lengths, self.epsilon)


class TrainableGaussian(torch.nn.Module):
    """A member of a family as trainable parameters: mean, and log variances, a factor or a root.

    It starts at mean zero with the prior variances; a factor starts near zero. A root is lower
    triangular, with the logarithm of its diagonal as parameter.

    Args:
        family: The family.
        prior_variance: Prior variances, ``(R,)``.
        seed: Seed of the start of a factor, whose gradient at zero is zero.

    Raises:
        UnsupportedError: The family is of another class.
        ArgumentError: A rank above R.

    Examples:
        >>> q = TrainableGaussian(DiagonalFamily(), model.prior_variance)
        >>> mll = LinearEvidenceLowerBound(model.likelihood, model, posterior=q)
    """

    @checked(prior_variance="float (R,)")
    def __init__(self, family: GaussianFamily, prior_variance: Tensor, seed: int = 0) -> None:
        super().__init__()
        self.family = family
        start = prior_variance.detach()
        R = len(start)
        self.mean: torch.nn.Parameter = torch.nn.Parameter(torch.zeros_like(start))
        if isinstance(family, DiagonalFamily):
            self.log_variance: torch.nn.Parameter = torch.nn.Parameter(start.log())
        elif isinstance(family, FullFamily):
            self.log_diagonal: torch.nn.Parameter = torch.nn.Parameter(0.5 * start.log())
            self.below: torch.nn.Parameter = torch.nn.Parameter(start.new_zeros(R, R))
        elif isinstance(family, LowRankFamily):
            check_rank(family.rank, R)
            generator = seeded(seed)
            draw = torch.randn(R, family.rank, generator=generator, dtype=torch.float64)
            self.factor: torch.nn.Parameter = torch.nn.Parameter(
                draw.to(start) * (start / R).sqrt().unsqueeze(-1)
            )
        else:
            known = "DiagonalFamily, LowRankFamily or FullFamily"
            raise UnsupportedError("family", type(family).__name__, known)

    def forward(self) -> WeightDistribution:
        """The distribution at the current parameters."""
        if isinstance(self.family, DiagonalFamily):
            return DiagonalGaussian(self.mean, self.log_variance.exp())
        if isinstance(self.family, LowRankFamily):
            return LowRankGaussian(self.mean, self.factor, self.family.epsilon)
        root = self.below.tril(-1) + torch.diag(self.log_diagonal.exp())
        return FullGaussian(self.mean, root)


def _unseen_directions(features: Tensor, rank: int) -> Tensor:
    """Orthonormal columns, ``(R, k)``, to which the features of all points are orthogonal."""
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
    suggestion = (
        "Use fewer features, or one prior variance for all with at least n + rank features."
    )
    check_memory("features", R, 3 * R * R, features.dtype, features.device, suggestion)
    scaled = features / noise.unsqueeze(-1)
    values, vectors = torch.linalg.eigh(scaled.mT @ features + torch.diag(1 / prior_variance))
    return vectors[:, :rank], values[:rank]


@checked(late=True, p="float (R,)")
def gaussian_kl(q: WeightDistribution, p: WeightDistribution | Tensor) -> Tensor:
    r"""The Kullback-Leibler divergence of q from p, in nats.

    .. math:: \tfrac12 \left( tr(\Sigma_p^{-1} \Sigma_q)
        + (\mu_p - \mu_q)^\top \Sigma_p^{-1} (\mu_p - \mu_q) - R
        + \log |\Sigma_p| - \log |\Sigma_q| \right)

    Args:
        q: A distribution of any form.
        p: A distribution of any form; or the variances ``(R,)`` of a prior of independent weights
            with mean zero.

    Returns:
        A number, not negative.

    Raises:
        ShapeError: The numbers of weights differ.

    Note:
        Linear in R except for full covariances.
    """
    if isinstance(p, Tensor):
        p = DiagonalGaussian(torch.zeros_like(p), p)
    R = len(q.mean)
    if len(p.mean) != R:
        raise ShapeError("p", f"{len(p.mean)} weights", f"{R}, as q")
    shift = (p.mean - q.mean).unsqueeze(-1)
    quadratic = (shift * p.precision_times(shift)).sum()
    if isinstance(p, DiagonalGaussian):
        trace = (q.variance() / p.variances).sum()
    else:
        diagonal, factor, sign = q.parts()
        trace = q.mean.new_zeros(())
        if diagonal is not None:
            trace = trace + (diagonal * p.precision_diagonal()).sum()
        if factor is not None:
            trace = trace + sign * (factor * p.precision_times(factor)).sum()
    return 0.5 * (trace + quadratic - R + p.log_det() - q.log_det())


@checked(late=True, features="float (n, R)", residual="float (n,)")
def expected_square(q: WeightDistribution, features: Tensor, residual: Tensor) -> Tensor:
    r"""The sum over points of :math:`E_q (r_i - w^\top \phi_i)^2`.

    .. math:: \|r - \Phi \mu\|^2 + tr(\Phi \Sigma \Phi^\top)

    Args:
        q: A distribution of any form.
        features: ``(n, R)``.
        residual: ``(n,)``.

    Returns:
        A number, differentiable in all of them once.

    Raises:
        ShapeError: The shapes do not fit each other.

    Note:
        n R k operations for a covariance of rank k and a diagonal; the gradient is one array of
        the features' size.
    """
    if features.shape[-1:] != q.mean.shape:
        expected = f"(n, {len(q.mean)}), one column for each weight"
        raise ShapeError("features", tuple(features.shape), expected)
    if residual.shape != features.shape[:1]:
        expected = f"({len(features)},), one for each row of features"
        raise ShapeError("residual", tuple(residual.shape), expected)
    if isinstance(q, DualGaussian):
        errors = residual - features @ q.mean
        return (errors.square() + q.predictive_variance(features)).sum()
    diagonal, factor, _ = q.parts()
    total = _ExpectedSquare.apply(features, residual, q.mean, diagonal, factor)
    assert isinstance(total, Tensor)
    return total


class _ExpectedSquare(torch.autograd.Function):
    """With a covariance diag(d) + V Vᵀ, of which either part may be missing."""

    @staticmethod
    def forward(ctx, features, residual, mean, diagonal, factor):
        errors = residual - features @ mean
        under = None if factor is None else features @ factor
        ctx.save_for_backward(features, mean, diagonal, factor, errors, under)
        total = errors.square().sum()
        if diagonal is not None:
            total = total + row_square_sums(features, diagonal).sum()
        return total if under is None else total + under.square().sum()

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("expected_square")
        features, mean, diagonal, factor, errors, under = ctx.saved_tensors
        grad, needed = grads[0], ctx.needs_input_grad
        of_features = of_mean = of_diagonal = of_factor = None
        if needed[0]:
            of_features = torch.zeros_like(features) if diagonal is None else features * diagonal
            of_features.addr_(errors, mean, alpha=-1.0)
            if under is not None:
                of_features.addmm_(under, factor.mT)
            of_features.mul_(2 * grad)
        if needed[2]:
            of_mean = -2 * grad * (errors @ features)
        if needed[3] and diagonal is not None:
            of_diagonal = grad * column_square_sums(features, torch.ones_like(errors))
        if needed[4] and under is not None:
            of_factor = 2 * grad * (features.mT @ under)
        return of_features, 2 * grad * errors, of_mean, of_diagonal, of_factor
