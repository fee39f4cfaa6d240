r"""Repeated solves with one covariance, each with a bound of its error, and predictions from them.

The errors of what is made of a solve of :math:`K V = B` are made of the norms
:math:`(R_j^\top K^{-1} R_j)^{1/2}` of the columns of its residual :math:`R = B - K V`. With noise D
and a pivoted Cholesky factor L of the kernel, :math:`L L^\top + D' \preceq K`, where D' is D less
what roundings of the entries of K may take from its eigenvalues. So the norm is at most
:math:`(R_j^\top (L L^\top + D')^{-1} R_j)^{1/2}` (Artemev, Burt and van der Wilk 2021), and the
square of that is the least of

.. math:: (R_j - L w)^\top D'^{-1} (R_j - L w) + w^\top w

over w. Any w gives an upper bound, and a sum of squares does not cancel, as Woodbury's identity
does. Without a preconditioner w is zero. R itself is known to the rounding of a product with K, for
which every bound has an allowance; where D' is not positive it is infinite.

Predictions: with r the residual of the observations, k their covariance with other values and
:math:`k_{**}` the prior covariance of those, solves :math:`K a = r - \rho` and :math:`K V = k - R`
give

.. math::
    \mu = k^\top a + V^\top \rho, \qquad
    C = k_{**} - k^\top V - V^\top R = k_{**} - 2 k^\top V + V^\top K V.

They are off by :math:`-R^\top K^{-1} \rho` and :math:`R^\top K^{-1} R` from
:math:`k^\top K^{-1} r` and :math:`k_{**} - k^\top K^{-1} k`: in second order, and a variance
is an upper bound. The mean :math:`k^\top a` needs no solve but the first and is off by
:math:`-k^\top K^{-1} \rho`, in first order; so a tenth of the tolerance is sought for a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, NotConvergedError, ShapeError
from gpclml.linalg.conjugate_gradients import (
    ConjugateGradients,
    Solution,
    check_finite,
    column_norms,
)
from gpclml.linalg.covariance import ConditionedBlock, Predictor
from gpclml.linalg.covariance_products import LowRankPreconditioner, NoisyCovariance, rounding

__all__ = [
    "CovarianceSolver",
    "IterativeBlock",
    "IterativeConditioning",
    "ResidualBound",
    "Solved",
]

_ROUNDING = 10  # units of double precision for the differences within a bound
# What rounding may do to a prediction, in units of what it may do to an entry of K: one each for
# its two products with K and its two inner products, which are sums of rounded terms.
_OF_SUMS = 4


@dataclass(frozen=True)
class ResidualBound:
    r"""Bound of the residuals R of solves in the metric of :math:`K^{-1}`.

    Attributes:
        root: X with :math:`R^\top K^{-1} R \preceq X^\top X`, ``(*batch, m, k)``, float64.
        slack: By how much the norm of each column may be above that of X, as R is known to rounding
            only, ``(*batch, k)``, float64; infinite where nothing bounds it.
    """

    root: Tensor
    slack: Tensor

    @property
    def errors(self) -> Tensor:
        """Upper bounds of the norms of the columns, ``(*batch, k)``."""
        return self.root.norm(dim=-2) + self.slack


@dataclass(frozen=True)
class Solved:
    r"""Columns that were solved for.

    Attributes:
        values: V, ``(*batch, n, k)``.
        unsolved: :math:`R = B - K V`, ``(*batch, n, k)``.
        errors: Upper bounds of :math:`(R_j^\top K^{-1} R_j)^{1/2}`, ``(*batch, k)``, float64;
            infinite where the noise is not independent or lost in the rounding of K.
        residual: Largest norm of a column of R, as a share of that of B.
        iterations: Products with the covariance.
    """

    values: Tensor
    unsolved: Tensor
    errors: Tensor
    residual: float
    iterations: int


class CovarianceSolver:
    """Conjugate gradients with a covariance and a preconditioner that are kept. Without gradients.

    Args:
        covariance: K, ``(*batch, n, n)``.
        settings: Tolerance, iterations, preconditioner, and what happens on failure.

    Raises:
        NonFiniteError: A variance is not finite; before any row of the covariance is evaluated.
    """

    @checked
    def __init__(self, covariance: NoisyCovariance, settings: ConjugateGradients) -> None:
        self.covariance = covariance
        self.settings = settings
        check_finite(covariance.latent.diagonal(), "variances")
        self._precondition = LowRankPreconditioner.of(covariance, settings.preconditioner_rank)
        self.rounding: Tensor = rounding(covariance.latent)
        self._lost = self.rounding * covariance.shape[-1] ** 0.5  # of an eigenvalue, at most
        self._left = self._noise_left()

    def _noise_left(self) -> Tensor | None:
        """D', ``(*batch, n, 1)``: one where observations are missing, None without noise."""
        noise, missing = self.covariance.noise, self.covariance.missing
        if noise is None:
            return None
        left = (noise.detach().double() - self._lost).unsqueeze(-1)
        return left if missing is None else torch.where(missing.unsqueeze(-1), 1.0, left)

    @property
    def bounds_errors(self) -> bool:
        """Whether the noise is above what roundings may take from it, so that bounds are finite."""
        return self._left is not None and bool((self._left > 0).all())

    def check_noise(self) -> None:
        """Raises a NotConvergedError where errors have no bound, however well one solves."""
        if self._left is None or self.bounds_errors:
            return
        raise NotConvergedError(
            "max_error",
            f"noise variances below {float(self._lost.max()):.2g}, the size of rounding errors "
            f"of the covariance in {self.covariance.dtype}",
            "larger ones, so that the error has a bound",
            "Compute in float64, raise the noise floor of the likelihood, use solver='cholesky' "
            "where memory allows, or do without a bound by max_error=None.",
        )

    def solution(
        self, right: Tensor, tolerance: float | None = None, start: Solution | None = None
    ) -> Solution:
        """Solves for all columns together, without a check of what was reached.

        Args:
            right: B, ``(*batch, n, k)``; zero where observations are missing.
            tolerance: Of relative residuals; the settings' if None.
            start: State to continue from, which is changed in place.
        """
        return self.settings.solve(
            self.covariance.fixed_matmul, right, self._precondition, start, tolerance
        )

    @torch.no_grad()
    def bound(self, unsolved: Tensor, values: Tensor) -> ResidualBound | None:
        r"""A bound of the residuals of solves.

        Args:
            unsolved: R, ``(*batch, n, k)``; zero where observations are missing.
            values: V, ``(*batch, n, k)``, with whose norm the roundings of R grow.

        Returns:
            The bound; None where the noise is not independent.
        """
        if self._left is None:
            return None
        bounded = self._left > 0
        left = torch.where(bounded, self._left, 1.0)
        deviation = left.sqrt()
        root = unsolved.double() / deviation
        # Of each entry of the product with V, independent of one another.
        slack = self.rounding * (1 / left).sum(-2).sqrt() * values.norm(dim=-2, dtype=torch.float64)
        if self._precondition is not None:
            weights = self._precondition.weights(unsolved)
            explained = self._precondition.features @ weights / deviation
            double = _ROUNDING * torch.finfo(torch.float64).eps
            slack = slack + double * (root.norm(dim=-2) + explained.norm(dim=-2))
            root = torch.cat([root - explained, weights], dim=-2)
        return ResidualBound(root, torch.where(bounded.all(-2), slack, torch.inf))

    def solve(self, right: Tensor, tolerance: float | None = None) -> Solved:
        """Solves for all columns together.

        Args:
            right: B, ``(*batch, n, k)``; zero where observations are missing.
            tolerance: Tolerance to aim at, as far as rounding permits; that of the settings if
                None. Only that of the settings has to be reached.

        Raises:
            NonFiniteError: The covariance is not finite.
            NotConvergedError: A residual is above the tolerance of the settings, unless these only
                warn.

        Note:
            2 n² k floating-point operations per iteration, the evaluation of the covariance if it
            is not kept, and memory for about twelve arrays of n x k.
        """
        solution = self.solution(right, tolerance)
        norms = column_norms(right).clamp_min(torch.finfo(right.dtype).tiny)
        residual = float((column_norms(solution.unsolved) / norms).max())
        self.settings.check(residual, solution.iterations)
        bound = self.bound(solution.unsolved, solution.values)
        if bound is None:
            errors = torch.full_like(right[..., 0, :], torch.inf, dtype=torch.float64)
        else:
            errors = bound.errors
        return Solved(solution.values, solution.unsolved, errors, residual, solution.iterations)


