from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator.operators import DenseLinearOperator

import reference
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evaluation import learning_curve, log_marginal_likelihood
from gpclml.evidence.training_speed import (
    divergences,
    expected_terms,
    marginal_terms,
    posterior_divergences,
    predict_prefixes,
    sampled_terms,
    training_speed,
)
from gpclml.inference.observations import training_observations
from gpclml.linalg import DenseCovariance, LowRankPlusDiagonal
from gpclml.models import GPRegression

N = 12
PRIOR, NOISE = 0.7, 0.15


def data(n=N, seed=7, columns=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, columns, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(5 * x.sum(-1)) + 0.3 * noise


def gp(kernel="rbf", noise=NOISE, **options):
    model = GPRegression(*data(), kernel, "zero", standardize=False, **options)
    if noise is not None:
        model.likelihood.noise = torch.tensor(noise, dtype=torch.float64)
    return model


def linear_gp():
    model = gp(gpytorch.kernels.LinearKernel())
    model.covar_module.variance = torch.tensor(PRIOR, dtype=torch.float64)
    return model


def dense(model):
    model.train()
    latent = model(*model.train_inputs)
    return latent.covariance_matrix.detach(), (model.train_targets - latent.mean).detach()


def brute_force_expected(latent, residual, noise, order):
    """E log p(y_i | f_i) with f_i from a Gaussian process refitted to each prefix."""
    total = 0.0
    for i in range(len(order)):
        seen, point = order[:i], order[i]
        K = latent[seen][:, seen] + noise[seen].diag()
        gain = latent[point, seen] @ torch.linalg.inv(K) if i else residual.new_zeros(0)
        error = residual[point] - gain @ residual[seen]
        variance = latent[point, point] - gain @ latent[seen, point]
        s = noise[point]
        total += -0.5 * (2 * math.pi * s).log() - (error**2 + variance) / (2 * s)
    return float(total)


@pytest.mark.parametrize(
    ("make", "form"), [(gp, DenseCovariance), (linear_gp, LowRankPlusDiagonal)]
)
def test_the_bound_in_closed_form_is_that_of_refitted_prefixes(make, form):
    model = make()
    assert isinstance(training_observations(model).covariance, form)
    K, r = dense(model)
    noise = torch.full((N,), NOISE, dtype=torch.float64)
    orders = torch.stack([torch.arange(N), torch.randperm(N), torch.randperm(N)])
    expected = [brute_force_expected(K, r, noise, order) for order in orders]
    for order, value in zip(orders, expected, strict=True):
        result = training_speed(model, 2, orderings=order.unsqueeze(0), repeats=1)
        assert result.expected.value == pytest.approx(value, rel=1e-9)
        assert result.expected.standard_error == result.lower.standard_error == math.inf
    result = training_speed(model, 2, orderings=orders)
    values = torch.tensor(expected, dtype=torch.float64)
    assert result.expected.value == pytest.approx(float(values.mean()), rel=1e-9)
    error = float(values.std()) / math.sqrt(3)
    assert result.expected.standard_error == pytest.approx(error, rel=1e-7)
    lml = float(reference.log_density(K + noise.diag(), r))
    assert result.log_marginal_likelihood == pytest.approx(lml, rel=1e-9)
    assert result.gap == pytest.approx(lml - result.expected.value)


def weight_posterior(features, target, prior_variance, noise):
    precision = features.mT @ features / noise + torch.eye(features.shape[-1]).to(features) / (
        prior_variance
    )
    return torch.linalg.solve(precision, features.mT @ target / noise), precision


def gaussian_divergence(first, second):
    """KL between Gaussians, each as mean and precision."""
    (mean, precision), (other, other_precision) = first, second
    trace = torch.trace(other_precision @ torch.linalg.inv(precision))
    shift = other - mean
    log_det = torch.linalg.slogdet(precision)[1] - torch.linalg.slogdet(other_precision)[1]
    return 0.5 * (trace + shift @ other_precision @ shift - len(mean) + log_det)


def test_the_gap_is_the_sum_of_divergences_between_posteriors_of_weights():
    model = linear_gp()
    x, y = data()
    order = torch.randperm(N)
    posteriors = [weight_posterior(x[order[:i]], y[order[:i]], PRIOR, NOISE) for i in range(N + 1)]
    expected = [gaussian_divergence(*posteriors[i : i + 2]) for i in range(N)]
    (terms,) = posterior_divergences(model, order.unsqueeze(0))
    torch.testing.assert_close(terms, torch.stack(expected), rtol=1e-8, atol=1e-8)
    result = training_speed(model, 2, orderings=order.unsqueeze(0))
    assert result.gap == pytest.approx(float(terms.sum()), abs=1e-8)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 8),
    k=st.integers(1, 3),
    log_noise=st.floats(-4, 2),
    seed=st.integers(0, 100),
)
def test_what_the_bound_misses_is_never_negative(n, k, log_noise, seed):
    noise = torch.full((n,), 10.0**log_noise, dtype=torch.float64)
    K = reference.random_covariance(n, seed=seed, noise=float(noise[0]))
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(k)])
    prefixes = predict_prefixes(
        DenseCovariance(K), reference.random_residual(n, seed=seed), noise, orders
    )
    terms = divergences(prefixes)
    assert terms.shape == (k, n)
    assert bool((terms >= 0).all())
    difference = marginal_terms(prefixes) - expected_terms(prefixes)
    torch.testing.assert_close(difference, terms, rtol=1e-7, atol=1e-9)
    sums = marginal_terms(prefixes).sum(-1)
    torch.testing.assert_close(sums, sums[:1].expand(k), rtol=1e-6, atol=1e-6)


