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
from functools import cached_property
from typing import Any, cast

import numpy
import torch
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.gram import Evaluated, Gradients, Gram, Hyperparameter, as_matrix, precomputed
from gpclml.linalg.covariance import ConditionedBlock, Covariance, Predictor
from gpclml.linalg.log_densities import (
    BlockLogDensities,
    ConditionalLogDensity,
    LogDensity,
    SequentialLogDensities,
    State,
)
from gpclml.linalg.matrices import (
    BatchLayout,
    SingularError,
    factor_and_whiten,
    permute,
    safe_cholesky,
    take,
    take_rows,
)

__all__ = ["DenseCovariance", "GramCovariance"]

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

    def density(self, blocks: Sequence[Tensor]) -> LogDensity:
        """The density of held-out blocks, as a function of matrices of this size."""
        if len(blocks) == 1 and blocks[0].shape[-2] == 1:
            held_out = blocks[0].squeeze(-2)
            order = _order_with_last(held_out, self.shape[-1])
            if order is not None:
                order = order.to(self.device, non_blocking=True)
            return ConditionalLogDensity(order, held_out.shape[-1], self.factor_dtype, self.checked)
        return self._block_density(blocks)

    def log_density_of(self, residual: Tensor, density: LogDensity) -> Tensor:
        """As one node of autograd."""
        return precomputed(self.log_density_and_vjp(residual, density))

    def log_density_and_vjp(self, residual: Tensor, density: LogDensity) -> Evaluated:
        """With the gradient from the same factor."""
        return self._log_density(residual, density, summed=True)

    def _with(self, matrix: Tensor) -> DenseCovariance:
        """Another matrix with the same settings."""
        return DenseCovariance(matrix, self.factor_dtype, self.checked)

    def _evaluated(self, order: Tensor | None) -> tuple[Evaluated, Tensor | None]:
        """The matrix, and an order that its points are yet to be brought into."""
        matrix = self.matrix
        tensors = [matrix] if matrix.requires_grad else []
        return Evaluated(matrix.detach(), tensors, lambda G, _=None, /: [(matrix, G)]), order

    def _log_density(self, residual: Tensor, density: LogDensity, *, summed: bool) -> Evaluated:
        """Densities of blocks, ``(*batch, k)``; or their sums, ``(*batch,)``."""
        order, batch = density.order, residual.shape[:-1]
        (matrix, tensors, of_matrix, is_free), left = self._evaluated(order)
        dtype, shape = matrix.dtype, matrix.shape
        in_own_order = density.one_residual or (left is not None and left.ndim > 1)
        own_shape = torch.Size((*batch, *shape[-2:])) if in_own_order else shape
        is_free = is_free and own_shape == shape
        layout = None if own_shape[:-2] == batch else BatchLayout(own_shape[:-2], batch)
        of_each = residual.detach()
        if order is not None and left is None:
            density, of_each = density.without_order(), of_each.index_select(-1, order)
        of_each = of_each.unsqueeze(-2) if layout is None else layout.stacked(of_each, 1)
        of_each = of_each.to(dtype)

        def evaluated(matrix: Tensor, is_free: bool) -> tuple[Tensor, State]:
            if own_shape != shape:
                matrix = matrix.expand(own_shape)
            if layout is not None:
                matrix = layout.covariances(matrix)
            return density.evaluate(matrix, of_each, is_free=is_free)

        with torch.no_grad():
            try:
                values, state = evaluated(matrix, is_free)
            except SingularError:
                is_free = False
                values, state = evaluated(self._evaluated(order)[0].value, is_free)
            del matrix  # the product needs the factor, and not the matrix
            states = [state]
            total = values.sum(-1) if summed and density.event else values
            event = 0 if summed else density.event
            value = total.squeeze(-1 - event) if layout is None else layout.unstacked(total, event)
            value = value.to(residual.dtype)
        del state

        def vjp(grad: Tensor, weight: Tensor | None = None, /) -> Gradients:
            grad = grad.to(values.dtype)
            grad = grad if weight is None else grad * weight[(..., *(None,) * event)]
            weights = grad.unsqueeze(grad.ndim - event)
            if layout is not None:
                weights = layout.stacked(grad, event)
            if summed and density.event:
                weights = weights.unsqueeze(-1).expand(values.shape)
            # In the memory of the factor, which is computed again for a graph that was kept.
            state = states.pop() if states else evaluated(self._evaluated(order)[0].value, True)[1]
            if not is_free:
                states.append(state)
            G, of_columns = density.gradient(state, weights, is_free=is_free)
            del state
            gradients: Gradients = []
            if tensors:
                if G.shape != own_shape:
                    G = G.reshape(own_shape)
                if own_shape != shape:
                    G = G.sum_to_size(shape)
                gradients += of_matrix(G.to(dtype))
            if residual.requires_grad:
                g = of_columns.squeeze(-2) if layout is None else layout.unstacked(of_columns, 1)
                if order is not None and left is None:
                    g = torch.empty_like(g).index_copy_(-1, order, g)
                gradients.append((residual, g.to(residual.dtype)))
            return gradients

        every = [*tensors, residual] if residual.requires_grad else tensors
        return Evaluated(value, every, vjp)

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        density = self.density([held_out.unsqueeze(-2)])
        return precomputed(self._log_density(residual, density, summed=True))

    def _block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        # One block too: its density is of the shape of several.
        density = self._block_density(blocks)
        return precomputed(self._log_density(residual, density, summed=False))

    def _block_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        return precomputed(self._log_density(residual, self._block_density(blocks), summed=True))

    def _block_density(self, blocks: Sequence[Tensor]) -> BlockLogDensities:
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
        densities = [
            SequentialLogDensities(order, self.factor_dtype)
            for order in ([None] if orders is None else orders)
        ]
        terms = [
            precomputed(self._log_density(residual, density, summed=False)) for density in densities
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


Noise = Tensor | torch.nn.Module | None
"""Variances of independent noise, ``(*batch, n)`` or ``(*batch, 1)``, or GPyTorch's module that has
one for all observations."""


class GramCovariance(DenseCovariance):
    """The covariance of observations by a kernel in closed form.

    Log densities of held-out points are computed with their gradients by hyperparameters and
    points, from one factor. Whatever else is asked for is computed from the matrix, formed when it
    is needed.

    Args:
        gram: The kernel.
        points: Its points, ``(*batch, n, d)``.
        noise: Of the observations.
        shape: Of the covariance, ``(*batch, n, n)``.
        factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
        checked: See :func:`gpclml.linalg.safe_cholesky`.
    """

    def __init__(
        self,
        gram: Gram,
        points: Tensor,
        noise: Noise,
        shape: Size,
        factor_dtype: torch.dtype | None = None,
        checked: bool = True,
    ) -> None:
        own = {"gram": gram, "points": points, "noise": noise, "_shape": shape}
        vars(self).update(own, factor_dtype=factor_dtype, checked=checked)  # it is frozen

    gram: Gram
    points: Tensor
    noise: Noise
    _shape: Size

    @cached_property
    def matrix(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The covariance as a matrix, differentiable."""
        return as_matrix(self._evaluated(None)[0], self.dtype)

    @property
    def shape(self) -> Size:
        """``(*batch, n, n)``, without forming the matrix."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the points."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """Of the points."""
        return self.points.device

    def factored_in(self, dtype: torch.dtype | None, *, checked: bool = True) -> GramCovariance:
        """With these settings of the Cholesky factors."""
        if dtype is self.factor_dtype and checked == self.checked:
            return self
        return GramCovariance(self.gram, self.points, self.noise, self._shape, dtype, checked)

    def _evaluated(self, order: Tensor | None) -> tuple[Evaluated, Tensor | None]:
        """In the order: n x d numbers are moved rather than n x n."""
        if order is not None and order.ndim > 1:
            return self._evaluated(None)[0], order
        points = self.points if order is None else self.points.index_select(-2, order)
        kernel = self.gram(points)
        if self.noise is None:
            return kernel, None
        matrix, tensors, vjp, is_free = kernel
        noise = Hyperparameter.of(self.noise, "noise", matrix.dtype)
        with torch.no_grad():
            of_each = noise.value
            if order is not None and of_each.shape[-1] > 1:
                of_each = of_each.index_select(-1, order)
            if not is_free or matrix.shape != self._shape:
                matrix = matrix.expand(self._shape).clone()
            matrix.diagonal(dim1=-2, dim2=-1).add_(of_each)

        def with_noise(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            gradients = vjp(G, weight)
            if noise.needed:
                of_noise = G.diagonal(dim1=-2, dim2=-1)
                if weight is not None:
                    of_noise = of_noise * weight.unsqueeze(-1)
                if order is not None and of_each.shape[-1] > 1:
                    of_noise = torch.empty_like(of_noise).index_copy_(-1, order, of_noise)
                gradients += noise.gradients(of_noise)
            return gradients

        needed = [noise.tensor] if noise.needed else []
        # A network may be another, with other features, when it is asked a second time. A GPU has
        # memory that is used again without being cleared.
        is_free = matrix.is_cpu and not self.gram.has_features
        return Evaluated(matrix, tensors + needed, with_noise, is_free), None

    def _log_density(self, residual: Tensor, density: LogDensity, *, summed: bool) -> Evaluated:
        # What was formed is not formed again.
        if "matrix" in vars(self):
            dense = DenseCovariance(self.matrix, self.factor_dtype, self.checked)
            return dense._log_density(residual, density, summed=summed)
        return super()._log_density(residual, density, summed=summed)


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
