"""How far values and gradients by conjugate gradients are from those of Cholesky factors."""

from __future__ import annotations

import time
import warnings
from typing import cast

import gpytorch
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor

from benchmarks.data import load
from benchmarks.speed.steps import ExactRBF, gpytorch_defaults
from benchmarks.speed.timing import Row, wait_for
from gpclml.conditioning import RandomHoldout
from gpclml.fit import fit_mll
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood

_FITTED_TO = 500  # points, of a model whose hyperparameters are neither random nor special
_START = 0.7  # lengthscales at the start, by the root of the number of inputs


def measure_accuracy(
    data: str, n: int, noise: float, fitted: bool, block: int = 128, rank: int = 300,
    seed: int = 0, *, device: str = "cpu",
) -> list[Row]:  # fmt: skip
    """Errors of value and gradient at random points of a set, all in float64.

    Each is evaluated once. Other hyperparameters than the noise are fitted to 500 of the points
    under the LML, or lengthscales are 0.7 times the root of the number of inputs and the
    outputscale is 1.

    Returns:
        ``value error``: in nats per held-out point; ``gradient error``: length of the difference of
        gradients by that of the gradient of raw hyperparameters; ``bound``: of the value's error,
        from residuals; seconds; and ``LML gradient error``: of GPyTorch's default path against its
        Cholesky path.
    """
    x, y = (values.to(device) for values in _points(data, n, seed))
    model = _model(x, y, noise, fitted)
    taken, results = {}, {}
    # Both evaluate the same block: the seed fixes it.
    solvers = {
        "dense": "cholesky",
        "iterative": ConjugateGradients(
            preconditioner_rank=rank, on_failure="warn", max_iterations=2000
        ),
    }
    for name, solver in solvers.items():
        mll = ConditionalMarginalLogLikelihood(
            model.likelihood, model, RandomHoldout(block / n, seed=seed), solver=solver
        )
        results[name], taken[name] = _evaluated(mll)
    [report] = mll.last_solve
    value, gradient = results["dense"]
    error = (results["iterative"][1] - gradient).norm() / gradient.norm()
    return [{
        "value": value, "value error": abs(results["iterative"][0] - value),
        "bound": report.error_bound, "gradient error": float(error),
        "iterations": report.iterations, "residual": report.residual,
        "dense s": taken["dense"], "iterative s": taken["iterative"],
        "LML gradient error": _gpytorch_error(model, seed),
    }]  # fmt: skip


def _points(name: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    data = load(name)
    chosen = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(seed))[:n]
    x, y = data.inputs[chosen].double(), data.targets[chosen].double()
    spread = x.std(0)
    x = (x - x.mean(0)) / torch.where(spread > 0, spread, 1.0)
    return x, (y - y.mean()) / y.std()


def _model(x: Tensor, y: Tensor, noise: float, fitted: bool) -> ExactRBF:
    def make(inputs: Tensor, targets: Tensor) -> ExactRBF:
        model = ExactRBF(inputs, targets).to(inputs)
        model.likelihood.noise_covar.register_constraint(
            "raw_noise", gpytorch.constraints.GreaterThan(1e-6)
        )
        model.covar_module.base_kernel.lengthscale = _START * x.shape[-1] ** 0.5
        model.covar_module.outputscale = 1.0
        model.likelihood.noise = noise
        return model

    model = make(x, y)
    if fitted:
        small = make(x[:_FITTED_TO], y[:_FITTED_TO])
        mll = ExactMarginalLogLikelihood(small.likelihood, small)
        # The noise is what is varied.
        freeze = ["likelihood.noise_covar.raw_noise"]
        # Its best point so far will do.
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            fit_mll(mll, "lbfgs", steps=50, freeze=freeze, progress=False)
        model.load_state_dict(small.state_dict())
    return model.train()


def _evaluated(mll: MarginalLogLikelihood) -> tuple[tuple[float, Tensor], float]:
    model = cast(ExactRBF, mll.model)
    model.zero_grad()
    device = model.train_targets.device
    wait_for(device)
    start = time.perf_counter()
    value = mll(model(*model.train_inputs), model.train_targets)
    value.backward()
    wait_for(device)
    seconds = time.perf_counter() - start
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return (float(value.detach()), gradient.clone()), seconds


def _gpytorch_error(model: ExactRBF, seed: int) -> float:
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.max_cholesky_size(len(model.train_targets)):
        (_, exact), _ = _evaluated(mll)
    with gpytorch_defaults(), torch.random.fork_rng():
        torch.manual_seed(seed)
        (_, estimate), _ = _evaluated(mll)
    return float((estimate - exact).norm() / exact.norm())
