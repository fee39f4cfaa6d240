r"""A preconditioner of low rank plus a diagonal, from a pivoted Cholesky factor.

With :math:`K_f \approx L L^\top` and noise D, :math:`(L L^\top + D)^{-1}` by Woodbury's identity:
the k largest parts of the kernel are solved exactly, and conjugate gradients are left with the rest
(Harbrecht, Peters and Schneider 2012; Gardner et al. 2018, Section 4.1). The identity takes the
difference of what nearly agrees where the noise is small beside the kernel: in single precision the
result is not positive definite there, so it is formed in double precision whatever comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.linalg.cholesky import safe_cholesky
from gpclml.linalg.covariance_products import CovarianceProducts, NoisyCovariance

__all__ = ["LowRankPreconditioner", "indefiniteness", "pivoted_cholesky"]


@dataclass(frozen=True)
class LowRankPreconditioner:
    r"""Multiplies by :math:`(L L^\top + D)^{-1}`. Everything in double precision.

    Attributes:
        features: L, ``(*batch, n, k)``; zero where observations are missing.
        noise: The diagonal of D, ``(*batch, n, 1)``; one where observations are missing.
        factor: The Cholesky factor of :math:`I + L^\top D^{-1} L`, ``(*batch, k, k)``.
    """

    features: Tensor
    noise: Tensor
    factor: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, covariance: NoisyCovariance, rank: int) -> LowRankPreconditioner | None:
        """Of a covariance, or None where rank or noise is zero.

        Args:
            covariance: Of the observations, ``(*batch, n, n)``.
            rank: Of the approximation.
        """
        if rank == 0 or covariance.noise is None or not bool((covariance.noise > 0).all()):
            return None
        noise = covariance.noise.detach().double().unsqueeze(-1)
        features = pivoted_cholesky(covariance.latent, rank)
        if covariance.missing is not None:
            missing = covariance.missing.unsqueeze(-1)
            features, noise = torch.where(missing, 0.0, features), torch.where(missing, 1.0, noise)
        one = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
        return cls(features, noise, safe_cholesky(one + features.mT @ (features / noise)))

    def __call__(self, right: Tensor) -> Tensor:
        """The product with ``(*batch, n, k)``, in its type."""
        left = right.double() - self.features @ self.weights(right)
        return (left / self.noise).to(right.dtype)

    def weights(self, right: Tensor) -> Tensor:
        r""":math:`w = (I + L^\top D^{-1} L)^{-1} L^\top D^{-1} v`, ``(*batch, k, columns)``.

        It is what minimizes :math:`(v - L w)^\top D^{-1} (v - L w) + w^\top w`, whose minimum is
        :math:`v^\top (L L^\top + D)^{-1} v`.
        """
        return torch.cholesky_solve(self.features.mT @ (right.double() / self.noise), self.factor)


def indefiniteness(covariance: CovarianceProducts) -> Tensor:
    r"""How far below zero the least eigenvalue of an evaluated covariance may be.

    Roundings of its entries, of size :math:`\epsilon \max_i K_{ii}` and independent, make a matrix
    of norm :math:`\epsilon \sqrt n \max_i K_{ii}` at most, where :math:`\epsilon` is twice the unit
    roundoff of the type in which it is evaluated.

    Args:
        covariance: Of latent values, ``(*batch, n, n)``.

    Returns:
        ``(*batch, 1)``, float64.
    """
    largest = covariance.diagonal().double().amax(-1, keepdim=True)
    return torch.finfo(covariance.dtype).eps * covariance.shape[-1] ** 0.5 * largest


@torch.no_grad()
def pivoted_cholesky(covariance: CovarianceProducts, rank: int) -> Tensor:
    r"""L with :math:`L L^\top \approx K` and :math:`L L^\top \preceq K + \eta I`.

    The pivots are those of largest remaining variance. Members of a batch share the pivots, chosen
    by their mean. :math:`\eta` is the :func:`indefiniteness` of the covariance, without which
    roundings of its entries could make the factor larger than the covariance.

    Args:
        covariance: K, ``(*batch, n, n)``.
        rank: Number k of columns, at most n; fewer come back where the remaining variance is
            rounding.

    Returns:
        ``(*batch, n, k)``, float64.

    Note:
        n k² floating-point operations and k rows of K.
    """
    n = covariance.shape[-1]
    shift = indefiniteness(covariance)
    remaining = (covariance.diagonal().double() + shift).expand(covariance.shape[:-1]).clone()
    epsilon = 10 * torch.finfo(covariance.dtype).eps
    negligible = shift + epsilon * remaining.amax(-1, keepdim=True)
    factor = remaining.new_zeros(*covariance.shape[:-2], n, min(rank, n))
    for k in range(factor.shape[-1]):
        pivot = int(remaining.reshape(-1, n).mean(0).argmax())
        variance = remaining[..., pivot, None]
        if bool((variance <= negligible).all()):
            return factor[..., :k]
        seen = factor[..., :k] @ factor[..., pivot, :k, None]
        column = covariance.row(pivot).double() - seen.squeeze(-1)
        column[..., pivot] = variance.squeeze(-1)
        column = column / variance.clamp_min(negligible).sqrt()
        column = torch.where(variance > negligible, column, 0.0)
        factor[..., k] = column
        remaining = (remaining - column.square()).clamp_min_(0.0)
        remaining[..., pivot] = 0.0
    return factor
