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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, NotConvergedError, UnsupportedError
from gpclml.linalg.conjugate_gradients import (
    ConjugateGradients,
    Solution,
    check_finite,
    column_norms,
)
from gpclml.linalg.covariance import Covariance
from gpclml.linalg.covariance_products import NoisyCovariance
from gpclml.linalg.covariance_solver import CovarianceSolver, IterativeConditioning, ResidualBound
from gpclml.linalg.matrices import safe_cholesky

__all__ = ["IterativeCovariance", "IterativeReport", "iterative_conditional_log_density"]

_VECTORS = 12  # arrays of n times the size of a block at the peak of a step
_MARGIN = 0.7  # of the error bound, for residuals that are computed anew
_TIGHTEST = 0.01  # of the residuals, at once: bounds may be far above errors


@dataclass(frozen=True)
class IterativeReport:
    """How well a block's density was solved for.

    Attributes:
        iterations: Products with the covariance.
        residual: Largest relative residual of a column, computed afterwards.
        error_bound: Upper bound of the error of the log density in nats per held-out point, the
            largest of a batch, for the covariance as its kernel evaluates it; with an allowance for
            the rounding of products. Infinite if the residuals are too large for a bound, or the
            noise is below the rounding of the covariance; None if the noise is not independent.
    """

    iterations: int
    residual: float
    error_bound: float | None


class IterativeCovariance(Covariance):
    """A covariance that is known by its products with vectors, and solved by conjugate gradients.

    Args:
        products: Multiplies by the covariance, ``(*batch, n, n)``.
        settings: Tolerance, iterations, preconditioner, and what happens on failure.

    Attributes:
        reports: How well each block of the last density was solved for, an
            :class:`IterativeReport` each.
    """

    @checked
    def __init__(self, products: NoisyCovariance, settings: ConjugateGradients) -> None:
        self.products = products
        self.settings = settings
        self.reports: tuple[IterativeReport, ...] = ()

    @property
    def shape(self) -> Size:
        """That of the products."""
        return self.products.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the products."""
        return self.products.dtype

    @property
    def device(self) -> torch.device:
        """That of the products."""
        return self.products.device

    @classmethod
    def memory(cls, shape: Size, block: int) -> int:
        """A dozen arrays of n times the size of the block and one more."""
        return _VECTORS * shape[:-1].numel() * (block + 1)

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> IterativeConditioning:
        """By one solve that is kept, and one for each value that is predicted."""
        given = self.products if missing is None else replace(self.products, missing=missing)
        return IterativeConditioning(given, residual, self.settings)

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        value, report = self._density(residual, held_out)
        self.reports = (report,)
        return value

    def _block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        done = [self._density(residual, block) for group in blocks for block in group]
        self.reports = tuple(report for _, report in done)
        return torch.stack([value for value, _ in done], dim=-1)

    def _density(self, residual: Tensor, held_out: Tensor) -> tuple[Tensor, IterativeReport]:
        n, b = residual.shape[-1], held_out.shape[-1]
        if held_out.ndim > 1:
            raise UnsupportedError(
                "conditioning", "held-out points of its own in each batch member",
                "the same in all, for conjugate gradients", "Use solver='cholesky'.",
            )  # fmt: skip
        if b == n:
            raise ArgumentError(
                "held_out", f"all {n} points", "at least one point left to condition on",
                "Hold out fewer points, or use solver='cholesky' for the log marginal likelihood.",
            )  # fmt: skip
        held_out = held_out.to(self.device)
        solve = _Solve(self.products, residual.detach(), held_out, self.settings)
        directions = solve.directions()
        product = self.products.matmul(directions)
        left = directions[..., :b].double()
        spread = left.mT @ product[..., :b].double()
        rest = residual - product[..., b]
        error = (left.mT @ rest.double().unsqueeze(-1)).squeeze(-1)
        factor, definite = solve.factor(0.5 * (spread + spread.mT))
        z = torch.linalg.solve_triangular(factor, error.unsqueeze(-1), upper=False).squeeze(-1)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value = -0.5 * z.square().sum(-1) - log_det - 0.5 * b * math.log(2 * math.pi)
        with torch.no_grad():
            unsolved = torch.cat([-product[..., :b], rest.unsqueeze(-1)], -1)
            unsolved = unsolved.masked_fill_(solve.gone, 0.0)
            report = solve.report(unsolved, directions, factor, z, definite)
        self.settings.check(report.residual, report.iterations, report.error_bound)
        return value.to(residual.dtype), report


@checked(residual="float (*batch, n)", held_out="index (b,)")
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
        solver: Tolerance, iterations, preconditioner; ``ConjugateGradients()`` if None.

    Returns:
        The log density, ``(*batch,)``, differentiable once in covariance and residual; and how
        well it was solved for.

    Raises:
        ArgumentError: If the indices are unusable, or no point is conditioned on.
        ShapeError: If the shapes do not fit one another.
        NonFiniteError: If the covariance, a residual or the density is not finite.
        NotConvergedError: If the tolerance is not reached, unless the solver only warns.
        NotPSDError: If the conditional covariance is not positive definite even with jitter.

    Note:
        2 n² (b + 1) floating-point operations per iteration, and about four times that for the
        gradient. Memory: about ten n x b arrays, a chunk of rows, and what the solver keeps.
    """
    by_products = IterativeCovariance(covariance, solver or ConjugateGradients())
    value = by_products.conditional_log_density(residual, held_out)
    return value, by_products.reports[0]


