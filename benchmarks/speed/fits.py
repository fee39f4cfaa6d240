"""Command line: ``python -m benchmarks.speed.fits --n 100``: whole fits, lone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import pandas as pd
import torch
import typer

from benchmarks._allocator import keep_freed_memory
from benchmarks.speed.methods import sampled_data
from benchmarks.speed.runs import (
    Csv,
    Device,
    Rounds,
    Threads,
    interleaved_times,
    print_tables,
    ratio_table,
)
from gpclml.conditioning import LastPoints
from gpclml.fit import fit_batch, fit_mll, suggest_batch_size
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["fit_seeds", "measure_fits"]

Objectives = list[ConditionalMarginalLogLikelihood]
SIZES = [100, 300, 700]
OBJECTIVES = ["clml", "lml"]
_CONDITIONINGS = {"clml": lambda: None, "lml": lambda: LastPoints(m=0)}


def measure_fits(
    n: int,
    objective: str = "clml",
    seeds: int = 10,
    steps: int = 30,
    rounds: int = 5,
    device: str = "cpu",
    keeps_memory: bool = False,
) -> pd.DataFrame:
    """Fits per second of bottleneck deep kernels, one by one, in a batch, and as is best.

    Args:
        n: Number of data points of each.
        objective: ``"clml"`` (a fresh tenth held out a step) or ``"lml"``.
        seeds: Number of fits, each on data and from a start of its own.
        steps: Adam steps of a fit.
        rounds: Rounds in which each way is timed once.
        device: Where the models are.
        keeps_memory: Whether this process keeps freed memory, for what is chosen.

    Returns:
        A row a way (``lone``, ``batched``: all in one batch, ``chosen``: as
        ``gpclml.fit.suggest_batch_size`` says) with ``size``, models in a batch;
        ``fits_per_second``, its median; ``ratio``, ``low`` and ``high``, median and quartiles
        over rounds of fits per second over lone ones in the same round.
    """
    sizes = {
        "lone": 1,
        "batched": seeds,
        "chosen": min(seeds, suggest_batch_size(n, device, keeps_memory)),
    }
    ways = {name: _way(n, objective, seeds, size, steps, device) for name, size in sizes.items()}
    times = interleaved_times(ways, rounds, device)
    more = {
        "n": n, "objective": objective, "size": pd.Series(sizes),
        "fits_per_second": seeds / times.median(),
    }  # fmt: skip
    return ratio_table(1 / times, "lone", ratio="ratio", name="way", more=more)


def _way(
    n: int, objective: str, seeds: int, size: int, steps: int, device: str
) -> Callable[[], object]:
    data = [sampled_data(n, torch.float64, device, seed) for seed in range(seeds)]

    def fit() -> None:
        mlls = []
        for seed, (x, y) in enumerate(data):
            model = GPRegression(x, y, "deep_bottleneck", seed=seed)
            mlls.append(
                ConditionalMarginalLogLikelihood(
                    model.likelihood, model, _CONDITIONINGS[objective](), seed=seed
                )
            )
        fit_seeds(mlls, size, steps)

    return fit


def fit_seeds(mlls: Objectives, size: int, steps: int) -> None:
    """Fits models by Adam, ``size`` at a time.

    Args:
        mlls: Their objectives.
        size: Models in a batch; 1 fits each alone.
        steps: Adam steps.
    """
    for start in range(0, len(mlls), size):
        part = mlls[start : start + size]
        if size == 1:
            fit_mll(part[0], "adam", steps=steps, progress=False)
        else:
            fit_batch(part, "adam", steps=steps, progress=False)


def main(
    n: Annotated[list[int], typer.Option(help="Number of points; may be repeated.")] = SIZES,
    objective: Annotated[
        list[str], typer.Option(help="clml or lml; may be repeated.")
    ] = OBJECTIVES,
    seeds: Annotated[int, typer.Option(min=1, help="Number of fits.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Adam steps of a fit.")] = 30,
    rounds: Rounds = 5,
    device: Device = "cpu",
    threads: Threads = 1,
    keep_memory: Annotated[
        bool, typer.Option(help="Keep freed memory in the process, as the runner's workers do.")
    ] = True,
    csv: Csv = None,
) -> None:
    """Fits per second of small deep kernels: one by one, in a batch, and as is chosen."""
    keeps = keep_memory and keep_freed_memory()
    tables = (
        measure_fits(size, kind, seeds, steps, rounds, device, keeps)
        for kind in objective
        for size in n
    )
    print_tables("benchmarks.speed.fits", tables, device=device, threads=threads, csv=csv)


if __name__ == "__main__":
    typer.run(main)
