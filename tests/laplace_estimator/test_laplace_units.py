"""Laplace posteriors of regressions in other units of the targets, and scales that do not fit."""

import warnings

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from torch import nn

from gpclml import Laplace
from gpclml.curvature import Full, GaussianWeightPrior
from gpclml.fit import FitWarning, fit_hyperparameters, fit_map, fit_online
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import train

UNITS = (1e-6, 1.0, 1e6)
N = 150


def fresh(outputs=1, seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, outputs)).double()


def trained(outputs=1):
    """A trained network with its points and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    y = torch.stack([x[:, 0].sin(), x[:, 1].cos()], -1)[:, :outputs]
    y = y + 0.3 * torch.randn(N, outputs, generator=generator, dtype=torch.float64)
    network = fresh(outputs, seed=0)
    return train(network, lambda f: (f(x) - y).square().mean(), lr=0.02), x, y


def scaled(network, unit):
    with torch.no_grad():
        network[-1].weight.mul_(unit)
        network[-1].bias.mul_(unit)


def ratio(unit, dtype=torch.float64, outputs=1, precision="evidence", **options):
    """Predicted deviations over those of residuals."""
    network, x, y = trained(outputs)
    scaled(network, unit)
    network, x, y = network.to(dtype), x.to(dtype), (unit * y).to(dtype)
    deviation = (network(x) - y).std(0).detach()
    data = x, y if outputs > 1 else y[:, 0]
    posterior = Laplace(network, "regression", **options).fit(data, precision=precision)
    predicted = posterior.predict(x).stddev.reshape(y.shape).mean(0)
    return float((predicted / deviation).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "weights", "outputs"),
    [("full", "last", 1), ("full", "all", 2), ("kron", "all", 1), ("kron", "last", 2)],
)
def test_intervals_by_the_evidence_have_no_units(structure, weights, outputs):
    options = {"structure": structure, "weights": weights, "outputs": outputs}
    ratios = [ratio(unit, **options) for unit in UNITS]
    assert all(0.9 < value < 1.2 for value in ratios)
    assert ratios == pytest.approx(ratios[:1] * len(UNITS), rel=2e-3)
    assert ratio(1e-6, torch.float32, **options) == pytest.approx(ratios[0], rel=2e-2)
    assert ratio(1e6, torch.float32, **options) == pytest.approx(ratios[0], rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "weights", "precision"), [("full", "last", 0.01), ("kron", "all", 30.0)]
)
def test_the_noise_is_fitted_where_the_precision_is_a_number(structure, weights, precision):
    for unit in UNITS:
        for dtype in (torch.float32, torch.float64):
            value = ratio(unit, dtype, precision=precision, structure=structure, weights=weights)
            assert 0.9 < value < 1.2


def test_a_noise_that_was_given_beside_a_precision_or_frozen_stays():
    network, x, y = trained()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.3
    Laplace(network, likelihood).fit((x, y), precision=1.0)
    assert float(likelihood.noise.detach()) == pytest.approx(0.3)
    likelihood.noise_covar.raw_noise.requires_grad_(False)
    Laplace(network, likelihood).fit((x, y))  # frozen
    assert float(likelihood.noise) == pytest.approx(0.3)
    likelihood = GaussianLikelihood().double()
    posterior = Laplace(network, likelihood)
    for away in (0.0, 0.5):  # a second fit, with other residuals
        with torch.no_grad():
            network[-1].bias.add_(away)
        posterior.fit((x, y), precision=1.0)
        residual = float((network(x) - y).square().mean().detach())
        assert float(likelihood.noise.detach()) == pytest.approx(residual)


def test_a_bound_of_the_caller_stays_and_is_told():
    network, x, y = trained()
    scaled(network, 1e-3)
    for precision in ("evidence", 1.0):
        likelihood = GaussianLikelihood(noise_constraint=GreaterThan(1e-3)).double()
        with pytest.warns(FitWarning, match=r"noise ended at a bound of the likelihood, 0\.00101"):
            Laplace(network, likelihood).fit((x, 1e-3 * y), precision=precision)
        assert float(likelihood.noise_covar.raw_noise_constraint.lower_bound) == pytest.approx(1e-3)


def test_targets_in_other_units_than_outputs_are_told():
    network, x, y = trained()
    with pytest.warns(FitWarning, match="not in the same units"):
        Laplace(network, "regression").fit((x, 1e5 * y + 3e5))
    network, x, y = trained(outputs=2)
    with torch.no_grad():
        network[-1].weight[1] *= 100
        network[-1].bias[1] *= 100
    with pytest.warns(FitWarning, match="one noise for all"):
        Laplace(network, "regression").fit((x, torch.tensor([1, 100]) * y))


def objective(network):
    model = LinearizedNetwork(network, GaussianWeightPrior(network))
    return LaplaceMarginalLogLikelihood(GaussianLikelihood().double(), model, N, Full())


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_hyperparameters_reach_the_optimum_in_any_units(unit):
    network, x, y = trained()
    scaled(network, unit)
    mll = objective(network)
    fit = fit_hyperparameters(mll, x, unit * y[:, 0])
    assert fit.converged
    posterior = Laplace(network, "regression", weights="all", structure="full")
    posterior.fit((x, unit * y[:, 0]))
    assert N * fit.objective == pytest.approx(posterior.log_evidence, abs=0.1)
    assert float(mll.likelihood.noise.detach()) == pytest.approx(
        float(posterior.likelihood.noise.detach()), rel=0.02
    )


@pytest.mark.slow
def test_an_evidence_that_climbs_is_told():
    network, x, y = trained()
    mll = objective(network)
    fit = fit_hyperparameters(mll, x, y[:, 0], steps=3)
    assert fit.problem == "limit"
    assert "Raise steps" in fit.message
    online = fit_online(objective(fresh()), x, y[:, 0], epochs=14, lr=0.01)
    assert online.problem == "limit"
    assert "Raise epochs" in online.message


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-6, 1e5])
def test_a_training_on_raw_units_is_told_and_its_noise_follows(unit):
    _, x, y = trained()
    target = unit * (y[:, 0] + 2)
    for fit in (fit_online, fit_map):
        network = fresh()
        mll = objective(network)
        with pytest.warns(FitWarning, match="not in the same units"):
            result = fit(mll, x, target, epochs=12)
        assert result.problem == "units"
        if fit is fit_online:
            residual = float((network(x)[:, 0] - target).square().mean().detach())
            assert float(mll.likelihood.noise.detach()) == pytest.approx(residual, rel=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_online(mll, x, y[:, 0], epochs=12, lr=0.01)
