"""Training speed by gradient descent, against exact draws of a linear model's posterior."""

from __future__ import annotations

import math

import pytest
import torch

import reference
from benchmarks.evidence.ledger.training_speed_linear import (
    WhitenedModel,
    training_speed_by_descent,
)
from gpclml.evidence.training_speed import expected_terms, predict_prefixes, sampled_terms
from gpclml.linalg import DenseCovariance
from gpclml.models import BayesianLinearModel


def problem(n=10, num_weights=4, seed=7):  # a stream that draws of seed 0 do not share
    """A linear model with other prior variances for each weight."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, num_weights, generator=generator, dtype=torch.float64)
    weights = torch.randn(num_weights, generator=generator, dtype=torch.float64)
    target = features @ weights + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    prior = torch.linspace(0.3, 2.0, num_weights, dtype=torch.float64)
    return BayesianLinearModel(features, target, prior_variance=prior, noise=0.4)


def arrays(model):
    return model.train_inputs[0], model.train_targets, model.prior_variance.detach(), 0.4


@pytest.mark.parametrize(("n", "num_weights"), [(10, 4), (4, 10)])
def test_draws_are_the_minimizers_that_their_starts_determine(n, num_weights):
    model = problem(n, num_weights)
    features, _, prior, noise = arrays(model)
    whitened = WhitenedModel(model)
    starts, targets = whitened.draws(5, 0)
    weights = whitened.descended(starts, starts, targets, 3000) * prior.sqrt()
    precision = features.mT @ features / noise + (1 / prior).diag()
    pull = targets / noise**0.5 @ features + starts / prior.sqrt()
    expected = torch.linalg.solve(precision, pull.mT).mT
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n", "num_weights"), [(10, 4), (6, 8)])
def test_descent_along_the_data_agrees_with_exact_draws(n, num_weights):
    model = problem(n, num_weights)
    features, target, prior, noise = arrays(model)
    k, covariance = 5, features * prior @ features.mT + noise * torch.eye(n).double()
    order, variances = torch.arange(n).unsqueeze(0), torch.full((n,), noise).double()
    prefixes = predict_prefixes(DenseCovariance(covariance), target, variances, order)
    lower, multi_sample = training_speed_by_descent(model, k, steps=100, repeats=400, seed=0)
    expected = float(expected_terms(prefixes).sum())
    assert abs(lower.value - expected) < 4 * lower.standard_error
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(4000, k, n, generator=generator, dtype=torch.float64)
    deviations = prefixes.errors[0] - prefixes.variances[0].sqrt() * normal
    terms = sampled_terms(deviations, prefixes.noise[0])
    for estimate, several in zip((lower, multi_sample), terms, strict=False):
        totals = several.sum(-1)
        error = math.hypot(estimate.standard_error, float(totals.std()) / math.sqrt(4000))
        assert abs(estimate.value - float(totals.mean())) < 4 * error
    assert lower.value < multi_sample.value
    lml = float(reference.log_density(covariance, target))
    assert multi_sample.value < lml + 4 * multi_sample.standard_error


def test_without_steps_every_point_is_predicted_by_the_prior():
    model = problem()
    features, target, prior, noise = arrays(model)
    none, enough = (
        training_speed_by_descent(model, 4, steps=steps, repeats=10, seed=2)[0]
        for steps in (0, 100)
    )
    variances = features.square() @ prior
    terms = math.log(2 * math.pi * noise) + (target.square() + variances) / noise
    assert abs(none.value + 0.5 * float(terms.sum())) < 4 * none.standard_error
    assert none.value < enough.value
