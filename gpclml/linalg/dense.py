r"""Dense covariances: densities and predictions by a Cholesky factor, gradients in closed form.

With :math:`K = L L^\top` and :math:`z = L^{-1} r`, the density of one point given its predecessors
is :math:`\log p(r_i \mid r_{<i}) = -z_i^2/2 - \log L_{ii} - \tfrac12\log 2\pi`. The sum over all
points is the log marginal likelihood; the sum over the last points is their joint log density
conditioned on the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.linalg.closed_forms import BlockLogDensities, SequentialLogDensities
from gpclml.linalg.covariance import (
    ClosedForm,
    ConditionedBlock,
    Covariance,
    Pairs,
    Predictor,
    State,
)
from gpclml.linalg.lapack import matrix_density_and_gradients
from gpclml.linalg.matrices import (
    Sharing,
    factor_and_whiten,
    inverse_of_factor,
    log_density_terms,
    permute,
    refuse_double_backward,
    rows_in_data_order,
    safe_cholesky,
    symmetric_columns,
    take,
    take_rows,
)

__all__ = ["DenseCovariance"]

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

    def density(self, blocks: Sequence[Tensor]) -> ClosedForm:
        """The density of held-out blocks, as a function of matrices of this size."""
        if len(blocks) == 1 and blocks[0].shape[-2] == 1:
            held_out = blocks[0].squeeze(-2)
            order = _order_with_last(held_out, self.shape[-1])
            if order is not None:
                order = order.to(self.device, non_blocking=True)
            return ConditionalLogDensity(order, held_out.shape[-1], self.factor_dtype, self.checked)
        return self._of_blocks(blocks)

    def value_and_gradients(self, residual: Tensor, density: ClosedForm) -> tuple[Tensor, Pairs]:
        """By the matrix and the residual."""
        if residual.shape[:-1] != self.shape[:-2]:
            value = self._sum(self._values(self.matrix, residual, density))
            pairs = [(value, torch.ones_like(value))] if value.requires_grad else []
            return value.detach(), pairs
        blocks = None if density.order is not None else density.for_lapack
        found = matrix_density_and_gradients(self.matrix, residual, blocks)
        if found is None:
            with torch.no_grad():
                values, state = density.evaluate(self.matrix, residual.unsqueeze(-2))
                of_matrix, of_residual = density.gradient(state, torch.ones_like(values))
            value = self._sum(values.squeeze(self.matrix.ndim - 2)).to(self.dtype)
            found = value, of_matrix, of_residual.squeeze(-2)
        value, of_matrix, of_residual = found
        pairs = (self.matrix, of_matrix), (residual, of_residual)
        return value, [(one, g.to(self.dtype)) for one, g in pairs if one.requires_grad]

    def _sum(self, values: Tensor) -> Tensor:
        """Over the blocks of each residual."""
        return values if values.ndim == self.matrix.ndim - 2 else values.sum(-1)

    def _values(self, matrix: Tensor, residual: Tensor, density: ClosedForm) -> Tensor:
        """Differentiable; of one block ``(*batch,)``, of several ``(*batch, k)``."""
        sharing = Sharing(matrix.shape[:-2], residual.shape[:-1])
        values = differentiable(density, sharing.covariances(matrix), sharing.residuals(residual))
        return sharing.values(values, event=density.event)

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        matrix = self.matrix
        if held_out.ndim > 1:  # in an order of its own for each residual
            matrix = matrix.expand(*residual.shape, residual.shape[-1])
        return self._values(matrix, residual, self.density([held_out.unsqueeze(-2)]))

    def _block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        # One block too: its density is of the shape of several.
        return self._values(self.matrix, residual, self._of_blocks(blocks))

    def _of_blocks(self, blocks: Sequence[Tensor]) -> BlockLogDensities:
        indices = torch.cat([group.flatten() for group in blocks])
        disjoint = indices.numel() == indices.unique().numel()
        moved = tuple(group.to(self.device, non_blocking=True) for group in blocks)
        return BlockLogDensities(moved, disjoint, self.factor_dtype, self.checked)

    def _leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        # Points ordered so that those asked for are last, the last block of K⁻¹ is
        # L_BB⁻ᵀ L_BB⁻¹: nothing of the inverse beyond it is formed.
        n, b = residual.shape[-1], rows.shape[-1]
        order = _order_with_last(rows, n)
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
            L, z = factor_and_whiten(self.matrix, residual.unsqueeze(-2), order, self.factor_dtype)
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


def _order_with_last(
    held_out: Tensor,  # shape: (b,) or (*batch, b)
    n: int,
) -> Tensor | None:
    """All other points in data order, then the held-out ones; None if no order is needed.

    None is needed where all are held out, or all members hold out the last ones in data order.
    """
    rows = held_out.cpu().numpy()  # for few points PyTorch's calls take longer
    b = rows.shape[-1]
    if b == n or (rows == numpy.arange(n - b, n)).all():
        return None
    members = rows.reshape(-1, b)
    kept = numpy.ones((len(members), n), bool)
    kept[numpy.arange(len(members))[:, None], members] = False
    rest = kept.nonzero()[1].reshape(*rows.shape[:-1], n - b)
    return torch.from_numpy(numpy.concatenate([rest, rows], -1)).to(held_out.device)


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

    @property
    def for_lapack(self) -> int | None:
        """Their number."""
        return None if self.factor_dtype == torch.float32 else self.num_held_out

    def evaluate(self, covariance: Tensor, residuals: Tensor) -> tuple[Tensor, State]:
        """Densities ``(*batch, k)``."""
        L, z = factor_and_whiten(covariance, residuals, self.order, self.factor_dtype, self.checked)
        return log_density_terms(L, z)[..., -self.num_held_out :, :].sum(-2), (L, z)

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
    gradient = inverse_of_factor(L)
    scale = -0.5 * grad.sum(-1, keepdim=True)
    if m == 0:  # u is alpha
        alpha = torch.linalg.solve_triangular(L.mT, z, upper=True)
        gradient.mul_(scale).add_((0.5 * grad * alpha) @ alpha.mT)
        return gradient, alpha
    gradient[..., :m, :m] -= inverse_of_factor(L[..., :m, :m])
    tail = torch.cat([torch.zeros_like(z[..., :m, :]), z[..., m:, :]], dim=-2)
    solved = torch.linalg.solve_triangular(L.mT, torch.cat([tail, z], dim=-1), upper=True)
    u, alpha = solved.split(k, dim=-1)
    left, right = symmetric_columns(u, alpha - 0.5 * u, grad)
    gradient.mul_(scale).add_(left @ right.mT)
    if order is not None:
        gradient = permute(gradient, order.argsort(-1))
    return gradient, rows_in_data_order(u, order)


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
