"""One value and gradient given all other points."""

from __future__ import annotations

import time

import pandas as pd

from benchmarks.speed.resident_memory import highest_resident
from benchmarks.speed.scale.data import Data, starting_model
from gpclml.conditioning import RandomHoldout
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["full_evaluation"]

_RANK = 1000


def full_evaluation(data: Data, block: int = 256, seed: int = 0) -> pd.DataFrame:
    """One value and gradient of the CLML of a block given all other points, in double precision.

    Args:
        data: Training points; hyperparameters are those that training starts from.
        block: Held-out points.
        seed: Of the block.

    Returns:
        One row: nats per held-out point, residual, bound of the error, iterations, seconds, peak.
    """
    double = Data(*(part.double() for part in (data.x, data.y, data.test_x, data.test_y)))
    model = starting_model(double)
    n = len(data.y)
    solver = ConjugateGradients(preconditioner_rank=_RANK, on_failure="warn", progress=True)
    mll = ConditionalMarginalLogLikelihood(
        model.likelihood, model, RandomHoldout(block / n, seed=seed), solver=solver
    )
    start = time.perf_counter()
    value = mll(model(*model.train_inputs), model.train_targets)
    value.backward()
    [report] = mll.last_solve
    return pd.DataFrame([{
        "n": n, "block": block, "nats per point": float(value.detach()),
        "residual": report.residual, "error bound": report.error_bound,
        "iterations": report.iterations, "seconds": time.perf_counter() - start,
        "GiB": highest_resident() / 2**30,
    }])  # fmt: skip
