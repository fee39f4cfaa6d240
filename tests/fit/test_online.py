"""Weights and hyperparameters trained together."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood

from gpclml.curvature import Full, FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.errors import ArgumentError, DataError, NonFiniteError, ShapeError
from gpclml.fit import fit_hyperparameters, fit_online
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

NOISE = 0.2


def waves(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 3
    noise = NOISE * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, x[:, 0].sin() + noise


def regression(structure=None, n=60, precision=1.0, **options):
    network = MLP([1, 20, 1], torch.nn.Tanh).double()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 1.0
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "layer", precision))
    return LaplaceMarginalLogLikelihood(likelihood, model, n, structure or Kronecker(), **options)


def fit(mll, data, **options):
    options = {"epochs": 60, "lr": 0.02, "burn_in": 10, "every": 5, "progress": False} | options
    return fit_online(mll, *data, **options)


def state(mll):
    return {name: value.clone() for name, value in mll.state_dict().items()}


@pytest.mark.parametrize("structure", [Kronecker(), Full()])
def test_the_noise_is_found_and_the_best_is_kept(structure):
    mll, data = regression(structure), waves()
    result = fit(mll, data, epochs=300, hyper_steps=20)
    assert result.evaluated[0] == 11
    assert result.objective > result.history[0] + 0.3
    assert NOISE / 1.6 < float(mll.likelihood.noise.detach().sqrt()) < NOISE * 1.6
    value = float(mll(mll.model(data[0]), data[1]).detach())
    assert value == pytest.approx(result.objective, abs=1e-9)
    assert result.evaluated[result.history.index(result.objective)] == result.best


def test_batches_and_a_whole_give_one_evidence():
    data = waves()
    whole, parts = regression(), regression()
    fit(whole, data, epochs=1, burn_in=0, hyper_steps=3)
    fit(parts, data, epochs=1, burn_in=0, hyper_steps=3, batch_size=17, lr=1e-12)
    start = regression()
    for name in ("model.prior.log_precision", "likelihood.noise_covar.raw_noise"):
        assert not torch.equal(parts.state_dict()[name], start.state_dict()[name])
    again = regression()
    fit(again, data, epochs=1, burn_in=0, hyper_steps=3, lr=1e-12)
    for name, value in again.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, rtol=1e-6, atol=1e-8)


def test_repeated_and_resumed_trainings(tmp_path):
    data = waves()
    once, again, resumed = (regression() for _ in range(3))
    options = {"batch_size": 25, "burn_in": 4, "every": 4}
    result = fit(once, data, epochs=20, **options)
    fit(again, data, epochs=20, **options)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in once.state_dict().items())
    path = tmp_path / "a.pt"
    fit(resumed, data, epochs=9, checkpoint=path, **options)
    resumed = regression()
    later = fit(resumed, data, epochs=20, checkpoint=path, **options)
    assert later.log_joints == result.log_joints
    assert later.history == result.history
    assert all(torch.equal(v, resumed.state_dict()[k]) for k, v in once.state_dict().items())


def interrupted_after(steps, monkeypatch):
    """Adam, that of weights and that of hyperparameters, until the user gives up."""
    step, calls = torch.optim.Adam.step, []

    def counted(self, *args, **kwargs):
        step(self, *args, **kwargs)
        calls.append(None)
        if len(calls) == steps:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.Adam, "step", counted)


@pytest.mark.parametrize("outputs", ["all", "column"])
@pytest.mark.parametrize("steps", [1, 8, 14, 16])  # the first; in an epoch; in a look; after it
def test_an_interrupted_training_ends_as_a_whole_one(tmp_path, monkeypatch, steps, outputs):
    data = waves()
    options = {
        "batch_size": 20, "burn_in": 3, "every": 2, "hyper_steps": 3, "epochs": 9,
    }  # fmt: skip
    whole = regression(outputs=outputs)
    expected = fit(whole, data, **options)
    path = tmp_path / "a.pt"
    with monkeypatch.context() as patch:
        interrupted_after(steps, patch)
        with pytest.raises(KeyboardInterrupt):
            fit(regression(outputs=outputs), data, checkpoint=path, **options)
    resumed = regression(outputs=outputs)
    result = fit(resumed, data, checkpoint=path, **options)
    assert result.log_joints == expected.log_joints
    assert (result.evaluated, result.history) == (expected.evaluated, expected.history)
    for name, stored in whole.state_dict().items():
        assert torch.equal(stored, resumed.state_dict()[name]), name


def test_what_ended_by_patience_stays_ended(tmp_path):
    data, path = waves(), tmp_path / "a.pt"
    options = {"lr": 0.5, "burn_in": 0, "every": 1, "patience": 2, "hyper_steps": 1}
    whole = fit(regression(), data, checkpoint=path, **options)
    assert len(whole.log_joints) < 60
    resumed = regression()
    again = fit(resumed, data, checkpoint=path, **options)
    assert again.log_joints == whole.log_joints


@pytest.mark.parametrize(
    ("structure", "outputs"),
    [(FunctionSpace(), "all"), (FunctionSpace(), "single"), (Kronecker(), "column")],
)
def test_stochastic_estimates(structure, outputs):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.nn.functional.one_hot(y, 3) + 0.4 * torch.randn(60, 3, generator=generator)
    network = MLP([3, 10, 3], torch.nn.Tanh)
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "layer", 0.01))
    mll = LaplaceMarginalLogLikelihood(likelihood, model, 60, structure, outputs=outputs)
    result = fit(mll, (x, y), epochs=60, batch_size=20, hyper_steps=5)
    assert result.objective > result.history[0]
    assert bool((model.prior.log_precision > -4.6).all())  # up from 0.01, far too weak


def test_dropout_stays_on_for_the_weights_and_off_for_the_evidence():
    network = torch.nn.Sequential(
        torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    ).double()
    seen = []
    network[1].register_forward_hook(lambda module, *_: seen.append(module.training))
    mll = LaplaceMarginalLogLikelihood(
        GaussianLikelihood().double(), LinearizedNetwork(network), 60, Full()
    )
    mll.train()
    fit(mll, waves(), epochs=3, burn_in=0, every=1)
    assert network[1].training
    assert {True, False} == set(seen)
    assert seen[0]
    assert seen[-1] is False


def test_a_temperature_that_is_a_parameter_is_fitted():
    temperature = torch.nn.Parameter(torch.tensor(2.0).double())
    mll = regression(temperature=temperature)
    fit(mll, waves(), epochs=12, burn_in=5)
    assert float(mll.temperature.detach()) != 2.0


def test_training_ends_without_a_better_evidence():
    mll = regression()
    result = fit(mll, waves(), epochs=60, burn_in=0, hyper_lr=1e-30, lr=1e-30, patience=3)
    assert len(result.log_joints) < 60
    assert len(result.evaluated) - 1 - result.evaluated.index(result.best) == 3


def test_bad_input(tmp_path):
    data = waves()
    for name in ("epochs", "batch_size", "hyper_steps", "every", "patience"):
        with pytest.raises(ArgumentError, match=name):
            fit(regression(), data, **{name: 0})
    with pytest.raises(ArgumentError, match="hyper_lr"):
        fit(regression(), data, hyper_lr=0.0)
    with pytest.raises(ArgumentError, match="burn_in"):
        fit(regression(), data, burn_in=-1)
    with pytest.raises(ShapeError, match="train_y"):
        fit(regression(), (data[0], data[1][1:]))
    with pytest.raises(ArgumentError, match="num_data = 50"):
        fit(regression(n=50), data)
    with pytest.raises(NonFiniteError):
        fit(regression(), data, lr=1e200)
    path = tmp_path / "a.pt"
    fit(regression(), data, epochs=1, burn_in=0, checkpoint=path)
    other = LinearizedNetwork(MLP([1, 5, 1]).double())
    mll = LaplaceMarginalLogLikelihood(GaussianLikelihood().double(), other, 60)
    with pytest.raises(DataError, match="of another architecture"):
        fit(mll, data, checkpoint=path)


def test_classes_that_were_shuffled_apart_from_their_points():
    x, _ = waves()
    network = MLP([x.shape[-1], 8, 3]).double()
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(6)
        y = network(x).argmax(-1)
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False).double()
    mll = LaplaceMarginalLogLikelihood(likelihood, LinearizedNetwork(network), len(x))
    assert fit_hyperparameters(mll, x, y, steps=1).objective < 0
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    with pytest.raises(ArgumentError, match="shuffled apart"):
        fit_hyperparameters(mll, x, shuffled)
