r"""Conjugate gradients: the density of held-out blocks and predictions without a factorization.

linear_operator's ``linear_cg`` solves, preconditioned by a pivoted Cholesky factor, and is started
again from true residuals until these are small. What is computed from a solution depends on its
residuals in the second order only: for columns B and solutions V of residuals R = B - K V,

.. math:: B^\top K^{-1} B = B^\top V + V^\top R + R^\top K^{-1} R.

**Errors** are made of the last term, without rounding. With a pivoted Cholesky factor L of the
kernel and noise D, :math:`M = L L^\top + D \preceq K`, so :math:`R^\top M^{-1} R` is an upper bound
(Artemev, Burt and van der Wilk 2021). Where the noise is lost in the rounding of K, bounds are
infinite.

**The density of a block B given all other points, A.** From :math:`K_{AA} V = K_{AB}` and
:math:`K_{AA} a = r_A`, with :math:`T = [-V; I]` and :math:`\bar a = [a; 0]`,

.. math:: S = T^\top K T, \quad e = T^\top (r - K \bar a), \quad
    \log p(r_B \mid r_A) = \log N(e; 0, S).

The derivatives of S and e with respect to V and a vanish at exact solves. So the gradient of this
expression with V and a held fixed is that of the density, and one product of K with b + 1 vectors
is all there is to differentiate.

**Predictions** of values with covariances k with the observations: the formula above for columns r
and k gives mean and variances, and no variance is too small. The mean :math:`k^\top a` needs no
solve but the first. Its error is of first order, so a tenth of the tolerance is sought for a.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, cast

import torch
from linear_operator import settings as linear_operator_settings
from linear_operator.operators import LinearOperator
from linear_operator.utils.linear_cg import linear_cg
from linear_operator.utils.warnings import NumericalWarning
from torch import Size, Tensor
from torch.linalg import solve_triangular
from torch.utils.checkpoint import checkpoint

from gpclml._utils.arguments import all_finite, check_finite, checked
from gpclml._utils.environment import available_memory, progress_bar
from gpclml.errors import ArgumentError, NonFiniteError, NotConvergedError, UnsupportedError
from gpclml.linalg.covariance import ConditionedBlock, Covariance, expanded
from gpclml.linalg.low_rank import LowRankPlusDiagonal, WeightPosterior
from gpclml.linalg.matrices import HALF_LOG_2PI, safe_cholesky

_NUMBERS_AT_ONCE = 2**24  # in a chunk of rows, of which a kernel makes several on its way
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

    Examples:
        >>> import torch
        >>> from gpclml import ConjugateGradients, GPRegression
        >>> x = torch.rand(500, 2, dtype=torch.float64)
        >>> model = GPRegression(x, x.sum(-1).sin())
        >>> mean = model.predict(x[:3], solver=ConjugateGradients(tolerance=1e-4)).mean
    """

    tolerance: float = 1e-3
    max_error: float | None = 1e-3
    max_iterations: int = 1000
    preconditioner_rank: int = 300
    on_failure: Literal["error", "warn"] = "error"
    kept_bytes: int | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        max_error, kept_bytes = self.max_error, self.kept_bytes
        for name, is_valid, expected in (
            ("tolerance", 0 < self.tolerance < 1, "a number in (0, 1)"),
            ("max_error", max_error is None or max_error > 0, "a positive number of nats, or None"),
            ("max_iterations", self.max_iterations >= 2, "at least 2"),
            ("preconditioner_rank", self.preconditioner_rank >= 0, "at least 0"),
            ("kept_bytes", kept_bytes is None or kept_bytes >= 0, "at least 0, or None"),
        ):
            if not is_valid:
                raise ArgumentError(name, getattr(self, name), expected)

    def room(self, device: torch.device) -> int:
        """What the evaluated covariance may occupy on a device, in bytes."""
        return available_memory(device) // 4 if self.kept_bytes is None else self.kept_bytes

    def _check(self, residual: float, iterations: int, error_bound: float = 0.0) -> None:
        """Raises or warns where a limit was not reached; always raises where numbers are NaN."""
        if math.isnan(residual + error_bound):
            got = f"a relative residual of {residual} and an error bound of {error_bound}"
            raise NonFiniteError("covariance", got, "numbers", _IF_NOT_FINITE)
        if residual > self.tolerance:
            argument, limit = "tolerance", self.tolerance
            got = f"a relative residual of {residual:.2g}"
        elif self.max_error is not None and error_bound > self.max_error:
            argument, limit = "max_error", self.max_error
            got = f"an error of up to {error_bound:.2g} nats per held-out point"
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


