"""Command line: ``python -m benchmarks.speed.fits --n 100``: whole fits, lone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import pandas as pd
import torch
import typer
from typer import Option

from benchmarks._process import keep_freed_memory
from benchmarks.speed.methods import sampled_data
from benchmarks.speed.runs import (
    Device,
    Rounds,
    interleaved_times,
    ratio_table,
    sweep_command,
)
from gpclml.conditioning import LastPoints
from gpclml.fit import fit_batch, fit_mll, suggest_batch_size
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["fit_seeds", "measure_fits", "way_of_fitting"]

Objectives = list[ConditionalMarginalLogLikelihood]
_CONDITIONINGS = {"clml": lambda: None, "lml": lambda: LastPoints(m=0)}


def measure_fits(
    n: Annotated[int, Option(help="Number of points; may be repeated.")],
    objective: Annotated[str, Option(help="clml or lml; may be repeated.")] = "clml",
    seeds: Annotated[int, Option(min=1, help="Number of fits.")] = 10,
    steps: Annotated[int, Option(min=1, help="Adam steps of a fit.")] = 30,
    rounds: Rounds = 5,
    device: Device = "cpu",
    keep_memory: Annotated[
        bool, Option(help="Keep freed memory in the process, as the runner's workers do.")
    ] = False,
) -> pd.DataFrame:
    """Fits per second of bottleneck deep kernels, one by one, in a batch, and as is best.

    ``chosen``: as ``gpclml.fit.suggest_batch_size`` says; ``ratio``, ``low`` and ``high``: median
    and quartiles over rounds of fits per second over lone ones in the same round.
    """
    keeps_memory = keep_memory and keep_freed_memory()
    sizes = {
        "lone": 1,
        "batched": seeds,
        "chosen": min(seeds, suggest_batch_size(n, device, keeps_memory)),
    }
    ways = {
        name: way_of_fitting(n, objective, seeds, size, steps, device)
        for name, size in sizes.items()
    }
    times = interleaved_times(ways, rounds, device)
    more = {
        "n": n, "objective": objective, "size": pd.Series(sizes),
        "fits_per_second": seeds / times.median(),
    }  # fmt: skip
    return ratio_table(1 / times, "lone", ratio="ratio", name="way", more=more)


def way_of_fitting(
    n: int, objective: str, seeds: int, size: int, steps: int, device: str
) -> Callable[[], object]:
    """Makes bottleneck deep kernels on data of their own and fits them, ``size`` at a time."""
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
    """Fits models by Adam, ``size`` at a time."""
    for start in range(0, len(mlls), size):
        part = mlls[start : start + size]
        if size == 1:
            fit_mll(part[0], "adam", steps=steps, progress=False)
        else:
            fit_batch(part, "adam", steps=steps, progress=False)


main = sweep_command(
    "benchmarks.speed.fits",
    measure_fits,
    {"objective": ["clml", "lml"], "n": [100, 300, 700]},
    "Fits per second of small deep kernels: one by one, in a batch, and as is chosen.",
    keep_memory=True,
)

if __name__ == "__main__":
    typer.run(main)
