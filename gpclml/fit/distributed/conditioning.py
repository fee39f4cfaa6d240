"""Held-out points of one process among several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.conditioning import Conditioning, Split
from gpclml.conditioning.strategies import integer
from gpclml.errors import ArgumentError
from gpclml.fit.distributed._processes import processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DistributedConditioning"]


class DistributedConditioning(Conditioning):
    """Held-out points that differ by process: of as many draws as processes, the rank's own.

    Every process makes the same draws, from objectives of the same seed on the same data, and so
    nothing is sent. The mean of the processes' objectives, with gradients by
    :func:`~gpclml.fit.distributed.average_gradients`, is the mean over these draws; one process
    computes it with an objective for each ``rank``.

    Args:
        conditioning: A strategy that draws at random. With a seed of its own the draws of the
            processes differ and are the same at each call.
        num_replicas: Number of draws. The number of processes in the group if None; one where
            ``torch.distributed`` is not initialized.
        rank: Which of the draws is held out, from 0. That of this process in the group if None.
        group: Process group; all processes if None.

    Raises:
        ArgumentError: If ``rank`` and ``num_replicas`` are not given together or do not fit; if
            a launcher started several processes and ``torch.distributed`` is not initialized;
            when drawing for several processes, if the strategy does not draw at random or no
            generator is given.

    Note:
        Costs the drawing of ``num_replicas`` splits.

    Examples:
        >>> draws = RandomHoldout(0.2, seed=0)
        >>> first = DistributedConditioning(draws, num_replicas=2, rank=0)
        >>> second = DistributedConditioning(draws, num_replicas=2, rank=1)
        >>> first.held_out(10), second.held_out(10)
        ([tensor([[4, 1]])], [tensor([[3, 9]])])
    """

    @checked
    def __init__(
        self,
        conditioning: Conditioning,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        # The seed starts the sequence of draws; a draw of its own would start it anew.
        super().__init__(conditioning.seed)
        if (num_replicas is None) != (rank is None):
            given = "num_replicas" if rank is None else "rank"
            raise ArgumentError(
                given, "this one alone", "num_replicas and rank together, or neither"
            )
        if num_replicas is None or rank is None:
            own = processes(group)
            num_replicas, rank = own.size, own.rank
        self.conditioning = conditioning
        self.num_replicas = integer("num_replicas", num_replicas, 1)
        self.rank = integer("rank", rank, 0)
        if self.rank >= self.num_replicas:
            raise ArgumentError("rank", rank, f"below the number of replicas, {num_replicas}")

    @property
    def redraws(self) -> bool:
        """Whether the strategy that draws for all processes holds out other points each call."""
        return self.conditioning.redraws

    def _blocks(self, rows: Tensor, num_data: int, generator: torch.Generator | None):
        return self._split(rows, num_data, generator).held_out

    def _split(self, rows: Tensor, num_data: int, generator: torch.Generator | None) -> Split:
        if self.num_replicas == 1:
            return self.conditioning._split(rows, num_data, generator)
        if generator is None:
            raise ArgumentError(
                "generator",
                None,
                "a generator, or a strategy with a seed",
                "The global generators of several processes need not agree.",
            )
        before = generator.get_state()
        # All of them, so that the generators of all processes advance alike.
        splits = [
            self.conditioning._split(rows, num_data, generator) for _ in range(self.num_replicas)
        ]
        if torch.equal(before, generator.get_state()):
            raise ArgumentError(
                "conditioning",
                f"{self.conditioning}, the same in all {self.num_replicas} processes",
                "a strategy that draws at random",
                "A fixed strategy is evaluated in one process.",
            )
        return splits[self.rank]