def test_terms_by_draws_are_their_definitions():
    deviations = torch.randn(2, 4, 3, dtype=torch.float64)
    noise = torch.tensor([0.2, 0.5, 1.5], dtype=torch.float64)
    densities = torch.distributions.Normal(0, noise.sqrt()).log_prob(deviations)
    centre = deviations.mean(1, keepdim=True)
    variance = (deviations - centre).square().sum(1) / 3 + noise
    expected = (
        densities.mean(1),
        densities.exp().mean(1).log(),
        torch.distributions.Normal(0, variance.sqrt()).log_prob(centre.squeeze(1)),
    )
    torch.testing.assert_close(sampled_terms(deviations, noise), expected)


def apart(first, second):
    """Standard errors by which the first exceeds the second."""
    error = math.hypot(first.standard_error, second.standard_error)
    return (first.value - second.value) / error


def test_bounds_are_ordered_and_tighten_with_draws():
    model = gp()
    few, more, many = (
        training_speed(model, k, orderings=2, repeats=300, seed=1) for k in (2, 5, 40)
    )
    lml = few.log_marginal_likelihood
    for result in (few, more, many):
        exact = result.expected.value
        assert abs(result.lower.value - exact) < 4 * result.lower.standard_error
        assert result.lower.standard_error < 0.05 * abs(lml - exact)
        assert result.multi_sample.value > exact + 4 * result.multi_sample.standard_error
        assert result.multi_sample.value < lml + 4 * result.multi_sample.standard_error
    assert many.multi_sample.value < lml
    assert apart(more.multi_sample, few.multi_sample) > 4
    assert apart(many.multi_sample, more.multi_sample) > 4


def test_the_gaussian_estimate_loses_its_bias_with_draws():
    model = gp()
    few, many = (training_speed(model, k, repeats=200, seed=2) for k in (3, 300))
    lml = few.log_marginal_likelihood
    assert abs(few.gaussian.value - lml) > 4 * few.gaussian.standard_error
    bias = abs(many.gaussian.value - lml)
    assert bias < 0.1 * abs(few.gaussian.value - lml) + 4 * many.gaussian.standard_error


def test_standard_errors_are_those_of_repeated_estimates():
    model, order = gp(), torch.arange(N).unsqueeze(0)
    results = [
        training_speed(model, 4, orderings=order, repeats=3, seed=seed) for seed in range(250)
    ]
    for name in ("lower", "multi_sample", "gaussian"):
        estimates = [getattr(result, name) for result in results]
        spread = torch.tensor([one.value for one in estimates]).std()
        variance = torch.tensor([one.standard_error**2 for one in estimates]).mean()
        # Two variances from 250 values: five standard errors, more with heavy tails.
        assert float(spread**2 / variance) == pytest.approx(1, abs=0.45)


def test_a_seed_fixes_orders_and_draws():
    model = gp()
    first = training_speed(model, 3, orderings=2, seed=5)
    assert first == training_speed(model, 3, orderings=2, seed=5)
    assert first != training_speed(model, 3, orderings=2, seed=6)
    terms = posterior_divergences(model, 2, seed=5)
    assert float(terms.sum(-1).mean()) == pytest.approx(first.gap)