@dataclass(frozen=True)
class IterativeBlock(ConditionedBlock):
    """What the observations say of some values.

    Attributes:
        shift: What the mean gains, ``(*batch, k)``, float64.
        reduction: What variances lose, ``(*batch, k)``, float64.
        errors: Upper bounds of the roots of what a variance is too large by, ``(*batch, k)``,
            float64.
        shift_rounding: What rounding may do to the shift, ``(*batch, k)``, float64.
        reduction_rounding: And to the reduction.
        residual: Largest norm of a column's residual as a share of that of its right-hand side.
        iterations: Products with the covariance.
        vectors: k, V and R, ``(*batch, n, k)`` each, if they were to be kept.
    """

    shift: Tensor
    reduction: Tensor
    errors: Tensor
    shift_rounding: Tensor
    reduction_rounding: Tensor
    residual: float
    iterations: int
    vectors: tuple[Tensor, Tensor, Tensor] | None

    def joint_reduction(self, other: IterativeBlock) -> Tensor:
        """What the covariance with another block's values loses, float64.

        Args:
            other: Values of the same observations; the vectors of both were kept.

        Returns:
            ``(*batch, k, l)``.

        Note:
            4 n k l floating-point operations.
        """
        assert self.vectors is not None
        assert other.vectors is not None
        cross, V, _ = (part.double() for part in self.vectors)
        _, W, R = (part.double() for part in other.vectors)
        return cross.mT @ W + V.mT @ R


