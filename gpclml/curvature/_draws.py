"""Standard normal numbers that do not depend on dtype and device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Draw", "normal_draws"]

Draw = Callable[..., Tensor]


def normal_draws(generator: torch.Generator | None, like: Tensor) -> Draw:
    """What draws an array of a shape, as the tensor is in dtype and device.

    Args:
        generator: Source of the draws, in float64; seed 0 if None.
        like: A tensor.
    """
    source = torch.Generator().manual_seed(0) if generator is None else generator

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=source, dtype=torch.float64, device=source.device)
        return numbers.to(like)

    return draw
