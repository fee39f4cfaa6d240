"""Log densities of residuals as functions of a covariance matrix, with gradients in closed form.

Of points that come last given the others, of each of several blocks given all points outside it,
and of each point given its predecessors. Many held-out blocks are read off one inverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from gpclml.linalg.matrices import (
    HALF_LOG_2PI,
    factor_and_whiten,
    inverse_of_factor,
    log_density_terms,
    permute,
    plus_product,
    rows_in_data_order,
    safe_cholesky,
    sandwich,
    sandwich_of_disjoint,
    symmetric_columns,
)

__all__ = [
    "BlockLogDensities",
    "ConditionalLogDensity",
    "LogDensity",
    "SequentialLogDensities",
    "State",
    "densities_of_group",
]

# Up to this held-out share, n x b triangular solves cost less than two inverses.
_SOLVE_UP_TO = 0.3


State = Sequence[Tensor]
"""What a gradient needs of an evaluation."""


class LogDensity(ABC):
    """Densities of residuals ``(*batch, k, n)`` that share covariances ``(*batch, n, n)``.

    Attributes:
        order: Order of the points in which they are computed, ``(n,)`` or ``(*batch, n)``; None for
            data order.
        event: Dimensions of the densities of one residual: none where there is one density.
        one_residual: Whether each covariance has one residual, k = 1.
    """

    order: Tensor | None
    event = 0
    one_residual = False

    def without_order(self) -> LogDensity:
        """The same of points that come in this order."""
        return replace(cast(Any, self), order=None)

    @abstractmethod
    def evaluate(
        self, covariance: Tensor, residuals: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, State]:
        """The densities, in the type of the factor, and what the gradient needs.

        Args:
            covariance: ``(*batch, n, n)``.
            residuals: ``(*batch, k, n)``.
            is_free: Whether the factor may be computed in the memory of the covariance.

        Raises:
            SingularError: That failed, and the covariance is gone.
        """

    @abstractmethod
    def gradient(
        self, state: State, weights: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the densities' weighted sum.

        Args:
            state: What the evaluation gave for it.
            weights: Of the shape and type of the densities.
            is_free: Whether it may be computed in the memory of the state.

        Returns:
            That with respect to the covariance, symmetric, and that with respect to the residuals.
        """


@dataclass(frozen=True)
class ConditionalLogDensity(LogDensity):
    """The joint log density of the points that come last, given those before them.

    Attributes:
        order: Of all points, ``(n,)`` or ``(*batch, n)``; None for data order.
        num_held_out: Number of points that are scored.
    """

    order: Tensor | None
    num_held_out: int
    factor_dtype: torch.dtype | None = None
    checked: bool = True

    def evaluate(
        self, covariance: Tensor, residuals: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, State]:
        """Densities ``(*batch, k)``."""
        L, z = factor_and_whiten(
            covariance, residuals, self.order, self.factor_dtype, self.checked, is_free
        )
        return log_density_terms(L, z, self.num_held_out).sum(-2), (L, z)

    def gradient(
        self, state: State, weights: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, Tensor]:
        """By n x b triangular solves, or by two inverses where many points are held out."""
        L, z = state
        weights = weights.unsqueeze(-2)  # (*batch, 1, k)
        few = self.num_held_out <= _SOLVE_UP_TO * z.shape[-2]
        of_covariance = _gradient_by_solve if few else _gradient_by_inverse
        gradient, u = of_covariance(L, z, self.order, self.num_held_out, weights, is_free)
        return gradient, (u * -weights).mT


def _gradient_by_solve(L, z, order, b, grad, is_free):
    n, k = z.shape[-2:]
    last = torch.eye(n, dtype=z.dtype, device=z.device)[:, n - b :].expand(*z.shape[:-1], b)
    tail = torch.cat([torch.zeros_like(z[..., : n - b, :]), z[..., n - b :, :]], dim=-2)
    right = torch.cat([last, tail, z], dim=-1)
    solved = rows_in_data_order(torch.linalg.solve_triangular(L.mT, right, upper=True), order)
    W, u, alpha = solved.split([b, k, k], dim=-1)
    # -uuᵀ/2 + (uαᵀ + αuᵀ)/2 as one symmetric term a residual.
    left, right = symmetric_columns(u, alpha - 0.5 * u, grad)
    left = torch.cat([W, left], dim=-1)
    right = torch.cat([-0.5 * grad.sum(-1, keepdim=True) * W, right], dim=-1)
    return torch.matmul(left, right.mT, out=L.mT if is_free else None), u


def _gradient_by_inverse(L, z, order, b, grad, is_free):
    # W Wᵀ is the inverse of K less the inverse of the block that is conditioned on.
    n, k = z.shape[-2:]
    m = n - b
    scale = (grad if k == 1 else grad.sum(-1, keepdim=True)) * -0.5
    if m == 0:  # u is alpha
        alpha = torch.linalg.solve_triangular(L.mT, z, upper=True)
        gradient = inverse_of_factor(L, in_place=is_free).mul_(scale)
        return plus_product(gradient, alpha * (0.5 * grad), alpha), alpha
    tail = torch.cat([torch.zeros_like(z[..., :m, :]), z[..., m:, :]], dim=-2)
    solved = torch.linalg.solve_triangular(L.mT, torch.cat([tail, z], dim=-1), upper=True)
    u, alpha = solved.split(k, dim=-1)
    left, right = symmetric_columns(u, alpha - 0.5 * u, grad)
    of_given = inverse_of_factor(L[..., :m, :m])
    gradient = inverse_of_factor(L, in_place=is_free)
    gradient[..., :m, :m] -= of_given
    gradient = plus_product(gradient.mul_(scale), left, right)
    if order is not None:
        gradient = permute(gradient, order.argsort(-1))
    return gradient, rows_in_data_order(u, order)


@dataclass(frozen=True)
class SequentialLogDensities(LogDensity):
    """The log density of each point given those before it.

    Attributes:
        order: In which the points arrive, ``(n,)``; None for data order.
    """

    order: Tensor | None
    factor_dtype: torch.dtype | None = None
    event = 1
    one_residual = True

    def evaluate(
        self, covariance: Tensor, residuals: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, State]:
        """The terms, ``(*batch, 1, n)``."""
        L, z = factor_and_whiten(covariance, residuals, self.order, self.factor_dtype)
        return log_density_terms(L, z, z.shape[-2]).mT, (L, z)

    def gradient(
        self, state: State, weights: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, Tensor]:
        """By two triangular solves with n columns."""
        L, z = state
        n, weights = z.shape[-2], weights.squeeze(-2)
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
class BlockLogDensities(LogDensity):
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

    def evaluate(
        self, covariance: Tensor, residuals: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, State]:
        """Densities of r residuals a covariance, ``(*batch, r, k_1 + k_2 + ...)``."""
        L = safe_cholesky(covariance, self.factor_dtype, checked=self.checked, in_place=is_free)
        alpha = torch.cholesky_solve(residuals.mT.to(L.dtype), L)  # (*batch, n, r)
        Q = inverse_of_factor(L, in_place=L.is_cpu)
        values, factors, sources = zip(
            *[densities_of_group(Q, alpha, group, self.checked) for group in self.blocks],
            strict=True,
        )
        return torch.cat(values, dim=-2).mT, (Q, alpha, *factors, *sources)

    def gradient(
        self, state: State, weights: Tensor, *, is_free: bool = False
    ) -> tuple[Tensor, Tensor]:
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


def densities_of_group(
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
    return half_log_det - 0.5 * quadratic - group.shape[-1] * HALF_LOG_2PI, L_Q, s
