"""Peak memory of a gradient step, beyond data and parameters.

On a GPU the allocator counts. On a CPU a fresh process takes the step and the kernel counts
its resident memory, so that nothing a method left behind is charged to, or reused by, another.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.speed.methods import Problem, gradient_step
from gpclml.errors import UnsupportedError

__all__ = ["peak_memory"]

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

    Args:
        method: A name in ``METHODS``.
        n: Number of data points.
        dtype: ``torch.float32`` or ``torch.float64``.
        device: ``"cpu"`` or a CUDA device.
        threads: Threads of the fresh process on a CPU; torch's default if None.

    Returns:
        Bytes. On a CPU it is exact to about a megabyte, which matters below n = 500.

    Raises:
        UnknownNameError: If there is no such method.
        UnsupportedError: If the system does not report peak memory (Windows).
        subprocess.CalledProcessError: If the step fails in its process.
    """
    if torch.device(device).type == "cuda":
        return _peak_on_gpu(method, n, dtype, device)
    gradient_step(method, Problem(2))  # an unknown name raises here, not in the process
    arguments = [method, str(n), str(dtype).removeprefix("torch."), str(threads or 0)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD)},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.split()[-1])


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


def _peak_of_this_process(method: str, n: int, dtype: torch.dtype) -> int:
    gradient_step(method, Problem(_WARM_UP_N, dtype))()
    step = gradient_step(method, Problem(n, dtype))
    gc.collect()
    before = _start_of_peak()
    step()
    return _highest_resident() - before


def _start_of_peak() -> int:
    """Resets the peak to the memory resident now, where the system can, and returns it."""
    if _CLEAR_REFS.exists():
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            pass  # a sandbox may forbid it: the peak so far, of the warm-up, is then the start
        else:
            return _status_bytes("VmRSS")
    return _highest_resident()


def _highest_resident() -> int:
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


if __name__ == "__main__":
    name, size, kind, num_threads = sys.argv[1:]
    if int(num_threads):
        torch.set_num_threads(int(num_threads))
    print(_peak_of_this_process(name, int(size), getattr(torch, kind)))
