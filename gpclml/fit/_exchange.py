"""Sums and broadcasts among processes, which end in time with a result or a typed error.

``torch.distributed.monitored_barrier`` names processes that hang but not those that ended, and
only in the process of rank 0; the roll call takes its place.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gpclml.errors import ArgumentError, LostWorkerError, ShapeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Processes:
    """A group of processes, of which this one has a rank; None for all, or where there is one."""

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
    """The processes of a group; one where ``torch.distributed`` is not initialized."""
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
        raise ArgumentError("group", "a group that this process is not in", "a group that it is in")
    return Processes(group, rank, dist.get_world_size(group))


AGREED = {
    "step": "Make the shared training in every process, and take the same steps with it.",
    "targets": "Load the same data, and split them by the same seed, in every process.",
    "order": "Give every process the same inputs, and the rows in the same order.",
    "conditioning": "Give every objective the same strategy and seed; DistributedConditioning has "
    "each process take a draw of its own.",
    "parameters": "Change parameters in the same way in all processes, by optimizers with the same "
    "settings.",
    "settings": "Build model, objective and optimizer in the same way in every process.",
}
"""What processes must agree in, and what to do where they do not."""

_TAG = 6743  # Messages of the roll call are told from others by it.


@dataclass
class Exchange:
    """One exchange, which all processes of a group take part in.

    It ends within so many ``seconds``. What is exchanged is told in words by ``call``, the same in
    all processes; ``agreed`` has digests by the names in ``AGREED``, positive and below 2^56, that
    are compared with the others'.
    """

    processes: Processes
    seconds: float
    call: str
    parameters: Sequence[Tensor]
    agreed: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ArgumentError("timeout", self.seconds, "a positive number of seconds")
        self._end = time.monotonic() + self.seconds

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum over processes of each tensor, bitwise the same in all; new tensors."""
        return self._collect(
            tensors, lambda flat: dist.all_reduce(flat, group=self._group, async_op=True)
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
        """The tensors of the process of that rank in the group; new tensors."""
        return self._collect(
            tensors,
            lambda flat: dist.broadcast(flat, group=self._group, group_src=source, async_op=True),
        )

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.processes.group

    def _collect(
        self, tensors: Sequence[Tensor], collective: Callable[[Tensor], dist.Work | None]
    ) -> list[Tensor]:
        device = self._device(tensors[0].device)
        self._check_alike(tensors, device)
        results = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            parts = [tensors[i].detach().reshape(-1).to(device) for i in places]
            flat = torch.cat(parts)
            try:
                self._wait(collective(flat))
            except RuntimeError as error:
                self._lost([], error)
            for i, part in zip(places, flat.split([part.numel() for part in parts]), strict=True):
                results[i] = part.view(tensors[i].shape).to(tensors[i].device)
        return results

    def _device(self, own: torch.device) -> torch.device:
        """Where tensors are sent from, of those where the group can send."""
        backends = self.processes.backends
        if backends.get(own.type, "gloo") != "gloo":
            return own
        # Gloo copies to the host by itself.
        return torch.device("cpu" if "cpu" in backends else next(iter(backends)))

    def _check_alike(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """One row of numbers from each process: that all are there, and with the same tensors."""
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        digest = hashlib.sha256(repr((self.call, device.type, kinds)).encode()).digest()
        row = [
            len(self.parameters),
            sum(parameter.numel() for parameter in self.parameters),
            int.from_bytes(digest[:7], "big"),
            # As many numbers in every call: whoever has none to compare must not be misread.
            *(self.agreed.get(name, 0) for name in AGREED),
        ]
        named = self.processes.backends.get("cpu") == "gloo"
        try:
            rows, lost = self._roll_call(row) if named else (self._gather(row, device), [])
        except RuntimeError as error:
            self._lost([], error)
        if lost:
            self._lost(lost)
        if any(other[:3] != row[:3] for other in rows):
            ranks = self.processes.global_ranks(range(len(rows)))
            told = "; ".join(
                f"rank {rank}: {count} of {entries} entries"
                for rank, (count, entries, *_) in zip(ranks, rows, strict=True)
            )
            raise ShapeError(
                "parameters",
                f"processes that disagree in {self.call} ({told})",
                "the same call, value, number, order, shapes and dtypes in every process",
                "Build the model in the same way in every process.",
            )
        self._check_agreed([other[3:] for other in rows])

    def _check_agreed(self, rows: list[list[int]]) -> None:
        """Raises, in every process, where digests differ; names the ranks unlike the first."""
        unlike = {
            name: [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
            for place, name in enumerate(AGREED)
        }
        if unlike["targets"]:
            unlike["order"] = []  # whose digest has the targets in it
        unlike = {name: ranks for name, ranks in unlike.items() if ranks}
        if unlike.get("step"):
            unlike = {"step": unlike["step"]}
        if not unlike:
            return
        told = []
        for name, ranks in unlike.items():
            named = ", ".join(map(str, self.processes.global_ranks(ranks)))
            told.append(f"other {name} in rank {named}")
        [first] = self.processes.global_ranks([0])
        raise ArgumentError(
            ", ".join(unlike),
            f"{' and '.join(told)} than in rank {first}",
            "the same in every process",
            " ".join(AGREED[name] for name in unlike),
        )

    def _gather(self, row: list[int], device: torch.device) -> list[list[int]]:
        own = torch.tensor(row, device=device)
        rows = [torch.empty_like(own) for _ in range(self.processes.size)]
        self._wait(dist.all_gather(rows, own, group=self._group, async_op=True))
        return [other.tolist() for other in rows]

    def _roll_call(self, row: list[int]) -> tuple[list[list[int]], list[int]]:
        """All rows, and the ranks of those that gave none.

        Rows go to rank 0 one by one, so that an error tells whose it is, and back as a table.
        """
        table = torch.zeros(self.processes.size, 1 + len(row), dtype=torch.long)
        table[self.processes.rank] = torch.tensor([1, *row])
        if self.processes.rank:
            self._wait(self._send(table[self.processes.rank].clone(), 0))
            self._wait(self._receive(table, 0))
        else:
            self._hear_and_tell(table)
        return table[:, 1:].tolist(), (table[:, 0] == 0).nonzero().flatten().tolist()

    def _hear_and_tell(self, table: Tensor) -> None:
        """Rank 0's part of the roll call: enters the others' rows, zero for those lost."""
        works = {}
        inbox = table.clone()
        for rank in range(1, len(table)):
            with suppress(RuntimeError):
                works[rank] = self._receive(inbox[rank], rank)
        # Gloo closes all connections where it waits in vain, but messages that came stay.
        for rank, work in works.items():
            with suppress(RuntimeError):
                self._wait(work)
                table[rank] = inbox[rank]
        heard = table[:, 0] == 1
        for rank in heard.nonzero().flatten().tolist()[1:]:
            try:
                self._wait(self._send(table, rank))
            except RuntimeError:
                if heard.all():
                    table[rank] = 0

    def _send(self, row: Tensor, rank: int) -> dist.Work | None:
        return dist.isend(row, group=self._group, group_dst=rank, tag=_TAG)

    def _receive(self, row: Tensor, rank: int) -> dist.Work | None:
        return dist.irecv(row, group=self._group, group_src=rank, tag=_TAG)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None  # None only outside the group
        # Zero would stand for the group's own timeout.
        work.wait(timedelta(seconds=max(self._end - time.monotonic(), 1e-3)))

    def _lost(self, ranks: list[int], cause: RuntimeError | None = None) -> NoReturn:
        own = self.processes
        if not ranks and own.size == 2:
            ranks = [1 - own.rank]
        named = own.global_ranks(ranks)
        who = f"rank {', '.join(map(str, named))}" if named else "one that is not known here"
        raise LostWorkerError(
            f"{self.call}: of {own.size} processes, {who} ended or did not come within "
            f"{self.seconds:g} s. Parameters and gradients are as before the call; start all "
            "processes anew, from a checkpoint.",
            named,
        ) from cause
