from __future__ import annotations

import math

import pytest
import torch

import reference
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.training_speed import sample_then_optimize, training_speed_by_descent
from gpclml.evidence.training_speed.estimators import Prefixes, predict_prefixes, sampled_terms
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


def minimizers(draws, features, prior, noise):
    """Where descent from these starts, with these targets, ends."""
    zero = torch.zeros(len(features), dtype=torch.float64)
    _, covariance = posterior(features, zero, prior, noise)
    pull = draws.targets / noise @ features + draws.starts / prior
    return pull @ covariance


@pytest.mark.parametrize(("n", "num_weights"), [(10, 4), (4, 10)])
@pytest.mark.parametrize("accelerated", [True, False])
def test_draws_are_the_minimizers_that_their_starts_determine(n, num_weights, accelerated):
    model = problem(n, num_weights)
    features, target, prior, noise = model
    draws = sample_then_optimize(*model, 5, steps=3000, accelerated=accelerated)
    expected = minimizers(draws, features, prior, noise)
    torch.testing.assert_close(draws.weights, expected, rtol=1e-9, atol=1e-9)
    assert float(draws.gradient_norms.max()) < 1e-9
    assert draws.starts.shape == (5, num_weights)
    assert draws.targets.shape == (5, n)
    torch.testing.assert_close(
        draws.targets - target, sample_then_optimize(*model, 5, steps=0).targets - target
    )


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_plain_descent_is_a_power_of_its_contraction(steps):
    features, target, prior, noise = problem()
    draws = sample_then_optimize(features, target, prior, noise, 3, steps=steps, accelerated=False)
    root = prior.sqrt()
    A = features * root / noise.sqrt().unsqueeze(-1)
    hessian = torch.eye(4, dtype=torch.float64) + A.mT @ A
    largest = torch.linalg.eigvalsh(hessian)[-1]
    contraction = torch.eye(4, dtype=torch.float64) - 2 / (1 + largest) * hessian
    end = minimizers(draws, features, prior, noise)
    off = (draws.starts - end) / root @ torch.linalg.matrix_power(contraction, steps)
    torch.testing.assert_close(draws.weights, end + off * root)
    torch.testing.assert_close(draws.gradient_norms, (off @ hessian).norm(dim=-1))


@pytest.mark.parametrize("accelerated", [True, False])
def test_the_gradient_left_bounds_the_distance_to_the_draw(accelerated):
    features, target, prior, noise = problem()
    before = math.inf
    for steps in (0, 5, 20, 80):
        draws = sample_then_optimize(
            features, target, prior, noise, 6, steps=steps, accelerated=accelerated
        )
        off = (draws.weights - minimizers(draws, features, prior, noise)) / prior.sqrt()
        assert bool((off.norm(dim=-1) <= draws.gradient_norms).all())
        worst = float(draws.gradient_norms.max())
        assert worst < before
        before = worst


def test_momentum_needs_fewer_steps():
    features, target, prior, noise = problem(40, 10)
    slow, fast = (
        sample_then_optimize(
            features, target, 100 * prior, noise, 4, steps=200, accelerated=accelerated
        ).gradient_norms.max()
        for accelerated in (False, True)
    )
    assert fast < 1e-2 * slow


def test_draws_have_mean_and_covariance_of_the_posterior():
    model = problem()
    count = 20_000
    draws = sample_then_optimize(*model, count, steps=150).weights
    mean, covariance = posterior(*model)
    variances = covariance.diagonal()
    off = (draws.mean(0) - mean) / (variances / count).sqrt()
    assert float(off.abs().max()) < 4
    # The variance of a sample covariance of Gaussians is (C_ij² + C_ii C_jj) / S.
    spread = ((covariance.square() + torch.outer(variances, variances)) / count).sqrt()
    assert float(((draws.mT.cov() - covariance) / spread).abs().max()) < 4


def test_one_number_is_the_same_variance_for_all_and_float32_is_near_float64(device):
    features, target, _, _ = (part.to(device) for part in problem())
    number = sample_then_optimize(features, target, 0.7, 0.1, 3)
    every = sample_then_optimize(
        features, target, torch.full((4,), 0.7), torch.full((10,), 0.1, dtype=torch.float64), 3
    )
    torch.testing.assert_close(number.weights, every.weights, rtol=1e-6, atol=1e-6)
    single = sample_then_optimize(features.float(), target.float(), 0.7, 0.1, 3)
    assert single.weights.dtype == torch.float32
    torch.testing.assert_close(single.weights.double(), number.weights, rtol=1e-4, atol=1e-4)
    again = sample_then_optimize(features, target, 0.7, 0.1, 3, seed=1)
    assert not torch.equal(number.weights, again.weights)
    host = sample_then_optimize(features.cpu(), target.cpu(), 0.7, 0.1, 3)
    torch.testing.assert_close(host.weights, number.weights.cpu())


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
    assert result.gradient_norm < 1e-3
    assert result.num_samples == k
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


def test_too_few_steps_are_reported():
    model = problem()
    none, few, enough = (
        training_speed_by_descent(*model, 4, steps=steps, seed=2) for steps in (0, 2, 100)
    )
    assert none.gradient_norm > few.gradient_norm > 0.1 > 1e-3 > enough.gradient_norm
    assert none.expected == few.expected == enough.expected
    # Without training every point is predicted by the prior.
    assert none.lower.value < enough.lower.value
    single = training_speed_by_descent(*model, 2, steps=1, repeats=1)
    assert single.gaussian.standard_error == single.multi_sample.standard_error == math.inf
    assert single.lower.standard_error < math.inf


@pytest.mark.parametrize("ask", [sample_then_optimize, training_speed_by_descent])
@pytest.mark.parametrize(
    ("place", "value", "error", "match"),
    [
        (0, torch.ones(10), ShapeError, r"features: got \(10,\), expected \(N, R\)"),
        (
            0,
            torch.full((10, 4), math.nan),
            NonFiniteError,
            "features: got 40 of 40 values not finite",
        ),
        (1, torch.ones(9), ShapeError, r"target: got \(9,\), expected \(N,\) with N = 10"),
        (1, torch.full((10,), math.inf), NonFiniteError, "target: got 10 of 10 values not finite"),
        (
            2,
            torch.ones(3),
            ShapeError,
            r"prior_variance: got \(3,\), .* with R = 4",
        ),
        (2, 0.0, ArgumentError, "prior_variance: got 0.0, expected positive"),
        (3, -1.0, ArgumentError, "noise: got -1"),
        (3, math.nan, ArgumentError, "noise: got nan"),
        (4, 0, ArgumentError, "num_samples: got 0"),
    ],
)
def test_bad_arguments_are_named(ask, place, value, error, match):
    arguments = [*problem(), 3]
    arguments[place] = value
    with pytest.raises(error, match=match):
        ask(*arguments)


def test_counts_are_checked():
    with pytest.raises(ArgumentError, match="steps: got -1"):
        sample_then_optimize(*problem(), 2, steps=-1)
    with pytest.raises(ArgumentError, match="repeats: got 0"):
        training_speed_by_descent(*problem(), 2, repeats=0)
    with pytest.raises(ArgumentError, match=r"num_samples: got 1, .* A variance needs two"):
        training_speed_by_descent(*problem(), 1)