class _Solve:
    """The systems of one block and how well they are solved."""

    @torch.no_grad()
    def __init__(
        self,
        covariance: NoisyCovariance,
        residual: Tensor,
        held_out: Tensor,
        solver: ConjugateGradients,
    ) -> None:
        n, b = residual.shape[-1], held_out.shape[-1]
        self._settings, self._held_out = solver, held_out
        gone = torch.zeros(n, dtype=torch.bool, device=held_out.device)
        gone[held_out] = True
        self.gone = gone.unsqueeze(-1)
        one = torch.zeros(n, b, dtype=covariance.dtype, device=covariance.device)
        one[held_out, torch.arange(b, device=held_out.device)] = 1
        self._one = one.expand(*residual.shape[:-1], n, b)
        right = torch.cat([covariance.fixed_matmul(self._one), residual.unsqueeze(-1)], dim=-1)
        self._of_held_out = right[..., held_out, :].double()
        self._right = right.masked_fill_(self.gone, 0.0)
        self._norms = column_norms(right).clamp_min(torch.finfo(right.dtype).tiny)
        missing = gone if covariance.missing is None else gone | covariance.missing
        self._solver = CovarianceSolver(replace(covariance, missing=missing), solver)
        self._iterations = 0

    @torch.no_grad()
    def directions(self) -> Tensor:
        """T and the solved residual side by side, ``(*batch, n, b + 1)``."""
        solver = self._settings
        goal = math.inf if solver.max_error is None else _MARGIN * solver.max_error
        if solver.max_error is not None and solver.on_failure == "error":
            self._solver.check_noise()  # a solve would not help
        solution = self._solver.solution(self._right)
        bound, floor = self._bound_of(solution)
        most = solver.max_iterations - 1
        while self._solver.bounds_errors and solution.iterations < most:
            goal = max(goal, 2 * floor)  # what rounding leaves cannot be solved away
            if bound <= goal:
                break
            worst = float((column_norms(solution.unsolved) / self._norms).max())
            tighter = worst * max(_TIGHTEST, (goal / bound) ** 0.5)
            before = solution.iterations
            solution = self._solver.solution(self._right, tighter, solution)
            if solution.iterations == before:  # no column can be improved: the bound stays
                break
            last, (bound, floor) = bound, self._bound_of(solution)
            if last <= bound < math.inf:  # at the limit of rounding
                break
        self._iterations = solution.iterations
        directions = solution.values.neg()
        b = self._one.shape[-1]
        directions[..., :b] += self._one
        directions[..., b].neg_()
        return directions

    def factor(self, spread: Tensor) -> tuple[Tensor, bool]:
        """The Cholesky factor of S, and whether S is positive definite without jitter.

        In exact arithmetic S is positive definite for any error of the solves; rounding may change
        that.
        """
        factor, info = torch.linalg.cholesky_ex(spread)
        definite = not bool(info.any())
        if definite:
            return factor, True
        check_finite(spread, "conditional covariances")
        if self._settings.on_failure == "error":
            raise NotConvergedError(
                "solver",
                f"a conditional covariance of {len(self._held_out)} held-out points that is not "
                f"positive definite after {self._iterations} iterations in "
                f"{self._right.dtype}",
                "one that is",
                "Compute in float64, raise the noise floor of the likelihood, or use "
                "solver='cholesky' where memory allows.",
            )
        return safe_cholesky(spread), False

    def report(
        self, unsolved: Tensor, directions: Tensor, factor: Tensor, z: Tensor, definite: bool
    ) -> IterativeReport:
        """How well the systems are solved, by residuals computed anew."""
        worst = float((column_norms(unsolved) / self._norms).max())
        values = directions.clone()
        values[..., : self._one.shape[-1]] -= self._one
        bound = self._solver.bound(unsolved, values)
        if bound is None:
            return IterativeReport(self._iterations, worst, None)
        error, _ = _density_error(bound, values, factor, z, self._solver.rounding)
        # A jittered covariance has another density.
        return IterativeReport(self._iterations, worst, error if definite else math.inf)

    def _bound_of(self, solution: Solution) -> tuple[float, float]:
        """The bound at a solution, and the part of it that no further solve reduces.

        S and e need no further product with the covariance. Zero where nothing bounds the error.
        """
        bound = self._solver.bound(solution.unsolved, solution.values)
        if bound is None:
            return 0.0, 0.0
        b = self._held_out.shape[-1]
        values, unsolved = solution.values.double(), solution.unsolved.double()
        V, R, right = values[..., :b], unsolved[..., :b], self._right.double()
        spread = self._of_held_out[..., :b] - right[..., :b].mT @ V - V.mT @ R
        factor, info = torch.linalg.cholesky_ex(0.5 * (spread + spread.mT))
        if bool(info.any()):
            return math.inf, 0.0
        error = self._of_held_out[..., b:] - right[..., :b].mT @ values[..., b:]
        error = error - V.mT @ unsolved[..., b:]
        z = torch.linalg.solve_triangular(factor, error, upper=False).squeeze(-1)
        return _density_error(bound, solution.values, factor, z, self._solver.rounding)


