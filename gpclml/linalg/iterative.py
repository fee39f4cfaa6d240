r"""Conjugate gradients: the density of held-out blocks and predictions without a factorization.

linear_operator's ``linear_cg`` solves, preconditioned by a pivoted Cholesky factor, and is started
again from true residuals until these are small. What is computed from a solution depends on its
residuals in the second order only.

**Errors** are made of the norms :math:`(R_j^\top K^{-1} R_j)^{1/2}` of residuals R. With a pivoted
Cholesky factor L of the kernel and noise D, :math:`M = L L^\top + D \preceq K`, so
:math:`(R_j^\top M^{-1} R_j)^{1/2}` is an upper bound (Artemev, Burt and van der Wilk 2021). It
excludes rounding. Where the noise is lost in the rounding of K, bounds are infinite.

**The density of a block B given all other points, A.** Solve :math:`K_{AA} V = K_{AB}` and
:math:`K_{AA} a = r_A`, and extend to all points: :math:`T = [-V; I]`, :math:`\bar a = [a; 0]`. Then

.. math:: S = T^\top K T, \quad e = T^\top (r - K \bar a), \quad
    \log p(r_B \mid r_A) = \log N(e; 0, S).

The derivatives of S and e with respect to V and a vanish at exact solves. So the gradient of this
expression with V and a held fixed is that of the density, and one product of K with b + 1 vectors
is all there is to differentiate.

**Predictions.** With r the residuals of the observations, k their covariance with other values and
:math:`k_{**}` the prior covariance of those, solves :math:`K a = r - \rho` and :math:`K V = k - R`
give

.. math::
    \mu = k^\top a + V^\top \rho, \qquad
    C = k_{**} - k^\top V - V^\top R = k_{**} - 2 k^\top V + V^\top K V.

They differ from the exact ones by :math:`-R^\top K^{-1} \rho` and :math:`R^\top K^{-1} R`, so a
variance is never too small. The mean :math:`k^\top a` needs no solve but the first. Its error
:math:`-k^\top K^{-1} \rho` is of first order, so a tenth of the tolerance is sought for a.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from linear_operator import settings as linear_operator_settings
from linear_operator.utils.linear_cg import linear_cg
from linear_operator.utils.warnings import NumericalWarning
from torch import Size, Tensor

from gpclml._utils.arguments import all_finite, check_finite, checked
from gpclml._utils.environment import available_memory, progress_bar
from gpclml.errors import ArgumentError, NonFiniteError, NotConvergedError, UnsupportedError
from gpclml.linalg.covariance import ConditionedBlock, Covariance, Predictor
from gpclml.linalg.covariance_products import LowRankPreconditioner, NoisyCovariance
from gpclml.linalg.matrices import HALF_LOG_2PI, safe_cholesky

__all__ = [
    "ConjugateGradients",
    "IterativeConditioning",
    "IterativeCovariance",
    "IterativeReport",
    "NotConvergedWarning",
]

_VECTORS = 12  # arrays of n times the size of a block at the peak of a step
_IF_NOT_FINITE = (
    "Check the inputs for NaN, and the hyperparameters of kernel and likelihood for values that "
    "are NaN or too large for the floating-point type."
)


class NotConvergedWarning(UserWarning):
    """An iterative solver did not reach its tolerance."""


@checked
@dataclass(frozen=True)
class ConjugateGradients:
    """Settings of conjugate gradients: tolerances, preconditioner, memory, progress.

    Attributes:
        tolerance: Largest allowed norm of a column's residual, as a share of the norm of its
            right-hand side.
        max_error: Largest allowed bound of the error of a conditional density, in nats per held-out
            point; the solver continues until the bound is below it. If None, only the tolerance
            counts. The error of a density is of second order in the residuals, that of its gradient
            of first order.
        max_iterations: Largest number of products with the covariance, at least 2.
        preconditioner_rank: Columns of the pivoted Cholesky factor that preconditions; 0 for the
            noise alone.
        on_failure: "error" or "warn": what happens if the tolerance is not reached.
        kept_bytes: Bytes for the evaluated half of the covariance, which is kept from one iteration
            to the next; a larger one is evaluated again in each iteration, in chunks of rows. A
            quarter of the device's memory if None.
        progress: Whether to show a bar of the products with the covariance, and the largest
            residual.

    Raises:
        ArgumentError: A value is out of its range.
    """

    tolerance: float = 1e-3
    max_error: float | None = 1e-3
    max_iterations: int = 1000
    preconditioner_rank: int = 300
    on_failure: Literal["error", "warn"] = "error"
    kept_bytes: int | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ArgumentError("tolerance", self.tolerance, "a number in (0, 1)")
        if self.max_error is not None and not self.max_error > 0:
            raise ArgumentError("max_error", self.max_error, "a positive number of nats, or None")
        if not self.max_iterations >= 2:
            raise ArgumentError("max_iterations", self.max_iterations, "at least 2")
        if not self.preconditioner_rank >= 0:
            raise ArgumentError("preconditioner_rank", self.preconditioner_rank, "at least 0")
        if self.kept_bytes is not None and not self.kept_bytes >= 0:
            raise ArgumentError("kept_bytes", self.kept_bytes, "at least 0, or None")

    def room(self, device: torch.device) -> int:
        """What the evaluated covariance may occupy on a device, in bytes."""
        return available_memory(device) // 4 if self.kept_bytes is None else self.kept_bytes

    def _check(self, residual: float, iterations: int, error_bound: float | None = None) -> None:
        """Raises an error or warns where tolerance or ``max_error`` was not reached.

        Numbers that are NaN are an error for either value of ``on_failure``.
        """
        bound = error_bound or 0.0
        if math.isnan(residual + bound):
            got = f"a relative residual of {residual} and an error bound of {bound}"
            raise NonFiniteError("covariance", got, "numbers", _IF_NOT_FINITE)
        if residual > self.tolerance:
            argument, limit = "tolerance", self.tolerance
            got = f"a relative residual of {residual:.2g}"
        elif self.max_error is not None and bound > self.max_error:
            argument, limit = "max_error", self.max_error
            got = f"an error of up to {bound:.2g} nats per held-out point"
        else:
            return
        error = NotConvergedError(
            argument, f"{got} after {iterations} iterations", f"at most {limit:g}",
            "Raise preconditioner_rank or max_iterations, compute in float64, or use "
            "solver='cholesky' where memory allows.",
        )  # fmt: skip
        if self.on_failure == "error":
            raise error
        warnings.warn(str(error), NotConvergedWarning, stacklevel=2)


@dataclass(frozen=True)
class _Solution:
    """Solutions V and residuals R = B - K V of all columns, ``(*batch, n, k)``.

    ``relative`` is the largest norm of a residual as a share of its right-hand side's, and
    ``iterations`` the number of products with the covariance.
    """

    values: Tensor
    residuals: Tensor
    relative: float
    iterations: int


class _OverflowError(Exception):
    """Vectors of conjugate gradients overflowed: what was reached before stays."""


class _Solver:
    """Solves with one covariance K, whose preconditioner is kept, and bounds the errors.

    Raises:
        NonFiniteError: A variance is not finite; before any row of the covariance is evaluated.
    """

    @torch.no_grad()
    def __init__(self, covariance: NoisyCovariance, settings: ConjugateGradients) -> None:
        self._covariance, self._settings = covariance, settings
        variances, noise = covariance.latent.diagonal(), covariance.noise
        check_finite("variances of the covariance", variances, _IF_NOT_FINITE)
        # Errors of entries are independent, so they move an eigenvalue by up to this.
        epsilon = torch.finfo(variances.dtype).eps * covariance.shape[-1] ** 0.5
        self.least_noise = epsilon * float(variances.max())
        self.noise_is_lost = False
        self._preconditioner: LowRankPreconditioner | None = None
        if noise is not None:
            check_finite("noise of the covariance", noise, _IF_NOT_FINITE)
            self.noise_is_lost = bool((noise <= self.least_noise).any())
            self._preconditioner = LowRankPreconditioner.from_covariance(
                replace(covariance, noise=noise.clamp_min(self.least_noise)),
                settings.preconditioner_rank,
            )
        self.has_bounds = self._preconditioner is not None and not self.noise_is_lost

    @torch.no_grad()
    def solve(self, right: Tensor, tolerance: float, start: _Solution | None = None) -> _Solution:
        """Solves for all columns together, as far as it gets; those that are done leave.

        Args:
            right: B, ``(*batch, n, k)``; zero where observations are missing.
            tolerance: Of relative residuals.
            start: Solution to continue from, which is changed in place; its iterations count.

        Raises:
            NonFiniteError: A right-hand side or a product is not finite; at the first such product.
        """
        check_finite("covariance or residuals", right, _IF_NOT_FINITE)
        start = start or _Solution(torch.zeros_like(right), right.clone(), 1.0, 0)
        values, residuals, products = start.values, start.residuals, start.iterations
        most = self._settings.max_iterations
        norms = _column_norms(right).clamp_min(torch.finfo(right.dtype).tiny)
        last = math.inf
        bar = progress_bar(
            progress=self._settings.progress, desc="products", initial=products, total=most,
            leave=False,
        )  # fmt: skip

        def product(vectors: Tensor) -> Tensor:
            nonlocal products
            if not bool(vectors.any()):  # linear_cg's first, with its initial guess
                return torch.zeros_like(vectors)
            result = self._covariance.matmul(vectors)
            products += 1
            bar.update()
            if not (all_finite(result) or all_finite(vectors)):
                raise _OverflowError
            check_finite("product with the covariance", result, _IF_NOT_FINITE)
            return result

        with bar:
            # The residuals that linear_cg updates drift away from the true ones, and it stops at
            # their mean. So it starts again from the true ones, for the columns above the
            # tolerance, until there are none or it gets no further.
            while True:
                shares = _column_norms(residuals) / norms
                relative = float(shares.max())
                bar.set_postfix_str(f"residual {relative:.1e} of {tolerance:.1e}")
                above = (shares > tolerance).nonzero().flatten()
                left = most - 1 - products  # one for the true residuals
                if above.numel() == 0 or not relative < last or left < 1:
                    return _Solution(values, residuals, relative, products)
                last = relative
                goal = tolerance / float(shares[above].max())
                try:
                    step = self._linear_cg(product, residuals[..., above], goal, left)
                    improved = values[..., above] + step
                    remaining = right[..., above] - product(improved)
                except _OverflowError:
                    return _Solution(values, residuals, relative, products)
                values[..., above], residuals[..., above] = improved, remaining

    def _linear_cg(
        self, multiply: Callable[[Tensor], Tensor], right: Tensor, tolerance: float, most: int
    ) -> Tensor:
        """linear_operator's, independent of its settings; :meth:`solve` checks the residuals."""
        with warnings.catch_warnings(), linear_operator_settings.terminate_cg_by_size(False):
            warnings.simplefilter("ignore", NumericalWarning)
            return linear_cg(
                multiply, right, tolerance=tolerance, eps=torch.finfo(right.dtype).tiny,
                stop_updating_after=tolerance / 10, max_iter=most, max_tridiag_iter=1,
                preconditioner=self._preconditioner,
            )  # fmt: skip

    @torch.no_grad()
    def whiten(self, residuals: Tensor) -> Tensor:
        r"""X with :math:`R^\top K^{-1} R \preceq X^\top X`, float64; infinite without a bound."""
        if self._preconditioner is None or self.noise_is_lost:
            return torch.full_like(residuals, torch.inf, dtype=torch.float64)
        return self._preconditioner.whiten(residuals)

    def density_error(self, residuals: Tensor, S: Tensor, e: Tensor) -> float:
        r"""Bound of the error of log N(e; 0, S), to first order in those of S and e.

        With :math:`C = S^{-1/2} R^\top K^{-1} R S^{-\top/2}`, :math:`c = \mathrm{tr}\, C < 1` and
        :math:`z = S^{-1/2} e`, the log-determinant is off by at most c / (1 - c), and
        :math:`z^\top z` by at most :math:`z^\top C z / (1 - c)` because of S and
        :math:`2 (c\, \rho^\top K^{-1} \rho)^{1/2} |z|` because of e.

        Args:
            residuals: R and rho, ``(*batch, n, b + 1)``.
            S: ``(*batch, b, b)``.
            e: ``(*batch, b, 1)``.

        Returns:
            Nats per held-out point, the largest of a batch; infinite where there is no bound.
        """
        factor, info = torch.linalg.cholesky_ex(S)
        if bool(info.any()):
            return math.inf
        b, whitened = S.shape[-1], self.whiten(residuals)
        root = torch.linalg.solve_triangular(factor, whitened[..., :b].mT, upper=False)
        z = torch.linalg.solve_triangular(factor, e, upper=False)
        c, along = root.square().sum((-2, -1)), (root.mT @ z).square().sum((-2, -1))
        shift = c.sqrt() * whitened[..., b].norm(dim=-1) * z.norm(dim=(-2, -1))
        bound = (0.5 * (c + along) / (1 - c) + shift) / b
        return float(torch.where(c < 1, bound, math.inf).max())


