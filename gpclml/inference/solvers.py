"""How a conditional density is solved for: by Cholesky, by conjugate gradients, by what fits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from gpclml._utils import memory
from gpclml._utils.arguments import callers_level, checked
from gpclml.errors import UnknownNameError
from gpclml.inference.observations import Observations
from gpclml.linalg import ConjugateGradients

__all__ = [
    "Solver",
    "SolverWarning",
    "check_solver",
    "choose_solver",
    "iterative_settings",
    "takes_cholesky",
]

Solver = Literal["auto", "cholesky", "cg"] | ConjugateGradients
"""A name, or the settings of conjugate gradients."""

_MATRICES = 7
"""Arrays of the covariance's size at the peak of a step: its kernel's, its factor, its gradient."""
_VECTORS = 12
"""Arrays of n times block size at the peak of an iterative step."""


class SolverWarning(UserWarning):
    """``solver="auto"`` took conjugate gradients."""


@checked(late=True)
def check_solver(solver: Solver) -> Solver:
    """The solver as it came.

    Raises:
        UnknownNameError: It is neither a known name nor settings.
    """
    names = ("auto", "cholesky", "cg")
    if not isinstance(solver, ConjugateGradients) and solver not in names:
        raise UnknownNameError("solver", str(solver), names)
    return solver


def takes_cholesky(solver: Solver, numbers: int, like: Tensor, size: str, mend: str) -> bool:
    """Whether a dense factorization is taken: if asked for, or by "auto" where it fits.

    Args:
        solver: What was asked for.
        numbers: How many numbers it needs at its peak.
        like: Of their type and device.
        size: The sizes that decide.
        mend: What to do where it was asked for and does not fit.

    Raises:
        ArgumentError: If it was asked for and needs more memory than the device has; with both
            figures.
    """
    if isinstance(solver, ConjugateGradients) or solver == "cg":
        return False
    if solver == "cholesky":
        got = f"'cholesky' at {size}"
        memory.check_memory("solver", got, numbers, like.dtype, like.device, mend)
        return True
    return memory.fits(numbers * like.dtype.itemsize, like.device)


def iterative_settings(
    solver: Solver, numbers: int, like: Tensor, size: str, loss: str = ""
) -> ConjugateGradients:
    """The settings of conjugate gradients, where no dense factorization is taken.

    Args:
        solver: As for :func:`takes_cholesky`.
        numbers: The same.
        like: The same.
        size: The same.
        loss: What is given up beside exactness.

    Warns:
        SolverWarning: If "auto" takes them.
    """
    settings = solver if isinstance(solver, ConjugateGradients) else ConjugateGradients()
    if solver == "auto":
        there = memory.available_memory(like.device)
        warnings.warn(
            f"{size}: a Cholesky factor needs {numbers * like.dtype.itemsize / 2**30:.1f} GiB, the "
            f"{like.device.type} has {there / 2**30:.1f}, so conjugate gradients are used, with "
            f"relative residuals of at most {settings.tolerance:g}{loss}. Pass solver='cg', or "
            "ConjugateGradients(...), to choose them.",
            SolverWarning,
            stacklevel=callers_level(),
        )
    return settings


@checked(late=True)
def choose_solver(
    solver: Solver, data: Observations, blocks: Sequence[Tensor]
) -> ConjugateGradients | None:
    """The settings of conjugate gradients, or None for Cholesky factors.

    "auto" takes Cholesky factors, which are exact, where they fit into the memory of the device,
    and says so where it does not. Covariances of low rank are solved exactly by their parts.

    Args:
        solver: What was asked for.
        data: The Gaussian of the observations.
        blocks: Held-out blocks, ``(k_i, b_i)`` a size.

    Raises:
        ArgumentError: If what was asked for needs more memory than the device has; with both
            figures.

    Warns:
        SolverWarning: If "auto" takes conjugate gradients.
    """
    like, size = data.residual, f"n = {data.residual.shape[-1]}"
    numbers = _MATRICES * data.lazy_covariance.shape.numel()
    if (
        solver in ("auto", "cholesky")
        and not memory.fits(numbers * like.itemsize, like.device)
        and data.lazy_covariance.is_low_rank()
    ):
        return None
    mend = "Use solver='cg', or condition on fewer points: RandomHoldout(fraction, condition_on=m)."
    if takes_cholesky(solver, numbers, like, size, mend):
        return None
    largest = max(group.shape[-1] for group in blocks)
    memory.check_memory(
        "conditioning", f"a block of {largest} held-out points",
        like.numel() * _VECTORS * (largest + 1), like.dtype, like.device,
        "Hold out a smaller share of the points.",
    )  # fmt: skip
    return iterative_settings(solver, numbers, like, size)
