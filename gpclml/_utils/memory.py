"""Memory of devices: whether arrays fit, and whether reading a value has to wait for a GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import psutil
import torch

from gpclml.errors import ArgumentError

_FEW = 2**28  # bytes that a GPU is not asked about

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory(device: torch.device) -> int:
    """Bytes of memory of a CPU; of a GPU those that are free or kept for PyTorch's next tensors.

    A CPU's free memory changes from one moment to the next, so all of it counts.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return _memory_of_the_machine()


@cache
def _memory_of_the_machine() -> int:
    """Memory of the machine or its container in bytes, which is asked once and does not change."""
    total = psutil.virtual_memory().total
    for name in _LIMITS:
        path = Path(name)
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total


def fits(needed: int, device: torch.device) -> bool:
    """Whether a number of bytes fits; on a GPU small numbers are not checked."""
    return (device.type == "cuda" and needed <= _FEW) or needed <= available_memory(device)


def check_memory(
    argument: str,
    got: object,
    numbers: int,
    dtype: torch.dtype,
    device: torch.device,
    suggestion: str,
) -> None:
    """Raises an ArgumentError, with both figures, where numbers do not fit into memory."""
    needed = numbers * dtype.itemsize
    if not fits(needed, device):
        there = available_memory(device)
        gib = 2**30
        raise ArgumentError(
            argument, f"{got}, which needs {needed / gib:.1f} GiB",
            f"at most {there / gib:.1f} GiB, what the {device.type} has", suggestion,
        )  # fmt: skip
