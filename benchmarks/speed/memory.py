"""Peak memory of a gradient step, beyond data and parameters.

On a GPU the allocator counts. On a CPU a fresh process takes the step and the kernel counts
its resident memory, so that nothing a method left behind is charged to, or reused by, another.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.speed.methods import Problem, gradient_step
from gpclml.errors import UnsupportedError

__all__ = ["growth_of_peak", "highest_resident", "in_fresh_process", "peak_memory", "start_of_peak"]

# Large enough to load every library path, float32 factors included; small beside the step.
_WARM_UP_N = 600
# Blocks of this many bytes go back to the system once freed: resident memory is memory in use.
_MMAP_THRESHOLD = 65536
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_memory(
    method: str,
    n: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    threads: int | None = None,
) -> int:
    """Highest memory in use during a step less that before it, in bytes.

    On a CPU it is exact to about a megabyte, which matters below n = 500, and an UnsupportedError
    where the system does not report it (Windows).
    """
    if torch.device(device).type == "cuda":
        return _peak_on_gpu(method, n, dtype, device)
    gradient_step(method, Problem(2))  # an unknown name raises here, not in the process
    kind = str(dtype).removeprefix("torch.")
    return in_fresh_process(_peak_of_this_process, method, n, kind, threads)


def _peak_on_gpu(method: str, n: int, dtype: torch.dtype, device: str) -> int:
    gradient_step(method, Problem(_WARM_UP_N, dtype, device))()
    step = gradient_step(method, Problem(n, dtype, device))
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_of_this_process(method: str, n: int, dtype: str, threads: int | None) -> int:
    if threads:
        torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    gradient_step(method, Problem(_WARM_UP_N, kind))()
    return growth_of_peak(gradient_step(method, Problem(n, kind)))


def growth_of_peak(step: Callable[[], object]) -> int:
    """Highest memory resident during a step less that before it, in bytes."""
    gc.collect()
    before = start_of_peak()
    step()
    return highest_resident() - before


def in_fresh_process(function: Callable[..., int], *arguments: object) -> int:
    """What a function of a module returns in a process of its own."""
    name = function.__name__
    code = f"from {function.__module__} import {name}; print({name}(*{arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD)},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.split()[-1])


def start_of_peak() -> int:
    """Resets the peak to the memory resident now, where the system can, and returns it."""
    if _CLEAR_REFS.exists():
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            pass  # a sandbox may forbid it: the peak so far, of the warm-up, is then the start
        else:
            return _status_bytes("VmRSS")
    return highest_resident()


def highest_resident() -> int:
    """The peak of this process, in bytes."""
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    try:
        import resource
    except ImportError as error:
        raise UnsupportedError("device", "a CPU under Windows", "Linux, macOS or CUDA") from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
