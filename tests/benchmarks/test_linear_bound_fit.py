"""Coordinate ascent on the bound: the published figures, tempering, and interruption."""

import itertools
import math

import numpy as np
import pytest
import torch

from benchmarks.evidence.ledger import elbo
from benchmarks.evidence.ledger.elbo import drawn_features, fit_linear_bound, learned_bound, sine
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


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lr"), [("diagonal", 0.01), ("rank-1", 0.1), ("full", 0.1)])
def test_published_figures(family, lr):
    cell = {"family": family, "seed": 0, "steps": 1000, "rates": [lr]}
    scores = learned_bound(cell).scores()
    for name, figure in zip(elbo._NAMES, elbo._SEED_FIGURES[family], strict=True):
        digits = 6e-8 if 0 < figure < 1e-3 else 6e-5
        assert scores[name] == pytest.approx(figure, rel=0, abs=digits)


@pytest.mark.slow
def test_a_published_temperature():
    cell = {"family": "diagonal", "seed": 0, "steps": 1000, "rates": [0.1], "temperature": 0.25}
    learned = learned_bound(cell)
    assert learned.bound_at_one == pytest.approx(-29.2296, abs=1e-3)
    assert log_marginal_likelihood(learned.model).item() == pytest.approx(-19.4402, abs=1e-3)


@pytest.mark.slow
def test_empirical_bayes_shrinks_the_prior_of_a_rank_one_posterior():
    mll = sine_bound(LowRankFamily(1, 1e-4), 128)
    history = fit_linear_bound(mll, steps=300, lr=0.1, empirical_bayes=True)
    model = mll.model
    assert model.prior_variance[0].item() < 1e-3
    # What is left is noise alone.
    y = model.train_targets
    noise_alone = -10 * (1 + math.log(2 * math.pi * y.square().mean().item()))
    assert 20 * max(history) == pytest.approx(noise_alone, abs=0.5)
    assert model.noise.item() > 0.3


@pytest.mark.parametrize("family", [DiagonalFamily(), FullFamily(), LowRankFamily(2)])
def test_with_features_that_stay_every_step_is_an_ascent(family):
    history = fit_linear_bound(sine_bound(family, 8), steps=40, lr=0.0, empirical_bayes=True)
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(history))
    assert history[-1] > history[0]


def test_the_hyperparameters_of_the_largest_bound_are_kept():
    mll = sine_bound(DiagonalFamily(), 32)
    history = fit_linear_bound(mll, steps=40, lr=1.0)
    assert history[-1] < max(history) - 1e-4
    again = fit_linear_bound(mll, steps=1, lr=0.0)  # q and noise are the best ones already
    assert again[0] >= max(history) - 1e-12


def test_a_bound_that_is_not_finite_is_refused():
    mll = sine_bound(DiagonalFamily(), 8)
    next(mll.model.covar_module.features.parameters()).data.fill_(math.nan)
    with pytest.raises((NonFiniteError, ArgumentError)):
        fit_linear_bound(mll, steps=100, lr=0.01)
