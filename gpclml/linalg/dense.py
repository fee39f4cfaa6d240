r"""Gaussian densities and predictions by one Cholesky factor, with gradients in closed form.

With :math:`K = L L^\top` and :math:`z = L^{-1} r`, the density of one point given its predecessors
is :math:`\log p(r_i \mid r_{<i}) = -z_i^2/2 - \log L_{ii} - \tfrac12\log 2\pi`. The sum over all
points is the log marginal likelihood; the sum over the last points is their joint log density
conditioned on the first ones. Many held-out blocks are read off one inverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.linalg.covariance import ConditionedBlock, Covariance, Predictor
from gpclml.linalg.matrices import (
    Sharing,
    order_with_last,
    permute,
    refuse_double_backward,
    safe_cholesky,
    symmetric_product,
    take,
    take_rows,
)

__all__ = ["DenseCovariance"]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# Up to this held-out share, n x b triangular solves cost less than two inverses.
_SOLVE_UP_TO = 0.3
_MATRICES = 7  # at the peak of a step: those of the kernel, of the factor and of the gradient


@checked(late=True, matrix="float (*batch, n, n)")
@dataclass(frozen=True, eq=False)
class DenseCovariance(Covariance):
    """A covariance as a matrix, factored by each density that is asked of it.

    Attributes:
        matrix: ``(*batch, n, n)``, symmetric.
        factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
        checked: See :func:`gpclml.linalg.safe_cholesky`; values of conditional densities are NaN
            where a factorization failed that was not checked.
    """

    matrix: Tensor
    factor_dtype: torch.dtype | None = None
    checked: bool = True

    @property
    def shape(self) -> Size:
        """That of the matrix."""
        return self.matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        """Of the matrix."""
        return self.matrix.device

    @classmethod
    def memory(cls, shape: Size, block: int) -> int:
        """Seven matrices, for a block of any size."""
        return _MATRICES * shape.numel()

    def to_dense(self) -> Tensor:
        """The matrix."""
        return self.matrix

    def diagonal(self) -> Tensor:
        """The diagonal of the matrix."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def take(self, rows: Tensor) -> DenseCovariance:
        """Rows and columns of the matrix, as :func:`gpclml.linalg.permute` takes them."""
        return replace(self, matrix=permute(self.matrix, rows))

    def __getitem__(self, index: Any) -> DenseCovariance:
        """The matrices at an index of the batch."""
        return replace(self, matrix=self.matrix[index])

    def operators(self) -> tuple[LinearOperator, None]:
        """The matrix as an operator, noise and all."""
        return to_linear_operator(self.matrix), None

    def factored_in(self, dtype: torch.dtype | None, *, checked: bool = True) -> DenseCovariance:
        """With these settings of the Cholesky factors."""
        return replace(self, factor_dtype=dtype, checked=checked)

    def condition_number(self) -> float:
        """LAPACK's estimate in the 1-norm, from a Cholesky factor."""
        from scipy.linalg import lapack

        factor = safe_cholesky(self.matrix).to("cpu", torch.float64)
        norm = float(self.matrix.abs().sum(0).max())
        estimate, _ = cast(Any, lapack).dpocon(factor.numpy().T, norm, uplo="U")
        return 1 / estimate if estimate > 0 else math.inf

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> Predictor:
        """By one factor, in the type of the matrix; differentiable."""
        factor = safe_cholesky(self.matrix, self.factor_dtype).to(self.dtype)
        whitened = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False)
        return _DensePredictor(factor, whitened, missing)

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        matrix, n = self.matrix, residual.shape[-1]
        if held_out.ndim > 1:  # in an order of its own for each residual
            matrix = matrix.expand(*residual.shape, n)
        order = order_with_last(held_out.cpu(), n)
        if order is not None:
            order = order.to(self.device, non_blocking=True)
        sharing = Sharing(matrix.shape[:-2], residual.shape[:-1])
        value = _ConditionalLogDensity.apply(
            sharing.covariances(matrix),
            sharing.residuals(residual),
            order,
            held_out.shape[-1],
            self.factor_dtype,
            self.checked,
        )
        return sharing.values(cast(Tensor, value))

    def _block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        indices = torch.cat([group.flatten() for group in blocks])
        disjoint = indices.numel() == indices.unique().numel()
        sharing = Sharing(self.shape[:-2], residual.shape[:-1])
        values = _BlockLogDensities.apply(
            sharing.covariances(self.matrix),
            sharing.residuals(residual),
            self.factor_dtype,
            self.checked,
            disjoint,
            *[group.to(self.device, non_blocking=True) for group in blocks],
        )
        return sharing.values(cast(Tensor, values), event=1)

    def _leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        # Points ordered so that those asked for are last, the last block of K⁻¹ is
        # L_BB⁻ᵀ L_BB⁻¹: nothing of the inverse beyond it is formed.
        n, b = residual.shape[-1], rows.shape[-1]
        order = order_with_last(rows, n)
        if order is None:
            order = rows if b == n else torch.arange(n, device=rows.device)
        residual = take(residual, order)
        matrix = self.matrix.expand(*residual.shape, n)
        L = safe_cholesky(permute(matrix, order), self.factor_dtype)
        z = torch.linalg.solve_triangular(L, residual.to(L.dtype).unsqueeze(-1), upper=False)
        inverse = torch.linalg.solve_triangular(
            L[..., -b:, -b:], torch.eye(b, dtype=L.dtype, device=L.device), upper=False
        )
        variance = 1 / inverse.square().sum(-2)
        error = (inverse.mT @ z[..., -b:, :]).squeeze(-1) * variance
        mean = residual[..., -b:] - error.to(residual.dtype)
        return mean, variance.to(residual.dtype)

    def _sequential(self, residual: Tensor, orders: Tensor | None) -> Tensor:
        matrix = self.matrix.expand(*residual.shape, residual.shape[-1])
        terms = [
            cast(Tensor, _SequentialLogDensities.apply(matrix, residual, order, self.factor_dtype))
            for order in ([None] if orders is None else orders)
        ]
        return torch.stack(terms, dim=-2)

    def _predictions(self, residual: Tensor, orders: Tensor) -> tuple[Tensor, Tensor]:
        errors, variances = [], []
        for order in orders:
            L, z = _factor(self.matrix, residual.unsqueeze(-2), order, self.factor_dtype)
            spread = L.diagonal()
            errors.append((z.squeeze(-1) * spread).to(residual.dtype))
            variances.append(spread.square().to(residual.dtype))
        return torch.stack(errors), torch.stack(variances)

    def _condition(
        self, residual: Tensor, rows: Tensor, others: Tensor
    ) -> tuple[DenseCovariance, Tensor]:
        cross = take_rows(self.matrix, rows).index_select(-1, others)
        block = self.take(rows).predictor(take(residual, rows)).given(cross, keep=True)
        spread = permute(self.matrix, others) - block.joint_reduction(block)
        return replace(self, matrix=spread), take(residual, others) - block.shift


class _DensePredictor(Predictor):
    """By the factor L and the whitened residuals, ``(*batch, n, 1)``."""

    def __init__(self, factor: Tensor, whitened: Tensor, missing: Tensor | None) -> None:
        self._factor, self._whitened, self.missing = factor, whitened, missing

    def _given(self, cross: Tensor, keep: bool) -> ConditionedBlock:
        V = torch.linalg.solve_triangular(self._factor, cross, upper=False)
        shift = (V.mT @ self._whitened).squeeze(-1)
        return _DenseBlock(shift, V.square().sum(-2), V if keep else None)


@dataclass(frozen=True, eq=False)
class _DenseBlock(ConditionedBlock):
    """By the whitened covariance with the observations, ``(*batch, n, k)``."""

    shift: Tensor
    reduction: Tensor
    vectors: Tensor | None

    def joint_reduction(self, other: _DenseBlock) -> Tensor:
        assert self.vectors is not None
        assert other.vectors is not None
        return self.vectors.mT @ other.vectors


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


class _BlockLogDensities(torch.autograd.Function):
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
