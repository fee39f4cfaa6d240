r"""A preconditioner of low rank plus a diagonal, from a pivoted Cholesky factor.

With :math:`K_f \approx L L^\top` and noise D, :math:`(L L^\top + D)^{-1}` by Woodbury's identity:
the k largest parts of the kernel are solved exactly, and conjugate gradients are left with the rest
(Harbrecht, Peters and Schneider 2012; Gardner et al. 2018, Section 4.1). The identity takes the
difference of what nearly agrees where the noise is small beside the kernel: in single precision the
result is not positive definite there, so it is formed in double precision whatever comes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpclml.linalg.cholesky import safe_cholesky
from gpclml.linalg.covariance_products import CovarianceProducts, NoisyCovariance

__all__ = ["pivoted_cholesky", "woodbury_preconditioner"]


@torch.no_grad()
def pivoted_cholesky(covariance: CovarianceProducts, rank: int) -> Tensor:
    r"""L with :math:`L L^\top \approx K`, by the pivots of largest remaining variance.

    Members of a batch share the pivots, chosen by their mean.

    Args:
        covariance: K, ``(*batch, n, n)``.
        rank: Number k of columns, at most n; fewer come back where the remaining variance is
            nil to rounding.

    Returns:
        ``(*batch, n, k)``.

    Note:
        n k² floating-point operations and k rows of K.
    """
    n = covariance.shape[-1]
    remaining = covariance.diagonal().expand(covariance.shape[:-1]).clone()
    negligible = 10 * torch.finfo(covariance.dtype).eps * remaining.amax(-1, keepdim=True)
    factor = torch.zeros(
        *covariance.shape[:-2], n, min(rank, n), dtype=covariance.dtype, device=covariance.device
    )
    for k in range(factor.shape[-1]):
        pivot = int(remaining.reshape(-1, n).mean(0).argmax())
        variance = remaining[..., pivot, None]
        if bool((variance <= negligible).all()):
            return factor[..., :k]
        seen = factor[..., :k] @ factor[..., pivot, :k, None]
        column = (covariance.row(pivot) - seen.squeeze(-1)) / variance.clamp_min(negligible).sqrt()
        column = torch.where(variance > negligible, column, 0.0)
        factor[..., k] = column
        remaining = (remaining - column.square()).clamp_min_(0.0)
        remaining[..., pivot] = 0.0
    return factor


@torch.no_grad()
def woodbury_preconditioner(
    covariance: NoisyCovariance, rank: int
) -> Callable[[Tensor], Tensor] | None:
    """What multiplies by the inverse of the approximation.

    Args:
        covariance: Of the observations, ``(*batch, n, n)``.
        rank: Of the approximation.

    Returns:
        A function of ``(*batch, n, k)``; None where rank or noise is nil.
    """
    if rank == 0 or covariance.noise is None or not bool((covariance.noise > 0).all()):
        return None
    noise = covariance.noise.detach().double().unsqueeze(-1)
    features = pivoted_cholesky(covariance.latent, rank).double()
    if covariance.missing is not None:
        missing = covariance.missing.unsqueeze(-1)
        features, noise = torch.where(missing, 0.0, features), torch.where(missing, 1.0, noise)
    deviation = noise.sqrt()
    features = features / deviation
    one = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
    inverse = torch.cholesky_inverse(safe_cholesky(one + features.mT @ features))

    def precondition(right: Tensor) -> Tensor:
        scaled = right.double() / deviation
        solved = scaled - features @ (inverse @ (features.mT @ scaled))
        return (solved / deviation).to(right.dtype)

    return precondition
