"""Command line: ``python -m benchmarks.speed --n 1000 --dtype float32``."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import pandas as pd
import torch
import typer
from typer import Option

from benchmarks.speed.memory import peak_memory
from benchmarks.speed.methods import (
    BASE,
    BY_DEFAULT,
    LOO_BASE,
    METHODS,
    NUM_FEATURES,
    OF_TASKS,
    Problem,
    gradient_step,
)
from benchmarks.speed.peers import peer_steps
from benchmarks.speed.runs import Device, interleaved_times, ratio_table, ratios, sweep_command
from gpclml.errors import ArgumentError

__all__ = ["main", "measure"]


class Dtype(StrEnum):
    """A floating-point type by name."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


def measure(
    n: Annotated[int, Option(help="Number of points; may be repeated.")],
    dtype: Annotated[Dtype, Option(help="Number type; may be repeated.")] = Dtype.FLOAT64,
    device: Device = "cpu",
    rounds: Annotated[
        int | None, Option(min=1, help="Rounds a size [default: fewer at large n]")
    ] = None,
    memory: Annotated[bool, Option(help="Peak memory too, of one task and 8 inputs.")] = True,
    tasks: Annotated[int, Option(min=1, help="Tasks at the same points; may be repeated.")] = 1,
    missing: Annotated[float, Option(help="Share of targets that are missing.")] = 0.0,
    dimensions: Annotated[int, Option(min=1, help="Inputs; may be repeated.")] = NUM_FEATURES,
    network: Annotated[
        bool, Option("--network", help="A deep kernel: inputs beside two features of a network.")
    ] = False,
    peers: Annotated[
        bool, Option("--peers", help="Beside GPyTorch's default, scikit-learn, JAX and tinygp.")
    ] = False,
) -> pd.DataFrame:
    """Time and memory of every method, relative to GPyTorch's LML step by Cholesky.

    ``ratio``, ``low``, ``high``: median and quartiles over rounds of a method's time over the
    base's in the same round; ``of_loo``: the same median over GPyTorch's leave-one-out; ``MiB``:
    peak beyond data and parameters; ``matrices``: that in n x n matrices of the data's type.
    """
    if rounds is None:  # a run of minutes; odd for a clear median
        rounds = 41 if n <= 500 else 21 if n <= 1000 else 11 if n <= 2000 else 7
    kind = getattr(torch, dtype)
    problem = Problem(
        n, kind, device, tasks=tasks, missing=missing, dimensions=dimensions, network=network
    )
    if network and (tasks > 1 or missing):
        raise ArgumentError("network", True, "False with tasks or missing targets")
    if peers and (tasks > 1 or missing or network or device != "cpu"):
        raise ArgumentError("peers", True, "False with tasks, missing targets, networks or a GPU")
    usual = tasks == 1 and not missing and not peers and not network
    names = METHODS if usual else OF_TASKS
    steps: dict[str, Callable[[], object]] = {one: gradient_step(one, problem) for one in names}
    if peers:
        steps |= {BY_DEFAULT: gradient_step(BY_DEFAULT, problem)} | peer_steps(problem)
    times = interleaved_times(steps, rounds, device)
    more = ({} if tasks == 1 else {"tasks": tasks}) | ({"missing": missing} if missing else {})
    more |= {} if dimensions == NUM_FEATURES and not peers else {"dimensions": dimensions}
    first = {"dtype": str(dtype), "n": n, **more, "ms": times.median() * 1e3}
    table = ratio_table(times, BASE, ratio="ratio", name="method", more=first).set_index("method")
    if usual:
        table["of_loo"] = ratios(times, LOO_BASE)["median"]
    if memory and usual and dimensions == NUM_FEATURES:
        table = table.join(_memory(n, kind, device))
    return table.assign(rounds=rounds).reset_index()


def _memory(n: int, dtype: torch.dtype, device: str) -> pd.DataFrame:
    threads = torch.get_num_threads()
    peaks = pd.Series({name: peak_memory(name, n, dtype, device, threads) for name in METHODS})
    base = peaks[BASE] or math.nan
    matrix = n * n * dtype.itemsize
    return pd.DataFrame(
        {"MiB": peaks / 2**20, "matrices": peaks / matrix, "memory_ratio": peaks / base}
    )


main = sweep_command(
    "benchmarks.speed",
    measure,
    {
        "dtype": list(Dtype),
        "tasks": [1],
        "dimensions": [NUM_FEATURES],
        "n": [250, 500, 1000, 2000, 4000],
    },
    "Time and memory of gradient steps, relative to GPyTorch's LML step by Cholesky.",
    threads=None,
)

if __name__ == "__main__":
    typer.run(main)
