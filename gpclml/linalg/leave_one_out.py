r"""Means and variances of points given all others, from one factorization.

With :math:`K = L L^\top`, points ordered so that those asked for are last, the last block of
:math:`K^{-1}` is :math:`L_{BB}^{-\top} L_{BB}^{-1}`: nothing of the inverse beyond it is formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.linalg._checks import check_gaussian, check_indices, check_residual
from gpclml.linalg.cholesky import safe_cholesky
from gpclml.linalg.low_rank import LowRankPlusDiagonal
from gpclml.linalg.permutations import order_with_last, permute, take

__all__ = ["leave_one_out_moments"]


@checked(
    late=True,
    covariance="float (*batch, n, n)",
    residual="float (*batch, n)",
    held_out="index (b,)",
)
def leave_one_out_moments(
    covariance: Tensor | LowRankPlusDiagonal,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    held_out: Tensor,  # shape: (b,)
    factor_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of single points given all others, those held out too.

    .. math:: \mu_i = r_i - \frac{[K^{-1} r]_i}{[K^{-1}]_{ii}}, \qquad
        \sigma_i^2 = \frac{1}{[K^{-1}]_{ii}}

    (Rasmussen and Williams 2006, Eq. 5.12).

    Args:
        covariance: Covariances of the observations, noise included, ``(*batch, n, n)``.
        residual: Observations minus their prior mean, ``(*batch, n)``.
        held_out: Indices of the b points to predict.
        factor_dtype: See :func:`gpclml.linalg.cholesky.factorization_dtype`.

    Returns:
        Means and variances in the order of ``held_out``, ``(*batch, b)`` each, in the type of
        ``covariance``.

    Raises:
        ShapeError, ArgumentError: If the arguments do not fit together.
        NonFiniteError: If a value is not finite.
        NotPSDError: If the covariance is not positive definite even with jitter.

    Note:
        (n³ + b³)/3 floating-point operations; n R² where the covariance has R features and a
        diagonal.
    """
    n, b = residual.shape[-1], held_out.shape[-1]
    held_out = check_indices("held_out", held_out, n).to(covariance.device)
    if isinstance(covariance, LowRankPlusDiagonal):
        check_residual(covariance.shape, residual)
        return _under_low_rank(covariance, residual, held_out)
    covariance, residual = check_gaussian(covariance, residual)
    order = order_with_last(held_out, n)
    if order is None:
        order = held_out if b == n else torch.arange(n, device=held_out.device)
    residual = take(residual, order)
    L = safe_cholesky(permute(covariance, order), factor_dtype)
    z = torch.linalg.solve_triangular(L, residual.to(L.dtype).unsqueeze(-1), upper=False)
    inverse = torch.linalg.solve_triangular(
        L[..., -b:, -b:], torch.eye(b, dtype=L.dtype, device=L.device), upper=False
    )
    variance = 1 / inverse.square().sum(-2)
    error = (inverse.mT @ z[..., -b:, :]).squeeze(-1) * variance
    mean = residual[..., -b:] - error.to(residual.dtype)
    return mean, variance.to(residual.dtype)


def _under_low_rank(
    covariance: LowRankPlusDiagonal, residual: Tensor, held_out: Tensor
) -> tuple[Tensor, Tensor]:
    """From one posterior of the weights, out of which each point is taken."""
    features, noise = covariance.features.double(), covariance.noise.double()
    factor, mean = covariance.posterior(residual)
    alpha = (residual.double() - (features @ mean.unsqueeze(-1)).squeeze(-1)) / noise
    under = torch.linalg.solve_triangular(factor, features.mT, upper=False)
    variance = 1 / (1 / noise - under.square().sum(-2) / noise.square())
    left_out = residual.double() - alpha * variance
    return left_out[..., held_out].to(residual), variance[..., held_out].to(residual)