def _density_error(
    bound: ResidualBound, values: Tensor, factor: Tensor, z: Tensor, rounding: Tensor
) -> tuple[float, float]:
    r"""Bound of the density's error from rounding and the residuals R of V and :math:`\rho` of a.

    With :math:`G \succeq R^\top K^{-1} R`, :math:`C = S^{-1/2} G S^{-\top/2}` and
    :math:`c = tr\, C < 1`, the log-determinant is off by at most c / (1 - c), and e by a vector of
    length at most :math:`\sqrt{c\, \rho^\top K^{-1} \rho}` in the metric of S. A product of K with
    a vector v is allowed a rounding of :math:`\epsilon \max_i K_{ii} |v|` along any direction, with
    :math:`\epsilon` twice the unit roundoff of the working type; S and e are such products.

    Args:
        bound: Of R and rho, ``(*batch, m, b + 1)``.
        values: V and a, ``(*batch, n, b + 1)``.
        factor: The Cholesky factor of S, ``(*batch, b, b)``.
        z: :math:`S^{-1/2} e`, ``(*batch, b)``.
        rounding: :math:`\epsilon \max_i K_{ii}`, ``(*batch, 1)``.

    Returns:
        Nats per held-out point, the largest of a batch; and the same where R and rho are zero.
    """
    b, rounding = z.shape[-1], rounding.squeeze(-1)
    inverse = torch.linalg.inv(factor)  # S^(-1/2), b x b
    at_z = (inverse.mT @ z.unsqueeze(-1)).squeeze(-1)
    V, length = values[..., :b].double(), values[..., b].double().norm(dim=-1)
    squares = V.mT @ V + torch.eye(b, dtype=V.dtype, device=V.device)
    of_spread, of_form = rounding * _trace(inverse, squares), rounding * _form(at_z, squares)
    of_shift = rounding * length * _trace(inverse, squares).sqrt()
    of_product = rounding * length * _form(at_z, squares).sqrt()
    slack = bound.slack[..., :b]
    root_c = (inverse * slack.unsqueeze(-2)).norm(dim=(-2, -1))
    along = (at_z.abs() * slack).sum(-1)

    def error(root_c: Tensor, along: Tensor, rho: Tensor) -> float:
        c, shift = root_c.square(), root_c * rho
        first = shift * z.norm(dim=-1) + of_product
        total = c / (1 - c) + (of_spread + of_form) / (1 - of_spread) + 2 * first
        shift = shift + of_shift
        total = total + shift.square() + (along + root_c * shift).square() / (1 - c)
        return float(torch.where((c < 1) & (of_spread < 1), 0.5 * total / b, math.inf).max())

    gram = bound.root[..., :b].mT @ bound.root[..., :b]
    return (
        error(
            root_c + _trace(inverse, gram).sqrt(),
            along + _form(at_z, gram).sqrt(),
            bound.errors[..., b],
        ),
        error(root_c, along, bound.slack[..., b]),
    )


def _trace(inverse: Tensor, gram: Tensor) -> Tensor:
    """tr(S^(-1/2) G S^(-T/2)), ``(*batch,)``, at least zero."""
    return ((inverse @ gram) * inverse).sum((-2, -1)).clamp_min(0.0)


def _form(vector: Tensor, gram: Tensor) -> Tensor:
    """The quadratic form of a vector, ``(*batch,)``, at least zero."""
    return ((gram @ vector.unsqueeze(-1)).squeeze(-1) * vector).sum(-1).clamp_min(0.0)
