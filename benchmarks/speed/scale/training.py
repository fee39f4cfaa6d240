"""Training on redrawn subsets of many points against training on a few that stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import gpytorch
import pandas as pd
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor
from torch.distributions import Normal
from tqdm.auto import tqdm

from benchmarks.data import load
from benchmarks.speed.memory import highest_resident
from benchmarks.speed.methods import ExactRBF
from gpclml.conditioning import RandomHoldout
from gpclml.inference import IterativePosterior
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["Data", "compare_training", "full_evaluation", "load_split"]

FEW = 2000
CONDITION_ON, BLOCK = 4000, 256
_LR = 0.1
_RANK, _RANK_OF_ONE = 2000, 1000
_PREDICTING = ConjugateGradients(
    tolerance=2e-3, preconditioner_rank=_RANK, kept_bytes=2**32, on_failure="warn", progress=True
)


@dataclass(frozen=True)
class Data:
    """Standardized by the training points."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_split(dataset: str, num_test: int, seed: int, num_train: int | None = None) -> Data:
    """Random test points of a set; all others, or some, to train on. In single precision."""
    data = load(dataset)
    order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(seed))
    test, train = order[:num_test], order[num_test:][:num_train]
    x, y = data.inputs.double(), data.targets.double()
    location, scale = x[train].mean(0), x[train].std(0).clamp_min(1e-12)
    x, y = (x - location) / scale, (y - y[train].mean()) / y[train].std()
    return Data(*(part.float() for part in (x[train], y[train], x[test], y[test])))


def starting_model(data: Data) -> ExactRBF:
    """Where training starts from: lengthscales √d, a noise of a tenth."""
    model = ExactRBF(data.x, data.y).to(data.x)
    model.covar_module.base_kernel.lengthscale = data.x.shape[-1] ** 0.5
    model.covar_module.outputscale = 1.0
    model.likelihood.noise = 0.1
    return model.train()


def compare_training(data: Data, steps: int = 100, seed: int = 0) -> Iterator[pd.DataFrame]:
    """Test densities after training on redrawn subsets, and on fixed points for as long.

    All start alike and take steps of Adam: on the CLML of 256 points given 4000, both redrawn among
    all points; on the LML, and on the CLML of a redrawn tenth, of 2000 points that stay the same,
    until as many seconds are over. Each predicts given all training points, by conjugate
    gradients, and those trained on 2000 also given these alone. ``less than redrawn`` is the mean
    of paired differences of log densities; the bounds are in units of the targets.
    """
    few = Data(data.x[:FEW], data.y[:FEW], data.test_x, data.test_y)
    redrawn = RandomHoldout(BLOCK / len(data.y), condition_on=CONDITION_ON)
    trained = {}
    model, seconds, taken = _train(
        data, lambda m: _clml(m, redrawn, seed), tqdm(range(steps), desc="redrawn")
    )
    trained["redrawn subsets of all"] = model, seconds, taken
    for name, objective in {
        f"LML of fixed {FEW}": lambda m: ExactMarginalLogLikelihood(m.likelihood, m),
        f"CLML of fixed {FEW}": lambda m: _clml(m, RandomHoldout(0.1), seed),
    }.items():
        trained[name] = _train(few, objective, _timed(seconds))
    first = None
    for name, (model, spent, taken) in trained.items():
        for given in [data] if model.train_targets.numel() > FEW else [data, few]:
            row, density = _scored(model, given)
            first = density if first is None else first
            difference = density - first
            yield pd.DataFrame([{
                "trained on": name, "given": len(given.y), "steps": taken, "seconds": spent, **row,
                "less than redrawn": -float(difference.mean()),
                "its error": float(difference.std() / len(difference) ** 0.5),
                "GiB": highest_resident() / 2**30,
            }])  # fmt: skip


def _clml(model: ExactRBF, conditioning: RandomHoldout, seed: int) -> MarginalLogLikelihood:
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)


def _timed(seconds: float) -> Iterator[int]:
    start, step = time.perf_counter(), 0
    with tqdm(desc="fixed") as bar:
        while time.perf_counter() - start < seconds:
            yield step
            step += 1
            bar.update()


def _train(
    data: Data, objective: Callable[[ExactRBF], MarginalLogLikelihood], turns: Iterable[int]
) -> tuple[ExactRBF, float, int]:
    model = starting_model(data)
    mll = objective(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=_LR)
    start, taken = time.perf_counter(), 0
    for _ in turns:
        optimizer.zero_grad()
        with gpytorch.settings.max_cholesky_size(FEW):
            (-mll(model(*model.train_inputs), model.train_targets)).backward()
        optimizer.step()
        taken += 1
    return model, time.perf_counter() - start, taken


def _scored(model: ExactRBF, given: Data) -> tuple[dict[str, float], Tensor]:
    model.set_train_data(given.x, given.y, strict=False)
    posterior = IterativePosterior(model, _PREDICTING, units="training")
    found = posterior.predict(given.test_x, marginal=True)
    normal = Normal(found.distribution.mean, found.distribution.variance.sqrt())
    density = normal.log_prob(given.test_y).double()
    error = (normal.mean - given.test_y).square().mean().sqrt()
    return {
        "NLL": -float(density.mean()), "error": float(density.std() / len(density) ** 0.5),
        "RMSE": float(error), "noise": float(model.likelihood.noise.detach()),
        "error bound": float(found.mean_error.max()),
        "excess bound": float(found.variance_excess.max()), "residual": found.residual,
    }, density  # fmt: skip


def full_evaluation(data: Data, block: int = 256, seed: int = 0) -> pd.DataFrame:
    """One value and gradient of the CLML of a block given all other points, in double precision.

    Hyperparameters are those that training starts from.
    """
    double = Data(*(part.double() for part in (data.x, data.y, data.test_x, data.test_y)))
    model = starting_model(double)
    n = len(data.y)
    solver = ConjugateGradients(preconditioner_rank=_RANK_OF_ONE, on_failure="warn", progress=True)
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
