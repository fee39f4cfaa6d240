"""How a conditional density is solved for: by Cholesky, by conjugate gradients, by what fits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from gpclml._memory import available_memory, check_memory
from gpclml.errors import UnknownNameError
from gpclml.linalg import ConjugateGradients
from gpclml.observations import Observations

__all__ = ["Solver", "SolverWarning", "check_solver", "choose_solver", "dense_bytes"]

Solver = Literal["auto", "cholesky", "cg"] | ConjugateGradients
"""A name, or the settings of conjugate gradients."""

_MATRICES = 7
"""Arrays of the covariance's size at the peak of a step: its kernel's, its factor, its gradient."""
_VECTORS = 12
"""Arrays of n times block size at the peak of an iterative step."""


class SolverWarning(UserWarning):
    """``solver="auto"`` took conjugate gradients."""


def check_solver(solver: Solver) -> Solver:
    """The solver as it came.

    Raises:
        UnknownNameError: It is neither a known name nor settings.
    """
    names = ("auto", "cholesky", "cg")
    if not isinstance(solver, ConjugateGradients) and solver not in names:
        raise UnknownNameError("solver", str(solver), names)
    return solver


def dense_bytes(data: Observations) -> int:
    """About what a step by Cholesky needs at its peak, value and gradient, in bytes.

    Args:
        data: The Gaussian of the observations.
    """
    return _MATRICES * data.lazy_covariance.shape.numel() * data.residual.dtype.itemsize


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
    device, dtype = data.residual.device, data.residual.dtype
    if solver in ("auto", "cholesky"):
        needed, there = dense_bytes(data), available_memory(device)
        if needed <= there or data.lazy_covariance.is_low_rank():
            return None
        n = data.residual.shape[-1]
        if solver == "cholesky":
            check_memory(
                "solver", f"'cholesky' at n = {n}", needed // dtype.itemsize, dtype, device,
                "Use solver='cg', or condition on fewer points: "
                "RandomHoldout(fraction, condition_on=m).",
            )  # fmt: skip
        warnings.warn(
            f"n = {n}: Cholesky factors need {needed / 2**30:.1f} GiB, the {device.type} has "
            f"{there / 2**30:.1f}, so conjugate gradients are used, with relative residuals of at "
            f"most {ConjugateGradients().tolerance:g}. Pass solver='cg', or "
            "ConjugateGradients(...), to choose them.",
            SolverWarning,
            stacklevel=3,
        )
    largest = max(group.shape[-1] for group in blocks)
    numbers = data.residual.numel() * _VECTORS * (largest + 1)
    check_memory(
        "conditioning", f"a block of {largest} held-out points", numbers, dtype, device,
        "Hold out a smaller share of the points.",
    )  # fmt: skip
    return solver if isinstance(solver, ConjugateGradients) else ConjugateGradients()
