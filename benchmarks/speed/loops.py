"""Command line: ``python -m benchmarks.speed.loops``: Bayesian optimization from end to end."""

from __future__ import annotations

import time
import warnings
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions import BadInitialCandidatesWarning, OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from gpytorch.mlls import ExactMarginalLogLikelihood
from typer import Option

from benchmarks.bo.surrogates import initial_points, make_problem
from benchmarks.speed.runs import sweep_command
from gpclml.fit import fit_gpytorch_mll_fused

__all__ = ["FITS", "measure_loops"]

FITS: dict[str, dict[str, Any]] = {
    "fit_gpytorch_mll": {},
    "optimizer=fit_gpytorch_mll_fused": {"optimizer": fit_gpytorch_mll_fused},
}
"""Options of BoTorch's ``fit_gpytorch_mll`` by name."""


def measure_loops(
    function: Annotated[str, Option(help="Test function; may be repeated.")],
    evaluations: Annotated[int, Option(min=1, help="Beside the initial ones.")] = 50,
    seeds: Annotated[int, Option(min=1, help="Initial points, one after the other.")] = 3,
    restarts: Annotated[int, Option(min=1, help="Starts of the acquisition's search.")] = 10,
    raw_samples: Annotated[int, Option(min=1, help="Points that they are chosen from.")] = 512,
) -> pd.DataFrame:
    """Loops of a fit of ``SingleTaskGP`` and a search of ``LogExpectedImprovement``.

    Each evaluation fits a new model from its start, as BoTorch's tutorials do. The ways are taken
    in turn on the same initial points. Medians over seeds: seconds in ``fits``, in the
    ``acquisition`` and in both, their ``ratio`` to BoTorch's own optimizer, and ``regret``: the
    largest value less the best one found.
    """
    rows = []
    for seed in range(seeds):
        for way in FITS:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)  # of BoTorch's optimizers
                row = _loop(function, evaluations, seed, restarts, raw_samples, FITS[way])
            rows.append({"function": function, "way": way, "seed": seed, **row})
    table = pd.DataFrame(rows)
    own = table[table.way == next(iter(FITS))].set_index("seed").total
    table["ratio"] = table.total / table.seed.map(own)
    return (
        table.drop(columns="seed").groupby(["function", "way"], sort=False).median().reset_index()
    )


def _loop(
    function: str, evaluations: int, seed: int, restarts: int, raw_samples: int, options: Any
) -> dict[str, float]:
    problem = make_problem(function)
    x = initial_points(problem.dim, seed)
    y = problem.values(x)
    bounds = torch.tensor([[0.0], [1.0]], dtype=x.dtype).expand(2, problem.dim)
    fits = acquisition = 0.0
    with warnings.catch_warnings():  # the best point so far will do
        warnings.simplefilter("ignore", OptimizationWarning)
        warnings.simplefilter("ignore", BadInitialCandidatesWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # of the acquisition's search
        for _ in range(evaluations):
            start = time.perf_counter()
            model = SingleTaskGP(x, y, outcome_transform=Standardize(1))
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **options)
            fitted = time.perf_counter()
            point, _ = optimize_acqf(
                LogExpectedImprovement(model, y.max()), bounds, 1, restarts, raw_samples
            )
            fits += fitted - start
            acquisition += time.perf_counter() - fitted
            x, y = torch.cat([x, point]), torch.cat([y, problem.values(point)])
    return {
        "fits": fits, "acquisition": acquisition, "total": fits + acquisition,
        "regret": float(problem.regrets(x).min()),
    }  # fmt: skip


main = sweep_command(
    "benchmarks.speed.loops",
    measure_loops,
    {"function": ["branin", "hartmann-6"]},
    "Bayesian optimization from end to end, with BoTorch's optimizer of fits and with ours.",
    digits=".3g",
)

if __name__ == "__main__":
    typer.run(main)
