r"""Dense covariances: densities and predictions by a Cholesky factor, gradients in closed form.

With :math:`K = L L^\top` and :math:`z = L^{-1} r`, the density of one point given its predecessors
is :math:`\log p(r_i \mid r_{<i}) = -z_i^2/2 - \log L_{ii} - \tfrac12\log 2\pi`. The sum over all
points is the log marginal likelihood; the sum over the last points is their joint log density
conditioned on the first ones. Many held-out blocks are read off one inverse.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

import numpy
import torch
from torch import Size, Tensor

from gpclml.gram import Evaluated, Gradients, Gram, Hyperparameter, matrix_node, precomputed
from gpclml.linalg.covariance import ConditionedBlock, ExactCovariance, Predictor, expanded
from gpclml.linalg.matrices import (
    HALF_LOG_2PI,
    SingularError,
    inverse_of_factor,
    permute,
    plus_product,
    safe_cholesky,
    sandwich,
    solve_lower,
    take,
)

# Up to this held-out share, n x b triangular solves cost less than two inverses.
_SOLVE_UP_TO = 0.3

State = Sequence[Tensor]  # what the gradient of a density needs of its evaluation


@dataclass(frozen=True)
class ConditionalLogDensity:
    r"""The joint log density of the points that come last, given those before them.

    With :math:`W = L^{-\top} E_B`, :math:`u = L^{-\top}[0; z_B]` and :math:`\alpha = L^{-\top} z`,

    .. math:: \partial/\partial K = -\tfrac12 (W W^\top + u u^\top)
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    n³/3 + 3 n² b floating-point operations for value and gradient (b <= 0.3 n; at most 5/3 n³
    beyond). The order has held-out points last, ``(n,)`` or ``(*batch, n)``; None for data order.
    """

    order: Tensor | None
    num_held_out: int
    checked: bool = True

    def evaluate(self, K: Tensor, residuals: Tensor, is_free: bool) -> tuple[Tensor, State]:
        """Log densities ``(*batch, k)`` of residuals ``(*batch, k, n)``, and what a gradient needs.

        A covariance K, ``(*batch, n, n)``, that is free may be overwritten by its factor; if that
        fails, a SingularError says that it is gone.
        """
        L = safe_cholesky(K, checked=self.checked, in_place=is_free)
        z = torch.linalg.solve_triangular(L, residuals.mT.to(L.dtype), upper=False)
        n, b = L.shape[-1], self.num_held_out
        pivots = L.diagonal(dim1=-2, dim2=-1).narrow(-1, n - b, b)
        z_B = z.narrow(-2, n - b, b)
        terms = torch.addcmul(pivots.log().unsqueeze(-1), z_B, z_B, value=0.5)
        return -b * HALF_LOG_2PI - terms.sum(-2), (L, z)

    def gradient(self, state: State, weights: Tensor, is_free: bool) -> tuple[Tensor, Tensor]:
        """Of the densities' sum, weighted ``(*batch, k)``, for K (symmetric) and for residuals.

        By n x b triangular solves, or by two inverses where many points are held out. A state, as
        the evaluation gave it, may be overwritten if it is free.
        """
        L, z = state
        (n, k), b = z.shape[-2:], self.num_held_out
        weights = weights.unsqueeze(-2)  # (*batch, 1, k)
        scale = -0.5 * (weights if k == 1 else weights.sum(-1, keepdim=True))
        # The inverse of K is all that the log marginal likelihood needs.
        if b == n:  # u is alpha
            alpha = torch.linalg.solve_triangular(L.mT, z, upper=True)
            gradient = inverse_of_factor(L, in_place=is_free).mul_(scale)
            left = alpha * weights
            # LAPACK has it column by column: the transpose, equal by symmetry, has rows in memory.
            return plus_product(gradient, left, alpha, 0.5).mT, -left.mT
        # Right-hand sides of one solve: the last columns of the identity, [0; z_B], and z.
        tail = torch.cat([torch.zeros_like(z[..., : n - b, :]), z[..., n - b :, :]], dim=-2)
        columns = [tail, z]
        if few := b <= _SOLVE_UP_TO * n:
            last = z.new_zeros(n, b)  # the last columns of the identity, which is never formed
            last.diagonal(b - n).fill_(1.0)
            columns.insert(0, last.expand(*z.shape[:-1], b))
        solved = torch.linalg.solve_triangular(L.mT, torch.cat(columns, dim=-1), upper=True)
        u, alpha = solved[..., -2 * k :].split(k, dim=-1)
        # -uuᵀ/2 + (uαᵀ + αuᵀ)/2 as one symmetric term a residual.
        v, half = alpha - 0.5 * u, 0.5 * weights
        left, right = torch.cat([u, v], dim=-1), torch.cat([half * v, half * u], dim=-1)
        if few:
            W = solved[..., :b]
            left, right = torch.cat([W, left], dim=-1), torch.cat([scale * W, right], dim=-1)
            gradient = torch.matmul(left, right.mT, out=L.mT if is_free else None)
        else:  # W Wᵀ is the inverse of K less that of the block that is conditioned on
            given = inverse_of_factor(L[..., : n - b, : n - b])
            gradient = inverse_of_factor(L, in_place=is_free)
            gradient[..., : n - b, : n - b] -= given
            gradient = plus_product(gradient.mul_(scale), left, right).mT
        return gradient, (u * -weights).mT


@dataclass(frozen=True)
class BlockLogDensity:
    r"""The sum of the joint log densities of several blocks, each given all points outside it.

    With :math:`Q = K^{-1}`, :math:`\alpha = Q r`, :math:`s = Q_{BB}^{-1} \alpha_B` and
    :math:`u = Q_{:B} s`, the gradient of block B is

    .. math:: \partial/\partial K = -\tfrac12 Q_{:B} (s s^\top + Q_{BB}^{-1}) Q_{B:}
        + \tfrac12 (u \alpha^\top + \alpha u^\top), \qquad \partial/\partial r = -u.

    About n³ floating-point operations for the values; the gradient adds about 1.2 n³ for disjoint
    blocks that cover the data, and 3.2 n³ for overlapping ones however many.
    """

    blocks: tuple[Tensor, ...]  # on the covariance's device, (k_i, b_i) each
    disjoint: bool  # whether no point is in two blocks
    checked: bool = True
    order = None

    def evaluate(self, K: Tensor, residuals: Tensor, is_free: bool) -> tuple[Tensor, State]:
        """As for one block."""
        L = safe_cholesky(K, checked=self.checked, in_place=is_free)
        alpha = torch.cholesky_solve(residuals.mT.to(L.dtype), L)  # (*batch, n, r)
        # A GPU uses memory again without clearing it: only a CPU gains by working in place.
        Q = inverse_of_factor(L, in_place=L.is_cpu)
        value, factors, sources = 0.0, [], []
        for group in self.blocks:
            values, L_Q, s = block_log_densities(Q, alpha, group, self.checked)
            value = value + values.sum(-2)
            factors.append(L_Q)
            sources.append(s)
        return cast(Tensor, value), (Q, alpha, *factors, *sources)

    def gradient(self, state: State, weights: Tensor, is_free: bool) -> tuple[Tensor, Tensor]:
        """As for one block; by products of the inverse with its blocks."""
        Q, alpha, *saved = state
        count = len(self.blocks)
        # Where residuals share a covariance, each is weighted before the sum.
        weights = weights[..., None, None, :]  # (*batch, 1, 1, r)
        middles, source = [], torch.zeros_like(alpha)
        for group, L_Q, s in zip(self.blocks, saved[:count], saved[count:], strict=True):
            weighted = weights * s  # (*batch, k, b, r)
            inverse = weights.sum(-1, keepdim=True) * inverse_of_factor(L_Q)
            middles.append((weighted @ s.mT + inverse).to(Q.dtype))
            weighted = weighted.flatten(-3, -2).to(Q.dtype)
            source.scatter_add_(-2, group.reshape(-1, 1).expand(weighted.shape), weighted)
        gradient = sandwich(Q, middles, self.blocks, self.disjoint).mul_(-0.5)
        u = Q @ source
        left, right = torch.cat([u, alpha], dim=-1), torch.cat([alpha, u], dim=-1)
        return gradient.add_(left @ (0.5 * right).mT), -u.mT


LogDensity = ConditionalLogDensity | BlockLogDensity


def block_log_densities(
    Q: Tensor, alpha: Tensor, group: Tensor, checked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities ``(*batch, k, r)`` of blocks ``(k, b)``, factors of Q_BB, and s, in float64.

    Q is the inverse covariance, ``(*batch, n, n)``, and alpha its products with r residuals,
    ``(*batch, n, r)``. The blocks are small, and their determinants cancel: hence float64.
    """
    alpha_B = alpha[..., group, :].double()
    single = group.shape[-1] == 1
    if single:
        Q_BB = Q.diagonal(dim1=-2, dim2=-1)[..., group].unsqueeze(-1).double()
    else:
        Q_BB = Q[..., group.unsqueeze(-1), group.unsqueeze(-2)].double()
    L_Q = safe_cholesky(Q_BB, checked=checked)
    if single:  # thousands of them would be solved for one by one on a GPU
        s = alpha_B / L_Q.square()
    elif L_Q.is_cpu:
        s = torch.cholesky_solve(alpha_B, L_Q)
    else:
        half = torch.linalg.solve_triangular(L_Q, alpha_B, upper=False)
        s = torch.linalg.solve_triangular(L_Q.mT, half, upper=True)
    half_log_det = L_Q.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    quadratic = (alpha_B * s).sum(-2)
    return half_log_det - 0.5 * quadratic - group.shape[-1] * HALF_LOG_2PI, L_Q, s


