"""Command line: ``python -m benchmarks.speed.scale accuracy | cost | constants | …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

from benchmarks.speed.header import describe_run

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Beyond one Cholesky factor: accuracy, cost, and training at large n.",
)  # fmt: skip

Csv = Annotated[Path | None, typer.Option(help="Write the table there as well.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
_SETS = ["kin8nm", "power", "protein"]
_NOISES = [1e-1, 1e-2, 1e-3]
_ACCURACY_SIZES = [2000, 8000]
_COST_SIZES = [500, 1000, 2000, 4000, 8000, 16000, 32000, 50000]


class _Table:
    """Rows that are printed and saved as they come: a long run that is stopped keeps them."""

    def __init__(self, program: str, device: str, csv: Path | None) -> None:
        self._header, self._csv = describe_run(program, device), csv
        self._tables: list[pd.DataFrame] = []
        print(self._header, flush=True)

    def add(self, rows: pd.DataFrame) -> None:
        shown = rows.to_string(
            index=False, header=not self._tables, float_format=lambda value: f"{value:.3g}"
        )
        print(shown, flush=True)
        self._tables.append(rows)
        if self._csv:
            self._csv.write_text(f"{self._header}\n{pd.concat(self._tables).to_csv(index=False)}")


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
    from benchmarks.speed.scale.accuracy import errors_of_solvers

    torch.set_num_threads(threads)
    table = _Table("benchmarks.speed.scale", device, csv)
    for size in n:
        for name in data:
            for variance in noise:
                for fitted in (False, True):
                    row = errors_of_solvers(
                        name, size, variance, fitted, block=block, rank=rank, device=device
                    )
                    table.add(pd.DataFrame([row]))


@app.command()
def cost(
    n: Annotated[list[int], typer.Option(help="Points; may be repeated.")] = _COST_SIZES,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    device: Device = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds a size.")] = 3,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    threads: Threads = 2,
    csv: Csv = None,
) -> None:
    """Time and memory of one gradient step against n, of methods that fit."""
    from benchmarks.speed.scale.cost import cost_of_steps

    torch.set_num_threads(threads)
    table = _Table("benchmarks.speed.scale", device, csv)
    for size in n:
        table.add(cost_of_steps(size, getattr(torch, dtype), device, rounds, memory))


@app.command()
def constants(
    n: Annotated[int, typer.Option(min=2, help="Rows.")] = 4000,
    columns: Annotated[int, typer.Option(min=1, help="Of the tall product.")] = 257,
    device: Device = "cpu",
    threads: Threads = 2,
    csv: Csv = None,
) -> None:
    """10⁹ operations, or kernel entries, a second: what costs at other sizes follow from."""
    from benchmarks.speed.scale.constants import machine_constants

    torch.set_num_threads(threads)
    table = _Table("benchmarks.speed.scale", device, csv)
    for dtype in (torch.float32, torch.float64):
        table.add(machine_constants(n, dtype, device, columns))


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
    from benchmarks.speed.scale.data import load_split
    from benchmarks.speed.scale.training import compare_training

    torch.set_num_threads(threads)
    table = _Table("benchmarks.speed.scale", "cpu", csv)
    for row in compare_training(load_split(data, num_test, seed), steps, seed):
        table.add(row)


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
    from benchmarks.speed.scale.data import load_split
    from benchmarks.speed.scale.evaluation import full_evaluation

    torch.set_num_threads(threads)
    table = _Table("benchmarks.speed.scale", "cpu", csv)
    table.add(full_evaluation(load_split(data, 2, seed, n), block, seed))


@app.command()
def report(
    csv: Annotated[Path, typer.Argument(help="What `cost` wrote.")],
    figure: Annotated[Path | None, typer.Option(help="Draw time and memory against n.")] = None,
) -> None:
    """The growth of time and memory with n, and a figure of both."""
    from benchmarks.speed.scale.cost import slopes
    from benchmarks.speed.scale.figure import draw_costs

    table = pd.read_csv(csv, comment="#")
    print(slopes(table).to_string(index=False, float_format="%.2f"))
    if figure:
        draw_costs(table, figure)


if __name__ == "__main__":
    app()
