r"""Gaussian log densities of many held-out blocks, each given all other points.

One factorization and one inverse serve every block. With :math:`Q = K^{-1}`,
:math:`\alpha = Q r` and :math:`s = Q_{BB}^{-1} \alpha_B`,

.. math:: \log p(r_B \mid r_{-B}) = -\tfrac12 \alpha_B^\top s + \tfrac12 \log |Q_{BB}|
    - \tfrac{b}{2} \log 2\pi.

Blocks of one point are leave-one-out (Rasmussen and Williams 2006, Eqs. 5.10-5.12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError
from gpclml.linalg._checks import check_indices, check_residual, refuse_double_backward
from gpclml.linalg._products import symmetric_product
from gpclml.linalg._sharing import Sharing
from gpclml.linalg.cholesky import safe_cholesky
from gpclml.linalg.low_rank import LowRankPlusDiagonal

__all__ = ["block_conditional_log_densities"]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@checked(late=True, covariance="float (*batch, n, n)", residual="float (*batch, n)")
def block_conditional_log_densities(
    covariance: Tensor | LowRankPlusDiagonal,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    blocks: Sequence[Tensor],  # shapes: (k_1, b_1), (k_2, b_2), ...
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> Tensor:
    r"""The joint log density of each block given all points outside it, in nats.

    The gradient of block B is in closed form: with :math:`u = Q_{:B} s`,

    .. math:: \partial/\partial K = -\tfrac12 Q_{:B} (s s^\top + Q_{BB}^{-1}) Q_{B:}
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    Residuals that share a covariance, in batch dimensions where the covariance has size 1 or
    none, share its factor and inverse.

    Args:
        covariance: Covariances of the observations, noise included, ``(*batch, n, n)``; one of
            low rank costs n R², and is differentiated step by step.
        residual: Observations minus their prior mean, ``(*batch, n)``; batches broadcast.
        blocks: Indices of the held-out blocks, blocks of one size stacked: ``k_i`` blocks of
            ``b_i`` points each, ``(k_i, b_i)``. Blocks may overlap.
        factor_dtype: See :func:`gpclml.linalg.cholesky.factorization_dtype`.
        checked: See :func:`gpclml.linalg.cholesky.safe_cholesky`; values are NaN where a
            factorization failed that was not looked at.

    Returns:
        One log density a block in the order given, ``(*batch, k_1 + k_2 + ...)``, in the type
        of ``covariance``.

    Raises:
        ShapeError: If the shapes do not fit one another.
        ArgumentError: If a block is empty, has repeated indices or leaves the range.
        NonFiniteError, NotPSDError: As :func:`~gpclml.linalg.cholesky.safe_cholesky`.
        UnsupportedError: On a second derivative.

    Note:
        About n³ floating-point operations for the values; the gradient adds about 1.2 n³ for
        disjoint blocks that cover the data, and 3.2 n³ for overlapping ones however many.
    """
    batch = check_residual(covariance.shape, residual)
    residual = residual.expand(*batch, residual.shape[-1])
    _check_blocks(blocks, residual.shape[-1])
    disjoint = _are_disjoint(blocks)
    blocks = [group.to(covariance.device, non_blocking=True) for group in blocks]
    if isinstance(covariance, LowRankPlusDiagonal):
        return covariance.block_log_densities(residual, blocks)
    sharing = Sharing(covariance.shape[:-2], residual.shape[:-1])
    values = _BlockConditionalLogDensities.apply(
        sharing.covariances(covariance),
        sharing.residuals(residual),
        factor_dtype,
        checked,
        disjoint,
        *blocks,
    )
    assert isinstance(values, Tensor)
    return sharing.values(values, event=1)


def _check_blocks(blocks: Sequence[Tensor], n: int) -> None:
    if len(blocks) == 0:
        raise ArgumentError("blocks", "none", "at least one group of blocks, each (k, b)")
    for group in blocks:
        if group.ndim != 2 or group.numel() == 0:
            raise ArgumentError("blocks", f"shape {tuple(group.shape)}", "(k, b), not empty")
        if group.shape[-1] == 1:
            check_indices("blocks", group.unique(), n)
        else:
            for block in group:
                check_indices("blocks", block, n)


def _are_disjoint(blocks: Sequence[Tensor]) -> bool:
    indices = torch.cat([group.flatten() for group in blocks])
    return indices.numel() == indices.unique().numel()


class _BlockConditionalLogDensities(torch.autograd.Function):
    """Residuals are ``(*batch, r, n)``, r to a covariance; values ``(*batch, r, k_1 + ...)``."""

    @staticmethod
    def forward(ctx, covariance, residuals, factor_dtype, checked, disjoint, *blocks):
        L = safe_cholesky(covariance, factor_dtype, checked=checked)
        alpha = torch.cholesky_solve(residuals.mT.to(L.dtype), L)  # (*batch, n, r)
        Q = torch.cholesky_inverse(L)
        values, factors, sources = zip(
            *[_densities_of_group(Q, alpha, group, checked) for group in blocks], strict=True
        )
        ctx.save_for_backward(Q, alpha, *blocks, *factors, *sources)
        ctx.dtype, ctx.disjoint = covariance.dtype, disjoint
        return torch.cat(values, dim=-2).mT.to(covariance.dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("block_conditional_log_densities")
        Q, alpha, *saved = ctx.saved_tensors
        count = len(saved) // 3
        blocks, factors, sources = saved[:count], saved[count : 2 * count], saved[2 * count :]
        weights = grads[0].double().mT.split([len(group) for group in blocks], dim=-2)
        middles, source = [], torch.zeros_like(alpha)
        for group, L_Q, s, weight in zip(blocks, factors, sources, weights, strict=True):
            weight = weight.unsqueeze(-2)  # (*batch, k, 1, r)
            inverse = weight.sum(-1, keepdim=True) * torch.cholesky_inverse(L_Q)
            middles.append(((weight * s) @ s.mT + inverse).to(Q.dtype))
            weighted = (weight * s).flatten(-3, -2).to(Q.dtype)  # (*batch, k b, r)
            source.scatter_add_(-2, group.reshape(-1, 1).expand(weighted.shape), weighted)
        product = _sandwich_of_disjoint if ctx.disjoint else _sandwich
        gradient = product(Q, middles, blocks).mul_(-0.5)
        u = Q @ source
        left = torch.cat([u, alpha], dim=-1)
        right = 0.5 * torch.cat([alpha, u], dim=-1)
        gradient.add_(left @ right.mT)
        return gradient.to(ctx.dtype), -u.mT.to(ctx.dtype), None, None, None, *[None] * count


def _densities_of_group(
    Q: Tensor, alpha: Tensor, group: Tensor, checked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities (*batch, k, r), factors of Q_BB (*batch, k, b, b), and s (*batch, k, b, r)."""
    # The blocks are small: float64 costs little and keeps their determinants accurate.
    if group.shape[-1] == 1:
        Q_BB = Q.diagonal(dim1=-2, dim2=-1)[..., group].unsqueeze(-1).double()
    else:
        Q_BB = Q[..., group.unsqueeze(-1), group.unsqueeze(-2)].double()
    alpha_B = alpha[..., group, :].double()
    L_Q = safe_cholesky(Q_BB, checked=checked)
    s = torch.cholesky_solve(alpha_B, L_Q)
    quadratic = (alpha_B * s).sum(-2)
    half_log_det = L_Q.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    return half_log_det - 0.5 * quadratic - group.shape[-1] * _HALF_LOG_2PI, L_Q, s


