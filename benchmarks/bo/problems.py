"""The functions to maximize, on the unit cube."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gpclml.errors import UnknownNameError

__all__ = ["FUNCTIONS", "Problem", "initial_points", "make_problem"]

FUNCTIONS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "branin": ("Branin", 2),
        "hartmann-6": ("Hartmann", 6),
        "ackley-10": ("Ackley", 10),
        "levy-10": ("Levy", 10),
    }
)
"""Classes of ``botorch.test_functions`` and numbers of inputs, by name."""


@dataclass(frozen=True)
class Problem:
    """A function on the unit cube, without noise, to be maximized.

    Args:
        dim: Number of inputs.
        optimum: Its largest value, to the five or six digits that BoTorch has.
        values: Maps points ``(n, dim)`` to values ``(n, 1)``.
    """

    dim: int
    optimum: float
    values: Callable[[Tensor], Tensor]

    def regrets(self, x: Tensor) -> Tensor:
        """How much less than the largest value the function is at points.

        Args:
            x: Points in the unit cube. Shape ``(n, dim)``.

        Returns:
            Regrets, not negative. Shape ``(n,)``.
        """
        return (self.optimum - self.values(x)[:, 0]).clamp_min(0.0)


def make_problem(name: str) -> Problem:
    """The negative of BoTorch's test function of that name.

    Args:
        name: One of :data:`FUNCTIONS`.

    Raises:
        UnknownNameError: No such function.
    """
    from botorch import test_functions
    from botorch.utils.transforms import unnormalize

    if name not in FUNCTIONS:
        raise UnknownNameError("functions", name, FUNCTIONS)
    cls, dim = FUNCTIONS[name]
    sizes: dict[str, Any] = {} if cls == "Branin" else {"dim": dim}
    function = getattr(test_functions, cls)(negate=True, dtype=torch.float64, **sizes)

    def values(x: Tensor) -> Tensor:
        return function(unnormalize(x, function.bounds.to(x))).unsqueeze(-1)

    return Problem(dim, float(function.optimal_value), values)


def initial_points(dim: int, seed: int) -> Tensor:
    """The points that an optimization starts from: 2 (dim + 1) of a scrambled Sobol sequence.

    Args:
        dim: Number of inputs.
        seed: Seed of the scrambling.

    Returns:
        Points in the unit cube, float64. Shape ``(2 (dim + 1), dim)``.
    """
    sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    return sobol.draw(2 * (dim + 1), dtype=torch.float64)
