"""The evidence lower bound of linear models: against its definition, the evidence, and memory."""

import math

import gpytorch
import pytest
import torch
from gpytorch.priors import GammaPrior

import reference
from gpclml.errors import (
    ArgumentError,
    ModelModeError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from gpclml.evaluation import log_marginal_likelihood
from gpclml.kernels import RandomFourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, LowRankFamily
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel

FAMILIES = {
    "diagonal": DiagonalFamily(), "rank-1": LowRankFamily(1, 0.01),
    "rank-3": LowRankFamily(3, 0.01), "full": FullFamily(),
}  # fmt: skip
SHAPES = [(12, 5), (5, 12)]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(n=12, R=5, noise=0.3, dtype=torch.float64, **options):
    x, y = drawn(n, R).to(dtype), drawn(n, seed=1).to(dtype)
    variance = 0.5 + torch.arange(R, dtype=dtype) / R
    options = {"prior_variance": variance, "noise": noise} | options
    return BayesianLinearModel(x, y, **options)


def bound(model, family=None, **options):
    return LinearEvidenceLowerBound(model.likelihood, model, family, **options)


def value_of(mll):
    model = mll.model
    return mll(model(*model.train_inputs), model.train_targets)


def defined_value(model, q, temperature=1.0):
    """The tempered bound from dense covariances alone, nats in all."""
    x, y = model.train_inputs[0], model.train_targets
    prior = torch.distributions.MultivariateNormal(
        torch.zeros_like(q.mean), torch.diag(model.prior_variance)
    )
    covariance = q.predictive_covariance(torch.eye(len(q.mean), dtype=q.mean.dtype))
    weights = torch.distributions.MultivariateNormal(q.mean, covariance)
    residual = y - model.mean_module(x)
    errors = (residual - x @ q.mean).square() + ((x @ covariance) * x).sum(-1)
    noise = model.noise
    likelihood = -0.5 * (errors / noise + (2 * math.pi * noise).log()).sum()
    return likelihood - temperature * torch.distributions.kl_divergence(weights, prior)


@pytest.mark.parametrize("temperature", [0.25, 4.0])
@pytest.mark.parametrize(("n", "R"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_value_is_its_definition(family, n, R, temperature):
    model = make(n, R)
    mll = bound(model, family, temperature=temperature)
    q = mll.weights_at(mll.data_at(model(*model.train_inputs), model.train_targets))
    expected = defined_value(model, q, temperature) / n
    assert value_of(mll).item() == pytest.approx(expected.item(), abs=1e-10)
    assert value_of(bound(model, family)) <= log_marginal_likelihood(model) / n + 1e-9
    untempered = mll.at_temperature(1.0, model(*model.train_inputs), model.train_targets)
    assert untempered.item() == pytest.approx(defined_value(model, q).item() / n, abs=1e-10)


@pytest.mark.parametrize(("n", "R"), SHAPES)
def test_the_full_family_has_the_evidence(n, R):
    model = make(n, R)
    x, y = model.train_inputs[0], model.train_targets
    K = x @ torch.diag(model.prior_variance) @ x.mT + model.noise * torch.eye(n).to(x)
    value, evidence = value_of(bound(model, FullFamily())), reference.log_density(K, y) / n
    assert value.item() == pytest.approx(evidence.item(), abs=1e-8)
    assert 20 * value.item() == pytest.approx(20 * log_marginal_likelihood(model).item() / n)
    gradients = (torch.autograd.grad(each, list(model.parameters())) for each in (value, evidence))
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("n", "R"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_gradient_at_the_best_q_is_that_of_the_best_bound(family, n, R):
    # q is held when the bound is differentiated; finite differences let it follow.
    model = make(n, R, prior_variance=0.8)
    mll = bound(model, family)
    value_of(mll).backward()
    for parameter in model.parameters():
        step = torch.full_like(parameter, 1e-5)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step)
            values.append(value_of(mll).item())
            with torch.no_grad():
                parameter.sub_(sign * step)
        slope = (values[0] - values[1]) / 2e-5
        assert parameter.grad.sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_missing_targets_are_left_out():
    x, y = drawn(9, 3), drawn(9, seed=1)
    missing = y.clone()
    missing[[2, 5]] = math.nan
    kept = ~missing.isnan()
    whole, observed = BayesianLinearModel(x, missing), BayesianLinearModel(x[kept], y[kept])
    with gpytorch.settings.observation_nan_policy("mask"):
        values = [value_of(bound(model)).item() for model in (whole, observed)]
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    with pytest.raises(NonFiniteError, match="observation_nan_policy"):
        value_of(bound(whole))


def test_priors_weigh_one_nth():
    model = make()
    mll = bound(model)
    before = value_of(mll).item()
    prior = GammaPrior(2.0, 3.0).double()
    model.likelihood.register_prior("noise_prior", prior, "noise")
    added = prior.log_prob(model.noise).sum().item() / 12
    assert value_of(mll).item() - before == pytest.approx(added, abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_float32_is_close_to_float64(family):
    values = []
    for dtype in (torch.float32, torch.float64):
        values.append(value_of(bound(make(dtype=dtype), family)))
        assert values[-1].dtype == dtype
    assert values[0].item() == pytest.approx(values[1].item(), abs=1e-4)


@pytest.mark.parametrize("family", [DiagonalFamily(), LowRankFamily(2)])
def test_many_features_need_no_matrix_of_their_number_squared(family):
    # 30,000 features squared are 7 GB in float64.
    x, y = drawn(30, 2), drawn(30, seed=1)
    model = BayesianLinearModel(x, y, RandomFourierFeatures(2, 30_000), noise=0.1)
    value = value_of(bound(model, family))
    value.backward()
    assert math.isfinite(value.item())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_bad_arguments():
    model = make()
    with pytest.raises(UnsupportedError, match="BayesianLinearModel"):
        LinearEvidenceLowerBound(model.likelihood, torch.nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match=r"model\.likelihood"):
        LinearEvidenceLowerBound(gpytorch.likelihoods.GaussianLikelihood(), model)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="temperature"):
            bound(model, temperature=temperature)
    with pytest.raises(ArgumentError, match=r"rank.*at most 5"):
        value_of(bound(model, LowRankFamily(6)))
    mll = bound(model)
    with pytest.raises(ShapeError, match="target"):
        mll(model(*model.train_inputs), torch.zeros(3, dtype=torch.float64))
    model.eval()
    with pytest.raises(ModelModeError):
        mll(model.forward(*model.train_inputs), model.train_targets)
