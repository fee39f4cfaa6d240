"""Command line: ``python -m benchmarks.speed.scale accuracy | cost | constants | …``."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

from benchmarks.speed.runs import Csv, Device, Rounds, Threads, print_tables
from benchmarks.speed.scale.accuracy import errors_of_solvers
from benchmarks.speed.scale.cost import cost_of_steps, draw_costs, machine_constants, slopes
from benchmarks.speed.scale.training import compare_training, full_evaluation, load_split

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Beyond one Cholesky factor: accuracy, cost, and training at large n.",
)  # fmt: skip

_SETS = ["kin8nm", "power", "protein"]
_NOISES = [1e-1, 1e-2, 1e-3]
_ACCURACY_SIZES = [2000, 8000]
_COST_SIZES = [500, 1000, 2000, 4000, 8000, 16000, 32000, 50000]


_print = partial(print_tables, "benchmarks.speed.scale", digits=".3g", joined=True)


@app.command()
def accuracy(
    data: Annotated[list[str], typer.Option(help="A UCI set; may be repeated.")] = _SETS,
    n: Annotated[list[int], typer.Option(help="Points; may be repeated.")] = _ACCURACY_SIZES,
    noise: Annotated[list[float], typer.Option(help="Noise variance; may be repeated.")] = _NOISES,
    block: Annotated[int, typer.Option(min=1, help="Held-out points.")] = 128,
    rank: Annotated[int, typer.Option(min=0, help="Of the preconditioner.")] = 300,
    device: Device = "cpu",
    threads: Threads = 2,
    csv: Csv = None,
) -> None:
    """Values and gradients by conjugate gradients against Cholesky factors in float64."""
    rows = (
        errors_of_solvers(name, size, variance, fitted, block=block, rank=rank, device=device)
        for size, name, variance, fitted in product(n, data, noise, (False, True))
    )
    _print((pd.DataFrame([row]) for row in rows), device=device, threads=threads, csv=csv)


@app.command()
def cost(
    n: Annotated[list[int], typer.Option(help="Points; may be repeated.")] = _COST_SIZES,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    device: Device = "cpu",
    rounds: Rounds = 3,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    threads: Threads = 2,
    csv: Csv = None,
) -> None:
    """Time and memory of one gradient step against n, of methods that fit."""
    kind = getattr(torch, dtype)
    tables = (cost_of_steps(size, kind, device, rounds, memory) for size in n)
    _print(tables, device=device, threads=threads, csv=csv)


@app.command()
def constants(
    n: Annotated[int, typer.Option(min=2, help="Rows.")] = 4000,
    columns: Annotated[int, typer.Option(min=1, help="Of the tall product.")] = 257,
    device: Device = "cpu",
    threads: Threads = 2,
    csv: Csv = None,
) -> None:
    """10⁹ operations, or kernel entries, a second: what costs at other sizes follow from."""
    kinds = (torch.float32, torch.float64)
    tables = (machine_constants(n, dtype, device, columns) for dtype in kinds)
    _print(tables, device=device, threads=threads, csv=csv)


@app.command()
def training(
    data: Annotated[str, typer.Option(help="A UCI set.")] = "kin40k",
    num_test: Annotated[int, typer.Option(min=2, help="Test points.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Steps on redrawn subsets.")] = 100,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of split and draws.")] = 0,
    threads: Threads = 2,
    csv: Csv = None,
) -> None:
    """Training on redrawn subsets of all points against training on a few fixed ones."""
    tables = compare_training(load_split(data, num_test, seed), steps, seed)
    _print(tables, threads=threads, csv=csv)


@app.command()
def evaluation(
    data: Annotated[str, typer.Option(help="A UCI set.")] = "kin40k",
    n: Annotated[int, typer.Option(min=300, help="Points.")] = 20000,
    block: Annotated[int, typer.Option(min=1, help="Held-out points.")] = 256,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of points and block.")] = 0,
    threads: Threads = 2,
    csv: Csv = None,
) -> None:
    """One value and gradient given all other points, by conjugate gradients in float64."""
    tables = (full_evaluation(load_split(data, 2, seed, n), block, seed) for _ in range(1))
    _print(tables, threads=threads, csv=csv)


@app.command()
def report(
    csv: Annotated[Path, typer.Argument(help="What `cost` wrote.")],
    figure: Annotated[Path | None, typer.Option(help="Draw time and memory against n.")] = None,
) -> None:
    """The growth of time and memory with n, and a figure of both."""
    table = pd.read_csv(csv, comment="#")
    print(slopes(table).to_string(index=False, float_format="%.2f"))
    if figure:
        draw_costs(table, figure)


if __name__ == "__main__":
    app()
