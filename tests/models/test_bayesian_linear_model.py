"""Bayesian linear models against dense GPs and GPyTorch's posterior."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll

import reference
from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evaluation import (
    learning_curve,
    log_marginal_likelihood,
)
from gpclml.fit import fit_mll
from gpclml.inference import evaluating, exact_posterior
from gpclml.kernels import PolynomialFeatures, RandomFourierFeatures
from gpclml.linalg.gaussians import DualGaussian, FullFamily, FullGaussian
from gpclml.mlls import ConditionalMarginalLogLikelihood, LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


X, Y, NEW = numbers(15, 2), numbers(15, seed=1), numbers(6, 2, seed=2)
DEGREES = [1, 6]  # three features, and 28: fewer and more than points


def make(degree: int = 1, own_variances: bool = True, mean=None, y=Y, **options):
    features = PolynomialFeatures(degree)
    count = features(X[:1]).shape[-1]
    variance = 0.2 + torch.rand(count, generator=torch.Generator().manual_seed(3))
    return BayesianLinearModel(
        X, y, features, prior_variance=variance.double() if own_variances else 0.6,
        noise=0.05, mean=mean, **options,
    )  # fmt: skip


def constant_mean(value: float = 0.7):
    mean = gpytorch.means.ConstantMean()
    mean.constant.data.fill_(value)
    return mean


# --- The same model by other roads ---


@pytest.mark.parametrize(
    ("own_variances", "mean", "noise"), [(False, None, True), (True, 0.7, False)]
)
@pytest.mark.parametrize("degree", DEGREES)
def test_predictions_are_those_of_the_gp(degree, own_variances, mean, noise):
    model = make(degree, own_variances, None if mean is None else constant_mean(mean))
    joint = model.predict(NEW, observation_noise=noise)
    marginal = model.predict(NEW, observation_noise=noise, marginal=True)
    torch.testing.assert_close(joint.mean, marginal.mean)
    torch.testing.assert_close(joint.covariance_matrix.diagonal(), marginal.variance)
    extra = model.noise.item() * noise * torch.eye(6)
    with evaluating(model):
        exact = exact_posterior(model, NEW, marginal=False)
        for other in (exact, model(NEW)):
            torch.testing.assert_close(joint.mean, other.mean, rtol=1e-7, atol=1e-8)
            torch.testing.assert_close(
                joint.covariance_matrix, other.covariance_matrix + extra, rtol=1e-6, atol=1e-8
            )
    assert model.training


@pytest.mark.parametrize("degree", DEGREES)
def test_weight_posterior_is_that_of_the_textbook(degree):
    model = make(degree, mean=constant_mean())
    posterior, phi = model.weight_posterior(), model.features(X)
    assert isinstance(posterior, FullGaussian if degree == 1 else DualGaussian)
    precision = phi.mT @ phi / model.noise + torch.diag(1 / model.prior_variance)
    mean = torch.linalg.solve(precision, phi.mT @ (Y - model.mean_module(X)) / model.noise)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-8, atol=1e-9)
    variance = torch.linalg.inv(precision).diagonal()
    torch.testing.assert_close(posterior.variance(), variance, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("degree", DEGREES)
def test_missing_targets_are_points_not_seen(degree):
    y = Y.clone()
    y[[3, 9, 14]] = torch.nan
    seen = ~torch.isnan(y)
    model = make(degree, y=y)
    features = PolynomialFeatures(degree)
    less = BayesianLinearModel(
        X[seen], Y[seen], features, prior_variance=model.prior_variance.detach(), noise=0.05
    )
    torch.testing.assert_close(model.weight_posterior().mean, less.weight_posterior().mean)
    ours, other = model.predict(NEW), less.predict(NEW)
    torch.testing.assert_close(ours.mean, other.mean)
    torch.testing.assert_close(ours.covariance_matrix, other.covariance_matrix)


@pytest.mark.parametrize("degree", DEGREES)
def test_gradients_of_the_evidence_are_those_of_brute_force(degree):
    model = make(degree, mean=constant_mean())
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    parameters = list(model.parameters())
    assert len(parameters) == 3
    value = 15 * mll(model(X), Y)
    phi = model.features(X)
    K = phi @ torch.diag(model.prior_variance) @ phi.mT + model.noise * torch.eye(15)
    expected = reference.log_density(K, Y - model.mean_module(X))
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        reference.gradients(value, *parameters),
        reference.gradients(expected, *parameters),
        rtol=1e-7,
        atol=1e-8,
    )


# --- Training ---


def wide_data():
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(-1)
    y = 2.0 * numbers(1, seed=4) + 1.5 * x.squeeze(-1) - x.squeeze(-1) ** 3
    return x, y + 0.1 * numbers(40, seed=5)


OBJECTIVES = {
    "lml": lambda likelihood, model: ConditionalMarginalLogLikelihood(
        likelihood, model, LastPoints(0)
    ),
    "clml": ConditionalMarginalLogLikelihood,
    "elbo": lambda likelihood, model: LinearEvidenceLowerBound(likelihood, model, FullFamily()),
}


@pytest.mark.parametrize(
    ("road", "objective"),
    [("botorch", OBJECTIVES["clml"]), ("lbfgs", OBJECTIVES["lml"]), ("adam", OBJECTIVES["elbo"])],
)
def test_training_finds_prior_variance_and_noise(objective, road):
    x, y = wide_data()
    model = BayesianLinearModel(x, y, PolynomialFeatures(3))
    before = log_marginal_likelihood(model).item()
    mll = objective(model.likelihood, model)
    if road == "botorch":
        fit_gpytorch_mll(mll)
    else:
        fit_mll(mll, road, steps=150 if road == "adam" else None, lr=0.1, progress=False)
    assert log_marginal_likelihood(model).item() > before + 20
    assert model.noise.sqrt().item() == pytest.approx(0.1, rel=0.35)
    assert model.prior_variance[0].item() > 0.1


# --- Copies, types, devices ---


def test_float32_is_close_to_float64():
    x, y = numbers(60, 2), numbers(60, seed=1)
    results = []
    for dtype in (torch.float64, torch.float32):
        features = RandomFourierFeatures(2, 30, seed=2)
        model = BayesianLinearModel(x.to(dtype), y.to(dtype), features, noise=0.05)
        assert all(p.dtype == dtype for p in model.parameters())
        predicted = model.predict(NEW.to(dtype))
        mll = LinearEvidenceLowerBound(model.likelihood, model, FullFamily())
        answers = (
            predicted.mean,
            predicted.covariance_matrix,
            log_marginal_likelihood(model),
            learning_curve(model, 2),
            model.weight_posterior().sample(2),
            mll(model(x.to(dtype)), y.to(dtype)),
        )
        assert all(answer.dtype == dtype for answer in answers)
        results.append([answer.detach().double() for answer in answers])
    for double, single in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=2e-3, atol=2e-3)


def test_inputs_of_one_column_and_default_features():
    model = BayesianLinearModel(X[:, 0], Y)
    assert model.num_features == 1
    assert model.prior_variance.tolist() == pytest.approx([1.0])
    assert model.noise.item() == pytest.approx(1.0)
    torch.testing.assert_close(model.features(X[:, 0]), X[:, :1])
    torch.testing.assert_close(model.predict(NEW[:, 0]).mean, model.predict(NEW[:, :1]).mean)


def test_bad_arguments():
    for build, error, match in (
        (lambda: BayesianLinearModel(X, Y[:5]), ShapeError, r"train_y: got \(5,\)"),
        (
            lambda: BayesianLinearModel(X.expand(2, 15, 2), Y.expand(2, 15)),
            ArgumentError,
            "train_x",
        ),
        (lambda: BayesianLinearModel(X * torch.nan, Y), NonFiniteError, "train_x"),
        (lambda: BayesianLinearModel(X, Y / 0), NonFiniteError, "train_y"),
        (lambda: BayesianLinearModel(X, Y * torch.nan), ArgumentError, "observed"),
        (lambda: BayesianLinearModel(X, Y, noise=0.0), ArgumentError, r"noise: got 0\.0"),
        (lambda: BayesianLinearModel(X, Y, noise=math.nan), ArgumentError, "noise: got nan"),
        (lambda: BayesianLinearModel(X, Y, prior_variance=-1.0), ArgumentError, "and finite"),
        (
            lambda: BayesianLinearModel(X, Y, prior_variance=torch.ones(3)),
            ShapeError,
            "prior_variance: got 3 numbers, expected one number, or 2",
        ),
        (lambda: BayesianLinearModel(X, Y, lambda x: x[:, 0]), ShapeError, "features: got"),
        (lambda: make().predict(NEW[:, :1]), ShapeError, "x: got"),
        (lambda: make().predict(NEW * torch.nan), NonFiniteError, "x: got"),
        (lambda: make().features(NEW.float()), ArgumentError, "x: got"),
    ):
        with pytest.raises(error, match=match):
            build()


def test_an_empty_module_of_features_is_no_default():
    """A ``Sequential`` without layers is false in Python, and is the identity."""
    x, y = torch.ones(5, 2, dtype=torch.float64), torch.arange(5, dtype=torch.float64)
    features = torch.nn.Sequential()
    model = BayesianLinearModel(x, y, features)
    assert any(module is features for module in model.modules())
