r"""Log densities of residuals under dense covariances, with gradients in closed form.

With :math:`K = L L^\top` and :math:`z = L^{-1} r`, the density of one point given its predecessors
is :math:`\log p(r_i \mid r_{<i}) = -z_i^2/2 - \log L_{ii} - \tfrac12\log 2\pi`. The sum over all
points is the log marginal likelihood; the sum over the last points is their joint log density
conditioned on the first ones. Many held-out blocks are read off one inverse.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from gpclml.linalg.matrices import (
    permute,
    refuse_double_backward,
    rows_in_data_order,
    safe_cholesky,
    sandwich,
    sandwich_of_disjoint,
    symmetric_columns,
    take_rows,
)

__all__ = [
    "BlockLogDensities",
    "ClosedForm",
    "ConditionalLogDensity",
    "SequentialLogDensities",
    "differentiable",
    "factor_and_whiten",
    "inverse_of_factor",
]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# Up to this held-out share, n x b triangular solves cost less than two inverses.
_SOLVE_UP_TO = 0.3
_UNDIVIDED, _UNDIVIDED_ON_GPU = 128, 1024  # least rows of a half of an inverse

State = Sequence[Tensor]
"""What a gradient needs of an evaluation."""


class ClosedForm(ABC):
    """Densities of residuals ``(*batch, k, n)`` that share covariances ``(*batch, n, n)``.

    Attributes:
        order: Order of the points in which they are computed, ``(n,)``; None for data order.
        event: Dimensions of the densities of one residual: none where there is one density.
    """

    order: Tensor | None
    event = 0

    @property
    def for_lapack(self) -> Any:
        """The held-out points as :mod:`gpclml.linalg.lapack` takes them; None if it cannot."""
        return None

    def of_ordered(self) -> ClosedForm:
        """The same of points that come in this order."""
        return replace(cast(Any, self), order=None)

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


def factor_and_whiten(
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


def inverse_of_factor(L: Tensor) -> Tensor:
    """The inverse of ``L @ L.mT``, ``(*batch, n, n)``.

    A large one is computed by halves, which takes 5/6 n³ operations, mostly of products. On a GPU
    this is faster than ``torch.cholesky_inverse``; on a CPU it does not slow down as that does
    where several threads share the cores with other programs. Many small ones are computed on a GPU
    by triangular solves, since ``torch.cholesky_inverse`` of a batch cannot be in a CUDA graph.
    """
    if L.shape[-1] == 1:
        return L.square().reciprocal()
    if L.ndim > 2 and L.device.type != "cpu" and L.shape[-1] < _UNDIVIDED_ON_GPU:
        one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand(L.shape)
        of_factor = torch.linalg.solve_triangular(L, one, upper=False)
        return of_factor.mT @ of_factor
    undivided = _UNDIVIDED if L.device.type == "cpu" else _UNDIVIDED_ON_GPU
    if L.shape[-1] < 2 * undivided:
        return torch.cholesky_inverse(L)
    inverse = torch.empty_like(L)
    _fill_by_halves(inverse, L, undivided)
    return inverse


def _fill_by_halves(inverse: Tensor, L: Tensor, undivided: int) -> None:
    """With A, B and C of the factor, S = (C Cᵀ)⁻¹ and Y = B A⁻¹: S, -S Y and (A Aᵀ)⁻¹ + Yᵀ S Y."""
    n = L.shape[-1]
    if n < 2 * undivided:
        inverse.copy_(torch.cholesky_inverse(L))
        return
    h = n // 2
    first, last = inverse[..., :h, :h], inverse[..., h:, h:]
    _fill_by_halves(first, L[..., :h, :h], undivided)
    _fill_by_halves(last, L[..., h:, h:], undivided)
    Y = torch.linalg.solve_triangular(L[..., :h, :h], L[..., h:, :h], upper=False, left=False)
    cross = last @ Y
    first.add_(Y.mT @ cross)
    cross.neg_()
    inverse[..., h:, :h] = cross
    inverse[..., :h, h:] = cross.mT


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

    @property
    def for_lapack(self) -> int | None:
        """Their number."""
        return None if self.factor_dtype == torch.float32 else self.num_held_out

    def evaluate(self, covariance: Tensor, residuals: Tensor) -> tuple[Tensor, State]:
        """Densities ``(*batch, k)``."""
        L, z = factor_and_whiten(covariance, residuals, self.order, self.factor_dtype, self.checked)
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
        L, z = factor_and_whiten(covariance, residuals, self.order, self.factor_dtype)
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
    order: Tensor | None = field(default=None, init=False)
    event = 1

    @cached_property
    def for_lapack(self) -> list[numpy.ndarray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Their indices."""
        if self.factor_dtype == torch.float32 or self.blocks[0].device.type != "cpu":
            return None
        return [group.numpy() for group in self.blocks]

    def evaluate(self, covariance: Tensor, residuals: Tensor) -> tuple[Tensor, State]:
        """Densities of r residuals a covariance, ``(*batch, r, k_1 + k_2 + ...)``."""
        L = safe_cholesky(covariance, self.factor_dtype, checked=self.checked)
        alpha = torch.cholesky_solve(residuals.mT.to(L.dtype), L)  # (*batch, n, r)
        Q = inverse_of_factor(L)
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
            inverse = weight.sum(-1, keepdim=True) * inverse_of_factor(L_Q)
            middles.append(((weight * s) @ s.mT + inverse).to(Q.dtype))
            weighted = (weight * s).flatten(-3, -2).to(Q.dtype)  # (*batch, k b, r)
            source.scatter_add_(-2, group.reshape(-1, 1).expand(weighted.shape), weighted)
        product = sandwich_of_disjoint if self.disjoint else sandwich
        gradient = product(Q, middles, self.blocks).mul_(-0.5)
        u = Q @ source
        left = torch.cat([u, alpha], dim=-1)
        right = 0.5 * torch.cat([alpha, u], dim=-1)
        return gradient.add_(left @ right.mT), -u.mT


def _solve_many(L: Tensor, right: Tensor) -> Tensor:
    """``(L @ L.mT)⁻¹ right`` of many small factors."""
    if L.device.type == "cpu":
        return torch.cholesky_solve(right, L)
    half = torch.linalg.solve_triangular(L, right, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True)


def _densities_of_group(
    Q: Tensor, alpha: Tensor, group: Tensor, checked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities (*batch, k, r), factors of Q_BB (*batch, k, b, b), and s (*batch, k, b, r)."""
    # The blocks are small: float64 costs little and keeps their determinants accurate.
    single = group.shape[-1] == 1
    if single:
        Q_BB = Q.diagonal(dim1=-2, dim2=-1)[..., group].unsqueeze(-1).double()
    else:
        Q_BB = Q[..., group.unsqueeze(-1), group.unsqueeze(-2)].double()
    alpha_B = alpha[..., group, :].double()
    L_Q = safe_cholesky(Q_BB, checked=checked)
    # Thousands of single points would be solved for one by one on a GPU.
    s = alpha_B / L_Q.square() if single else _solve_many(L_Q, alpha_B)
    quadratic = (alpha_B * s).sum(-2)
    half_log_det = L_Q.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    return half_log_det - 0.5 * quadratic - group.shape[-1] * _HALF_LOG_2PI, L_Q, s
