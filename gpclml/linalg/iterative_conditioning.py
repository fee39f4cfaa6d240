r"""Moments given observations, by conjugate gradients.

With K the covariance of the observations, r their residual, k their covariance with other values
and :math:`k_{**}` the prior covariance of those, solves :math:`K a = r - \rho` and
:math:`K V = k - R` give

.. math::
    \mu = k^\top a + V^\top \rho, \qquad
    C = k_{**} - k^\top V - V^\top R = k_{**} - 2 k^\top V + V^\top K V.

They are off by :math:`-R^\top K^{-1} \rho` and :math:`R^\top K^{-1} R` from
:math:`k^\top K^{-1} r` and :math:`k_{**} - k^\top K^{-1} k`: in second order, and a variance is
never too small. The mean :math:`k^\top a` needs no solve but the first and is off by
:math:`-k^\top K^{-1} \rho`, in first order; so a tenth of the tolerance is sought for a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError
from gpclml.linalg.conjugate_gradients import ConjugateGradients
from gpclml.linalg.covariance_products import NoisyCovariance
from gpclml.linalg.covariance_solver import CovarianceSolver, Solved

__all__ = ["ConditionedBlock", "IterativeConditioning"]


@dataclass(frozen=True)
class ConditionedBlock:
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

    def joint_reduction(self, other: ConditionedBlock) -> Tensor:
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


class IterativeConditioning:
    r"""Observations, solved for once. Without gradients.

    Args:
        covariance: K, of the observations, ``(*batch, n, n)``.
        residual: r, observations minus their prior mean, ``(*batch, n)``; zero where missing.
        settings: Tolerance and the rest.

    Attributes:
        weights: a, ``(*batch, n, 1)``.
        error: Upper bound of :math:`(\rho^\top K^{-1} \rho)^{1/2}`, ``(*batch, 1)``, float64: the
            mean :math:`k^\top a` of a value is off by at most that times its prior deviation.
        residual: Norm of :math:`\rho` as a share of that of r.
        iterations: Products with the covariance.

    Raises:
        NonFiniteError: The covariance or a residual is not finite.
        NotConvergedError: The tolerance is not reached, unless the settings only warn.

    Note:
        2 n² floating-point operations an iteration, beside the evaluation of the covariance.
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
        self._missing = covariance.missing
        solved = self._solver.solve(residual.unsqueeze(-1), tolerance=settings.tolerance / 10)
        self.weights, self._unsolved, self.error = solved.values, solved.unsolved, solved.errors
        self.residual, self.iterations = solved.residual, solved.iterations

    @torch.no_grad()
    def given(self, cross: Tensor, keep: bool = False) -> ConditionedBlock:
        """What the observations say of other values, by a solve for each.

        Args:
            cross: k, ``(*batch, n, k)``; batches broadcast.
            keep: Keep the vectors, for the joint covariance.

        Raises:
            NonFiniteError: The covariance with these values is not finite.
            NotConvergedError: The tolerance is not reached, unless the settings only warn.

        Note:
            2 n² k floating-point operations an iteration, beside the evaluation of the covariance;
            memory for about 16 arrays n x k.
        """
        if self._missing is not None:
            cross = torch.where(self._missing.unsqueeze(-1), 0.0, cross)
        solved: Solved = self._solver.solve(cross)
        V, R = solved.values, solved.unsolved
        rounding, length = self._solver.rounding, V.norm(dim=-2, dtype=torch.float64)
        weight = self.weights.norm(dim=-2, dtype=torch.float64)
        return ConditionedBlock(
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
