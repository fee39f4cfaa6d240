"""The log density of held-out blocks in nats per held-out target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml.held_out_densities import held_out_densities
from gpclml.linalg import IterativeReport
from gpclml.observations import Observations
from gpclml.solvers import Solver

__all__ = ["held_out_density"]


def held_out_density(
    data: Observations,
    blocks: Sequence[Tensor],
    solver: Solver = "cholesky",
    factor_dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[IterativeReport, ...]]:
    """The mean over held-out targets of the blocks' log densities given all others.

    Args:
        data: The Gaussian of the observations.
        blocks: As :func:`~gpclml.held_out_densities.held_out_densities` takes them.
        solver: The same.
        factor_dtype: The same.

    Returns:
        Nats per observed held-out target, ``(*batch,)``; and how well each block was solved for.
    """
    values, reports = held_out_densities(data, blocks, solver, factor_dtype)
    return data.per_held_out_target(values.sum(-1), blocks), reports
