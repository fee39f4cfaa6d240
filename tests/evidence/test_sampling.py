"""Draws of weights and densities averaged over them, against linear models in closed form."""

import functools
import math

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, SoftmaxLikelihood

import reference
from gpclml.curvature import Diagonal, Full, FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.evidence.sampling import (
    estimate_conditional_log_density,
    joint_log_density,
    laplace_conditional_log_density,
    linearized_outputs,
    log_mean,
    marginal_log_densities,
    rescaled,
    sample_sgld,
    sampled_outputs,
)
from gpclml.fit import fit_map
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from linear_evidence import LinearEvidence, drawn

N, NOISE, DELTA = 60, 0.3, 2.0
SEEN, SCALING, HELD_OUT = slice(30), slice(30, 54), slice(54, N)


def gaussian(noise=NOISE):
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    return likelihood


def objective(network, likelihood, num_data, structure=None):
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", DELTA))
    return LaplaceMarginalLogLikelihood(likelihood, model, num_data, structure or Full())


def weights_given(x, y):
    """Mean and covariance of the weights of a linear model."""
    covariance = torch.linalg.inv(x.mT @ x / NOISE + DELTA * torch.eye(x.shape[-1]).to(x))
    return covariance @ x.mT @ y / NOISE, covariance


def data(columns=3):
    """Inputs, the last of which is correlated with the first if there are two, and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, columns, generator=generator, dtype=torch.float64)
    if columns == 2:
        x[:, 1] += x[:, 0]
    y = x @ torch.tensor([1.0, -0.5, 0.2]).double()[:columns]
    y = y + NOISE**0.5 * torch.randn(N, generator=generator, dtype=torch.float64)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    return x[order], y[order]


def linear():
    """The objective of a linear model at the mode given the points seen, where it is exact."""
    x, y = data()
    network = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(weights_given(x[SEEN], y[SEEN])[0])
    return objective(network, gaussian(), 30)


def draws_of(mll, widened=1.0, count=20_000):
    """Draws of the weights' posterior, their covariance multiplied, and its center."""
    x, y = data()
    weights = mll.evidence_of(x[SEEN], y[SEEN]).sample_weights(count)
    center = {"weight": mll.model.network.weight.detach()}
    return rescaled(weights, widened, center), center


def exact_conditional(rows):
    """The log density of held-out rows given those seen."""
    x, y = data()
    K = x @ x.mT / DELTA + NOISE * torch.eye(N)
    used = torch.cat([torch.arange(30), rows])
    held_out = torch.arange(30, len(used))
    return float(reference.conditional_log_density(K[used][:, used], y[used], held_out))


@pytest.mark.parametrize("case", [(5, 2, 1.0), (30, 2, 4.0)])
def test_the_log_mean_likelihood_over_draws_of_the_prior_is_the_evidence(case):
    model = LinearEvidence(*case)
    estimate = log_mean(model.log_likelihood(model.prior_draws(50_000)))
    assert 0 < estimate.standard_error < 0.1
    assert abs(estimate.value - model.exact) < 4 * estimate.standard_error
    assert 10 < estimate.effective_draws < 50_000


def test_the_reported_error_is_that_of_repeated_estimates():
    model = LinearEvidence(5, 2, 2.0)
    estimates = [log_mean(model.log_likelihood(drawn(500, 2, seed=100 + i))) for i in range(200)]
    spread = torch.tensor([estimate.value for estimate in estimates]).std()
    reported = torch.tensor([estimate.standard_error for estimate in estimates]).mean()
    assert 0.75 < float(reported / spread) < 1.25