class IterativeConditioning(Predictor):
    r"""Observations that are solved for once, to predict other values. Without gradients.

    Args:
        covariance: K, of the observations, ``(*batch, n, n)``.
        residual: r, observations minus their prior mean, ``(*batch, n)``; zero where missing.
        settings: Tolerance and the rest.

    Attributes:
        weights: The solution a of K a = r, ``(*batch, n, 1)``.
        error: Upper bound of :math:`(\rho^\top K^{-1} \rho)^{1/2}` for the residual :math:`\rho = r
            - K a`, ``(*batch, 1)``, float64: the mean :math:`k^\top a` of a value is off by at most
            that times its prior deviation.
        residual: Norm of :math:`\rho` as a share of that of r.
        iterations: Products with the covariance.

    Raises:
        NonFiniteError: The covariance or a residual is not finite.
        NotConvergedError: The tolerance is not reached, unless the settings only warn.

    Note:
        2 n² floating-point operations per iteration, and the evaluation of the covariance.
        Predicting k values takes k solves: 2 n² k operations per iteration, and memory for about 16
        arrays of n x k.
    """

    @checked(residual="float (*batch, n)")
    def __init__(
        self, covariance: NoisyCovariance, residual: Tensor, settings: ConjugateGradients
    ) -> None:
        if residual.shape[-1] != covariance.shape[-1]:
            expected = f"(*batch, {covariance.shape[-1]}), as the covariance"
            raise ShapeError("residual", tuple(residual.shape), expected)
        if residual.dtype != covariance.dtype:
            expected = f"{covariance.dtype}, as the covariance"
            raise ArgumentError("residual", residual.dtype, expected)
        self._solver = CovarianceSolver(covariance, settings)
        self.missing: Tensor | None = covariance.missing
        solved = self._solver.solve(residual.unsqueeze(-1), tolerance=settings.tolerance / 10)
        self.weights: Tensor = solved.values
        self._unsolved = solved.unsolved
        self.error: Tensor = solved.errors
        self.residual: float = solved.residual
        self.iterations: int = solved.iterations

    @torch.no_grad()
    def _given(self, cross: Tensor, keep: bool) -> IterativeBlock:
        solved: Solved = self._solver.solve(cross.contiguous())
        V, R = solved.values, solved.unsolved
        rounding = _OF_SUMS * self._solver.rounding
        length = V.norm(dim=-2, dtype=torch.float64)
        weight = self.weights.norm(dim=-2, dtype=torch.float64)
        return IterativeBlock(
            shift=_dots(cross, self.weights) + _dots(V, self._unsolved),
            reduction=_dots(cross, V) + _dots(V, R),
            errors=solved.errors,
            shift_rounding=rounding * weight * (1 + length),
            reduction_rounding=rounding * (1 + length.square()),
            residual=solved.residual,
            iterations=solved.iterations,
            vectors=(cross, V, R) if keep else None,
        )


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of columns, ``(*batch, n, k)`` to ``(*batch, k)``, summed in float64."""
    return (left * right).sum(-2, dtype=torch.float64)
