"""The objectives of several models evaluated together on the stack of these models."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import cast

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.inference.observations import Observations
from gpclml.mlls._held_out import held_out_density
from gpclml.mlls._terms import prior_and_added_loss
from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood

__all__ = ["member_objectives"]

Blocks = Sequence[Tensor]


def member_objectives(
    mlls: Sequence[ConditionalMarginalLogLikelihood],
    stack: ExactGP,
    data: Observations,
    blocks: Sequence[Blocks],
) -> Tensor:
    """The objective of each member at its own held-out points.

    Runs of consecutive members with one held-out block of the same size, or with the very same
    blocks, are evaluated in one pass; others one by one.

    Args:
        mlls: The objectives of the members.
        stack: Their models stacked, ``batch_shape`` ``(k,)``.
        data: The Gaussian of the stack's observations.
        blocks: Held-out blocks of each member, as its ``draw_split`` gives them.

    Returns:
        Nats per observed held-out target, ``(k,)``.
    """
    keys = [(mll.factor_dtype, *_key(own)) for mll, own in zip(mlls, blocks, strict=True)]
    values = []
    for key, run in itertools.groupby(range(len(mlls)), keys.__getitem__):
        places = list(run)
        part = slice(places[0], places[-1] + 1)
        rows = data if len(places) == len(mlls) else data.member(part)
        joined = _joined([blocks[place] for place in places])
        dtype = cast(torch.dtype | None, key[0])
        values.append(held_out_density(rows, joined, "cholesky", dtype)[0])
    value = torch.cat(values)
    terms = prior_and_added_loss(stack, value.shape, data.params)
    return value + terms / data.num_observed()


def _is_single(blocks: Blocks) -> bool:
    return len(blocks) == 1 and len(blocks[0]) == 1


def _key(blocks: Blocks) -> tuple[Hashable, ...]:
    """Equal for members that can be evaluated in one pass."""
    if _is_single(blocks):
        return (blocks[0].shape[-1],)
    return tuple((group.shape, group.numpy().tobytes()) for group in blocks)


def _joined(members: Sequence[Blocks]) -> Blocks:
    return [torch.stack([own[0] for own in members])] if _is_single(members[0]) else members[0]
