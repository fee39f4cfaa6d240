r"""Dense covariances: densities and predictions by a Cholesky factor, gradients in closed form.

With :math:`K = L L^\top` and :math:`z = L^{-1} r`, the density of one point given its predecessors
is :math:`\log p(r_i \mid r_{<i}) = -z_i^2/2 - \log L_{ii} - \tfrac12\log 2\pi`. The sum over all
points is the log marginal likelihood; the sum over the last points is their joint log density
conditioned on the first ones. Many held-out blocks are read off one inverse.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
    rows_in_data_order,
    safe_cholesky,
    sandwich,
    sandwich_of_disjoint,
    symmetric_columns,
    take,
    take_rows,
)

__all__ = [
    "BlockLogDensities",
    "ClosedForm",
    "ConditionalLogDensity",
    "DenseCovariance",
    "SequentialLogDensities",
    "differentiable",
]

_MATRICES = 7  # at the peak of a step: those of the kernel, of the factor and of the gradient
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# Up to this held-out share, n x b triangular solves cost less than two inverses.
_SOLVE_UP_TO = 0.3


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
        return self._with(permute(self.matrix, rows))

    def __getitem__(self, index: Any) -> DenseCovariance:
        """The matrices at an index of the batch."""
        return self._with(self.matrix[index])

    def operators(self) -> tuple[LinearOperator, None]:
        """The matrix as an operator, noise and all."""
        return to_linear_operator(self.matrix), None

    def factored_in(self, dtype: torch.dtype | None, *, checked: bool = True) -> DenseCovariance:
        """With these settings of the Cholesky factors."""
        return DenseCovariance(self.matrix, dtype, checked)

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

    def _with(self, matrix: Tensor) -> DenseCovariance:
        """Another matrix with the same settings."""
        return DenseCovariance(matrix, self.factor_dtype, self.checked)

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        matrix, n = self.matrix, residual.shape[-1]
        if held_out.ndim > 1:  # in an order of its own for each residual
            matrix = matrix.expand(*residual.shape, n)
        order = order_with_last(held_out.cpu(), n)
        if order is not None:
            order = order.to(self.device, non_blocking=True)
        density = ConditionalLogDensity(order, held_out.shape[-1], self.factor_dtype, self.checked)
        sharing = Sharing(matrix.shape[:-2], residual.shape[:-1])
        residuals = sharing.residuals(residual)
        return sharing.values(differentiable(density, sharing.covariances(matrix), residuals))

    def _block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        density = self._blocks(blocks)
        sharing = Sharing(self.shape[:-2], residual.shape[:-1])
        residuals = sharing.residuals(residual)
        values = differentiable(density, sharing.covariances(self.matrix), residuals)
        return sharing.values(values, event=1)

    def _blocks(self, blocks: Sequence[Tensor]) -> BlockLogDensities:
        indices = torch.cat([group.flatten() for group in blocks])
        disjoint = indices.numel() == indices.unique().numel()
        moved = tuple(group.to(self.device, non_blocking=True) for group in blocks)
        return BlockLogDensities(moved, disjoint, self.factor_dtype, self.checked)

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
            differentiable(
                SequentialLogDensities(order, self.factor_dtype), matrix, residual.unsqueeze(-2)
            )
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
        return self._with(spread), take(residual, others) - block.shift


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


State = Sequence[Tensor]
"""What a gradient needs of an evaluation."""


class ClosedForm(ABC):
    """Densities of residuals ``(*batch, k, n)`` that share covariances ``(*batch, n, n)``."""

    @abstractmethod
    def evaluate(self, covariance: Tensor, residuals: Tensor) -> tuple[Tensor, State]:
        """The densities, in the type of the factor, and what the gradient needs."""

    @abstractmethod
    def gradient(self, state: State, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the densities' weighted sum, ``weights`` of their shape and type."""