class DenseCovariance(ExactCovariance):
    """A covariance as a matrix, factored by each density that is asked of it.

    Args:
        matrix: ``(*batch, n, n)``, symmetric.
        checked: See :func:`gpclml.linalg.safe_cholesky`; values of conditional densities are NaN
            where a factorization failed that was not checked.
    """

    matrix: Tensor

    def __init__(self, matrix: Tensor, checked: bool = True) -> None:
        self.matrix, self.checked = matrix, checked
        self.shape, self.dtype, self.device = matrix.shape, matrix.dtype, matrix.device

    def to_dense(self) -> Tensor:
        """The matrix."""
        return self.matrix

    def diagonal(self) -> Tensor:
        """The diagonal of the matrix."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def take(self, rows: Tensor) -> DenseCovariance:
        """Rows and columns of the matrix, as :func:`gpclml.linalg.permute` takes them."""
        return DenseCovariance(permute(self.matrix, rows), self.checked)

    def __getitem__(self, index: Any) -> DenseCovariance:
        """The matrices at an index of the batch."""
        return DenseCovariance(self.matrix[index], self.checked)

    def unchecked(self) -> Self:
        """The same covariance, whose Cholesky factors are not checked."""
        # A shallow copy shares the matrix, also one that has been formed already.
        covariance = copy.copy(self)
        covariance.checked = False
        return covariance

    def condition_number(self) -> float:
        """LAPACK's estimate in the 1-norm, from a Cholesky factor."""
        from scipy.linalg import lapack

        # dpocon takes the upper factor: to LAPACK, which has columns first, the transpose.
        factor = safe_cholesky(self.matrix).to("cpu", torch.float64)
        norm = float(self.matrix.abs().sum(0).max())
        estimate, _ = cast(Any, lapack).dpocon(factor.numpy().T, norm, uplo="U")
        return 1 / estimate if estimate > 0 else math.inf

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> Predictor:
        """By one factor, in the type of the matrix; differentiable."""
        factor = safe_cholesky(self.matrix).to(self.dtype)
        whitened = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False)
        return _DensePredictor(factor, whitened, missing)

    def density(self, blocks: Sequence[Tensor]) -> Any:
        """The density of held-out blocks, as a :class:`LogDensity` of matrices of this size.

        One block comes last, after all others in data order; where it does so already, or is all
        there is, no order is needed.
        """
        if len(blocks) == 1 and blocks[0].shape[-2] == 1:
            (*_, b), n, order = blocks[0].shape, self.shape[-1], None
            if b < n:  # for few points PyTorch's calls take longer than those of numpy
                rows = blocks[0].squeeze(-2).cpu().numpy()
                if (rows != numpy.arange(n - b, n)).any():
                    members = rows.reshape(-1, b)
                    kept = numpy.ones((len(members), n), bool)
                    kept[numpy.arange(len(members))[:, None], members] = False
                    others = kept.nonzero()[1].reshape(*rows.shape[:-1], n - b)
                    order = torch.from_numpy(numpy.concatenate([others, rows], -1))
                    order = order.to(self.device, non_blocking=True)
            return ConditionalLogDensity(order, b, self.checked)
        # Disjoint blocks have fewer columns in all than the overlapping general case.
        indices = torch.cat([group.flatten() for group in blocks])
        disjoint = indices.numel() == indices.unique().numel()
        moved = tuple(group.to(self.device, non_blocking=True) for group in blocks)
        return BlockLogDensity(moved, disjoint, self.checked)

    def held_out_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """As one node of autograd, with the gradient from the same factor."""
        return precomputed(self.log_density_and_vjp(residual, self.density(blocks)))

    def log_density_and_vjp(self, residual: Tensor, density: Any) -> Evaluated:
        """With the gradient from the same factor, computed in its memory where that is free."""
        order, batch = cast(Tensor | None, density.order), residual.shape[:-1]
        if batch != self.shape[:-2]:
            residual = expanded(residual, self.shape)
            batch = residual.shape[:-1]
        matrix, tensors, matrix_vjp, is_free = self._evaluated(order, batch)
        dtype, shape = matrix.dtype, matrix.shape
        layout = None if shape[:-2] == batch else BatchLayout(shape[:-2], batch)
        residuals = residual.detach() if order is None else take(residual.detach(), order)
        residuals = residuals.unsqueeze(-2) if layout is None else layout.stacked(residuals)
        residuals = residuals.to(dtype)
        members = shape if layout is None else (*layout.sizes, *shape[-2:])
        try:
            values, state = density.evaluate(matrix.reshape(members), residuals, is_free)
        except SingularError:
            is_free, matrix = False, self._evaluated(order, batch).value
            values, state = density.evaluate(matrix.reshape(members), residuals, is_free)
        del matrix  # the product needs the factor, and not the matrix
        # A list, so that the product can let go of the state before the gradient is formed.
        states = [state]
        del state
        value = values.squeeze(-1) if layout is None else layout.unstacked(values)

        def vjp(grad: Tensor) -> Gradients:
            grad = grad.to(values.dtype)
            weights = grad.unsqueeze(-1) if layout is None else layout.stacked(grad)
            if states:
                state = states.pop()
            else:  # a graph that was kept: the gradient has the memory of the factor
                again = self._evaluated(order, batch).value.reshape(members)
                state = density.evaluate(again, residuals, True)[1]
                del again
            if not is_free:
                states.append(state)
            grad_matrix, columns = density.gradient(state, weights, is_free)
            del state
            gradients = matrix_vjp(grad_matrix.reshape(shape).to(dtype)) if tensors else []
            if residual.requires_grad:
                g = columns.squeeze(-2) if layout is None else layout.unstacked(columns)
                if order is not None:
                    g = torch.empty_like(g).scatter_(-1, order.expand(g.shape), g)
                gradients.append((residual, g.to(residual.dtype)))
            return gradients

        every = [*tensors, residual] if residual.requires_grad else tensors
        return Evaluated(value.to(residual.dtype), every, vjp)

    def _evaluated(self, order: Tensor | None, batch: Size) -> Evaluated:
        """The matrix of points in an order; one for each of a batch if the order is of each."""
        matrix = self.matrix
        tensors = [matrix] if matrix.requires_grad else []
        in_data_order = Evaluated(matrix.detach(), tensors, lambda G: [(matrix, G)])
        if order is None:
            return in_data_order
        return _reordered(in_data_order, order, batch, is_free=matrix.is_cpu)

    def block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """From one inverse, for any number of blocks; each with a gradient of its own."""
        if len(blocks) == 1 and blocks[0].shape[-2] == 1:
            return self.held_out_log_density(residual, blocks).unsqueeze(-1)
        K = matrix_node(self._evaluated(None, self.shape[:-2]))
        L = safe_cholesky(K, checked=self.checked)
        alpha = torch.cholesky_solve(residual.to(L.dtype).unsqueeze(-1), L)
        Q = torch.cholesky_inverse(L) if L.requires_grad else inverse_of_factor(L, in_place=True)
        groups = [block.to(self.device, non_blocking=True) for block in blocks]
        values = [block_log_densities(Q, alpha, group, self.checked)[0] for group in groups]
        return torch.cat(values, dim=-2).squeeze(-1).to(residual.dtype)

    def leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """From L⁻¹ of the points themselves, which come last: of them K⁻¹ is L⁻ᵀ L⁻¹."""
        rows, count, K, ordered = rows.to(self.device), rows.shape[0], self.matrix, residual
        if count < self.shape[-1]:
            position = rows.new_zeros(self.shape[-1])
            position[rows] = torch.arange(1, count + 1, device=self.device)
            order = position.argsort(stable=True)
            K, ordered = permute(K, order), take(residual, order)
        L = safe_cholesky(K)
        z = torch.linalg.solve_triangular(L, ordered.to(L.dtype).unsqueeze(-1), upper=False)
        L, z = L[..., -count:, -count:], z[..., -count:, :]
        units = torch.eye(count, dtype=L.dtype, device=L.device)
        columns = torch.linalg.solve_triangular(L, units, upper=False)
        variance = 1 / columns.square().sum(-2)
        error = (columns.mT @ z).squeeze(-1) * variance
        if count == self.shape[-1]:
            variance, error = variance[..., rows], error[..., rows]
        mean = residual[..., rows] - error.to(residual.dtype)
        return mean, variance.to(residual.dtype).expand(mean.shape)

    def predictions(self, residual: Tensor, orders: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """By a factor for each order, whose whitened residuals are z: z_i L_ii and L_ii²."""
        K, errors, variances = matrix_node(self._evaluated(None, self.shape[:-2])), [], []
        for order in [None] if orders is None else orders.to(self.device):
            ordered = residual if order is None else take(residual, order)
            L = safe_cholesky(K if order is None else permute(K, order))
            z = torch.linalg.solve_triangular(L, ordered.to(L.dtype).unsqueeze(-1), upper=False)
            pivots = L.diagonal(dim1=-2, dim2=-1)
            errors.append((z.squeeze(-1) * pivots).to(residual.dtype))
            variances.append(pivots.square().to(residual.dtype).expand(errors[0].shape))
        return torch.stack(errors, dim=-2), torch.stack(variances, dim=-2)


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
    """

    def __init__(self, gram: Gram, points: Tensor, noise: Noise, shape: Size) -> None:
        self.gram, self.points, self.noise, self.checked = gram, points, noise, True
        self.shape, self.dtype, self.device = shape, points.dtype, points.device

    @cached_property
    def matrix(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The covariance as a matrix, differentiable."""
        return matrix_node(self._evaluated(None, self.shape[:-2]), self.dtype)

    def _evaluated(self, order: Tensor | None, batch: Size) -> Evaluated:
        """By the kernel of points in that order, or from the matrix where it has been formed."""
        if "matrix" in vars(self):
            return super()._evaluated(order, batch)
        if order is not None and order.ndim > 1:  # one kernel for all members that share it
            evaluated = self._evaluated(None, batch)
            return _reordered(evaluated, order, batch, is_free=evaluated.is_free)
        # n x d numbers are moved rather than n x n.
        points = self.points if order is None else self.points.index_select(-2, order)
        kernel = self.gram(points)
        if self.noise is None:
            return kernel
        matrix, tensors, kernel_vjp, is_free = kernel
        noise = Hyperparameter(self.noise, "noise", matrix.dtype)
        moves_noise = order is not None and noise.value.shape[-1] > 1
        variances = noise.value
        if moves_noise:
            variances = variances.index_select(-1, cast(Tensor, order))
        if not is_free or matrix.shape != self.shape:
            matrix = matrix.expand(self.shape).clone()
        matrix.diagonal(dim1=-2, dim2=-1).add_(variances)

        def vjp(G: Tensor) -> Gradients:
            gradients = kernel_vjp(G)
            grad_noise = G.diagonal(dim1=-2, dim2=-1)
            if moves_noise:
                index = cast(Tensor, order)
                grad_noise = torch.empty_like(grad_noise).index_copy_(-1, index, grad_noise)
            return gradients + noise.gradients(grad_noise)

        needed = [noise.tensor] if noise.tensor.requires_grad else []
        # A network may be another, with other features, when it is asked a second time. A GPU has
        # memory that is used again without being cleared.
        is_free = matrix.is_cpu and not self.gram.has_features
        return Evaluated(matrix, tensors + needed, vjp, is_free)


def _reordered(evaluated: Evaluated, order: Tensor, batch: Size, *, is_free: bool) -> Evaluated:
    """A matrix with its rows and columns in an order, ``(n,)`` or ``(*batch, n)``."""
    matrix, tensors, matrix_vjp, _ = evaluated
    shape, inverse = matrix.shape, order.argsort(-1)
    if order.ndim > 1:
        matrix = matrix.expand(*batch, *shape[-2:])

    def vjp(G: Tensor) -> Gradients:
        return matrix_vjp(permute(G, inverse).sum_to_size(shape))

    return Evaluated(permute(matrix, order), tensors, vjp, is_free)


class BatchLayout:
    """How a batch of residuals splits into covariances and the k residuals that share each.

    They share one in dimensions where the covariances' batch has size 1, or which it lacks. The
    batch of covariances that are there once is ``sizes``.
    """

    def __init__(self, covariances: Size, batch: Size) -> None:
        # As shapes are broadcast: missing leading dimensions have size one.
        padded = (1,) * (len(batch) - len(covariances)) + tuple(covariances)
        self._batch = batch
        self._shared = [i for i, size in enumerate(padded) if size < batch[i]]
        self._last = list(range(len(batch) - len(self._shared), len(batch)))
        self.sizes: list[int] = [size for i, size in enumerate(batch) if i not in self._shared]

    def stacked(self, values: Tensor) -> Tensor:
        """Numbers of each covariance's residuals, ``(*batch, ...)`` to ``(*sizes, k, ...)``."""
        event = values.shape[len(self._batch) :]
        return values.movedim(self._shared, self._last).reshape(*self.sizes, -1, *event)

    def unstacked(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`stacked`."""
        shared = [self._batch[i] for i in self._shared]
        values = values.reshape(*self.sizes, *shared, *values.shape[len(self.sizes) + 1 :])
        return values.movedim(self._last, self._shared)


@dataclass(frozen=True)
class _DensePredictor:
    """By the factor L and the whitened residuals, ``(*batch, n, 1)``."""

    factor: Tensor
    whitened: Tensor
    missing: Tensor | None

    def given(self, cross: Tensor, keep: bool = False) -> ConditionedBlock:
        """See :class:`~gpclml.linalg.Predictor`."""
        if self.missing is not None:
            cross = torch.where(self.missing.unsqueeze(-1), 0.0, cross)
        V = solve_lower(self.factor, cross)
        shift = (V.mT @ self.whitened).squeeze(-1)
        return ConditionedBlock(shift, V.square().sum(-2), V if keep else None)
