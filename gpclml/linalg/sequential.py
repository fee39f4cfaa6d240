r"""Gaussian log densities of points given the points before them, from one factorization.

With :math:`K = L L^\top` and :math:`z = L^{-1} r`, the density of one point given its
predecessors is :math:`\log p(r_i \mid r_{<i}) = -z_i^2/2 - \log L_{ii} - \tfrac12\log 2\pi`.
The sum over all points is the log marginal likelihood; the sum over the last points is
their joint log density conditioned on the first ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.linalg._checks import (
    check_gaussian,
    check_indices,
    check_member_indices,
    check_residual,
    refuse_double_backward,
)
from gpclml.linalg._sharing import Sharing
from gpclml.linalg.cholesky import safe_cholesky
from gpclml.linalg.low_rank import LowRankPlusDiagonal
from gpclml.linalg.permutations import order_with_last, permute, take_rows

__all__ = ["conditional_log_density", "sequential_log_densities"]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# Up to this held-out share, n x b triangular solves cost less than two inverses.
_SOLVE_UP_TO = 0.3


@checked(
    late=True,
    covariance="float (*batch, n, n)",
    residual="float (*batch, n)",
    held_out="index (b,) | (*batch, b)",
)
def conditional_log_density(
    covariance: Tensor | LowRankPlusDiagonal,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    held_out: Tensor,  # shape: (b,) or (*batch, b)
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> Tensor:
    r"""The joint log density of the held-out points given all others, in nats.

    .. math:: \log p(r_B \mid r_A) = \sum_{i \in B} \left(-\tfrac12 z_i^2 - \log L_{ii}
        - \tfrac12 \log 2\pi\right)

    with the points ordered so that B is last (Lotfi et al. 2022, Eq. 5 and Section 6). The
    gradient is in closed form: with :math:`W = L^{-\top} E_B`,
    :math:`u = L^{-\top}[0; z_B]`, :math:`\alpha = L^{-\top} z`,

    .. math:: \partial/\partial K = -\tfrac12 (W W^\top + u u^\top)
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    With every point held out this is the log marginal likelihood. Residuals that share a
    covariance, in batch dimensions where the covariance has size 1 or none, share its one
    factor, and their vectors enter its gradient side by side.

    Args:
        covariance: Covariances of the observations, noise included, ``(*batch, n, n)``; one of
            low rank costs n R², and is differentiated step by step.
        residual: Observations minus their prior mean, ``(*batch, n)``; batches broadcast.
        held_out: Indices of the b points that are scored, ``1 <= b <= n``: ``(b,)``, or
            ``(*batch, b)`` for points of its own in each batch member.
        factor_dtype: See :func:`gpclml.linalg.cholesky.factorization_dtype`.
        checked: See :func:`gpclml.linalg.cholesky.safe_cholesky`; the value is NaN where a
            factorization failed that was not looked at.

    Returns:
        One log density a batch member, ``(*batch,)``, in the type of ``covariance``.

    Raises:
        ShapeError: If the shapes do not fit one another.
        ArgumentError: If indices are empty, repeated or out of range.
        NonFiniteError, NotPSDError: As :func:`~gpclml.linalg.cholesky.safe_cholesky`.
        UnsupportedError: On a second derivative.

    Note:
        n³/3 + 3 n² b floating-point operations for value and gradient (b <= 0.3 n; at most
        5/3 n³ beyond); three n x n arrays at the peak.
    """
    batch = check_residual(covariance.shape, residual)
    n = residual.shape[-1]
    if held_out.ndim == 1:
        check_indices("held_out", held_out, n)
    else:
        check_member_indices("held_out", held_out, torch.Size(batch), n)
    if isinstance(covariance, LowRankPlusDiagonal):
        return covariance.conditional_log_density(residual, held_out.to(covariance.device))
    residual = residual.expand(*batch, n)
    if held_out.ndim > 1:  # in an order of its own for each residual
        covariance = covariance.expand(*batch, n, n)
    order = order_with_last(held_out.cpu(), n)
    if order is not None:
        order = order.to(covariance.device, non_blocking=True)
    sharing = Sharing(covariance.shape[:-2], residual.shape[:-1])
    value = _ConditionalLogDensity.apply(
        sharing.covariances(covariance),
        sharing.residuals(residual),
        order,
        held_out.shape[-1],
        factor_dtype,
        checked,
    )
    assert isinstance(value, Tensor)
    return sharing.values(value)


@checked(
    late=True, covariance="float (*batch, n, n)", residual="float (*batch, n)", order="index (n,)"
)
def sequential_log_densities(
    covariance: Tensor | LowRankPlusDiagonal,  # shape: (*batch, n, n)
    residual: Tensor,  # shape: (*batch, n)
    order: Tensor | None = None,  # shape: (n,)
    factor_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""The n terms :math:`\log p(r_i \mid r_{<i})` of a learning curve, in nats.

    The gradient is in closed form for any weighting of the terms: with weights w,
    :math:`W = L^{-\top}`, :math:`u = W (w \circ z)` and
    :math:`V_{ij} = w_{\min(i,j)} z_i z_j + w_i \delta_{ij}`,

    .. math:: \partial/\partial K = -\tfrac12 W V W^\top
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    Args:
        covariance: Covariances of the observations, noise included, ``(*batch, n, n)``.
        residual: Observations minus their prior mean, ``(*batch, n)``.
        order: Indices in the order in which points arrive, ``(n,)``; data order if None.
        factor_dtype: See :func:`gpclml.linalg.cholesky.factorization_dtype`.

    Returns:
        Term i is the log density of point ``order[i]`` given the points before it,
        ``(*batch, n)``.

    Raises:
        ShapeError: If the shapes do not fit one another.
        ArgumentError: If ``order`` is not a permutation.
        NonFiniteError, NotPSDError: As :func:`~gpclml.linalg.cholesky.safe_cholesky`.
        UnsupportedError: On a second derivative.

    Note:
        n³/3 floating-point operations for the values, about 6 n³ with a gradient.
    """
    if isinstance(covariance, LowRankPlusDiagonal):
        covariance = covariance.to_dense()
    covariance, residual = check_gaussian(covariance, residual)
    n = residual.shape[-1]
    if order is not None:
        order = check_indices("order", order, n, count=n).to(covariance.device)
    terms = _SequentialLogDensities.apply(covariance, residual, order, factor_dtype)
    assert isinstance(terms, Tensor)
    return terms


