"""Training speed by gradient descent, against exact draws of a linear model's posterior."""

from __future__ import annotations

import math

import pytest
import torch

import reference
from benchmarks.evidence.descent import WhitenedModel, training_speed_by_descent
from gpclml.evidence.training_speed import Prefixes, predict_prefixes, sampled_terms
from gpclml.linalg import DenseCovariance


def problem(n=10, num_weights=4, seed=7):  # a stream that draws of seed 0 do not share
    """Features, targets, prior variances of the weights and noise variances of the points."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, num_weights, generator=generator, dtype=torch.float64)
    weights = torch.randn(num_weights, generator=generator, dtype=torch.float64)
    target = features @ weights + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    prior = torch.linspace(0.3, 2.0, num_weights, dtype=torch.float64)
    return features, target, prior, torch.linspace(0.2, 0.6, n, dtype=torch.float64)


def posterior(features, target, prior, noise):
    precision = features.mT @ (features / noise.unsqueeze(-1)) + (1 / prior).diag()
    covariance = torch.linalg.inv(precision)
    return covariance @ features.mT @ (target / noise), covariance


def draws(model, count, steps):
    """Draws of the weights, and the minimizers that their starts and targets determine."""
    _, _, prior, noise = model
    whitened = WhitenedModel(*model)
    starts, targets = whitened.draws(count, 0)
    weights = whitened.descended(starts, starts, targets, steps) * prior.sqrt()
    precision = torch.linalg.inv(posterior(*model)[1])
    pull = targets / noise.sqrt() @ model[0] + starts / prior.sqrt()
    return weights, torch.linalg.solve(precision, pull.mT).mT


@pytest.mark.parametrize(("n", "num_weights"), [(10, 4), (4, 10)])
def test_draws_are_the_minimizers_that_their_starts_determine(n, num_weights):
    weights, expected = draws(problem(n, num_weights), 5, steps=3000)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


def exact(model) -> tuple[Prefixes, float]:
    features, target, prior, noise = model
    covariance = features * prior @ features.mT + noise.diag()
    order = torch.arange(len(target)).unsqueeze(0)
    lml = float(reference.log_density(covariance, target))
    return predict_prefixes(DenseCovariance(covariance), target, noise, order), lml


@pytest.mark.parametrize(("n", "num_weights"), [(10, 4), (6, 8)])
def test_descent_along_the_data_agrees_with_exact_draws(n, num_weights):
    model = problem(n, num_weights)
    prefixes, lml = exact(model)
    k, repeats = 5, 400
    result = training_speed_by_descent(*model, k, steps=100, repeats=repeats)
    assert result.log_marginal_likelihood == pytest.approx(lml)
    assert abs(result.lower.value - result.expected.value) < 4 * result.lower.standard_error
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(4000, k, n, generator=generator, dtype=torch.float64)
    deviations = prefixes.errors[0] - prefixes.variances[0].sqrt() * normal
    for name, terms in zip(
        ("lower", "multi_sample", "gaussian"),
        sampled_terms(deviations, prefixes.noise[0]),
        strict=True,
    ):
        totals = terms.sum(-1)
        estimate = getattr(result, name)
        error = math.hypot(estimate.standard_error, float(totals.std()) / math.sqrt(4000))
        assert abs(estimate.value - float(totals.mean())) < 4 * error
    assert result.lower.value < result.multi_sample.value
    assert result.multi_sample.value < lml + 4 * result.multi_sample.standard_error


def test_without_steps_every_point_is_predicted_by_the_prior():
    features, target, prior, noise = problem()
    none, enough = (
        training_speed_by_descent(features, target, prior, noise, 4, steps=steps, seed=2)
        for steps in (0, 100)
    )
    assert none.expected == enough.expected
    variances = features.square() @ prior
    terms = (2 * math.pi * noise).log() + (target.square() + variances) / noise
    assert abs(none.lower.value + 0.5 * float(terms.sum())) < 4 * none.lower.standard_error
    assert none.lower.value < enough.lower.value
