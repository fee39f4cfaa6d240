"""Training speed of exact GPs against refitted prefixes, and of training loops by plain sums."""

import math

import gpytorch
import pytest
import torch
from botorch.models import KroneckerMultiTaskGP
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from hypothesis import given
from hypothesis import strategies as st
from linear_operator.operators import DenseLinearOperator

import reference
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.evaluation import log_marginal_likelihood
from gpclml.evidence.training_speed import SumOfTrainingLosses, sampled_terms, training_speed
from gpclml.models import GPRegression

N = 12
PRIOR, NOISE = 0.7, 0.15
ESTIMATES = ("lower", "multi_sample", "gaussian")


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


def varied_gp():
    noise = torch.linspace(0.05, 0.6, N, dtype=torch.float64)
    return gp(likelihood=FixedNoiseGaussianLikelihood(noise), noise=None)


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


@pytest.mark.parametrize("make", [gp, linear_gp, varied_gp])
def test_the_bound_in_closed_form_is_that_of_refitted_prefixes(make):
    model = make()
    latent = model(*model.train_inputs)
    K, r = latent.covariance_matrix.detach(), (model.train_targets - latent.mean).detach()
    noise = model.likelihood.noise.detach().expand(N)
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


@pytest.mark.slow
def test_standard_errors_are_those_of_repeated_estimates():
    model, order = gp(), torch.arange(N).unsqueeze(0)
    results = [
        training_speed(model, 4, orderings=order, repeats=3, seed=seed) for seed in range(250)
    ]
    assert results[0] == training_speed(model, 4, orderings=order, repeats=3, seed=0)
    for name in ESTIMATES:
        estimates = [getattr(result, name) for result in results]
        spread = torch.tensor([estimate.value for estimate in estimates]).std()
        variance = torch.tensor([estimate.standard_error**2 for estimate in estimates]).mean()
        # Two variances from 250 values: five standard errors, more with heavy tails.
        assert float(spread**2 / variance) == pytest.approx(1, abs=0.45)


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
    order = torch.arange(N - 2).unsqueeze(0)
    expected = training_speed(model(x[there], y[there]), 50, orderings=order, repeats=20)
    assert result.expected.value == pytest.approx(expected.expected.value)
    assert result.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood)
    for name in ESTIMATES:
        assert abs(apart(getattr(result, name), getattr(expected, name))) < 4


def test_units_shift_all_values_alike():
    x, y = data()
    model = GPRegression(x, 30 * y + 4)
    shift = N * float(model.target_scale.log())
    training, original = (
        training_speed(model, 3, units=units) for units in ("training", "original")
    )
    assert original.log_marginal_likelihood == pytest.approx(float(log_marginal_likelihood(model)))
    for name in (*ESTIMATES, "expected"):
        first, second = getattr(training, name), getattr(original, name)
        assert first.value - second.value == pytest.approx(shift)
        assert first.standard_error == pytest.approx(second.standard_error)


def test_float32_is_near_float64_and_the_mode_stays(device):
    x, y = data()
    single = GPRegression(x.float(), y.float()).to(device).eval()
    double = GPRegression(x, y).to(device)
    results = [training_speed(model, 4, orderings=3) for model in (single, double)]
    for name in (*ESTIMATES, "expected"):
        first, second = (getattr(result, name) for result in results)
        assert first.value == pytest.approx(second.value, rel=1e-4)
        assert first.standard_error == pytest.approx(second.standard_error, rel=1e-3)
    assert not single.training


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_samples": 1}, ArgumentError, "num_samples: got 1, .* two draws"),
        ({"repeats": 0}, ArgumentError, "repeats: got 0"),
        ({"orderings": 0}, ArgumentError, "orderings: got 0"),
        ({"orderings": torch.arange(N)}, ShapeError, r"orderings: got \(12,\)"),
        ({"orderings": torch.zeros(1, N, dtype=torch.long)}, ArgumentError, "no permutations"),
        ({"units": "metres"}, ArgumentError, "units"),
    ],
)
def test_bad_arguments_are_named(arguments, error, match):
    with pytest.raises(error, match=match):
        training_speed(gp(), **arguments)


class SharedNoise(torch.nn.Module):
    def forward(self, *params, shape=None, **kwargs):
        identity = torch.eye(shape[-1], dtype=torch.float64)
        return DenseLinearOperator(identity + 0.1)


def test_models_that_are_not_one_with_one_target_a_row_are_refused():
    x, y = data()
    batch = GPRegression(x.expand(2, N, 2), torch.stack([y, -y]))
    with pytest.raises(ArgumentError, match=r"model: got a batch of shape \(2,\), expected one"):
        training_speed(batch)
    with pytest.raises(ArgumentError, match="model: got 2 targets for each row"):
        training_speed(KroneckerMultiTaskGP(x, torch.stack([y, -y], dim=-1)))
    likelihood = gpytorch.likelihoods.gaussian_likelihood._GaussianLikelihoodBase(SharedNoise())
    with pytest.raises(UnsupportedError, match="correlated noise, expected independent"):
        training_speed(gp(likelihood=likelihood, noise=None))


EPOCHS = st.lists(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 9)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@given(EPOCHS)
def test_sums_of_losses_are_plain_sums(epochs):
    speed = SumOfTrainingLosses()
    written = torch.zeros((), dtype=torch.float64)  # a loop may use the memory of a loss again
    for number, batches in enumerate(epochs):
        for loss, points in batches:
            speed.update(written.fill_(loss) if number % 2 else loss, points)
        speed.end_epoch()
    batches = [batch for epoch in epochs for batch in epoch]
    close = {"rel": 1e-12, "abs": 1e-9}
    assert speed.sum() == pytest.approx(sum(loss for loss, _ in batches), **close)
    assert speed.total() == pytest.approx(sum(loss * b for loss, b in batches), **close)
    means = [sum(loss * b for loss, b in epoch) / sum(b for _, b in epoch) for epoch in epochs]
    assert speed.epoch_means() == pytest.approx(means, **close)


def test_bad_losses_are_named(device):
    speed = SumOfTrainingLosses()
    with pytest.raises(ArgumentError, match="epoch: got no batches"):
        speed.end_epoch()
    with pytest.raises(ShapeError, match=r"loss: got \(3,\), expected one number.*loss.mean"):
        speed.update(torch.ones(3), 3)
    with pytest.raises(ArgumentError, match="num_points: got 0"):
        speed.update(1.0, 0)
    speed.update(torch.tensor(1.0, device=device), 2)
    speed.end_epoch()
    for loss in (2.0, math.nan, 3.0):
        speed.update(torch.tensor(loss, device=device, requires_grad=True), 2)
    for ask in (speed.sum, speed.total, speed.end_epoch, speed.epoch_means):  # every one raises
        with pytest.raises(NonFiniteError, match=r"loss: got nan at step 3 \(epoch 2\)"):
            ask()
