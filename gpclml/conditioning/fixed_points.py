"""Held-out points that are the same at each call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.conditioning.checks import check_below, integer, stack_by_size
from gpclml.conditioning.strategy import Conditioning
from gpclml.errors import ArgumentError

__all__ = ["HeldOut", "LastPoints", "LeaveOneOut"]

Indices = Sequence[int] | Tensor


class LeaveOneOut(Conditioning):
    """Every point on its own, given all others (Rasmussen and Williams 2006, Section 5.4.2)."""

    def __init__(self) -> None:
        super().__init__()

    def _blocks(self, rows, num_data, generator):
        return [rows.unsqueeze(-1)]


class LastPoints(Conditioning):
    """The points after the first m, in data order: what follows given what came before.

    Args:
        m: Number of points conditioned on, the first ones; 0 gives the log marginal
            likelihood.

    Raises:
        ArgumentError: If ``m`` is negative, or, once the data are seen, not below their number.
    """

    @checked
    def __init__(self, m: int) -> None:
        super().__init__()
        self.m = integer("m", m, 0)

    def _blocks(self, rows, num_data, generator):
        check_below("m", self.m, rows.numel())
        return [rows[self.m :].unsqueeze(0)]


class HeldOut(Conditioning):
    """Blocks that the caller chooses: a validation set, or one block a group.

    Args:
        *blocks: Row indices, one sequence or one-dimensional tensor a block; blocks are
            disjoint and may differ in size.

    Raises:
        ArgumentError: If there is no block, one is empty, or indices are negative, repeated,
            shared by blocks, or, once the data are seen, beyond them.

    Examples:
        >>> HeldOut([0, 1, 2]).held_out(5)
        [tensor([[0, 1, 2]])]
    """

    @checked
    def __init__(self, *blocks: Indices) -> None:
        super().__init__()
        if not blocks:
            raise ArgumentError("blocks", "none", "at least one sequence of row indices")
        self.blocks = tuple(_row_indices(block) for block in blocks)
        every = torch.cat(self.blocks)
        values, counts = every.unique(return_counts=True)
        if (counts > 1).any():
            repeated = values[counts > 1].tolist()
            raise ArgumentError(
                "blocks", f"repeated indices {repeated[:5]}", "each row in one block, once"
            )

    def _blocks(self, rows, num_data, generator):
        highest = max(int(block.max()) for block in self.blocks)
        if highest >= num_data:
            raise ArgumentError("blocks", f"index {highest}", f"rows from 0 to {num_data - 1}")
        kept = [block[torch.isin(block, rows)] for block in self.blocks]
        kept = [block for block in kept if block.numel()]
        if not kept:
            raise ArgumentError(
                "blocks", "rows whose targets are all missing", "at least one observed target"
            )
        return stack_by_size(kept)


def _row_indices(block: Indices) -> Tensor:
    expected = "a one-dimensional sequence of non-negative integers, not empty"
    indices = torch.as_tensor(block).cpu()
    if indices.ndim != 1 or indices.numel() == 0:
        raise ArgumentError("blocks", f"indices of shape {tuple(indices.shape)}", expected)
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ArgumentError("blocks", f"indices of {indices.dtype}", expected)
    if int(indices.min()) < 0:
        raise ArgumentError("blocks", f"index {int(indices.min())}", expected)
    return indices.long()
