"""The log density of held-out blocks in nats per held-out target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml.linalg import block_conditional_log_densities, conditional_log_density
from gpclml.observations import Observations

__all__ = ["held_out_density"]


def held_out_density(
    data: Observations, blocks: Sequence[Tensor], factor_dtype: torch.dtype | None = None
) -> Tensor:
    """The mean over held-out targets of the blocks' log densities given all others.

    A single block is factored with its points last; several share one inverse.

    Args:
        data: The Gaussian of the observations.
        blocks: Flat target indices, ``(k_i, b_i)`` a block size, or ``(*batch, 1, b)`` for one
            block of its own in each batch member.
        factor_dtype: See :func:`gpclml.linalg.cholesky.factorization_dtype`.

    Returns:
        Nats per observed held-out target, ``(*batch,)``.
    """
    if len(blocks) == 1 and blocks[0].shape[-2] == 1:
        held_out = blocks[0].squeeze(-2)
        value = conditional_log_density(data.covariance, data.residual, held_out, factor_dtype)
    else:
        values = block_conditional_log_densities(
            data.covariance, data.residual, blocks, factor_dtype
        )
        value = values.sum(-1)
    return data.per_held_out_target(value, blocks)
