"""How a posterior is solved for: by a dense factorization, by conjugate gradients, by what fits."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils import memory
from gpclml.errors import UnsupportedError
from gpclml.inference.solvers import Solver, check_solver, iterative_settings, takes_cholesky
from gpclml.linalg import ConjugateGradients

__all__ = [
    "VECTORS_AT_PEAK",
    "choose_posterior_solver",
    "num_points_at_once",
    "refuse_gradient",
]

_MATRICES, _WITH_GRADIENT, _WITH_MISSING = 5, 11, 2
"""Arrays n x n at the peak of a dense posterior; under autograd; more with targets missing."""
VECTORS_AT_PEAK = 16
"""Arrays of n times points at the peak of a solve: conjugate gradients', kernel's, the result."""
_NUMBERS_AT_ONCE = 2**23
"""In one such array: 64 MiB in float64."""


def choose_posterior_solver(
    solver: Solver, train_x: Tensor, train_y: Tensor, x: Tensor, marginal: bool
) -> ConjugateGradients | None:
    """The settings of conjugate gradients, or None for a dense factorization.

    "auto" factors, which is exact, where that fits into the memory of the device, and warns where
    it does not. It needs about 5 n² numbers without a gradient and 11 n² with one, 2 n² more where
    targets are missing, and n m + 3 m² for a joint covariance.

    Args:
        solver: What was asked for.
        train_x: Training inputs, ``(*batch, n, d)``.
        train_y: Their targets, ``(*batch, n)``.
        x: New points, ``(*batch, m, d)``.
        marginal: Whether only variances are asked for.

    Raises:
        UnknownNameError: The solver is neither a known name nor settings.
        ArgumentError: What was asked for needs more memory than the device has; with both figures.
        UnsupportedError: x asks for a gradient of conjugate gradients.

    Warns:
        SolverWarning: "auto" takes conjugate gradients.
    """
    chosen = check_solver(solver)
    n, m = train_x.shape[-2], x.shape[-2]
    batch = torch.broadcast_shapes(train_x.shape[:-2], x.shape[:-2]).numel()
    matrices = _WITH_GRADIENT if torch.is_grad_enabled() else _MATRICES
    matrices += _WITH_MISSING * bool(train_y.isnan().any())
    numbers = batch * (matrices * n * n + (not marginal) * (n + 3 * m) * m)
    size, mend = f"n = {n}, m = {m}", "Use solver='cg', torch.no_grad(), or fewer points."
    if takes_cholesky(chosen, numbers, x, size, mend):
        return None
    refuse_gradient(x)
    num_points_at_once(x, batch * n, batch, not marginal)
    return iterative_settings(chosen, numbers, x, size, " and without a gradient")


def num_points_at_once(
    x: Tensor, size: int, batch: int, joint: bool, held: int = 0, asked: int | None = None
) -> int:
    """How many new points are solved for together, or an error before anything is.

    Args:
        x: New points, ``(*batch, m, d)``.
        size: Training points of all batch members.
        batch: Number of those.
        joint: Whether the joint covariance of all m is asked for.
        held: Numbers in memory throughout.
        asked: How many were asked for; as many as go well and fit if None.

    Raises:
        ArgumentError: They need more memory than the device has; with both figures.
    """
    m = x.shape[-2]
    if joint:
        held += 3 * size * m + 4 * batch * m * m * 8 // x.dtype.itemsize  # those in float64
    if asked is None:
        there = memory.available_memory(x.device) // x.dtype.itemsize - held
        asked = max(1, min(_NUMBERS_AT_ONCE, there // (2 * VECTORS_AT_PEAK)) // size)
    got, mend = f"{min(m, asked)} points at once", "Lower points_at_once."
    if joint:
        got, mend = f"{m} points jointly", "Give fewer, or ask for their marginals."
    numbers = held + VECTORS_AT_PEAK * size * min(m, asked)
    memory.check_memory("x", got, numbers, x.dtype, x.device, mend)
    return min(m, asked)


def refuse_gradient(x: Tensor) -> None:
    """Refuses points that ask for a gradient, which conjugate gradients do not give.

    Args:
        x: Any shape.

    Raises:
        UnsupportedError: They do, outside ``torch.no_grad()``.
    """
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        raise UnsupportedError(
            "x", "points that ask for a gradient", "points without one",
            "Use x.detach(), or a dense posterior (solver='cholesky').",
        )  # fmt: skip