def _sandwich_of_disjoint(Q: Tensor, middles: list[Tensor], blocks: list[Tensor]) -> Tensor:
    """Sum over blocks of Q_:B M_B Q_B:, with no more columns than points."""
    # LAPACK returns Q column by column: its transpose, equal by symmetry, has rows in memory.
    by_rows = Q.mT
    rows, scaled = [], []
    for group, M in zip(blocks, middles, strict=True):
        Q_B = by_rows.index_select(-2, group.flatten())  # (*batch, k b, n)
        rows.append(Q_B)
        if group.shape[-1] == 1:
            scaled.append(M.flatten(-3).unsqueeze(-1) * Q_B)
        else:
            scaled.append((M @ Q_B.unflatten(-2, group.shape)).flatten(-3, -2))
    return symmetric_product(_cat_rows(scaled).mT, _cat_rows(rows).mT)


def _cat_rows(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _sandwich(Q: Tensor, middles: list[Tensor], blocks: list[Tensor]) -> Tensor:
    """The same for overlapping blocks: the M_B are added up first, one product serves all."""
    total = torch.zeros_like(Q)
    for group, M in zip(blocks, middles, strict=True):
        for block, M_B in zip(group, M.unbind(-3), strict=True):
            total[..., block.unsqueeze(-1), block] += M_B
    return symmetric_product(Q @ total, Q)
