"""Inverse temperatures between the prior, 0, and the posterior, 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError

__all__ = ["checked_schedule", "power_schedule"]


@checked
def power_schedule(count: int, power: float = 4.0) -> Tensor:
    r"""Inverse temperatures that are dense near the prior, :math:`\beta_t = (t / T)^c`.

    (Friel and Pettitt 2008). Where data shrink a prior, most of the way lies at small
    :math:`\beta`: with 100 temperatures powers of 3 to 5 left linear models gaps between both
    bounds 1.5 to 3.5 times smaller than a sigmoid in t from -4 to 4 did.

    Args:
        count: Number T of steps from 0 to 1.
        power: The power c; 1 spaces evenly.

    Returns:
        Increasing from 0 to 1, ``(T + 1,)``, in float64.

    Raises:
        ArgumentError: A number is out of range.

    Examples:
        >>> power_schedule(4, power=2.0)
        tensor([0.0000, 0.0625, 0.2500, 0.5625, 1.0000], dtype=torch.float64)
    """
    if count < 1:
        raise ArgumentError("count", count, "at least 1")
    if not 0 < power < math.inf:
        raise ArgumentError("power", power, "a positive number")
    return torch.linspace(0, 1, count + 1, dtype=torch.float64) ** power


def checked_schedule(temperatures: int | Sequence[float] | Tensor) -> list[float]:
    """The schedule that was asked for, by its length or its values."""
    if isinstance(temperatures, int):
        if temperatures < 1:
            raise ArgumentError("temperatures", temperatures, "at least 1")
        return power_schedule(temperatures).tolist()
    betas = torch.as_tensor(temperatures, dtype=torch.float64).flatten().tolist()
    if len(betas) < 2 or betas[0] != 0 or betas[-1] != 1:
        got = f"{len(betas)} from {betas[0]} to {betas[-1]}" if betas else "none"
        raise ArgumentError("temperatures", got, "inverse temperatures from 0 to 1")
    if not all(low < high for low, high in itertools.pairwise(betas)):
        raise ArgumentError("temperatures", "some that do not increase", "0 < ... < 1, increasing")
    return betas
