"""Which processes work together, and which of them this is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from gpclml.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Processes", "processes"]


@dataclass(frozen=True)
class Processes:
    """A group of processes, of which this one has a rank.

    Attributes:
        group: The group; None for all processes, or where there is one.
        rank: Rank of this process in the group.
        size: Number of processes.
    """

    group: ProcessGroup | None
    rank: int
    size: int

    @property
    def backends(self) -> dict[str, str]:
        """Backend of each type of device that the group can send from."""
        config = dist.get_backend_config(self.group)
        return dict(part.split(":") for part in config.split(","))

    def global_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Ranks among all processes, as launchers print them."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return tuple(dist.get_global_rank(group, rank) for rank in ranks)


def processes(group: ProcessGroup | None) -> Processes:
    """The processes of a group; one where ``torch.distributed`` is not initialized.

    Raises:
        ArgumentError: If a launcher started several and it is not initialized, or this process
            is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            # Each process would train on its own, on the same blocks as all others.
            raise ArgumentError(
                "group",
                f"no process group in one of {started} processes (WORLD_SIZE)",
                "an initialized torch.distributed",
                "Call torch.distributed.init_process_group first.",
            )
        return Processes(None, 0, 1)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError("group", "a group without this process", "one that it belongs to")
    return Processes(group, rank, dist.get_world_size(group))