def _column_norms(vectors: Tensor) -> Tensor:
    """The largest norm over a batch of each column of ``(*batch, n, k)``, ``(k,)``."""
    return vectors.norm(dim=-2).reshape(-1, vectors.shape[-1]).amax(0)


@dataclass(frozen=True)
class IterativeReport:
    """How well a block's density was solved for.

    Attributes:
        iterations: Products with the covariance.
        residual: Largest relative residual of a column.
        error_bound: Upper bound of the error of the log density in nats per held-out point, the
            largest of a batch: to first order, and without rounding. Infinite if the residuals are
            too large for a bound, or the noise is below the rounding of the covariance; None if the
            noise is not independent.
    """

    iterations: int
    residual: float
    error_bound: float | None


class IterativeCovariance(Covariance):
    """A covariance that is known by its products with vectors, and solved by conjugate gradients.

    Densities of blocks are differentiable once in covariance and residual. They raise a
    :class:`~gpclml.errors.NotConvergedError` where the tolerance or ``max_error`` is not reached,
    unless the settings only warn.

    Args:
        products: Multiplies by the covariance, ``(*batch, n, n)``.
        settings: Tolerance, iterations, preconditioner, and what happens on failure.

    Attributes:
        reports: How well each block of the last density was solved for, an
            :class:`IterativeReport` each.

    Note:
        For a block of b points 2 n² (b + 1) floating-point operations per iteration, and about four
        times that for the gradient. Memory: about ten n x b arrays, a chunk of rows, and what the
        solver keeps.
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
        return self.products.latent.dtype

    @property
    def device(self) -> torch.device:
        """That of the products."""
        return self.products.latent.device

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
        results = [self._density(residual, block) for group in blocks for block in group]
        self.reports = tuple(report for _, report in results)
        return torch.stack([value for value, _ in results], dim=-1)

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
        directions, report = self._solve(residual.detach(), held_out.to(self.device))
        product = self.products.matmul(directions)
        images = torch.cat([product[..., :b], (residual - product[..., b]).unsqueeze(-1)], dim=-1)
        S, e = _moments(directions, images)
        check_finite("conditional covariance", S, _IF_NOT_FINITE)
        factor, info = torch.linalg.cholesky_ex(S)
        indefinite = bool(info.any())  # by rounding, whatever the residuals
        if indefinite:  # a jittered covariance has another density
            report = replace(report, error_bound=math.inf)
        self.settings._check(report.residual, report.iterations, report.error_bound)
        if indefinite:
            factor = safe_cholesky(S)
        z = torch.linalg.solve_triangular(factor, e, upper=False)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value = -0.5 * z.square().sum((-2, -1)) - log_det - b * HALF_LOG_2PI
        return value.to(residual.dtype), report

    @torch.no_grad()
    def _solve(self, residual: Tensor, held_out: Tensor) -> tuple[Tensor, IterativeReport]:
        """T and a side by side, ``(*batch, n, b + 1)``, and how well they were solved for."""
        settings, n, b = self.settings, residual.shape[-1], held_out.shape[-1]
        limit = math.inf if settings.max_error is None else settings.max_error
        unit = torch.zeros(n, b, dtype=self.dtype, device=self.device)
        unit[held_out, torch.arange(b, device=self.device)] = 1
        unit = unit.expand(*residual.shape[:-1], n, b)
        right = torch.cat([self.products.matmul(unit), residual.unsqueeze(-1)], dim=-1)
        at_block = right[..., held_out, :].double()
        right[..., held_out, :] = 0.0
        missing = torch.zeros(n, dtype=torch.bool, device=self.device)
        missing[held_out] = True
        if self.products.missing is not None:
            missing = missing | self.products.missing
        solver = _Solver(replace(self.products, missing=missing), settings)
        if solver.noise_is_lost and limit < math.inf and settings.on_failure == "error":
            raise NotConvergedError(
                "max_error",
                f"noise variances below {solver.least_noise:.2g}, the size of rounding errors of "
                f"the covariance in {self.dtype}",
                "larger ones, so that the error has a bound",
                "Compute in float64, raise the noise floor of the likelihood, use "
                "solver='cholesky' where memory allows, or do without a bound by max_error=None.",
            )
        tolerance, solution = settings.tolerance, None
        while True:
            solution = solver.solve(right, tolerance, solution)
            values = solution.values
            directions = torch.cat([unit - values[..., :b], values[..., b:]], dim=-1)
            # K T and r - K a are the residuals, but for the rows of the block.
            images = solution.residuals.to(torch.float64, copy=True)
            images[..., held_out, :] = at_block - right[..., :b].double().mT @ values.double()
            bound = solver.density_error(solution.residuals, *_moments(directions, images))
            if not (solver.has_bounds and bound > limit) or not solution.relative < tolerance:
                break
            # The bound is of second order in the residuals.
            share = 0.1 if bound == math.inf else 0.5 * (limit / bound) ** 0.5
            tolerance = share * solution.relative
        known = None if self.products.noise is None else bound
        return directions, IterativeReport(solution.iterations, solution.relative, known)


def _moments(directions: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """S and e, from T and a side by side, and from K T and r - K a."""
    b = images.shape[-1] - 1
    products = directions[..., :b].double().mT @ images.double()
    return 0.5 * (products[..., :b] + products[..., :b].mT), products[..., b:]


@dataclass(frozen=True)
class IterativeBlock(ConditionedBlock):
    """What the observations say of k other values.

    Attributes:
        shift: What the mean gains, ``(*batch, k)``, float64.
        reduction: What variances lose, ``(*batch, k)``, float64.
        errors: Upper bounds of the roots of what a variance is too large by, ``(*batch, k)``,
            float64.
        residual: Largest norm of a residual as a share of that of its right-hand side.
        iterations: Products with the covariance.
        vectors: Cross-covariances k, solutions V and residuals R, ``(*batch, n, k)`` each, if they
            were to be kept.
    """

    shift: Tensor
    reduction: Tensor
    errors: Tensor
    residual: float
    iterations: int
    vectors: tuple[Tensor, Tensor, Tensor] | None

    def joint_reduction(self, other: IterativeBlock) -> Tensor:
        """What the covariance with another block's values loses, ``(*batch, k, l)``, float64."""
        assert self.vectors is not None
        assert other.vectors is not None
        cross, V, _ = (vectors.double() for vectors in self.vectors)
        _, W, R = (vectors.double() for vectors in other.vectors)
        return cross.mT @ W + V.mT @ R


