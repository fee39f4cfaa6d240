"""Log densities of each point given its predecessors, and of several held-out blocks.

Their gradients are in closed form. Many held-out blocks are read off one inverse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy
import torch
from torch import Tensor

from gpclml.linalg.covariance import ClosedForm, State
from gpclml.linalg.matrices import (
    HALF_LOG_2PI,
    factor_and_whiten,
    inverse_of_factor,
    log_density_terms,
    permute,
    rows_in_data_order,
    safe_cholesky,
    sandwich,
    sandwich_of_disjoint,
    symmetric_columns,
)

__all__ = ["BlockLogDensities", "SequentialLogDensities", "densities_of_group"]


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
        return log_density_terms(L, z).squeeze(-1), (L, z)

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
            *[densities_of_group(Q, alpha, group, self.checked) for group in self.blocks],
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