def test_a_log_mean_by_hand():
    mean = log_mean(torch.tensor([1.0, 2.0, 3.0]).log())
    assert mean.value == pytest.approx(math.log(2.0))
    assert mean.standard_error == pytest.approx(1.0 / 3**0.5 / 2.0)
    assert mean.effective_draws == pytest.approx(36 / 14)
    shifted = log_mean(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log() - 2000)
    assert shifted.value == pytest.approx(math.log(2.0) - 2000)
    assert shifted.standard_error == pytest.approx(mean.standard_error)
    half = log_mean(torch.tensor([0.0, -math.inf]).repeat(5))  # of no density at every other draw
    assert (half.value, half.effective_draws) == pytest.approx((math.log(0.5), 5))


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ([], ShapeError, r"log_values: got \(0,\)"),
        ([0.0, math.nan], NonFiniteError, "log_values: got a log mean of nan"),
        ([-math.inf] * 2, NonFiniteError, "log_values: got a log mean of -inf"),
    ],
)
def test_logs_without_a_mean(values, error, match):
    with pytest.raises(error, match=match):
        log_mean(torch.tensor(values))


def estimator(mll):
    """The estimate of a linear model, which takes draws, held-out points, and options."""
    outputs_of = functools.partial(linearized_outputs, mll.model.network)
    return functools.partial(estimate_conditional_log_density, mll.likelihood, outputs_of)


@pytest.mark.slow
def test_the_conditional_evidence_of_a_linear_model():
    mll = linear()
    weights, _ = draws_of(mll)
    x, y = (values[HELD_OUT] for values in data())
    outputs = sampled_outputs(mll.model.network, weights, x)
    torch.testing.assert_close(outputs, linearized_outputs(mll.model.network, weights, x))
    exact = exact_conditional(torch.arange(54, N))
    estimate = estimator(mll)(weights, (x, y))
    assert (estimate.scale, estimate.num_held_out) == (1.0, 6)
    joint = joint_log_density(mll.likelihood, outputs, y)
    assert estimate.joint.value == pytest.approx(joint.value)
    assert 0 < estimate.joint.standard_error < 0.05
    assert abs(estimate.joint.value - exact) < 4 * estimate.joint.standard_error
    marginal = marginal_log_densities(mll.likelihood, outputs, y)
    alone = [exact_conditional(torch.tensor([54 + i])) for i in range(6)]
    assert marginal.tolist() == pytest.approx(alone, abs=0.05)
    assert estimate.marginal == pytest.approx(float(marginal.mean()))


def test_draws_that_are_too_wide_are_narrowed():
    mll = linear()
    weights, center = draws_of(mll, widened=100.0)
    few = {name: draws[:50] for name, draws in weights.items()}
    x, y = data()
    scaling, held_out = ((x[rows], y[rows]) for rows in (SCALING, HELD_OUT))
    estimate = estimator(mll)
    with pytest.warns(UserWarning, match=r"of 50 draws have nearly all the weight"):
        estimate(few, held_out)
    wide = estimate(weights, held_out)
    mended = estimate(weights, held_out, scaling=scaling, center=center)
    assert mended.scale in (1e-3, 1e-2, 3e-2)
    assert mended.joint.value > wide.joint.value + 1
    assert mended.joint.value == pytest.approx(exact_conditional(torch.arange(54, N)), abs=0.7)
    for scales in ((), (0.0, 1.0), (1.0, math.nan), (math.inf,)):
        with pytest.raises(ArgumentError, match="scales"):
            estimate(few, held_out, scaling=scaling, scales=scales)


def test_rescaled_draws():
    weights = {"a": drawn(50, 3, 2)}
    scaled = rescaled(weights, 0.25)["a"]
    torch.testing.assert_close(scaled.mean(0), weights["a"].mean(0))
    torch.testing.assert_close(scaled.var(0), 0.25 * weights["a"].var(0))
    center = {"a": torch.ones(3, 2).double()}
    torch.testing.assert_close(rescaled(weights, 4.0, center)["a"], 2 * weights["a"] - 1)
    integers = {"a": torch.ones(3, 2).long()}
    for draws, scale, middle, error, match in (
        (weights, -1.0, None, ArgumentError, "scale"),
        (weights, 1.0, {"b": weights["a"][0]}, ArgumentError, "center: got b, expected a"),
        (weights, 1.0, {"a": drawn(2)}, ShapeError, r"center\['a'\]: got \(2,\)"),
        (integers, 1.0, None, ShapeError, r"weights\['a'\]: got torch.int64"),
    ):
        with pytest.raises(error, match=match):
            rescaled(draws, scale, middle)


