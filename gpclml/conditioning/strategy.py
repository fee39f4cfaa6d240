"""What a way of holding points out is asked for, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.conditioning.checks import integer
from gpclml.errors import ArgumentError

__all__ = ["Conditioning", "Split"]


@dataclass(frozen=True)
class Split:
    """Held-out blocks and the rows that they are conditioned on; indices on the CPU.

    Attributes:
        held_out: Row indices, one tensor a block size: ``k_i`` blocks of ``b_i`` rows,
            ``(k_i, b_i)``.
        conditioned_on: Row indices, ``(m,)``; None where each block is conditioned on every row
            outside it.
    """

    held_out: list[Tensor]
    conditioned_on: Tensor | None = None


class Conditioning(ABC):
    """A way of dividing data into held-out points and the points conditioned on.

    Args:
        seed: With a seed every call gives the same blocks; without one, random strategies
            draw afresh from the generator of the caller.
    """

    _is_random = False

    def __init__(self, seed: int | None = None) -> None:
        self.seed = None if seed is None else integer("seed", seed, 0)

    @property
    def redraws(self) -> bool:
        """Whether each call holds out other points: a random strategy without a seed."""
        return self._is_random and self.seed is None

    def held_out(
        self,
        num_data: int,
        generator: torch.Generator | None = None,
        observed: Tensor | None = None,  # shape: (num_data,)
    ) -> list[Tensor]:
        """The held-out blocks of :meth:`split`, which takes the same arguments.

        Returns:
            Row indices on the CPU, one tensor a block size: ``k_i`` blocks of ``b_i`` rows,
            ``(k_i, b_i)``.
        """
        return self.split(num_data, generator, observed).held_out

    @checked(late=True, observed="boolean (n,)")
    def split(
        self,
        num_data: int,
        generator: torch.Generator | None = None,
        observed: Tensor | None = None,  # shape: (num_data,)
    ) -> Split:
        """The held-out blocks, blocks of one size stacked, and what they are conditioned on.

        Args:
            num_data: Number of data rows, at least 1.
            generator: CPU generator for random strategies without a seed; theirs to advance.
            observed: Which rows have a target at all, boolean, ``(num_data,)``; the others are
                neither held out nor counted. All rows if None.

        Raises:
            ArgumentError: If there are no rows, or the strategy does not fit their number.
        """
        rows = torch.arange(integer("num_data", num_data, 1))
        if observed is not None:
            rows = rows[observed.cpu()]
        if rows.numel() == 0:
            raise ArgumentError("target", "no observed value", "at least one")
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)
        return self._split(rows, num_data, generator)

    def _split(self, rows: Tensor, num_data: int, generator: torch.Generator | None) -> Split:
        return Split(self._blocks(rows, num_data, generator))

    @abstractmethod
    def _blocks(
        self, rows: Tensor, num_data: int, generator: torch.Generator | None
    ) -> list[Tensor]:
        """Blocks among the observed ``rows`` (sorted indices) of ``num_data``."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({arguments})"
