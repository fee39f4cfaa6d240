"""Noise that ends at its lower bound: told where few points cannot support it, and only there."""

from __future__ import annotations

import pytest
import torch
from gpytorch.priors import LogNormalPrior

from gpclml import GPRegression, fit_mll
from gpclml.conditioning import LastPoints
from gpclml.fit import FitWarning
from gpclml.mlls import ConditionalMarginalLogLikelihood


def drawn(n, d, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = torch.sin(3 * x[:, :3]).sum(-1)
    return x, y + noise * torch.randn(n, generator=generator, dtype=torch.float64)


def fitted(x, y, prior=None):
    model = GPRegression(x, y, "matern")
    if prior is not None:
        model.likelihood.noise_covar.register_prior("noise_prior", prior, "noise")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    return model, fit_mll(mll, progress=False)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_few_points_with_noise_that_the_fit_takes_for_exact(seed):
    x, y = drawn(530, 10, 0.5, seed)
    with pytest.warns(FitWarning, match="noise ended at its lower bound"):
        model, result = fitted(x[:30], y[:30])
    assert result.problem == "noise"
    assert not result.converged
    assert model.likelihood.noise.item() < 1.1e-4
    found = model.predict(x[30:], marginal=True)
    inside = (y[30:] - found.mean).abs() < 1.96 * found.stddev
    assert float(inside.double().mean()) < 0.85  # of what should be .95


@pytest.mark.parametrize(("n", "d", "noise"), [(30, 2, 0.0), (150, 2, 0.0), (60, 3, 0.3)])
def test_it_is_silent_where_targets_are_exact_or_points_many(n, d, noise):
    for seed in range(3):
        model, result = fitted(*drawn(n, d, noise, seed))
        assert result.problem == ""
        assert (model.likelihood.noise.item() < 1.1e-4) == (noise == 0)


def test_it_is_silent_where_a_prior_allows_for_it():
    x, y = drawn(30, 10, 0.5, 1)
    model, result = fitted(x, y, LogNormalPrior(-12.0, 0.1))
    assert model.likelihood.noise.item() < 1.1e-4
    assert result.problem == ""