def test_joint_and_marginal_densities_differ():
    """Two draws, each sure of one of two contrary answers to both questions."""
    likelihood = SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    sure = math.log(0.9 / 0.1)
    outputs = torch.tensor([[[sure, 0.0], [sure, 0.0]], [[0.0, sure], [0.0, sure]]])
    target = torch.tensor([0, 1])
    joint = joint_log_density(likelihood, outputs, target)
    marginal = marginal_log_densities(likelihood, outputs, target)
    assert math.exp(joint.value) == pytest.approx(0.09)
    assert math.exp(float(marginal.sum())) == pytest.approx(0.25)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_scale_of_the_best_accuracy(classes):
    x, truth = drawn(200, 3), drawn(3, classes - (classes == 2), seed=1)
    y = (x @ truth)[:, 0].gt(0).long() if classes == 2 else (x @ truth).argmax(-1)
    likelihood = SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
    likelihood = BernoulliLikelihood() if classes == 2 else likelihood
    weights, center = {"w": truth + 10 * drawn(40, *truth.shape, seed=2)}, {"w": truth}

    def estimate(likelihood, scales, scale_by):
        return estimate_conditional_log_density(
            likelihood, lambda weights, x: x @ weights["w"], weights, (x[150:], y[150:]),
            scaling=(x[:150], y[:150]), center=center, scales=scales, scale_by=scale_by,
        )  # fmt: skip

    result = estimate(likelihood, (1e-10, 1e-9, 1e-8, 3.0), "accuracy")
    # All are right at the mode and nearby, and some wrong far from it: the largest of equal ones.
    assert result.scale == 1e-8
    assert not result.scale_at_edge
    assert estimate(likelihood, (1e-9, 1e-8, 10.0), "density").scale < 1
    with pytest.raises(UnsupportedError, match="regression"):
        estimate(GaussianLikelihood(), (1.0,), "accuracy")


def in_one_layer(likelihood, outputs, structure):
    """The evidence of a trained linear network, its points and further ones."""
    x, y = drawn(40, 3, seed=2), drawn(40, seed=3)
    labels = (x @ drawn(3, max(outputs, 2), seed=4)).argmax(-1)
    y = x[:, 0] + 0.5 * y if isinstance(likelihood, GaussianLikelihood) else labels
    network = torch.nn.Linear(3, outputs, bias=False).double()
    mll = objective(network, likelihood, 25, structure)
    fit_map(mll, x[:25], y[:25], epochs=500, lr=0.1, final_lr=1e-4, progress=False)
    return mll.evidence_of(x[:25], y[:25]), x[:25], (x[25:], y[25:])


@pytest.mark.slow
@pytest.mark.parametrize("structure", [Full(), Kronecker(), Diagonal()])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_laplace_without_draws_of_a_regression(structure, scale):
    evidence, seen, (x, y) = in_one_layer(gaussian(), 1, structure)
    mean = evidence.mll.model.network(x)[:, 0].detach()
    value = laplace_conditional_log_density(evidence, (x, y), scale=scale)
    H, eye = seen.mT @ seen / NOISE, torch.eye(3, dtype=torch.float64)
    if isinstance(structure, Full) or (isinstance(structure, Kronecker) and scale == 1):  # exact
        covariance = scale * x @ torch.linalg.inv(H + DELTA * eye) @ x.mT
        normal = torch.distributions.MultivariateNormal(mean, covariance + NOISE * torch.eye(15))
        assert value == pytest.approx(float(normal.log_prob(y)), abs=1e-5)
    elif isinstance(structure, Diagonal):
        both = (H + scale * x.mT @ x / NOISE).diagonal() + DELTA
        ratio = (both / (H.diagonal() + DELTA)).log().sum()
        density = torch.distributions.Normal(mean, NOISE**0.5).log_prob(y).sum()
        assert value >= float(density - 0.5 * ratio)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_laplace_without_draws_of_classes(classes):
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    likelihood = BernoulliLikelihood() if classes == 2 else likelihood
    evidence, _, held_out = in_one_layer(likelihood, classes - (classes == 2), Full())
    weights = evidence.sample_weights(20_000)
    estimate = estimator(evidence.mll)(weights, held_out)
    assert estimate.joint.standard_error < 0.05
    value = laplace_conditional_log_density(evidence, held_out)
    assert value == pytest.approx(estimate.joint.value, abs=0.3)
    if classes == 2:
        return
    (x, y), whole = held_out, evidence
    evidence_of_others = evidence.mll.evidence_of(x, y)
    for evidence, points, options, error, match in (
        (whole, held_out, {"scale": 0.0}, ArgumentError, "scale"),
        (whole, (x.abs().to(torch.uint8), y), {}, ShapeError, "uint8"),
        (whole, (x, y[1:]), {}, ShapeError, "target"),
        (evidence_of_others, held_out, {}, UnsupportedError, "all points"),
    ):
        with pytest.raises(error, match=match):
            laplace_conditional_log_density(evidence, points, **options)


