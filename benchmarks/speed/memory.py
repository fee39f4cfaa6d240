"""Peak memory of a gradient step, beyond data and parameters.

On a GPU the allocator counts. On a CPU a fresh process takes the step and the kernel counts
its resident memory, so that nothing a method left behind is charged to, or reused by, another.
"""

from __future__ import annotations

import gc
import sys

import torch

from benchmarks.speed.methods import Problem, gradient_step
from benchmarks.speed.resident_memory import bytes_printed_by, highest_resident, start_of_peak

__all__ = ["peak_memory"]

# Large enough to load every library path, float32 factors included; small beside the step.
_WARM_UP_N = 600


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
    return bytes_printed_by(__name__, *arguments)


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
    before = start_of_peak()
    step()
    return highest_resident() - before


if __name__ == "__main__":
    name, size, kind, num_threads = sys.argv[1:]
    if int(num_threads):
        torch.set_num_threads(int(num_threads))
    print(_peak_of_this_process(name, int(size), getattr(torch, kind)))
