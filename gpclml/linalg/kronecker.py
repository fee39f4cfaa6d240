r"""Covariances of several tasks at the same points, by matrices of the points alone.

The covariance of all tasks at all points is :math:`K \otimes C + I \otimes D`, with the tasks of
a point next to each other and D diagonal. With :math:`D^{-1/2} C D^{-1/2} = U \Lambda U^\top` and
:math:`B = D^{-1/2} U`, the columns of :math:`R B` are independent, R being the residuals
``(n, t)``, and column j has covariance :math:`S_j = \lambda_j K + I`. Points are held out with all
their tasks, so densities are sums over columns, less :math:`\tfrac12 \log |D|` a point: t
factorizations of n x n matrices in place of one of n t x n t.

With :math:`Q_j = S_j^{-1}`, :math:`\alpha_j = Q_j r_j`, :math:`u_j = Q_{j,:B} Q_{j,BB}^{-1}
\alpha_{j,B}` and :math:`T_j = Q_{j,:B} Q_{j,BB}^{-1} Q_{j,B:}`, summed over the held-out blocks B,
the gradient by the covariance of columns j and l is

.. math:: H_{jl} = \tfrac12 (u_j \alpha_l^\top + \alpha_j u_l^\top - \sum_B u_{j}^B u_{l}^{B\top}
    - \delta_{jl} T_j),

from which those by K, C and D are :math:`\sum_j \lambda_j H_{jj}`, :math:`B E B^\top` with
:math:`E_{jl} = \langle H_{jl}, K \rangle`, and the same with the identity for K.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from gpclml.gram import Evaluated, Gradients
from gpclml.gram.autograd import fitted
from gpclml.linalg.dense import DenseCovariance, block_log_densities
from gpclml.linalg.matrices import HALF_LOG_2PI, inverse_of_factor, safe_cholesky


class _Rows(NamedTuple):
    """Held-out points with all their tasks, ``(k_i, b_i)`` a size; and whether they are all."""

    blocks: list[Tensor]
    all: bool


class KroneckerCovariance(DenseCovariance):
    """The covariance of t tasks at n points, of which a point's are next to each other.

    Log densities of points that are held out with all their tasks are computed from the factors.
    Whatever else is asked for is computed from the matrix, formed when it is needed.

    Args:
        points: Covariance of the points, ``(*batch, n, n)``.
        tasks: Covariance of the tasks, ``(*batch, t, t)``.
        noise: Noise variance of each task, positive, ``(*batch, t)``.
    """

    def __init__(self, points: Tensor, tasks: Tensor, noise: Tensor) -> None:
        self.arguments: tuple[Tensor, Tensor, Tensor] = (points, tasks, noise)
        self.checked = True
        batch = torch.broadcast_shapes(points.shape[:-2], tasks.shape[:-2], noise.shape[:-1])
        size = points.shape[-1] * tasks.shape[-1]
        self.shape, self.dtype = Size((*batch, size, size)), points.dtype
        self.device = points.device

    @cached_property
    def matrix(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The covariance as a matrix, differentiable."""
        points, tasks, noise = self.arguments
        product = points[..., :, None, :, None] * tasks[..., None, :, None, :]
        variances = noise.unsqueeze(-2).expand(*noise.shape[:-1], *product.shape[-2:])
        return product.flatten(-4, -3).flatten(-2) + torch.diag_embed(variances.flatten(-2))

    def density(self, blocks: Sequence[Tensor]) -> Any:
        """The blocks as points, if these have all their tasks; else as for a dense matrix."""
        rows = _rows(blocks, self.arguments[1].shape[-1])
        if rows is None:
            return super().density(blocks)
        every = len(rows) == 1 and rows[0].shape == (1, self.arguments[0].shape[-1])
        return _Rows([group.to(self.device, non_blocking=True) for group in rows], every)

    def log_density_and_vjp(self, residual: Tensor, density: Any) -> Evaluated:
        """With gradients with respect to both covariances, noise and residual."""
        if not isinstance(density, _Rows):
            return super().log_density_and_vjp(residual, density)
        tensors = (*self.arguments, residual)
        points, tasks, noise, residual = (tensor.detach() for tensor in tensors)
        n, t = points.shape[-1], tasks.shape[-1]
        # Small matrices are in double precision, and so is all else where the factors will be.
        weight = noise.double().rsqrt()
        scaled = tasks * weight.unsqueeze(-1) * weight.unsqueeze(-2)
        share, U = torch.linalg.eigh(scaled)
        # Rounding may leave a rank-deficient covariance of tasks slightly indefinite.
        share = share.clamp_min(0.0)
        B = weight.unsqueeze(-1) * U
        S = share[..., None, None] * points.unsqueeze(-3)
        S.diagonal(dim1=-2, dim2=-1).add_(1.0)
        L = safe_cholesky(S.to(points.dtype), checked=self.checked)
        Q = inverse_of_factor(L)
        columns = (residual.unflatten(-1, (n, t)).double() @ B).mT.unsqueeze(-1).to(L.dtype)
        alpha = torch.cholesky_solve(columns, L)
        value: Any = 0.0
        T: Any = 0.0
        if density.all:
            count = n
            value = -0.5 * (columns * alpha).sum((-2, -1))
            value = value - L.diagonal(dim1=-2, dim2=-1).log().sum(-1) - n * HALF_LOG_2PI
            T, U_B = Q, alpha
        else:
            count, solved = 0, []
            for group in density.blocks:
                values, L_Q, s = block_log_densities(Q, alpha, group, self.checked)
                value = value + values.squeeze(-1).sum(-1)
                count += group.numel()
                rows = Q[..., group, :]  # (*batch, t, k, b, n)
                solved.append((rows.mT @ s.to(Q.dtype)).squeeze(-1).mT)
                root = torch.linalg.solve_triangular(L_Q.to(Q.dtype), rows, upper=False)
                root = root.flatten(-3, -2)
                T = T + root.mT @ root
            U_B = torch.cat(solved, -1)
        value = value.sum(-1) - 0.5 * count * noise.double().log().sum(-1)
        value = value.to(residual.dtype)

        @torch.no_grad()
        def vjp(grad: Tensor) -> Gradients:
            u = U_B.sum(-1, keepdim=True)
            K, lambdas, W = points.to(L.dtype).unsqueeze(-3), share.to(L.dtype), B.to(L.dtype)
            # H_jj of each column; those off the diagonal are needed as inner products alone.
            H = u @ alpha.mT
            H = 0.5 * (H + H.mT - U_B @ U_B.mT - T)

            def inner_products(left_u: Tensor, left_blocks: Tensor, trace: Tensor) -> Tensor:
                """Of all H with a matrix, from its products with u and with the blocks."""
                cross = left_u.squeeze(-1) @ alpha.squeeze(-1).mT
                products = left_blocks.flatten(-2) @ U_B.flatten(-2).mT
                E = 0.5 * (cross + cross.mT - products - torch.diag_embed(trace))
                return W @ E @ W.mT

            grad_noise = inner_products(u, U_B, T.diagonal(dim1=-2, dim2=-1).sum(-1))
            gradients = [
                (lambdas[..., None, None] * H).sum(-3),
                inner_products(K @ u, K @ U_B, (T * K).sum((-2, -1))),
                grad_noise.diagonal(dim1=-2, dim2=-1),
                -(u.squeeze(-1).mT @ W.mT).flatten(-2),
            ]
            return [
                (tensor, fitted(g * grad[(..., *(None,) * (g.ndim - grad.ndim))], tensor))
                for tensor, g in zip(tensors, gradients, strict=True) if tensor.requires_grad
            ]  # fmt: skip

        return Evaluated(value, [tensor for tensor in tensors if tensor.requires_grad], vjp)


def _rows(blocks: Sequence[Tensor], t: int) -> list[Tensor] | None:
    """Points whose tasks are the blocks, ``(k_i, b_i)``; None where some are without others."""
    rows = []
    for group in blocks:
        if group.ndim != 2 or group.shape[-1] % t:
            return None
        tasks = group.unflatten(-1, (-1, t))
        first = tasks[..., :1]
        # The tasks of a point are next to each other, from the first to the last.
        expected = first + torch.arange(t, device=group.device)
        if not torch.equal(tasks, expected) or bool((first % t).any()):
            return None
        rows.append(first.squeeze(-1) // t)
    return rows
