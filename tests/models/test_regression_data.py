import warnings

import gpytorch
import pytest
import torch

from gpclml.conditioning import LastPoints
from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.fit import warm_start
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression
from regression_cases import lml


@pytest.mark.parametrize("kernel", ["rbf", "spectral_mixture", "deep"])
def test_units_do_not_matter(kernel, train, new_x):
    x, y = train
    factor, shift = torch.logspace(-2, 3, 10, dtype=x.dtype), torch.arange(10.0)
    # Without a warm start, whose optimum is found to a line search's tolerance only.
    first = GPRegression(x, y, kernel=kernel, warm_start=False)
    second = GPRegression(x * factor + shift, 7 * y - 300, kernel=kernel, warm_start=False)
    torch.testing.assert_close(lml(first), lml(second))
    one, two = first.predict(new_x), second.predict(new_x * factor + shift)
    torch.testing.assert_close(two.mean, 7 * one.mean - 300, rtol=1e-3, atol=0.1)
    torch.testing.assert_close(two.covariance_matrix, 49 * one.covariance_matrix, rtol=1e-3, atol=1)
    torch.testing.assert_close(second.target_scale, 7 * first.target_scale)


def test_target_scale_turns_densities_into_original_units(train):
    x, y = train
    model = GPRegression(x, y)
    density = lml(model) * 60 - 60 * model.target_scale.log()
    prior = model.likelihood(model(x))
    covariance = prior.covariance_matrix * y.var()
    original = torch.distributions.MultivariateNormal(y.mean() + 0 * y, covariance).log_prob(y)
    torch.testing.assert_close(density, original)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_objective_refuses_targets_in_original_units(train, dtype):
    x, y = (part.to(dtype) for part in train)
    model = GPRegression(x, y, kernel="rbf")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    for original in (y, y.clone(), y.unsqueeze(-1).squeeze(-1)):
        with pytest.raises(ArgumentError, match=r"Pass model\.train_targets"):
            mll(model(x), original)
    value = mll(model(x), model.train_targets)
    assert torch.equal(mll(model(x), model.train_targets.clone()), value)
    other = model.train_targets + 0.1 * torch.randn_like(y)  # as in a bootstrap of the noise
    assert not torch.equal(mll(model(x), other), value)
    with pytest.raises(UnsupportedError, match="swapped"):
        mll(model.train_targets, model(x))  # type: ignore[arg-type]
    mll.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
        posterior = model(x)
    with pytest.raises(ArgumentError, match=r"Pass model\.train_targets"):
        mll(posterior, y)
    mll.train()
    missing = y.clone()
    missing[3] = torch.nan
    model = GPRegression(x, missing, kernel="rbf")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
    with gpytorch.settings.observation_nan_policy("mask"):
        with pytest.raises(ArgumentError, match="original units"):
            mll(model(x), missing)
        mll(model(x), model.train_targets)


def test_targets_that_are_standardized_already_are_taken(train):
    x, y = train
    y = (y - y.mean()) / y.std()
    for model, target in [
        (GPRegression(x, y), y),
        (GPRegression(x, 5 * y, standardize=False), 5 * y),
    ]:
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        torch.testing.assert_close(
            mll(model(x), target), mll(model(x), model.train_targets), rtol=1e-9, atol=1e-12
        )


def test_where_reads_wait_targets_are_compared_until_some_have_passed(train, monkeypatch):
    x, y = train
    model = GPRegression(x, y)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    monkeypatch.setattr("gpclml.models.regression.reads_are_free", lambda device: False)
    compared = []
    before = torch.allclose
    monkeypatch.setattr(torch, "allclose", lambda *a, **k: compared.append(a) or before(*a, **k))
    with pytest.raises(ArgumentError, match="original units"):
        mll(model(x), y)
    compared.clear()
    mll(model(x), model.train_targets)
    assert not compared
    for _ in range(3):
        mll(model(x), model.train_targets.clone())
    assert len(compared) == 1


def test_missing_targets(train, new_x):
    x, y = train
    missing = y.clone()
    missing[::6] = torch.nan
    observed = ~missing.isnan()
    model = GPRegression(x, missing, kernel="deep")
    warm_start(model)
    reference = GPRegression(x[observed], y[observed], kernel="deep")
    reference.load_state_dict(model.state_dict())
    for marginal in (False, True):
        ours = model.predict(new_x, marginal=marginal)
        theirs = reference.predict(new_x, marginal=marginal)
        torch.testing.assert_close(ours.mean, theirs.mean)
        torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix)
    with gpytorch.settings.observation_nan_policy("mask"):
        value = lml(model)
    torch.testing.assert_close(value * 60, lml(reference) * 50)
    cold = GPRegression(x[observed], y[observed], kernel="deep", warm_start=False)
    assert lml(reference) > lml(cold)


X, Y = torch.zeros(5, 2) + torch.arange(5.0).unsqueeze(-1), torch.arange(5.0)


@pytest.mark.parametrize(
    ("x", "y", "options", "error", "match"),
    [
        (X, Y[:4], {}, ShapeError, "train_y"),
        (X, Y.unsqueeze(-1), {}, ShapeError, "squeeze"),
        (X[:0], Y[:0], {}, ShapeError, "train_x"),
        (X[:, :0], Y, {}, ShapeError, "train_x"),
        (torch.tensor(1.0), Y, {}, ShapeError, "train_x"),
        (X.half(), Y, {}, ArgumentError, r"train_x.double\(\)"),
        (X, Y.half(), {}, ArgumentError, r"train_y.double\(\)"),
        (X, Y.double(), {}, ArgumentError, "as train_x"),
        (X.tolist(), Y, {}, ArgumentError, "as_tensor"),
        (X / 0, Y, {}, NonFiniteError, "train_x"),
        (X, Y / 0, {}, NonFiniteError, "NaN"),
        (X, Y * torch.nan, {}, ArgumentError, "observed"),
        (X, Y, {"kernel": "rbff"}, UnknownNameError, "'rbf'"),
        (X, Y, {"mean": "constnat"}, UnknownNameError, "'constant'"),
        (X, Y, {"kernel": 3}, ArgumentError, "kernel"),
        (X, Y, {"mean": None}, ArgumentError, "mean"),
        (
            X,
            Y,
            {"likelihood": gpytorch.likelihoods.BernoulliLikelihood()},
            ArgumentError,
            "Gaussian",
        ),
    ],
)
def test_bad_input(x, y, options, error, match):
    with pytest.raises(error, match=match):
        GPRegression(x, y, **options)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (X[:, :1], ShapeError),
        (Y, ShapeError),
        (X[:0], ShapeError),
        (X.double(), ArgumentError),
        (X / 0, NonFiniteError),
        ([[1.0, 2.0]], ArgumentError),
    ],
)
def test_bad_points(x, error):
    with pytest.raises(error, match="x: got"):
        GPRegression(X, Y).predict(x)
    batch = GPRegression(torch.randn(2, 5, 2), torch.randn(2, 5))
    with pytest.raises(ShapeError, match="broadcasts"):
        batch.predict(torch.randn(3, 5, 2))
