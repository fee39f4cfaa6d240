"""Log densities of draws as a caller's functions give them, checked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpclml._utils.finite import all_finite
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError

__all__ = [
    "LogDensity",
    "check_differentiable",
    "check_finite",
    "drawn_parameters",
    "log_values",
]

LogDensity = Callable[[Tensor], Tensor]
"""Maps draws ``(S, P)`` to the log density of each, ``(S,)``."""


def drawn_parameters(argument: str, draws: Tensor) -> Tensor:
    """The draws without their graph, if they are real, finite and ``(S, P)``."""
    if draws.ndim != 2 or 0 in draws.shape:
        raise ShapeError(argument, tuple(draws.shape), "(S, P), S draws of P parameters")
    if not draws.is_floating_point():
        raise ArgumentError(argument, draws.dtype, "a floating-point type")
    check_finite(argument, draws)
    return draws.detach()


def log_values(
    argument: str, log_density: LogDensity, draws: Tensor, finite: bool = False
) -> Tensor:
    """Log densities of the draws, ``(S,)``."""
    values = log_density(draws)
    if values.shape != draws.shape[:1]:
        expected = f"({len(draws)},), one value a draw"
        raise ShapeError(argument, tuple(values.shape), expected, "Sum over parameters and data.")
    if finite:
        check_finite(argument, values)
    return values


def check_differentiable(argument: str, log_density: LogDensity, draws: Tensor) -> None:
    """Refuses functions that autograd cannot follow to the parameters."""
    with torch.enable_grad():
        inputs = draws.detach().requires_grad_()
        values = log_values(argument, log_density, inputs)
        gradient = None
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(values.sum(), inputs, allow_unused=True)
    if gradient is None:
        raise UnsupportedError(
            argument,
            "values without a gradient with respect to the parameters",
            "a differentiable function of them",
            "Use torch operations throughout, without detach or numpy.",
        )


def check_finite(argument: str, values: Tensor) -> None:
    """Refuses NaN and infinite values."""
    if not all_finite(values):
        bad = int((~torch.isfinite(values)).sum())
        raise NonFiniteError(argument, f"{bad} of {values.numel()} not finite", "finite values")
