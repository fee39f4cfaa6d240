"""The mode of the weights, and partitions of an online training."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood

from gpclml.curvature import Full, FunctionSpace, GaussianWeightPrior
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnknownNameError
from gpclml.fit import fit_hyperparameters, fit_map, fit_online
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

N = 40


def linear(delta=2.0, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = x[:, 0] - x[:, 1] + 0.3 * torch.randn(N, generator=generator, dtype=torch.float64)
    network = torch.nn.Linear(3, 1, bias=False).double()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", delta))
    mll = LaplaceMarginalLogLikelihood(likelihood, model, N, Full())
    mode = torch.linalg.solve(x.mT @ x / noise + delta * torch.eye(3), x.mT @ y / noise)
    return mll, x, y, mode


def test_the_mode_of_a_linear_model():
    mll, x, y, mode = linear()
    fit = fit_map(mll, x, y, epochs=400, lr=0.05, final_lr=1e-4, progress=False)
    assert len(fit.history) == 400
    assert fit.objective == fit.history[-1] > fit.history[0]
    torch.testing.assert_close(mll.model.network.weight[0].detach(), mode, atol=1e-4, rtol=0)


def test_hyperparameters_at_fixed_weights_reach_a_stationary_point():
    mll, x, y, mode = linear()
    with torch.no_grad():
        mll.model.network.weight.copy_(mode)
    before = float(mll(mll.model(x), y).detach())
    fit = fit_hyperparameters(mll, x, y, steps=300, batch_size=9)
    after = fit.objective
    assert fit.history[0] == pytest.approx(before, abs=1e-9)
    assert len(fit.history) == 300
    assert torch.equal(mll.model.network.weight[0].detach(), mode)
    value = mll(mll.model(x), y)
    assert after == pytest.approx(float(value.detach()), abs=1e-9)
    assert after > before
    hyper = [mll.model.prior.log_precision, mll.likelihood.raw_noise]
    for gradient in torch.autograd.grad(value, hyper):
        assert float(gradient.abs().max()) < 1e-3


def test_batches_are_drawn_by_the_seed():
    ends = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        mll, x, y, _ = linear()
        fit_map(mll, x, y, epochs=2, batch_size=7, seed=seed, lr=0.1, progress=False)
        ends.append(mll.model.network.weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_bad_arguments():
    mll, x, y, _ = linear()
    for name in ("epochs", "batch_size", "lr", "final_lr"):
        with pytest.raises(ArgumentError, match=name):
            fit_map(mll, x, y, **{name: 0}, progress=False)
    with pytest.raises(ShapeError, match="train_y"):
        fit_map(mll, x, y[1:], progress=False)
    with pytest.raises(ArgumentError, match="num_data"):
        fit_map(mll, x[1:], y[1:], progress=False)
    with pytest.raises(NonFiniteError, match="Lower lr"):
        fit_map(mll, x, y, lr=1e200, epochs=5, progress=False)
    with pytest.raises(ArgumentError, match="partition"):
        fit_online(mll, x, y, partition="class", progress=False)
    with pytest.raises(UnknownNameError, match="partition"):
        fit_online(mll, x, y, partition="classes", progress=False)


def test_estimates_over_batches_of_a_class():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(N) % 4
    x = torch.nn.functional.one_hot(y, 4) + 0.4 * torch.randn(N, 4, generator=generator)

    def evidence(partition):
        torch.manual_seed(0)
        network = MLP([4, 10, 4], torch.nn.Tanh)
        likelihood = SoftmaxLikelihood(num_classes=4, mixing_weights=False)
        model = LinearizedNetwork(network, GaussianWeightPrior(network, "layer", 0.1))
        mll = LaplaceMarginalLogLikelihood(likelihood, model, N, FunctionSpace())
        fit = fit_online(
            mll, x, y, epochs=30, batch_size=10, lr=0.02, hyper_lr=1e-9, burn_in=29,
            hyper_steps=1, partition=partition, progress=False,
        )  # fmt: skip
        return fit.history[-1]

    assert evidence("class") > evidence("random")  # a tighter lower bound


@pytest.mark.parametrize("fit", [fit_map, fit_hyperparameters, fit_online])
def test_data_that_are_not_finite_are_refused_before_anything_is_trained(fit):
    network = MLP([2, 1], dtype=torch.float64)
    mll = LaplaceMarginalLogLikelihood(
        GaussianLikelihood().double(), LinearizedNetwork(network), 5, Full()
    )
    before = [p.clone() for p in mll.parameters()]
    x, y = torch.ones(5, 2, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    spoiled_x, spoiled_y = x.clone(), y.clone()
    spoiled_x[1, 0], spoiled_y[3] = torch.inf, torch.nan
    for data, name in (((spoiled_x, y), "train_x"), ((x, spoiled_y), "train_y")):
        with pytest.raises(NonFiniteError, match=f"{name}: got 1 of .* not finite"):
            fit(mll, *data)
    assert all(torch.equal(one, other) for one, other in zip(mll.parameters(), before, strict=True))
