"""Time and memory of one gradient step against the number of points."""

from __future__ import annotations

import math

import pandas as pd
import torch

from benchmarks.speed.memory import peak_memory
from benchmarks.speed.methods import BASE, SCALE_METHODS, Problem, gradient_step
from benchmarks.speed.timing import interleaved_times
from gpclml._utils.memory import available_memory

__all__ = ["cost_of_steps", "slopes"]

_MATRICES = {  # of n x n numbers at the peak of a step; what is not there needs none
    BASE: 9, "gpytorch LML, its default": 9, "CLML of 256, Cholesky": 7,
}  # fmt: skip
_WARM_UP_TO = 10_000  # beyond, a step takes longer than any warming up


def methods_that_fit(n: int, dtype: torch.dtype, device: str) -> list[str]:
    """Names of the methods whose step fits into half the memory of the device.

    Args:
        n: Points.
        dtype: Of the numbers.
        device: Where.
    """
    room = available_memory(torch.device(device)) / 2
    of_subsets = [name for name in SCALE_METHODS if "given" in name and n < 4500]
    return [
        name
        for name in SCALE_METHODS
        if _MATRICES.get(name, 0) * n * n * dtype.itemsize <= room and name not in of_subsets
    ]


def cost_of_steps(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rounds: int = 3,
    memory: bool = True,
    methods: list[str] | None = None,
) -> pd.DataFrame:
    """Seconds and peak memory of a step of each method that fits, interleaved in one run.

    Args:
        n: Points.
        dtype: Of the numbers.
        device: Where.
        rounds: In which each takes a step.
        memory: Whether to measure memory too, in a process each on a CPU.
        methods: Names; all that fit if None.

    Returns:
        A row a method: ``seconds``, the median; ``ratio`` to GPyTorch's Cholesky step in the same
        round, where that fits; ``GiB`` beyond data and parameters.
    """
    names = methods or methods_that_fit(n, dtype, device)
    problem = Problem(n, dtype, device)
    steps = {name: gradient_step(name, problem) for name in names}
    torch.manual_seed(0)  # of GPyTorch's random vectors
    times = interleaved_times(steps, rounds, device, warm_up=n <= _WARM_UP_TO)
    base = times[BASE] if BASE in names else math.nan
    rows = []
    for name in names:
        row = {
            "method": name, "dtype": str(dtype).removeprefix("torch."), "n": n,
            "seconds": times[name].median(), "ratio": (times[name] / base).median(),
        }  # fmt: skip
        if memory:
            peak = peak_memory(name, n, dtype, device, torch.get_num_threads())
            row["GiB"] = peak / 2**30
        rows.append(row)
    return pd.DataFrame(rows)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """The power of n that seconds and memory grow with, between the two largest n of each method.

    Args:
        table: Rows of :func:`cost_of_steps`.
    """
    rows = []
    for (method, dtype), one in table.sort_values("n").groupby(["method", "dtype"], sort=False):
        if len(one) < 2:
            continue
        low, high = one.iloc[-2], one.iloc[-1]
        growth = math.log(high["n"] / low["n"])
        row = {"method": method, "dtype": dtype, "from": low["n"], "to": high["n"]}
        for column in ("seconds", "GiB"):
            if column in one:
                row[column] = math.log(high[column] / low[column]) / growth
        rows.append(row)
    return pd.DataFrame(rows)
