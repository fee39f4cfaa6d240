"""Command line: ``python -m benchmarks.speed.fits --n 100``: whole fits, lone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

from benchmarks._allocator import keep_freed_memory
from benchmarks.speed.header import describe_run
from benchmarks.speed.methods import sampled_data
from benchmarks.speed.timing import interleaved_times, ratios
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
    table = ratios(1 / times, "lone").rename(columns={"median": "ratio"})
    table.insert(0, "fits_per_second", seeds / times.median())
    table.insert(0, "size", pd.Series(sizes))
    table.insert(0, "objective", objective)
    table.insert(0, "n", n)
    return table.rename_axis("way").reset_index()


def _way(
    n: int, objective: str, seeds: int, size: int, steps: int, device: str
) -> Callable[[], object]:
    data = [sampled_data(n, torch.float64, device, seed) for seed in range(seeds)]

    def fit() -> None:
        mlls = []
        for seed, (x, y) in enumerate(data):
            model = GPRegression(x, y, "deep-bottleneck", seed=seed)
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
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    keep_memory: Annotated[
        bool, typer.Option(help="Keep freed memory in the process, as the runner's workers do.")
    ] = True,
    csv: Annotated[Path | None, typer.Option(help="Write the table there as well.")] = None,
) -> None:
    """Fits per second of small deep kernels: one by one, in a batch, and as is chosen."""
    torch.set_num_threads(threads)
    keeps = keep_memory and keep_freed_memory()
    about = describe_run("benchmarks.speed.fits", device)
    print(about, flush=True)
    tables = []
    for kind in objective:
        for size in n:
            table = measure_fits(size, kind, seeds, steps, rounds, device, keeps)
            print(f"\n{table.to_string(index=False, float_format='%.2f')}", flush=True)
            tables.append(table)
            if csv:  # after each size: a long run that is stopped keeps what it has
                csv.write_text(f"{about}\n{pd.concat(tables).to_csv(index=False)}")


if __name__ == "__main__":
    typer.run(main)
