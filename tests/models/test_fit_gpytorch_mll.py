"""The bare objective in ``botorch.fit.fit_gpytorch_mll``: it runs, and seeds do not matter."""

from __future__ import annotations

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import KroneckerMultiTaskGP, MultiTaskGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim.fit import fit_gpytorch_mll_torch
from exact_gps import PlainGP

from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def data(n=24):
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = torch.stack([(6 * x[:, 0]).sin() + x[:, 1], (5 * x[:, 1]).cos()], -1) + 0.15 * noise
    return x, (y - y.mean(0)) / y.std(0)


def transformed(x, y):
    transforms = {"input_transform": Normalize(2), "outcome_transform": Standardize(1)}
    return SingleTaskGP(10 * x, 3 * y[:, :1] + 5, **transforms)


def multi_task(x, y):
    x, y = x[:12], y[:12]
    tasks = torch.arange(2, dtype=torch.float64)
    long = torch.cat([torch.cat([x, task.expand(12, 1)], -1) for task in tasks])
    return MultiTaskGP(long, y.T.reshape(-1, 1), task_feature=-1)


MODELS = {
    "single": lambda x, y: SingleTaskGP(x, y[:, :1]),
    "transformed": transformed,
    "batch of two outputs": lambda x, y: SingleTaskGP(
        torch.stack([x, x.flip(-1)]), torch.stack([y, y])
    ),
    "multi-task": multi_task,
    "kronecker": lambda x, y: KroneckerMultiTaskGP(x[:12], y[:12]),
    "plain": lambda x, y: PlainGP(x, y[:, 0]).double(),
    "regression": lambda x, y: GPRegression(x, y[:, 0]),
}

# By default BoTorch's search stops where steps gain little. Task covariances have flat regions, in
# which the values where it stops are up to 5e-4 apart.
TO_THE_END = {"options": {"ftol": 1e-13, "gtol": 1e-8, "maxcor": 30}}


def value(mll) -> torch.Tensor:
    mll.train()
    with torch.no_grad():
        return -mll.compute_custom_loss()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", MODELS)
def test_two_seeds_reach_the_same_optimum(name):
    is_flat = name == "kronecker"
    optima = []  # of fits that differ in the global seed alone
    for seed in range(2):
        torch.manual_seed(seed)
        model = MODELS[name](*data())
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
        before = value(mll)
        fit_gpytorch_mll(mll, optimizer_kwargs=TO_THE_END if is_flat else None)
        assert not mll.training
        after = value(mll)
        assert (after > before).all()
        optima.append(after)
    assert torch.stack(optima).std(0).max() < (1e-9 if is_flat else 1e-5), optima


def test_botorchs_torch_optimizer():
    model = SingleTaskGP(*data())
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
    before = value(mll)
    fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_torch, optimizer_kwargs={"step_limit": 30})
    assert (value(mll) > before).all()
