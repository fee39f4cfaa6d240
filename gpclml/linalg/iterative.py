r"""The conditional log density of a held-out block by conjugate gradients.

With A the points conditioned on and B the block, solve :math:`K_{AA} V = K_{AB}` and
:math:`K_{AA} a = r_A`, and put them to all points: :math:`T = [-V; I]`, :math:`\bar a = [a; 0]`.
Then

.. math:: S = T^\top K T, \quad e = T^\top (r - K \bar a), \quad
    \log p(r_B \mid r_A) = \log N(e; 0, S).

With exact solves S is the conditional covariance and e the conditional residual, and their
derivatives by V and a vanish: errors of V and a enter both in the second order only, and the
gradient of this expression with V and a held fixed is that of the density. So one differentiable
product of K with b + 1 vectors is all there is to differentiate, and the residuals of the solves
are read off it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.errors import ArgumentError
from gpclml.linalg._checks import check_indices, check_residual
from gpclml.linalg.cholesky import safe_cholesky
from gpclml.linalg.conjugate_gradients import ConjugateGradients, column_norms
from gpclml.linalg.covariance_products import NoisyCovariance
from gpclml.linalg.preconditioner import woodbury_preconditioner

__all__ = ["IterativeReport", "iterative_conditional_log_density"]


@dataclass(frozen=True)
class IterativeReport:
    """How well a block's density was solved for.

    Attributes:
        iterations: Products with the covariance.
        residual: Largest relative residual of a column, computed afterwards.
        error_bound: Upper bound of the error of the log density in nats per held-out point, the
            largest of a batch; from the residuals and the least noise, which no eigenvalue of the
            covariance is below, in exact arithmetic. Infinite where the residuals are too large to
            say, or the noise is not independent.
    """

    iterations: int
    residual: float
    error_bound: float


def iterative_conditional_log_density(
    covariance: NoisyCovariance,
    residual: Tensor,  # shape: (*batch, n)
    held_out: Tensor,  # shape: (b,)
    solver: ConjugateGradients | None = None,
) -> tuple[Tensor, IterativeReport]:
    """The joint log density of held-out residuals given all others, in nats.

    Args:
        covariance: Of the observations, by its products, ``(*batch, n, n)``.
        residual: Observations minus their prior mean, ``(*batch, n)``; batches broadcast.
        held_out: Indices of the b points that are scored, ``1 <= b < n``.
        solver: Tolerance, iterations, preconditioner.

    Returns:
        The log density, ``(*batch,)``, differentiable once in covariance and residual; and how
        well it was solved for.

    Raises:
        ArgumentError: If the indices are unusable, or no point is conditioned on.
        ShapeError: If the shapes do not fit one another.
        NotConvergedError: If the tolerance is not reached, unless the solver only warns.
        NotPSDError: If the conditional covariance is not positive definite even with jitter.

    Note:
        2 n² (b + 1) floating-point operations an iteration, and about four times that for the
        gradient; memory for about ten n x b arrays and a chunk of rows, beside what the solver
        keeps.
    """
    solver = solver or ConjugateGradients()
    batch = torch.Size(check_residual(covariance.shape, residual))
    n, b = residual.shape[-1], held_out.shape[-1]
    held_out = check_indices("held_out", held_out, n).to(covariance.device)
    if b == n:
        raise ArgumentError(
            "held_out", f"all {n} points", "at least one point left to condition on",
            "Hold out fewer points, or use solver='cholesky' for the log marginal likelihood.",
        )  # fmt: skip
    residual = residual.expand(*batch, n)
    directions, norms, iterations = _solve(covariance, residual.detach(), held_out, solver)
    product = covariance.matmul(directions)
    left = directions[..., :b].double()
    spread = left.mT @ product[..., :b].double()
    rest = residual - product[..., b]
    error = (left.mT @ rest.double().unsqueeze(-1)).squeeze(-1)
    factor = safe_cholesky(0.5 * (spread + spread.mT))
    z = torch.linalg.solve_triangular(factor, error.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value = -0.5 * z.square().sum(-1) - log_det - 0.5 * b * math.log(2 * math.pi)
    with torch.no_grad():
        unsolved = torch.cat([product[..., :b], rest.unsqueeze(-1)], -1)
        unsolved.masked_fill_(_is_held_out(held_out, n).unsqueeze(-1), 0.0)
        worst = float((column_norms(unsolved) / norms).max())
        bound = _error_bound(covariance, unsolved.double(), factor, z)
    solver.check(worst, iterations)
    return value.to(residual.dtype), IterativeReport(iterations, worst, bound)


def _is_held_out(held_out: Tensor, n: int) -> Tensor:
    mask = torch.zeros(n, dtype=torch.bool, device=held_out.device)
    mask[held_out] = True
    return mask


@torch.no_grad()
def _solve(
    covariance: NoisyCovariance, residual: Tensor, held_out: Tensor, solver: ConjugateGradients
) -> tuple[Tensor, Tensor, int]:
    """T and the solved residual side by side, norms of the right-hand sides, the iterations."""
    n, b = residual.shape[-1], held_out.shape[-1]
    gone = _is_held_out(held_out, n)
    one = torch.zeros(n, b, dtype=covariance.dtype, device=covariance.device)
    one[held_out, torch.arange(b, device=held_out.device)] = 1
    one = one.expand(*residual.shape[:-1], n, b)
    right = torch.cat([covariance.fixed_matmul(one), residual.unsqueeze(-1)], dim=-1)
    right.masked_fill_(gone.unsqueeze(-1), 0.0)
    solution = solver.solve(
        lambda vectors: covariance.fixed_matmul(vectors).masked_fill_(gone.unsqueeze(-1), 0.0),
        right,
        woodbury_preconditioner(covariance, ~gone, solver.preconditioner_rank),
    )
    directions = solution.values
    directions[..., :b] = one - directions[..., :b]
    norms = column_norms(right).clamp_min(torch.finfo(right.dtype).tiny)
    return directions, norms, solution.iterations


def _error_bound(covariance: NoisyCovariance, unsolved: Tensor, factor: Tensor, z: Tensor) -> float:
    r"""What the residuals R of V and :math:`\rho` of a can do to the density at most.

    With :math:`C = S^{-1/2} R^\top R S^{-\top/2} / \sigma^2` and :math:`c = tr\, C < 1`, the
    log-determinant is off by at most c / (1 - c), and e by a vector of length at most
    :math:`\sqrt{c}\, |\rho| / \sigma` in the metric of S.
    """
    if covariance.noise is None:
        return math.inf
    noise = covariance.noise.double()
    if covariance.missing is not None:
        noise = torch.where(covariance.missing, 1.0, noise)
    deviation = noise.amin(-1).sqrt()
    b = z.shape[-1]
    white = torch.linalg.solve_triangular(factor, unsolved[..., :b].mT, upper=False)
    c = white.square().sum((-2, -1)) / deviation.square()
    along = (white.mT @ z.unsqueeze(-1)).squeeze(-1).norm(dim=-1) / deviation
    shift = c.sqrt() * unsolved[..., b].norm(dim=-1) / deviation
    bound = c / (1 - c) + shift * (2 * z.norm(dim=-1) + shift)
    bound = 0.5 * (bound + (along + c.sqrt() * shift).square() / (1 - c)) / b
    return float(torch.where(c < 1, bound, math.inf).max())
