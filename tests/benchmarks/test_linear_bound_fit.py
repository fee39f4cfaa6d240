"""Coordinate ascent on the bound: the published figures, tempering, and interruption."""

import itertools
import math

import numpy as np
import pytest
import torch

from benchmarks.evidence.ledger.elbo import drawn_features, learned_bound, sine
from benchmarks.evidence.linear_bound import fit_linear_bound
from gpclml.errors import ArgumentError, NonFiniteError
from gpclml.evaluation import log_marginal_likelihood
from gpclml.kernels import RandomFourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, LowRankFamily
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel


def sine_bound(family, num_features):
    """Harvey and Hughes (2026): 20 points of a sine and random features of seed 0."""
    x, y = sine(np.random.RandomState(0), 20)
    weight, bias = drawn_features(torch.Generator().manual_seed(0), num_features)
    features = RandomFourierFeatures(1, num_features, weight=weight, bias=bias)
    model = BayesianLinearModel(x, y, features)
    return LinearEvidenceLowerBound(model.likelihood, model, family)


@pytest.mark.parametrize(
    ("family", "lr", "figures"),
    [
        ("diagonal", 0.01, (0.3949, 0.3278, 0.3071, -15.7618, -13.0351)),
        pytest.param(
            "rank-1", 0.1, (5.539e-4, 0.0204, 0.5563, -6443.5416, -15.1993), marks=pytest.mark.slow
        ),
        pytest.param(
            "full", 0.1, (0.1340, 0.6738, 1.0797, -2.2153, -2.2153), marks=pytest.mark.slow
        ),
    ],
)
def test_published_figures(family, lr, figures):
    scores = learned_bound(family, 0, 1000, [lr]).scores()
    names = ("noise", "lengthscale", "amplitude", "elbo", "lml")
    for name, figure in zip(names, figures, strict=True):
        digits = 6e-8 if 0 < figure < 1e-3 else 6e-5
        assert scores[name] == pytest.approx(figure, rel=0, abs=digits)


@pytest.mark.slow
def test_a_published_temperature():
    learned = learned_bound("diagonal", 0, 1000, [0.1], temperature=0.25)
    assert learned.bound_at_one == pytest.approx(-29.2296, abs=1e-3)
    assert log_marginal_likelihood(learned.model).item() == pytest.approx(-19.4402, abs=1e-3)


@pytest.mark.slow
def test_empirical_bayes_shrinks_the_prior_of_a_rank_one_posterior():
    mll = sine_bound(LowRankFamily(1, 1e-4), 128)
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


@pytest.mark.slow
def test_an_interruption_leaves_the_best(monkeypatch):
    whole, mll = (sine_bound(DiagonalFamily(), 64) for _ in range(2))
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
