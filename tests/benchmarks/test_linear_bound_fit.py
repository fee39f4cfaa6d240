"""Coordinate ascent on the bound: the published figures, tempering, and interruption."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from benchmarks.evidence.linear_bound import fit_linear_bound
from gpclml.errors import ArgumentError, NonFiniteError
from gpclml.evaluation import log_marginal_likelihood
from gpclml.kernels import RandomFourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, LowRankFamily
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel


def sine(family, *, temperature=1.0, num_features=1024, seed=0):
    """Harvey and Hughes (2026): 20 points of a sine and random features of seed 0."""
    random = np.random.RandomState(seed)
    x = random.randn(20)
    y = np.sin(3 * x) + 0.1 * random.randn(20)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_features, 1, generator=generator, dtype=torch.float64)
    bias = 2 * math.pi * torch.rand(num_features, generator=generator, dtype=torch.float64)
    features = RandomFourierFeatures(1, num_features, weight=weight, bias=bias)
    model = BayesianLinearModel(torch.tensor(x), torch.tensor(y), features)
    return LinearEvidenceLowerBound(model.likelihood, model, family, temperature=temperature)


@pytest.mark.parametrize(
    ("family", "lr", "noise", "lengthscale", "amplitude", "elbo", "lml"),
    [
        (DiagonalFamily(), 0.01, 0.3949, 0.3278, 0.3071, -15.7618, -13.0351),
        pytest.param(
            LowRankFamily(1, 1e-6), 0.1, 5.539e-4, 0.0204, 0.5563, -6443.5416, -15.1993,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FullFamily(), 0.1, 0.1340, 0.6738, 1.0797, -2.2153, -2.2153, marks=pytest.mark.slow
        ),
    ],
    ids=["diagonal", "rank-1", "full"],
)  # fmt: skip
def test_published_figures(family, lr, noise, lengthscale, amplitude, elbo, lml):
    mll = sine(family)
    fit = fit_linear_bound(mll, steps=1000, lr=lr)
    model, features = mll.model, mll.model.covar_module.features
    digits = 7 if noise < 1e-3 else 4
    assert round(model.noise.sqrt().item(), digits) == pytest.approx(noise, abs=1e-9)
    assert features.lengthscale.item() == pytest.approx(lengthscale, abs=6e-5)
    assert features.amplitude.item() == pytest.approx(amplitude, abs=6e-5)
    assert 20 * fit.objective == pytest.approx(elbo, abs=6e-5)
    assert log_marginal_likelihood(model).item() == pytest.approx(lml, abs=6e-5)


@pytest.mark.slow
def test_a_published_temperature():
    mll = sine(DiagonalFamily(), temperature=0.25)
    fit_linear_bound(mll, steps=1000, lr=0.1)
    model = mll.model
    untempered = 20 * mll.at_temperature(1.0, model(*model.train_inputs), model.train_targets)
    assert untempered.item() == pytest.approx(-29.2296, abs=1e-3)
    assert log_marginal_likelihood(model).item() == pytest.approx(-19.4402, abs=1e-3)


def test_empirical_bayes_shrinks_the_prior_of_a_rank_one_posterior():
    mll = sine(LowRankFamily(1, 1e-4), num_features=128)
    fit = fit_linear_bound(mll, steps=300, lr=0.1, empirical_bayes=True)
    model = mll.model
    assert model.prior_variance[0].item() < 1e-3
    # What is left is noise alone.
    y = model.train_targets
    noise_alone = -10 * (1 + math.log(2 * math.pi * y.square().mean().item()))
    assert 20 * fit.objective == pytest.approx(noise_alone, abs=0.5)
    assert model.noise.item() > 0.3


@pytest.mark.parametrize("family", [DiagonalFamily(), FullFamily(), LowRankFamily(2)])
def test_without_features_to_train_every_step_is_an_ascent(family):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(15, 4, generator=generator, dtype=torch.float64)
    y = x.sum(-1) + 0.3 * torch.randn(15, generator=generator, dtype=torch.float64)
    model = BayesianLinearModel(x, y)
    mll = LinearEvidenceLowerBound(model.likelihood, model, family)
    fit = fit_linear_bound(mll, steps=40, lr=0.01, empirical_bayes=True)
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(fit.history))
    assert fit.objective == max(fit.history) > fit.history[0]


def noises_of(mll, monkeypatch, interrupt_at=None):
    """The noise before each step, which is interrupted at one of them."""
    noises, weights_at = [], mll.weights_at

    def noted(data):
        noises.append(mll.model.noise.item())
        if len(noises) == interrupt_at:
            raise KeyboardInterrupt
        return weights_at(data)

    monkeypatch.setattr(mll, "weights_at", noted)
    return noises


def test_an_interruption_leaves_the_best(monkeypatch):
    whole, mll = (sine(DiagonalFamily(), num_features=64) for _ in range(2))
    noises = noises_of(whole, monkeypatch)
    history = fit_linear_bound(whole, steps=100, lr=0.1).history[:7]
    noises_of(mll, monkeypatch, interrupt_at=8)
    with pytest.raises(KeyboardInterrupt):
        fit_linear_bound(mll, steps=100, lr=0.1)
    assert mll.model.noise.item() == noises[history.index(max(history)) + 1] != 1.0


def test_a_bound_that_is_not_finite_leaves_the_best():
    class Failing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.scale * (math.nan if self.calls > 20 else 1.0)

    x = torch.linspace(-1, 1, 9, dtype=torch.float64)
    model = BayesianLinearModel(x, x.sin(), Failing())
    mll = LinearEvidenceLowerBound(model.likelihood, model)
    with pytest.raises((NonFiniteError, ArgumentError)):
        fit_linear_bound(mll, steps=100, lr=0.01)
    assert all(value.isfinite().all() for value in model.parameters())
