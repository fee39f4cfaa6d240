"""The log density of held-out blocks in nats per held-out target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import all_finite
from gpclml._utils.memory import reads_are_free
from gpclml.inference.held_out_densities import held_out_densities
from gpclml.inference.observations import Observations
from gpclml.inference.solvers import Solver
from gpclml.linalg import IterativeReport

__all__ = ["held_out_density"]


def held_out_density(
    data: Observations,
    blocks: Sequence[Tensor],
    solver: Solver = "cholesky",
    factor_dtype: torch.dtype | None = None,
    *,
    redrawn: bool = False,
) -> tuple[Tensor, tuple[IterativeReport, ...]]:
    """The mean over held-out targets of the blocks' log densities given all others.

    A GPU is looked at once, at the end, by the density. Where that is not finite, it is computed
    again with every step looked at: with jitter, or an error that says what was wrong.

    Args:
        data: The Gaussian of the observations.
        blocks: As :func:`~gpclml.inference.held_out_densities.held_out_densities` takes them.
        solver: The same.
        factor_dtype: The same.
        redrawn: As :meth:`~gpclml.inference.Observations.per_held_out_target` takes it.

    Returns:
        Nats per observed held-out target, ``(*batch,)``; and how well each block was solved for.

    Raises:
        NonFiniteError: If a density is not finite.
    """
    checked = reads_are_free(data.residual.device)
    values, reports = held_out_densities(data, blocks, solver, factor_dtype, checked=checked)
    value = values.sum(-1)
    if not all_finite(value):
        if not checked:
            del values, value  # what they hold for the gradient
            values, reports = held_out_densities(data, blocks, solver, factor_dtype)
            value = values.sum(-1)
        data.check_density(value)
    return data.per_held_out_target(value, blocks, redrawn=redrawn), reports