class RowProducts:
    """A covariance ``(*batch, n, n)`` whose rows are evaluated in chunks.

    Products under ``torch.no_grad()``, a solver's, evaluate only the lower half, keep it if it fits
    into ``kept_bytes``, and otherwise evaluate it again each time. Differentiable products evaluate
    whole rows, and each chunk once more in the backward pass, so that only one chunk is in memory.

    Args:
        rows: Function of i, j and k that returns the first k columns of the rows i to j, ``(*batch,
            j - i, k)``, differentiable; the matrix is symmetric.
        diagonal: The variances, ``(*batch, n)``.
        kept_bytes: Bytes that the evaluated half may occupy.
        multiple: ``rows`` is called only with multiples of this number.
        row: Computes one row by its index, ``(*batch, n)``, if that is faster than ``rows``.
    """

    def __init__(
        self,
        rows: Callable[[int, int, int], Tensor],
        diagonal: Tensor,
        kept_bytes: int,
        multiple: int = 1,
        row: Callable[[int], Tensor] | None = None,
    ) -> None:
        n = diagonal.shape[-1]
        self.shape = Size((*diagonal.shape, n))
        self.dtype: torch.dtype = diagonal.dtype
        self.device: torch.device = diagonal.device
        self._diagonal = diagonal.detach()
        self._rows, self._multiple, self._row = rows, multiple, row
        # At least one point's rows, however many tasks and members there are.
        step = max(1, _NUMBERS_AT_ONCE // (diagonal.numel() * multiple)) * multiple
        self._chunks = [(start, min(start + step, n)) for start in range(0, n, step)]
        half = diagonal.numel() // n * sum((stop - start) * stop for start, stop in self._chunks)
        self.kept_numbers: int = half if half * self.dtype.itemsize <= kept_bytes else 0
        self._rows_of_half = cache(rows) if self.kept_numbers else rows

    def __matmul__(self, right: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            products = [
                checkpoint(
                    lambda start, stop: self._rows(start, stop, self.shape[-1]) @ right,
                    *chunk, use_reentrant=False, preserve_rng_state=False,
                )
                for chunk in self._chunks
            ]  # fmt: skip
            return torch.cat(products, dim=-2)
        batch = torch.broadcast_shapes(self.shape[:-2], right.shape[:-2])
        product = right.new_zeros(*batch, *right.shape[-2:])
        for start, stop in self._chunks:
            rows = self._rows_of_half(start, stop, stop)
            product[..., start:stop, :] += rows @ right[..., :stop, :]
            # The mirrored half: what is above the diagonal is never evaluated.
            product[..., :start, :] += rows[..., :start].mT @ right[..., start:stop, :]
        return product

    def diagonal(self, dim1: int = -1, dim2: int = -2) -> Tensor:
        """The variances, ``(*batch, n)``, in the way of a linear operator."""
        return self._diagonal

    @torch.no_grad()
    def row(self, index: int) -> Tensor:
        """One row, evaluated, ``(*batch, n)``."""
        if self._row is not None:
            return self._row(index)
        start = index // self._multiple * self._multiple
        rows = self._rows(start, start + self._multiple, self.shape[-1])
        return rows[..., index - start, :]


@torch.no_grad()
def pivoted_cholesky(row: Callable[[int], Tensor], variances: Tensor, rank: int) -> Tensor:
    r"""L with :math:`L L^\top \approx K` and, up to rounding, :math:`L L^\top \preceq K`, float64.

    K is given by a function of its rows, ``(*batch, n)``, and its variances, ``(*batch, n)``. The
    pivots are those of largest remaining variance, in the mean over a batch. L, ``(*batch, n, k)``,
    has at most n columns, fewer than the rank where the remaining variance is rounding, and one of
    zeros at rank 0. It takes n k² floating-point operations and k rows of K.
    """
    # LinearOperator.pivoted_cholesky takes three to five times as long at rank 300: it gathers all
    # previous columns in each step. It also works in the type of the covariance.
    n = variances.shape[-1]
    remaining = variances.double()
    negligible = 10 * torch.finfo(variances.dtype).eps * remaining.amax(-1, keepdim=True)
    factor = remaining.new_zeros(*variances.shape, max(1, min(rank, n)))
    for k in range(min(rank, n)):
        pivot = int(remaining.reshape(-1, n).mean(0).argmax())
        variance = remaining[..., pivot, None]
        if bool((variance <= negligible).all()):
            return factor[..., : max(1, k)]
        explained = factor[..., :k] @ factor[..., pivot, :k, None]
        column = row(pivot).double() - explained.squeeze(-1)
        column[..., pivot] = variance.squeeze(-1)
        column = column / variance.clamp_min(negligible).sqrt()
        factor[..., k] = column = torch.where(variance > negligible, column, 0.0)
        remaining = (remaining - column.square()).clamp_min_(0.0)
        remaining[..., pivot] = 0.0
    return factor


@dataclass(frozen=True)
class _Solution:
    """Solutions V and residuals R = B - K V of columns B, ``(*batch, n, k)`` each.

    ``relative`` is the largest norm of a residual as a share of its right-hand side's.
    """

    right: Tensor
    values: Tensor
    residuals: Tensor
    relative: float
    iterations: int

    def products(self, other: _Solution) -> Tensor:
        r""":math:`B^\top K^{-1} B'` to second order in residuals, ``(*batch, k, l)``, float64."""
        V, W = self.values.double(), other.values.double()
        return self.right.double().mT @ W + V.mT @ other.residuals.double()


@dataclass(eq=False)
class IterativeCovariance(Covariance):
    """A covariance that is known by its products with vectors, and solved by conjugate gradients.

    Densities of blocks are differentiable once in covariance and residual. They raise a
    :class:`~gpclml.errors.NotConvergedError` where the tolerance or ``max_error`` is not reached,
    unless the settings only warn.

    Attributes:
        latent: Covariance of the latent values, ``(*batch, n, n)``, by its rows or with a structure
            of its own (Toeplitz, interpolated, KeOps, …); with all noise in it where the noise is
            not independent.
        noise: Noise variances, ``(*batch, n)``; None where the noise is in ``latent``.
        settings: Tolerance, iterations, preconditioner, and what happens on failure.
        missing: Which observations are missing, ``(*batch, n)``: each has variance one and no
            correlation. None where none is.
        reports: How well each block of the last density was solved for, an
            :class:`IterativeReport` each.

    Note:
        For a block of b points 2 n² (b + 1) floating-point operations per iteration, and about four
        times that for the gradient. Memory: about ten n x b arrays, a chunk of rows, and what the
        solver keeps.
    """

    latent: RowProducts | LinearOperator
    noise: Tensor | None
    settings: ConjugateGradients
    missing: Tensor | None = None

    def __post_init__(self) -> None:
        latent, diagonals = self.latent, (self.noise, self.missing)
        batches = [values.shape[:-1] for values in diagonals if values is not None]
        batch = torch.broadcast_shapes(latent.shape[:-2], *batches)
        self.shape = Size((*batch, *latent.shape[-2:]))
        self.dtype, self.device = cast(torch.dtype, latent.dtype), cast(torch.device, latent.device)

    def matmul(self, right: Tensor) -> Tensor:
        """The product with ``(*batch, n, k)``, differentiable except under ``torch.no_grad()``."""
        missing = None if self.missing is None else self.missing.unsqueeze(-1)
        observed = right if missing is None else right.masked_fill(missing, 0.0)
        product = cast(Tensor, self.latent @ observed)
        if self.noise is not None:
            product = product + self.noise.unsqueeze(-1) * observed
        return product if missing is None else torch.where(missing, right, product)

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> IterativePredictor:
        """By one solve that is kept, and one for each value that is predicted."""
        covariance = self if missing is None else replace(self, missing=missing)
        return IterativePredictor(covariance, residual)

    def block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """Block by block, each by a solve and one product that is differentiable."""
        if any(group.ndim > 2 for group in blocks):
            raise UnsupportedError(
                "conditioning", "held-out points of its own in each batch member",
                "the same in all, for conjugate gradients", "Use solver='cholesky'.",
            )  # fmt: skip
        residual = expanded(residual, self.shape)
        results = [self._density(residual, block) for group in blocks for block in group]
        self.reports = tuple(report for _, report in results)
        return torch.stack([value for value, _ in results], dim=-1)

    def _density(self, residual: Tensor, held_out: Tensor) -> tuple[Tensor, IterativeReport]:
        """The log density of a block ``(b,)``, ``(*batch,)``."""
        n, b = residual.shape[-1], held_out.shape[-1]
        if b == n:
            raise ArgumentError(
                "held_out", f"all {n} points", "at least one point left to condition on",
                "Hold out fewer points, or use solver='cholesky' for the log marginal likelihood.",
            )  # fmt: skip
        T, a, report = self._solve_block(residual.detach(), held_out.to(self.device))
        KT, Ka = self.matmul(torch.cat([T, a], dim=-1)).split([b, 1], dim=-1)
        S = T.double().mT @ KT.double()
        # In float64: S is a difference of covariances that nearly agree.
        S, e = 0.5 * (S + S.mT), T.double().mT @ (residual.unsqueeze(-1) - Ka).double()
        check_finite("conditional covariance", S, _IF_NOT_FINITE)
        factor, info = torch.linalg.cholesky_ex(S)
        indefinite = bool(info.any())  # by rounding, whatever the residuals
        if indefinite:  # a jittered covariance has another density
            report = replace(report, error_bound=math.inf)
        self.settings._check(report.residual, report.iterations, report.error_bound or 0.0)
        if indefinite:
            factor = safe_cholesky(S)
        z = solve_triangular(factor, e, upper=False)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value = -0.5 * z.square().sum((-2, -1)) - log_det - b * HALF_LOG_2PI
        return value.to(residual.dtype), report

    @torch.no_grad()
    def _solve_block(
        self, residual: Tensor, held_out: Tensor
    ) -> tuple[Tensor, Tensor, IterativeReport]:
        """T, ``(*batch, n, b)``, a, ``(*batch, n, 1)``, and how well they were solved for."""
        settings, n, b = self.settings, residual.shape[-1], held_out.shape[-1]
        limit = settings.max_error or math.inf
        unit = torch.zeros(n, b, dtype=self.dtype, device=self.device)
        unit[held_out, torch.arange(b, device=self.device)] = 1
        unit = unit.expand(*residual.shape[:-1], n, b)
        right = torch.cat([self.matmul(unit), residual.unsqueeze(-1)], dim=-1)
        prior = right[..., held_out, :].double()  # K_BB and r_B
        # With identity rows for the block the system has one size, and solutions zeros there.
        right[..., held_out, :] = 0.0
        missing = unit.any(-1) if self.missing is None else unit.any(-1) | self.missing
        others = replace(self, missing=missing)
        tolerance, solution = settings.tolerance, None
        while True:
            solution = others._solve(right, tolerance, solution)
            moments = prior - solution.products(solution)[..., :b, :]
            bound = others._density_error(solution, moments[..., :b], moments[..., b:])
            if not (others._has_bounds and bound > limit) or not solution.relative < tolerance:
                break
            # The bound is of second order in the residuals.
            share = 0.1 if bound == math.inf else 0.5 * (limit / bound) ** 0.5
            tolerance = share * solution.relative
        bound = None if self.noise is None else bound
        report = IterativeReport(solution.iterations, solution.relative, bound)
        return unit - solution.values[..., :b], solution.values[..., b:], report

    @torch.no_grad()
    def _solve(self, right: Tensor, tolerance: float, start: _Solution | None = None) -> _Solution:
        """Solves for all columns B together, as far as it gets; those that are done leave.

        B is zero where observations are missing. A solution that it starts from is changed in
        place, and its iterations count. The first product that is not finite is an error.
        """
        check_finite("covariance or residuals", right, _IF_NOT_FINITE)
        preconditioner, most = self._preconditioner, self.settings.max_iterations
        start = start or _Solution(right, torch.zeros_like(right), right.clone(), 1.0, 0)
        values, residuals, products = start.values, start.residuals, start.iterations
        # A column of zeros is solved by zeros, and not divided by its norm.
        norms = _column_norms(right).clamp_min(torch.finfo(right.dtype).tiny)
        last = math.inf
        bar = progress_bar(
            progress=self.settings.progress, desc="products", initial=products, total=most,
            leave=False,
        )  # fmt: skip

        def multiply(vectors: Tensor) -> Tensor:
            nonlocal products
            if not bool(vectors.any()):  # linear_cg's first, with its initial guess
                return torch.zeros_like(vectors)
            result = self.matmul(vectors)
            products += 1
            bar.update()
            if not (all_finite(result) or all_finite(vectors)):
                raise FloatingPointError  # an overflow: what was reached before stays
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
                budget = most - 1 - products  # one for the true residuals
                if above.numel() == 0 or not relative < last or budget < 1:
                    break
                last, goal = relative, tolerance / relative
                try:
                    with (
                        warnings.catch_warnings(),
                        linear_operator_settings.terminate_cg_by_size(False),
                    ):
                        warnings.simplefilter("ignore", NumericalWarning)  # residuals are checked
                        step = linear_cg(
                            multiply, residuals[..., above], tolerance=goal, max_iter=budget,
                            eps=torch.finfo(right.dtype).tiny, stop_updating_after=goal / 10,
                            max_tridiag_iter=1,
                            preconditioner=preconditioner and preconditioner.solve,
                        )  # fmt: skip
                    improved = values[..., above] + step
                    remaining = right[..., above] - multiply(improved)
                except FloatingPointError:
                    break
                values[..., above], residuals[..., above] = improved, remaining
        return _Solution(right, values, residuals, relative, products)

    def _row(self, index: int) -> Tensor:
        """A row of the latent covariance, ``(*batch, n)``."""
        if isinstance(self.latent, RowProducts):
            return self.latent.row(index)
        unit = torch.zeros(self.shape[-1], 1, dtype=self.dtype, device=self.device)
        unit[index] = 1
        return cast(Tensor, self.latent @ unit).squeeze(-1)

    @cached_property
    @torch.no_grad()
    def _least_noise(self) -> float:
        """What rounding of the covariance leaves of a noise variance."""
        variances = self.latent.diagonal(dim1=-1, dim2=-2)
        check_finite("variances of the covariance", variances, _IF_NOT_FINITE)
        if self.noise is not None:
            check_finite("noise of the covariance", self.noise, _IF_NOT_FINITE)
        # Errors of entries are independent, so they move an eigenvalue by up to this.
        return torch.finfo(self.dtype).eps * self.shape[-1] ** 0.5 * float(variances.max())

    @cached_property
    def _has_bounds(self) -> bool:
        """Whether the noise is independent and above rounding."""
        return self.noise is not None and bool((self.noise > self._least_noise).all())

    @cached_property
    @torch.no_grad()
    def _preconditioner(self) -> WeightPosterior | None:
        """Solves with a pivoted Cholesky factor and the noise; None if that is not independent.

        The k largest parts of the kernel are solved exactly, and conjugate gradients are left with
        the others (Harbrecht, Peters and Schneider 2012; Gardner et al. 2018, Section 4.1).
        """
        least = self._least_noise
        if self.noise is None:
            return None
        variances = self.latent.diagonal(dim1=-1, dim2=-2)
        features = pivoted_cholesky(self._row, variances, self.settings.preconditioner_rank)
        covariance = LowRankPlusDiagonal(features, self.noise.clamp_min(least))
        return (covariance if self.missing is None else covariance.masked(self.missing)).weights()

    @torch.no_grad()
    def _whiten(self, residuals: Tensor) -> Tensor:
        r"""X with :math:`R^\top K^{-1} R \preceq X^\top X`, float64; infinite without a bound."""
        if not self._has_bounds:
            return torch.full_like(residuals, torch.inf, dtype=torch.float64)
        return cast(WeightPosterior, self._preconditioner).whiten(residuals)

    def _density_error(self, solution: _Solution, S: Tensor, e: Tensor) -> float:
        r"""Bound of the error of log N(e; 0, S), to first order in those of S and e.

        With :math:`C = S^{-1/2} R^\top K^{-1} R S^{-\top/2}`, :math:`c = \mathrm{tr}\, C < 1` and
        :math:`z = S^{-1/2} e`, the log-determinant is off by at most c / (1 - c), and
        :math:`z^\top z` by at most :math:`z^\top C z / (1 - c)` because of S and
        :math:`2 (c\, \rho^\top K^{-1} \rho)^{1/2} |z|` because of e.

        S, ``(*batch, b, b)``, and e, ``(*batch, b, 1)``, are those of a solution whose residuals
        are R and, last, rho. In nats per held-out point, the largest of a batch.
        """
        factor, info = torch.linalg.cholesky_ex(S)
        if bool(info.any()):
            return math.inf
        b, whitened = S.shape[-1], self._whiten(solution.residuals)
        root = solve_triangular(factor, whitened[..., :b].mT, upper=False)
        z = solve_triangular(factor, e, upper=False)
        # Of C the trace bounds the largest eigenvalue; z takes the part along it.
        c, along = root.square().sum((-2, -1)), (root.mT @ z).square().sum((-2, -1))
        shift = c.sqrt() * whitened[..., b].norm(dim=-1) * z.norm(dim=(-2, -1))
        bound = (0.5 * (c + along) / (1 - c) + shift) / b
        return float(torch.where(c < 1, bound, math.inf).max())


def _column_norms(vectors: Tensor) -> Tensor:
    """The largest norm over a batch of each column of ``(*batch, n, k)``, ``(k,)``."""
    return vectors.norm(dim=-2).reshape(-1, vectors.shape[-1]).amax(0)


class IterativePredictor:
    r"""Observations that are solved for once, to predict other values. Without gradients.

    Predicting k values takes k solves, and memory for about 16 arrays of n x k.

    Attributes:
        solution: Of K a = r, ``(*batch, n, 1)``; r is zero where missing.
        error: Upper bound of :math:`(\rho^\top K^{-1} \rho)^{1/2}` for the residual
            :math:`\rho = r - K a`, ``(*batch, 1)``, float64: the mean :math:`k^\top a` of a value
            is off by at most that times its prior deviation.
    """

    def __init__(self, covariance: IterativeCovariance, residual: Tensor) -> None:
        self._covariance = covariance
        tolerance = covariance.settings.tolerance / 10
        self.solution: _Solution = self._solve(residual.unsqueeze(-1), tolerance)
        self.error: Tensor = covariance._whiten(self.solution.residuals).norm(dim=-2)

    @torch.no_grad()
    def given(self, cross: Tensor, keep: bool = False) -> IterativeBlock:
        """See :class:`~gpclml.linalg.Predictor`."""
        missing = self._covariance.missing
        if missing is not None:
            cross = torch.where(missing.unsqueeze(-1), 0.0, cross)
        solution = self._solve(cross.contiguous(), self._covariance.settings.tolerance)
        V, R = solution.values, solution.residuals
        return IterativeBlock(
            shift=solution.products(self.solution).squeeze(-1),
            reduction=(V * (cross + R)).sum(-2, dtype=torch.float64),
            errors=self._covariance._whiten(R).norm(dim=-2),
            residual=solution.relative,
            iterations=solution.iterations,
            vectors=solution if keep else None,
        )

    def _solve(self, right: Tensor, tolerance: float) -> _Solution:
        solution = self._covariance._solve(right, tolerance)
        self._covariance.settings._check(solution.relative, solution.iterations)
        return solution


@dataclass(frozen=True)
class IterativeBlock(ConditionedBlock):
    """What the observations say of k other values; ``vectors`` are the solution, if it was kept.

    ``errors`` are upper bounds of the roots of what a variance is too large by, ``(*batch, k)``,
    float64; ``residual`` is the largest norm of one as a share of that of its right-hand side.
    """

    errors: Tensor
    residual: float
    iterations: int

    def joint_reduction(self, other: IterativeBlock) -> Tensor:
        """What the covariance with another block's values loses, ``(*batch, k, l)``, float64."""
        return self.vectors.products(other.vectors)