def test_draws_and_densities_that_are_refused():
    mll = linear()
    network, likelihood = mll.model.network, gaussian()
    seen, first = ([values[rows] for values in data()] for rows in (SEEN, slice(4)))
    kernel = objective(network, likelihood, 30, FunctionSpace())
    for call, error, match in (
        (lambda: mll.evidence_of(*seen).sample_weights(0), ArgumentError, "count"),
        (lambda: mll.evidence_of(*first).sample_weights(1), UnsupportedError, "at 4 of 30 points"),
        (lambda: kernel.evidence_of(*seen).sample_weights(1), UnsupportedError, "Use Full"),
        (lambda: joint_log_density(likelihood, drawn(3, 4), drawn(3)), ShapeError, "outputs"),
        (lambda: joint_log_density(likelihood, drawn(2, 3, 1), drawn(4)), ShapeError, "N = 3 as"),
        (lambda: sampled_outputs(network, {"weight": drawn(2, 3)}, seen[0]), ShapeError, "weights"),
        (lambda: sampled_outputs(network, {"w": drawn(2, 3)}, seen[0]), ShapeError, "of weight"),
    ):
        with pytest.raises(error, match=match):
            call()


def sgld_draws(**options):
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 1, bias=False).double()
    mll = objective(network, gaussian(), N)
    return sample_sgld(mll, *data(2), progress=False, **options)["weight"].squeeze(1)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 30])
def test_langevin_draws_follow_the_posterior_of_a_linear_model(batch_size):
    mean, covariance = weights_given(*data(2))
    if batch_size:
        draws = sgld_draws(count=4400, epochs=4000, batch_size=batch_size, lr=0.04)[400:]
    else:
        draws = sgld_draws(count=1700, epochs=3000, lr=0.1)[150:]
    # Steps fall to zero, so that draws at the end are alike: about 200 are independent.
    scale = covariance.diagonal().sqrt()
    assert bool(((draws.mean(0) - mean).abs() < 0.4 * scale).all())
    # A mini-batch of half the points adds the noise of its gradient to that of the step.
    limits = (0.65, 2.5) if batch_size else (0.65, 1.4)
    spread = draws.var(0) / covariance.diagonal()
    assert bool(((spread > limits[0]) & (spread < limits[1])).all())
    together = float(torch.corrcoef(draws.mT)[0, 1])
    assert together == pytest.approx(float(covariance[0, 1] / scale.prod()), abs=0.25)


def test_a_seed_fixes_the_draws():
    options = {"count": 6, "epochs": 10, "lr": 0.01}
    first = sgld_draws(**options)
    assert first.shape == (6, 2)
    assert torch.equal(first, sgld_draws(**options))
    assert not torch.equal(first, sgld_draws(seed=1, **options))
    assert len(first.unique(dim=0)) == 6


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"count": 0}, ArgumentError, "count"),
        ({"epochs": 0}, ArgumentError, "epochs"),
        ({"batch_size": 0}, ArgumentError, "batch_size"),
        ({"lr": 0.0}, ArgumentError, "lr"),
        ({"count": 21}, ArgumentError, "at most 20, one a step"),
        ({"lr": 1e200}, NonFiniteError, "Lower lr"),
    ],
)
def test_langevin_draws_that_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        sgld_draws(**options)
