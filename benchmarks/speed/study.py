"""The table of times and memory of every method at one size."""

from __future__ import annotations

import math

import pandas as pd
import torch

from benchmarks.speed.memory import peak_memory
from benchmarks.speed.methods import BASE, LOO_BASE, METHODS, Problem, gradient_step
from benchmarks.speed.timing import interleaved_times, ratios, rounds_for

__all__ = ["measure"]


def measure(
    n: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    rounds: int | None = None,
    memory: bool = True,
) -> pd.DataFrame:
    """Time and memory of every method, relative to GPyTorch's LML step by Cholesky.

    Args:
        n: Number of data points.
        dtype: ``torch.float32`` or ``torch.float64``.
        device: ``"cpu"`` or a CUDA device.
        rounds: Number of rounds; fewer at large n if None.
        memory: Whether to measure peak memory too, one more process a method on a CPU.

    Returns:
        A row a method. ``ms``: median time of a step. ``ratio``, ``low``, ``high``: median and
        quartiles over rounds of its time over the base's in the same round. ``of_loo``: the
        same median over GPyTorch's leave-one-out. With memory, ``MiB``: peak beyond data and
        parameters; ``matrices``: that in n x n matrices of the data's type; ``memory_ratio``:
        over the base's.
    """
    rounds = rounds or rounds_for(n)
    problem = Problem(n, dtype, device)
    steps = {name: gradient_step(name, problem) for name in METHODS}
    times = interleaved_times(steps, rounds, device)
    table = ratios(times, BASE).rename(columns={"median": "ratio"})
    table.insert(0, "ms", times.median() * 1e3)
    table["of_loo"] = ratios(times, LOO_BASE)["median"]
    if memory:
        table = table.join(_memory(n, dtype, device))
    table.insert(0, "n", n)
    table.insert(0, "dtype", str(dtype).removeprefix("torch."))
    table["rounds"] = rounds
    return table.rename_axis("method").reset_index()


def _memory(n: int, dtype: torch.dtype, device: str) -> pd.DataFrame:
    threads = torch.get_num_threads()
    peaks = pd.Series({name: peak_memory(name, n, dtype, device, threads) for name in METHODS})
    base = peaks[BASE] or math.nan
    matrix = n * n * dtype.itemsize
    return pd.DataFrame(
        {"MiB": peaks / 2**20, "matrices": peaks / matrix, "memory_ratio": peaks / base}
    )