def _factor(
    covariance: Tensor,
    residuals: Tensor,
    order: Tensor | None,
    factor_dtype: torch.dtype | None,
    checked: bool = True,
) -> tuple[Tensor, Tensor]:
    """The factor, and z of residuals ``(*batch, k, n)`` as columns, ``(*batch, n, k)``."""
    columns = residuals.mT
    if order is not None:
        covariance = permute(covariance, order)
        columns = take_rows(columns, order)
    L = safe_cholesky(covariance, factor_dtype, checked=checked)
    return L, torch.linalg.solve_triangular(L, columns.to(L.dtype), upper=False)


def _terms(L: Tensor, z: Tensor) -> Tensor:
    log_diagonal = L.diagonal(dim1=-2, dim2=-1).log().unsqueeze(-1)
    return -0.5 * z.square() - log_diagonal - _HALF_LOG_2PI


class _ConditionalLogDensity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, covariance, residuals, order, num_held_out, factor_dtype, checked):
        L, z = _factor(covariance, residuals, order, factor_dtype, checked)
        ctx.save_for_backward(L, z, order)
        ctx.num_held_out, ctx.dtype = num_held_out, covariance.dtype
        return _terms(L, z)[..., -num_held_out:, :].sum(-2).to(covariance.dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("conditional_log_density")
        L, z, order = ctx.saved_tensors
        grad = grads[0].to(L.dtype).unsqueeze(-2)  # (*batch, 1, k)
        few = ctx.num_held_out <= _SOLVE_UP_TO * z.shape[-2]
        of_covariance = _gradient_by_solve if few else _gradient_by_inverse
        gradient, u = of_covariance(L, z, order, ctx.num_held_out, grad)
        of_residuals = -(grad * u).mT
        return gradient.to(ctx.dtype), of_residuals.to(ctx.dtype), None, None, None, None


def _rows_in_data_order(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else take_rows(values, order.argsort(-1))


def _symmetric(u: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Columns whose product is the weighted sum of (u vᵀ + v uᵀ) / 2 over columns."""
    return torch.cat([u, v], dim=-1), 0.5 * torch.cat([weight * v, weight * u], dim=-1)


def _gradient_by_solve(L, z, order, b, grad):
    n, k = z.shape[-2:]
    right = z.new_zeros(*z.shape[:-1], b + 2 * k)
    right[..., n - b :, :b] = torch.eye(b, dtype=z.dtype, device=z.device)
    right[..., n - b :, b : b + k] = z[..., n - b :, :]
    right[..., b + k :] = z
    solved = _rows_in_data_order(torch.linalg.solve_triangular(L.mT, right, upper=True), order)
    W, u, alpha = solved.split([b, k, k], dim=-1)
    # -uuᵀ/2 + (uαᵀ + αuᵀ)/2 as one symmetric term a residual.
    left, right = _symmetric(u, alpha - 0.5 * u, grad)
    left = torch.cat([W, left], dim=-1)
    right = torch.cat([-0.5 * grad.sum(-1, keepdim=True) * W, right], dim=-1)
    return left @ right.mT, u


def _gradient_by_inverse(L, z, order, b, grad):
    # W Wᵀ is the inverse of K less the inverse of the block that is conditioned on.
    n, k = z.shape[-2:]
    m = n - b
    gradient = torch.cholesky_inverse(L)
    scale = -0.5 * grad.sum(-1, keepdim=True)
    if m == 0:  # u is alpha
        alpha = torch.linalg.solve_triangular(L.mT, z, upper=True)
        gradient.mul_(scale).add_((0.5 * grad * alpha) @ alpha.mT)
        return gradient, alpha
    gradient[..., :m, :m] -= torch.cholesky_inverse(L[..., :m, :m])
    tail = torch.cat([torch.zeros_like(z[..., :m, :]), z[..., m:, :]], dim=-2)
    solved = torch.linalg.solve_triangular(L.mT, torch.cat([tail, z], dim=-1), upper=True)
    u, alpha = solved.split(k, dim=-1)
    left, right = _symmetric(u, alpha - 0.5 * u, grad)
    gradient.mul_(scale).add_(left @ right.mT)
    if order is not None:
        gradient = permute(gradient, order.argsort(-1))
    return gradient, _rows_in_data_order(u, order)


class _SequentialLogDensities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, covariance, residual, order, factor_dtype):
        L, z = _factor(covariance, residual.unsqueeze(-2), order, factor_dtype)
        ctx.save_for_backward(L, z, order)
        ctx.dtype = covariance.dtype
        return _terms(L, z).squeeze(-1).to(covariance.dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("sequential_log_densities")
        L, z, order = ctx.saved_tensors
        weights = grads[0].to(L.dtype)
        n = z.shape[-2]
        first = torch.arange(n, device=z.device)
        first = torch.minimum(first[:, None], first)
        V = weights[..., first] * (z @ z.mT) + torch.diag_embed(weights)
        right = torch.cat([V, weights.unsqueeze(-1) * z, z], dim=-1)
        solved = torch.linalg.solve_triangular(L.mT, right, upper=True)
        WV, u, alpha = solved.split([n, 1, 1], dim=-1)
        gradient = -0.5 * torch.linalg.solve_triangular(L.mT, WV.mT, upper=True)
        left, right = _symmetric(u, alpha, torch.ones_like(u[..., :1, :]))
        gradient = gradient + left @ right.mT
        if order is not None:
            gradient = permute(gradient, order.argsort(-1))
        of_residual = -_rows_in_data_order(u, order).squeeze(-1)
        return gradient.to(ctx.dtype), of_residual.to(ctx.dtype), None, None
