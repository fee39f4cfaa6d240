"""Training on redrawn subsets of many points against training on a few that stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import gpytorch
import pandas as pd
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor
from torch.distributions import Normal
from tqdm.auto import tqdm

from benchmarks.speed.methods import ExactRBF
from benchmarks.speed.resident_memory import highest_resident
from benchmarks.speed.scale.data import Data, starting_model
from gpclml.conditioning import RandomHoldout
from gpclml.inference import IterativePosterior
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["compare_training"]

FEW = 2000
CONDITION_ON, BLOCK = 4000, 256
_LR = 0.1
_RANK = 2000
_PREDICTING = ConjugateGradients(
    tolerance=2e-3, preconditioner_rank=_RANK, kept_bytes=2**32, on_failure="warn", progress=True
)


def compare_training(data: Data, steps: int = 100, seed: int = 0) -> Iterator[pd.DataFrame]:
    """Test densities after training on redrawn subsets, and on fixed points for as long.

    All start alike and take steps of Adam: on the CLML of 256 points given 4000, both redrawn among
    all points; on the LML, and on the CLML of a redrawn tenth, of 2000 points that stay the same,
    until as many seconds are over. Each predicts given all training points, by conjugate
    gradients, and those trained on 2000 also given these alone.

    Args:
        data: Training and test points.
        steps: Of the training on redrawn subsets.
        seed: Of the draws.

    Yields:
        A row a training and number of points conditioned on, as it is done: ``steps``,
        ``seconds``, test ``NLL`` with its standard error, ``less than redrawn``: the mean of
        paired differences of log densities, and its standard error, ``RMSE``; the largest
        ``error bound`` of a mean and ``excess bound`` of a variance, in units of the targets;
        ``GiB``, the peak of this process so far.
    """
    few = Data(data.x[:FEW], data.y[:FEW], data.test_x, data.test_y)
    redrawn = RandomHoldout(BLOCK / len(data.y), condition_on=CONDITION_ON)
    trained = {}
    model, seconds, taken = _train(data, lambda m: _clml(m, redrawn, seed), _counted(steps))
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


def _counted(steps: int) -> Iterator[int]:
    return iter(tqdm(range(steps), desc="redrawn"))


def _timed(seconds: float) -> Iterator[int]:
    start, step = time.perf_counter(), 0
    with tqdm(desc="fixed") as bar:
        while time.perf_counter() - start < seconds:
            yield step
            step += 1
            bar.update()


def _train(
    data: Data, objective: Callable[[ExactRBF], MarginalLogLikelihood], turns: Iterator[int]
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
