"""Time and memory of one gradient step against n, and what a machine computes in a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gpytorch
import pandas as pd
import torch
from torch import Tensor

from benchmarks._figures import new_figure, save_figure
from benchmarks.speed.memory import peak_memory
from benchmarks.speed.methods import BASE, SCALE_METHODS, Problem, gradient_step
from benchmarks.speed.runs import interleaved_times
from gpclml._utils.environment import available_memory

__all__ = ["cost_of_steps", "draw_costs", "machine_constants", "slopes"]

_INPUTS = 8

_MATRICES = {  # of n x n numbers at the peak of a step; what is not there needs none
    BASE: 9, "gpytorch LML, its default": 9, "CLML of 256, Cholesky": 7,
}  # fmt: skip
_WARM_UP_TO = 10_000  # beyond, a step takes longer than any warming up


def methods_that_fit(n: int, dtype: torch.dtype, device: str) -> list[str]:
    """Names of the methods whose step fits into half the memory of the device."""
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
) -> pd.DataFrame:
    """Median seconds and peak memory of a step of each method that fits, interleaved in one run.

    ``ratio`` is to GPyTorch's Cholesky step in the same round, where that fits.
    """
    names = methods_that_fit(n, dtype, device)
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
    """The power of n that seconds and memory grow with, between a method's two largest n."""
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


def draw_costs(table: pd.DataFrame, path: Path) -> None:
    """Draws seconds and GiB of each method against n, both axes logarithmic."""
    columns = [name for name in ("seconds", "GiB") if name in table]
    figure = new_figure(5.5 * len(columns), 4.2, layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for ax, column in zip(axes, columns, strict=True):
        for method, rows in table.groupby("method", sort=False):
            rows = rows.sort_values("n")
            ax.loglog(rows["n"], rows[column], marker="o", label=method)
        ax.set_xlabel("number of points n")
        ax.set_ylabel("seconds a gradient step" if column == "seconds" else "peak memory, GiB")
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def machine_constants(
    n: int, dtype: torch.dtype, device: str = "cpu", columns: int = 257, rounds: int = 5
) -> pd.DataFrame:
    """Rates at one size, medians of rounds.

    10⁹ floating-point operations a second of n x n times n x n and of n x n times n x columns, of a
    Cholesky factor; and 10⁹ entries a second of an RBF kernel of 8 inputs.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, _INPUTS, generator=generator).to(device, dtype)
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=_INPUTS).to(device, dtype)
    with torch.no_grad():
        K = kernel(x).to_dense()
        definite = K + torch.eye(n, dtype=dtype, device=device)
        wide = K[:, :columns].contiguous()
        steps: dict[str, Callable[[], Tensor]] = {
            "product": lambda: K @ K,
            "tall product": lambda: K @ wide,
            "Cholesky": lambda: torch.linalg.cholesky(definite),
            "kernel": lambda: kernel(x, x + 1).to_dense(),
        }
        seconds = interleaved_times(steps, rounds, device).median()
    work = {
        "product": 2 * n**3, "tall product": 2 * n**2 * columns, "Cholesky": n**3 / 3,
        "kernel": n**2,
    }  # fmt: skip
    rates = {name: work[name] / seconds[name] / 1e9 for name in steps}
    kind = str(dtype).removeprefix("torch.")
    return pd.DataFrame([{"n": n, "dtype": kind, "columns": columns, **rates}])