def differentiable(density: ClosedForm, covariance: Tensor, residuals: Tensor) -> Tensor:
    """The densities with their gradient in closed form, in the type of the covariance."""
    return cast(Tensor, _Differentiable.apply(covariance, residuals, density))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, covariance, residuals, density):
        values, state = density.evaluate(covariance, residuals)
        ctx.save_for_backward(*state)
        ctx.density, ctx.type, ctx.dtype = density, values.dtype, covariance.dtype
        return values.to(covariance.dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward(type(ctx.density).__name__)
        gradients = ctx.density.gradient(ctx.saved_tensors, grads[0].to(ctx.type))
        return *[one.to(ctx.dtype) for one in gradients], None


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


@dataclass(frozen=True)
class ConditionalLogDensity(ClosedForm):
    """The joint log density of the points that come last, given those before them.

    Attributes:
        order: Of all points, ``(n,)`` or ``(*batch, n)``; None for data order.
        num_held_out: Number of points that are scored.
    """

    order: Tensor | None
    num_held_out: int
    factor_dtype: torch.dtype | None = None
    checked: bool = True

    def evaluate(self, covariance: Tensor, residuals: Tensor) -> tuple[Tensor, State]:
        """Densities ``(*batch, k)``."""
        L, z = _factor(covariance, residuals, self.order, self.factor_dtype, self.checked)
        return _terms(L, z)[..., -self.num_held_out :, :].sum(-2), (L, z)

    def gradient(self, state: State, weights: Tensor) -> tuple[Tensor, Tensor]:
        """By n x b triangular solves, or by two inverses where many points are held out."""
        L, z = state
        weights = weights.unsqueeze(-2)  # (*batch, 1, k)
        few = self.num_held_out <= _SOLVE_UP_TO * z.shape[-2]
        of_covariance = _gradient_by_solve if few else _gradient_by_inverse
        gradient, u = of_covariance(L, z, self.order, self.num_held_out, weights)
        return gradient, -(weights * u).mT


def _gradient_by_solve(L, z, order, b, grad):
    n, k = z.shape[-2:]
    right = z.new_zeros(*z.shape[:-1], b + 2 * k)
    right[..., n - b :, :b] = torch.eye(b, dtype=z.dtype, device=z.device)
    right[..., n - b :, b : b + k] = z[..., n - b :, :]
    right[..., b + k :] = z
    solved = rows_in_data_order(torch.linalg.solve_triangular(L.mT, right, upper=True), order)
    W, u, alpha = solved.split([b, k, k], dim=-1)
    # -uuᵀ/2 + (uαᵀ + αuᵀ)/2 as one symmetric term a residual.
    left, right = symmetric_columns(u, alpha - 0.5 * u, grad)
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
    left, right = symmetric_columns(u, alpha - 0.5 * u, grad)
    gradient.mul_(scale).add_(left @ right.mT)
    if order is not None:
        gradient = permute(gradient, order.argsort(-1))
    return gradient, rows_in_data_order(u, order)


@dataclass(frozen=True)
class SequentialLogDensities(ClosedForm):
    """The log density of each point given those before it.

    Attributes:
        order: In which the points arrive, ``(n,)``; None for data order.
    """

    order: Tensor | None
    factor_dtype: torch.dtype | None = None

    def evaluate(self, covariance: Tensor, residuals: Tensor) -> tuple[Tensor, State]:
        """Terms of one residual a covariance, ``(*batch, n)``."""
        L, z = _factor(covariance, residuals, self.order, self.factor_dtype)
        return _terms(L, z).squeeze(-1), (L, z)

    def gradient(self, state: State, weights: Tensor) -> tuple[Tensor, Tensor]:
        """By two triangular solves with n columns."""
        L, z = state
        n = z.shape[-2]
        first = torch.arange(n, device=z.device)
        first = torch.minimum(first[:, None], first)
        V = weights[..., first] * (z @ z.mT) + torch.diag_embed(weights)
        right = torch.cat([V, weights.unsqueeze(-1) * z, z], dim=-1)
        solved = torch.linalg.solve_triangular(L.mT, right, upper=True)
        WV, u, alpha = solved.split([n, 1, 1], dim=-1)
        gradient = -0.5 * torch.linalg.solve_triangular(L.mT, WV.mT, upper=True)
        left, right = symmetric_columns(u, alpha, torch.ones_like(u[..., :1, :]))
        gradient = gradient + left @ right.mT
        if self.order is not None:
            gradient = permute(gradient, self.order.argsort(-1))
        return gradient, -rows_in_data_order(u, self.order).mT


@dataclass(frozen=True)
class BlockLogDensities(ClosedForm):
    """The joint log density of each of several blocks given all points outside it.

    Attributes:
        blocks: Indices on the covariance's device, ``(k_i, b_i)`` each.
        disjoint: Whether no point is in two blocks.
    """

    blocks: tuple[Tensor, ...]
    disjoint: bool
    factor_dtype: torch.dtype | None = None
    checked: bool = True

    def evaluate(self, covariance: Tensor, residuals: Tensor) -> tuple[Tensor, State]:
        """Densities of r residuals a covariance, ``(*batch, r, k_1 + k_2 + ...)``."""
        L = safe_cholesky(covariance, self.factor_dtype, checked=self.checked)
        alpha = torch.cholesky_solve(residuals.mT.to(L.dtype), L)  # (*batch, n, r)
        Q = torch.cholesky_inverse(L)
        values, factors, sources = zip(
            *[_densities_of_group(Q, alpha, group, self.checked) for group in self.blocks],
            strict=True,
        )
        return torch.cat(values, dim=-2).mT, (Q, alpha, *factors, *sources)

    def gradient(self, state: State, weights: Tensor) -> tuple[Tensor, Tensor]:
        """By products of the inverse with its blocks."""
        Q, alpha, *saved = state
        count = len(self.blocks)
        sizes = [len(group) for group in self.blocks]
        middles, source = [], torch.zeros_like(alpha)
        for group, L_Q, s, weight in zip(
            self.blocks, saved[:count], saved[count:], weights.mT.split(sizes, dim=-2), strict=True
        ):
            weight = weight.unsqueeze(-2)  # (*batch, k, 1, r)
            inverse = weight.sum(-1, keepdim=True) * torch.cholesky_inverse(L_Q)
            middles.append(((weight * s) @ s.mT + inverse).to(Q.dtype))
            weighted = (weight * s).flatten(-3, -2).to(Q.dtype)  # (*batch, k b, r)
            source.scatter_add_(-2, group.reshape(-1, 1).expand(weighted.shape), weighted)
        product = sandwich_of_disjoint if self.disjoint else sandwich
        gradient = product(Q, middles, self.blocks).mul_(-0.5)
        u = Q @ source
        left = torch.cat([u, alpha], dim=-1)
        right = 0.5 * torch.cat([alpha, u], dim=-1)
        return gradient.add_(left @ right.mT), -u.mT


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
