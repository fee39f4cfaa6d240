from __future__ import annotations

import gpytorch
import pytest
import torch

from gpclml.conditioning import LastPoints
from gpclml.early_stopping import fit_networks
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression, networks_of


def objective(x, y, conditioning=None, **options):
    model = GPRegression(x, y, **{"kernel": "deep", **options})
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


def step_data(n=80, seed=0):
    """A jump that a stationary kernel cannot follow and a network can."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 2
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sign(x[:, 0]) + 0.05 * noise


def noise_data(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, generator=generator, dtype=torch.float64)


def outside_networks(mll):
    inside = {id(p) for network in networks_of(mll.model) for p in network.parameters()}
    return [p.detach().clone() for p in mll.parameters() if id(p) not in inside]


def test_a_network_is_trained_where_held_out_data_support_it():
    x, y = step_data()
    new_x, new_y = step_data(seed=1)
    mll = objective(x, y)
    before = outside_networks(mll)
    with torch.no_grad():
        start = mll.model.predict(new_x, marginal=True)
    result = fit_networks(mll, steps=200, progress=False)
    with torch.no_grad():
        end = mll.model.predict(new_x, marginal=True)
    assert result.steps > 0
    assert result.fit is not None
    assert len(result.fit.history) >= result.steps - 1
    best = result.steps // 10
    assert result.gains[best] > result.standard_errors[best]
    scores = [
        torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(new_y).mean()
        for p in (start, end)
    ]
    assert scores[1] > scores[0] + 0.05
    for one, other in zip(before, outside_networks(mll), strict=True):
        assert torch.equal(one, other)
    assert all(parameter.requires_grad for parameter in mll.parameters())
    assert not mll.training


@pytest.mark.parametrize("conditioning", [None, LastPoints(0)], ids=["clml", "lml"])
def test_the_model_stays_as_it_was_where_they_do_not(conditioning):
    mll = objective(*noise_data(), conditioning)
    state = {name: value.clone() for name, value in mll.state_dict().items()}
    result = fit_networks(mll, steps=100, progress=False)
    assert result.steps == 0
    assert result.fit is None
    assert result.gains[0] == result.standard_errors[0] == 0
    for name, value in mll.state_dict().items():
        assert torch.equal(value, state[name])


def test_the_same_seed_gives_the_same_result():
    results = [
        fit_networks(objective(*step_data()), steps=30, seed=2, progress=False) for _ in range(2)
    ]
    assert results[0].gains == results[1].gains
    other = fit_networks(objective(*step_data()), steps=30, seed=3, progress=False)
    assert other.gains != results[0].gains


def test_missing_targets_are_neither_trained_on_nor_scored():
    x, y = step_data(n=40)
    y[[3, 17]] = float("nan")
    with gpytorch.settings.observation_nan_policy("mask"):
        result = fit_networks(objective(x, y), steps=20, progress=False)
    assert all(torch.tensor(result.gains).isfinite())


def test_bad_arguments():
    x, y = step_data(n=20)
    with pytest.raises(UnsupportedError, match="network"):
        fit_networks(objective(x, y, kernel="rbf"))
    batch = objective(x.expand(2, 20, 1), y.expand(2, 20), warm_start=False)
    with pytest.raises(UnsupportedError, match="batch"):
        fit_networks(batch)
    with pytest.raises(ArgumentError, match="steps"):
        fit_networks(objective(x, y, warm_start=False), steps=0)
    with pytest.raises(ArgumentError, match="folds"):
        fit_networks(objective(x, y, warm_start=False), folds=1)
