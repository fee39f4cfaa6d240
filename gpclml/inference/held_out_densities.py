"""The joint log densities of held-out blocks, by the solver that was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import UnsupportedError
from gpclml.inference.observations import Observations
from gpclml.inference.solvers import Solver, choose_solver
from gpclml.linalg import (
    ConjugateGradients,
    IterativeReport,
    block_conditional_log_densities,
    conditional_log_density,
    iterative_conditional_log_density,
)

__all__ = ["held_out_densities"]


@checked(late=True, blocks="index (k, b) | (*batch, k, b)")
def held_out_densities(
    data: Observations,
    blocks: Sequence[Tensor],
    solver: Solver = "auto",
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> tuple[Tensor, tuple[IterativeReport, ...]]:
    """The log density of each block given all points outside it, in nats.

    By Cholesky a single block is factored with its points last and several share one inverse; by
    conjugate gradients each block is solved for by itself.

    Args:
        data: The Gaussian of the observations.
        blocks: Flat target indices, ``(k_i, b_i)`` a block size, or ``(*batch, 1, b)`` for one
            block of its own in each batch member.
        solver: See :func:`gpclml.inference.solvers.choose_solver`.
        factor_dtype: See :func:`gpclml.linalg.cholesky.factorization_dtype`.
        checked: See :func:`gpclml.linalg.cholesky.safe_cholesky`; values are NaN where a
            factorization failed that was not looked at.

    Returns:
        The densities, ``(*batch, k)``, blocks of one size together; and how well each was solved
        for, none after Cholesky.

    Raises:
        ArgumentError: If memory does not suffice; with the figures.
        UnsupportedError: If batch members have blocks of their own and conjugate gradients are
            asked for.
        NotConvergedError: If conjugate gradients do not reach their tolerance.
    """
    chosen = choose_solver(solver, data, blocks)
    if chosen is not None:
        return _by_conjugate_gradients(data, blocks, chosen)
    if len(blocks) == 1 and blocks[0].shape[-2] == 1:
        held_out = blocks[0].squeeze(-2)
        value = conditional_log_density(
            data.covariance, data.residual, held_out, factor_dtype, checked=checked
        )
        return value.unsqueeze(-1), ()
    values = block_conditional_log_densities(
        data.covariance, data.residual, blocks, factor_dtype, checked=checked
    )
    return values, ()


def _by_conjugate_gradients(
    data: Observations, blocks: Sequence[Tensor], solver: ConjugateGradients
) -> tuple[Tensor, tuple[IterativeReport, ...]]:
    if any(group.ndim > 2 for group in blocks):
        raise UnsupportedError(
            "conditioning", "held-out points of its own in each batch member",
            "the same in all, for conjugate gradients", "Use solver='cholesky'.",
        )  # fmt: skip
    covariance = data.lazy_covariance.products(solver.room(data.residual.device))
    done = [
        iterative_conditional_log_density(covariance, data.residual, block, solver)
        for group in blocks
        for block in group
    ]
    return torch.stack([value for value, _ in done], dim=-1), tuple(report for _, report in done)