def test_noise_may_differ_from_point_to_point():
    noise = torch.linspace(0.05, 0.6, N, dtype=torch.float64)
    model = gp(likelihood=FixedNoiseGaussianLikelihood(noise), noise=None)
    K, r = dense(model)
    order = torch.randperm(N)
    result = training_speed(model, 2, orderings=order.unsqueeze(0))
    expected = brute_force_expected(K, r, noise, order)
    assert result.expected.value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_missing_targets_count_for_nothing(kernel):
    def model(x, y):
        used = gpytorch.kernels.LinearKernel() if kernel == "linear" else kernel
        return GPRegression(x, y, used, "zero", standardize=False)

    x, y = data()
    holes = y.clone()
    holes[[3, 7]] = math.nan
    there = ~holes.isnan()
    with gpytorch.settings.observation_nan_policy("mask"):
        order = torch.arange(N).unsqueeze(0)
        result = training_speed(model(x, holes), 50, orderings=order, repeats=20)
        terms = posterior_divergences(model(x, holes), order)[0]
    order = torch.arange(N - 2).unsqueeze(0)
    expected = training_speed(model(x[there], y[there]), 50, orderings=order, repeats=20)
    assert result.expected.value == pytest.approx(expected.expected.value)
    assert result.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood)
    for name in ("lower", "multi_sample", "gaussian"):
        assert abs(apart(getattr(result, name), getattr(expected, name))) < 4
    assert terms[~there].tolist() == [0.0, 0.0]


def test_units_shift_all_values_alike():
    x, y = data()
    model = GPRegression(x, 30 * y + 4)
    training, result = (training_speed(model, 3, units=units) for units in ("training", "original"))
    for one, units in ((training, "training"), (result, "original")):
        lml = float(log_marginal_likelihood(model, units=units))
        assert one.log_marginal_likelihood == pytest.approx(lml)
    shift = N * float(model.target_scale.log())
    assert training.lower.value - result.lower.value == pytest.approx(shift)
    assert training.gap == pytest.approx(result.gap)
    assert training.gaussian.standard_error == pytest.approx(result.gaussian.standard_error)


def test_float32_is_near_float64_and_the_mode_stays(device):
    x, y = data()
    single = GPRegression(x.float(), y.float()).to(device).eval()
    double = GPRegression(x, y).to(device)
    results = [training_speed(model, 4, orderings=3) for model in (single, double)]
    for name in ("lower", "multi_sample", "gaussian", "expected"):
        first, second = (getattr(result, name) for result in results)
        assert first.value == pytest.approx(second.value, rel=1e-4)
        assert first.standard_error == pytest.approx(second.standard_error, rel=1e-3)
    assert not single.training
    curves = learning_curve(double, 1).sum(-1)
    assert results[1].log_marginal_likelihood == pytest.approx(float(curves))


def test_one_point_is_predicted_by_the_prior():
    x, y = data(1)
    model = GPRegression(x, y, "rbf", "zero", standardize=False)
    noise, variance = 0.5, model.covar_module.outputscale.item()
    model.likelihood.noise = noise
    result = training_speed(model, 2)
    expected = -0.5 * math.log(2 * math.pi * noise) - (float(y) ** 2 + variance) / (2 * noise)
    assert result.expected.value == pytest.approx(expected)


class _SharedNoise(torch.nn.Module):
    def forward(self, *params, shape=None, **kwargs):
        n = shape[-1]
        one = torch.eye(n, dtype=torch.float64)
        return DenseLinearOperator(one + torch.full((n, n), 0.1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_samples": 1}, ArgumentError, "num_samples: got 1, .* two draws"),
        ({"repeats": 0}, ArgumentError, "repeats: got 0"),
        ({"repeats": 1.5}, ArgumentError, "repeats: got 1.5, expected an integer"),
        ({"orderings": 0}, ArgumentError, "orderings: got 0"),
        ({"orderings": torch.arange(N)}, ShapeError, r"orderings: got \(12,\)"),
        ({"orderings": torch.arange(N - 1)[None]}, ArgumentError, "no permutations"),
        ({"orderings": torch.zeros(1, N, dtype=torch.long)}, ArgumentError, "no permutations"),
        ({"units": "metres"}, ArgumentError, "units"),
    ],
)
def test_bad_arguments_are_named(arguments, error, match):
    with pytest.raises(error, match=match):
        training_speed(gp(), **arguments)


def test_models_that_are_not_one_with_one_target_a_row_are_refused():
    x, y = data()
    batch = GPRegression(x.expand(2, N, 2), torch.stack([y, -y]))
    with pytest.raises(ArgumentError, match=r"model: got a batch of shape \(2,\), expected one"):
        training_speed(batch)
    from botorch.models import KroneckerMultiTaskGP

    multitask = KroneckerMultiTaskGP(x, torch.stack([y, -y], dim=-1))
    with pytest.raises(ArgumentError, match="model: got 2 targets for each row"):
        posterior_divergences(multitask)
    likelihood = gpytorch.likelihoods.gaussian_likelihood._GaussianLikelihoodBase(_SharedNoise())
    with pytest.raises(UnsupportedError, match="correlated noise, expected independent"):
        training_speed(gp(likelihood=likelihood, noise=None))