class IterativeConditioning(Predictor):
    r"""Observations that are solved for once, to predict other values. Without gradients.

    Predicting k values takes k solves, and memory for about 16 arrays of n x k.

    Args:
        covariance: K, of the observations, ``(*batch, n, n)``.
        residual: r, observations minus their prior mean, ``(*batch, n)``; zero where missing.
        settings: Tolerance and the rest.

    Attributes:
        weights: The solution a of K a = r, ``(*batch, n, 1)``.
        error: Upper bound of :math:`(\rho^\top K^{-1} \rho)^{1/2}`, ``(*batch, 1)``, float64: the
            mean :math:`k^\top a` of a value is off by at most that times its prior deviation.
        residual: Norm of :math:`\rho = r - K a` as a share of that of r.
        iterations: Products with the covariance.
    """

    def __init__(
        self, covariance: NoisyCovariance, residual: Tensor, settings: ConjugateGradients
    ) -> None:
        self.missing: Tensor | None = covariance.missing
        self._settings, self._solver = settings, _Solver(covariance, settings)
        solution = self._solve(residual.unsqueeze(-1), settings.tolerance / 10)
        self.weights: Tensor = solution.values
        self._rho = solution.residuals
        self.error: Tensor = self._solver.whiten(self._rho).norm(dim=-2)
        self.residual: float = solution.relative
        self.iterations: int = solution.iterations

    @torch.no_grad()
    def _given(self, cross: Tensor, keep: bool) -> IterativeBlock:
        solution = self._solve(cross.contiguous(), self._settings.tolerance)
        V, R = solution.values, solution.residuals
        return IterativeBlock(
            shift=_inner_products(cross, self.weights) + _inner_products(V, self._rho),
            reduction=_inner_products(cross, V) + _inner_products(V, R),
            errors=self._solver.whiten(R).norm(dim=-2),
            residual=solution.relative,
            iterations=solution.iterations,
            vectors=(cross, V, R) if keep else None,
        )

    def _solve(self, right: Tensor, tolerance: float) -> _Solution:
        solution = self._solver.solve(right, tolerance)
        self._settings._check(solution.relative, solution.iterations)
        return solution


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Those of columns, ``(*batch, n, k)`` to ``(*batch, k)``, summed in float64."""
    return (left * right).sum(-2, dtype=torch.float64)
