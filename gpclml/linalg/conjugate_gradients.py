"""Preconditioned conjugate gradients that check what they return."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from linear_operator import settings
from linear_operator.utils.linear_cg import linear_cg
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpclml._utils.arguments import all_finite, checked
from gpclml._utils.environment import available_memory, progress_bar
from gpclml.errors import ArgumentError, NonFiniteError, NotConvergedError

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["ConjugateGradients", "NotConvergedWarning", "Solution", "check_finite", "column_norms"]

Multiply = Callable[[Tensor], Tensor]


class NotConvergedWarning(UserWarning):
    """An iterative solver did not reach its tolerance."""


@dataclass(frozen=True)
class Solution:
    """The result of a solve.

    Attributes:
        values: Solutions of all columns, ``(*batch, n, k)``.
        unsolved: Right-hand sides less the matrix times these, ``(*batch, n, k)``.
        iterations: Products with the matrix of any number of columns.
    """

    values: Tensor
    unsolved: Tensor
    iterations: int


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
        preconditioner_rank: Columns of the pivoted Cholesky factor that preconditions; 0 for none.
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

    @torch.no_grad()
    def solve(
        self,
        multiply: Multiply,
        right: Tensor,
        precondition: Multiply | None = None,
        start: Solution | None = None,
        tolerance: float | None = None,
    ) -> Solution:
        """Solves for all columns together, those that are done leaving.

        Conjugate gradients stop at a mean residual that they update by recursion. Here they restart
        from the newly computed residual, for the columns above the tolerance, until no column is
        above it. A column that stays above it raises no error here: see :meth:`check`.

        Args:
            multiply: Multiplies ``(*batch, n, k)`` by the matrix.
            right: Right-hand sides, ``(*batch, n, k)``.
            precondition: Multiplies by an approximation of its inverse.
            start: State to continue from, which is changed in place; its iterations count.
            tolerance: Replaces that of the settings.

        Raises:
            NonFiniteError: A right-hand side or a product with the matrix is not finite; at the
                first such product.
        """
        tolerance = tolerance or self.tolerance
        start = start or Solution(torch.zeros_like(right), right.clone(), 0)
        values, residual = start.values, start.unsolved
        norms = column_norms(right).clamp_min(torch.finfo(right.dtype).tiny)
        check_finite(right, "right-hand sides, covariances or residuals")
        last = float("inf")
        with self._bar(start.iterations) as bar:
            counted = _Counted(multiply, start.iterations, bar)
            while counted.products < self.max_iterations - 1:  # one to see what was reached
                relative = column_norms(residual) / norms
                check_finite(relative, "relative residuals")
                open_columns = (relative > tolerance).nonzero().flatten()
                worst = float(relative.max())
                bar.set_postfix_str(f"residual {worst:.1e} of {tolerance:.1e}")
                if open_columns.numel() == 0 or not worst < last:  # done, or as far as it goes
                    break
                last = worst
                left = residual[..., open_columns]
                goal = tolerance * float((norms / column_norms(residual))[open_columns].min())
                most = self.max_iterations - counted.products - 1
                try:
                    step = _conjugate_gradients(counted, left, goal, most, precondition)
                except _DivergedError:
                    break
                values[..., open_columns] += step
                residual[..., open_columns] = left - counted(step)
        return Solution(values, residual, counted.products)

    def _bar(self, done: int) -> tqdm:
        return progress_bar(
            progress=self.progress, desc="products", initial=done, total=self.max_iterations,
            leave=False,
        )  # fmt: skip

    def check(self, residual: float, iterations: int, error_bound: float | None = None) -> None:
        """Raises an error or warns where the tolerance was not reached, as ``on_failure`` says.

        Args:
            residual: The largest relative residual, as computed afterwards.
            iterations: Number of iterations.
            error_bound: Bound of the error of a density, in nats per held-out point; None if there
                is none.

        Raises:
            NonFiniteError: A number is NaN, for either value of ``on_failure``.
            NotConvergedError: The tolerance or ``max_error`` was not reached and ``on_failure`` is
                "error".
        """
        bound = error_bound or 0.0
        if math.isnan(residual) or math.isnan(bound):
            raise _non_finite(f"a relative residual of {residual} and an error bound of {bound}")
        suggestion = (
            "Raise preconditioner_rank or max_iterations, compute in float64, or use "
            "solver='cholesky' where memory allows."
        )
        after = f"after {iterations} iterations"
        if not residual <= self.tolerance:
            got = f"a relative residual of {residual:.2g} {after}"
            error = NotConvergedError("tolerance", got, f"at most {self.tolerance:g}", suggestion)
        elif self.max_error is not None and not bound <= self.max_error:
            got = f"an error of up to {error_bound:.2g} nats per held-out point {after}"
            error = NotConvergedError("max_error", got, f"at most {self.max_error:g}", suggestion)
        else:
            return
        if self.on_failure == "error":
            raise error
        warnings.warn(str(error), NotConvergedWarning, stacklevel=2)


def column_norms(vectors: Tensor) -> Tensor:
    """The largest norm over a batch of each column of ``(*batch, n, k)``, ``(k,)``."""
    return vectors.norm(dim=-2).reshape(-1, vectors.shape[-1]).amax(0)


def check_finite(values: Tensor, what: str) -> None:
    """Refuses numbers that come of a covariance and are NaN or infinite.

    Args:
        values: Any shape.
        what: What they are, for the message.

    Raises:
        NonFiniteError: Some are; with how many.
    """
    if not all_finite(values):
        bad = int((~torch.isfinite(values)).sum())
        raise _non_finite(f"{bad} non-finite of {values.numel()} {what}")


def _non_finite(got: str) -> NonFiniteError:
    return NonFiniteError(
        "covariance", got, "finite values",
        "Check the inputs for NaN, and the hyperparameters of kernel and likelihood for values "
        "that are NaN or too large for the floating-point type.",
    )  # fmt: skip


class _DivergedError(Exception):
    """The vectors of conjugate gradients overflowed: they reach no more than was reached before."""


class _Counted:
    """A product that counts how often it is taken; its first product may be with zeros."""

    def __init__(self, multiply: Multiply, products: int, bar: tqdm) -> None:
        self._multiply, self._bar = multiply, bar
        self.products = products

    def __call__(self, vectors: Tensor) -> Tensor:
        product = self._multiply(vectors)
        self.products += 1
        self._bar.update()
        if not all_finite(product):
            if not all_finite(vectors):
                raise _DivergedError
            check_finite(product, "numbers of its product with vectors")
        return product

    def after_the_first(self) -> Multiply:
        """The same, where the first product is with zeros."""
        calls = 0

        def product(vectors: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.zeros_like(vectors) if calls == 1 else self(vectors)

        return product


def _conjugate_gradients(
    multiply: _Counted,
    right: Tensor,
    tolerance: float,
    max_iterations: int,
    precondition: Multiply | None,
) -> Tensor:
    """linear_operator's, independent of its settings, and silent: residuals are checked here."""
    with warnings.catch_warnings(), settings.terminate_cg_by_size(False):
        warnings.simplefilter("ignore", NumericalWarning)
        return linear_cg(
            multiply.after_the_first(),
            right,
            tolerance=tolerance,
            eps=torch.finfo(right.dtype).tiny,
            stop_updating_after=tolerance / 10,
            max_iter=max_iterations,
            max_tridiag_iter=1,
            preconditioner=precondition,
        )
