"""Command line: ``python -m benchmarks.speed.shares``: how much of a step is LAPACK and BLAS."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import typer
from botorch.models import SingleTaskGP
from typer import Option

from benchmarks.speed.runs import Rounds, sweep_command
from gpclml.conditioning import Conditioning, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.linalg import array_kernels, lapack
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss

__all__ = ["measure_shares"]


def measure_shares(
    n: Annotated[int, Option(help="Number of points; may be repeated.")],
    dimensions: Annotated[int, Option(min=1, help="Number of inputs.")] = 8,
    rounds: Rounds = 9,
) -> pd.DataFrame:
    """A step of a fit of BoTorch's ``SingleTaskGP`` in double precision, and what it consists of.

    ``share``: the part of its time within LAPACK and BLAS; ``Gflop``: their floating-point
    operations, where half of a symmetric matrix is computed; ``limit``: the time of these at the
    rate of a product of two n x n matrices in the same round, over that of the step.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, dimensions, generator=generator, dtype=torch.float64)
    y = torch.sin(3 * x).sum(-1, keepdim=True)
    y += 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    steps = {name: _step(x, (y - y.mean()) / y.std(), each) for name, each in _OBJECTIVES.items()}
    square = np.random.default_rng(0).standard_normal((n, n))
    rows: list[dict[str, Any]] = []
    for turn in range(rounds + 1):
        start = time.perf_counter()
        square @ square
        rate = 2.0 * n**3 / (time.perf_counter() - start)
        for name, step in steps.items():
            within = _Clock()
            blas, of_lapack = within.of(lapack.blas), within.of(lapack.lapack)
            with (
                patch.multiple(lapack, blas=blas, lapack=of_lapack),
                patch.object(array_kernels, "blas", blas),
            ):
                start = time.perf_counter()
                step()
                seconds = time.perf_counter() - start
            operations = _OPERATIONS[name] * n**3
            row = {
                "n": n, "objective": name, "ms": 1e3 * seconds,
                "share": within.seconds / seconds, "Gflop": 1e-9 * operations,
                "limit": operations / rate / seconds,
            }  # fmt: skip
            if turn:  # the first warms up
                rows.append(row)
    return pd.DataFrame(rows).groupby(["n", "objective"], sort=False).median().reset_index()


_OBJECTIVES: dict[str, Conditioning] = {
    "LML": LastPoints(m=0), "held-out tenth": RandomHoldout(0.1), "leave-one-out": LeaveOneOut(),
}  # fmt: skip

# By n³: a factor takes 1/3, its inverse 2/3 more; of a tenth b the solve n² b / 2 (of what is not
# known to be zero) and a symmetric product n² b; of single points a symmetric product n³.
_OPERATIONS = {"LML": 1.0, "held-out tenth": 1 / 3 + 0.05 + 0.1, "leave-one-out": 2.0}


def _step(x: torch.Tensor, y: torch.Tensor, conditioning: Conditioning) -> Callable[[], float]:
    model = SingleTaskGP(x, y, outcome_transform=None).train()
    return FixedLoss(ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning))


class _Clock:
    """Seconds spent in the functions of some modules."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, module: Any) -> Any:
        """The module, with functions that are timed."""
        clock = self

        class Timed:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                function = getattr(module, name)

                def timed(*args: Any, **options: Any) -> Any:
                    start = time.perf_counter()
                    try:
                        return function(*args, **options)
                    finally:
                        clock.seconds += time.perf_counter() - start

                return timed

        return Timed()


main = sweep_command(
    "benchmarks.speed.shares",
    measure_shares,
    {"n": [500, 1000, 2000]},
    "Steps of fits, and how much of their time is spent in LAPACK and BLAS.",
)

if __name__ == "__main__":
    typer.run(main)
