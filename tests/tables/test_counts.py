"""Counts: the average of their models, the estimator of scikit-learn on request, bad input."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import nbinom
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gpclml import LaplaceMarginalLogLikelihood, Regressor, fit_mll
from gpclml.errors import ArgumentError
from gpclml.likelihoods import LogNegativeBinomialLikelihood, TargetMixture, TargetPrediction
from gpclml.models import GPCounts
from gpclml.tables.averages import AVERAGED, class_kernel

FAST = ("linear", "rbf")


def arrays(n=40, seed=0):
    draws = np.random.default_rng(seed)
    x = draws.uniform(0, 3, (n, 2))
    return x, draws.poisson(np.exp(np.sin(2 * x[:, 0]) + 0.5 * x[:, 1]))


def frame(n=60, seed=0):
    draws = np.random.default_rng(seed)
    table = pd.DataFrame({"size": draws.uniform(0, 3, n), "kind": draws.choice(["a", "b", "c"], n)})
    shift = table["kind"].map({"a": -1.0, "b": 1.0, "c": 0.0}).to_numpy(float)
    return table, draws.poisson(np.exp(shift + 0.5 * table["size"].to_numpy()))


def mixture():
    """Two negative binomials whose latent values are all but known, and their laws."""
    members, laws = [], []
    for size, logs in ((2.0, [0.0, 1.0, 3.0]), (5.0, [1.0, 1.0, 4.0])):
        likelihood = LogNegativeBinomialLikelihood().double()
        likelihood.size = size
        mean = torch.tensor(logs).double()
        members.append(TargetPrediction(likelihood, mean, 1e-12 + 0 * mean))
        laws.append(nbinom(size, size / (size + np.exp(logs))))
    return TargetMixture(members), laws


def test_a_mixture_is_the_average_of_its_members():
    prediction, laws = mixture()
    y = np.array([0.0, 2.0, 30.0])

    def average(value):
        return np.mean([value(law) for law in laws], axis=0)

    mean = average(lambda law: law.mean())
    np.testing.assert_allclose(prediction.mean, mean)
    variance = average(lambda law: law.var() + law.mean() ** 2) - mean**2
    np.testing.assert_allclose(prediction.variance, variance)
    np.testing.assert_allclose(prediction.std, variance**0.5)
    np.testing.assert_allclose(prediction.log_prob(y), np.log(average(lambda law: law.pmf(y))))
    np.testing.assert_allclose(prediction.cdf(y), average(lambda law: law.cdf(y)))
    levels = [0.05, 0.5, 0.95]
    quantiles = prediction.quantile(levels).numpy()
    assert quantiles.shape == (3, 3)
    for column, level in zip(quantiles.T, levels, strict=True):
        assert (prediction.cdf(column) >= level).all()
        assert (prediction.cdf(column - 1) < level).all()
    np.testing.assert_array_equal(torch.stack(prediction.interval(0.9), 1), quantiles[:, [0, 2]])
    draws = prediction.sample(20000, seed=1).numpy()
    np.testing.assert_array_equal(draws, prediction.sample(20000, seed=1))
    assert not np.array_equal(draws, prediction.sample(20000, seed=2))
    np.testing.assert_allclose((draws <= y).mean(0), prediction.cdf(y), atol=0.02)
    for call, message in (
        (lambda: TargetMixture([]), "members: got none"),
        (lambda: prediction.interval(1.0), "level: got 1.0"),
        (lambda: prediction.quantile([0.5, 2.0]), "probability: got 2.0"),
        (lambda: prediction.sample(0), "count: got 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


@pytest.mark.slow
def test_it_is_the_average_of_models_of_counts():
    x, y = arrays()
    new, new_y = arrays(9, seed=1)
    regressor = Regressor(counts=True).fit(x, y)
    assert tuple(regressor.models_.models) == AVERAGED
    members = []
    for name in AVERAGED:
        model = GPCounts(x, y, class_kernel(name, torch.from_numpy(x), scale=1.0))
        fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
        members.append(model.predict(new))
    expected, prediction = TargetMixture(members), regressor.predict_distribution(new)
    np.testing.assert_allclose(prediction.log_prob(new_y), expected.log_prob(new_y), rtol=1e-6)
    mean, std, limits = regressor.predict(new, return_std=True, quantiles=(0.1, 0.9))
    np.testing.assert_allclose(mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(std, expected.std, rtol=1e-6)
    np.testing.assert_array_equal(limits, expected.quantile([0.1, 0.9]))
    assert regressor.score(x, y) > 0.3
    assert regressor.n_rows_ == 40


def test_missing_values_and_unknown_levels_are_averaged_over():
    table, y = frame()
    regressor = Regressor(FAST, counts=True).fit(table, y)
    new = pd.DataFrame({"size": [1.5] * 4, "kind": ["a", "b", "c", "elsewhere"]})
    with pytest.warns(UserWarning, match="kind") as caught:
        mean, std = regressor.predict(new, return_std=True)
    assert caught[0].filename == __file__
    shares = table["kind"].value_counts(normalize=True)[["a", "b", "c"]].to_numpy()
    average = shares @ mean[:3]
    assert mean[3] == pytest.approx(average, rel=0.1)
    # The total variance: within the levels and between them.
    total = shares @ (std[:3] ** 2 + (mean[:3] - average) ** 2)
    assert std[3] ** 2 == pytest.approx(total, rel=0.2)


@pytest.mark.slow
def test_tools_of_scikit_learn():
    x, y = arrays()
    regressor = clone(Regressor(FAST).set_params(counts=True))
    assert regressor.counts
    assert cross_val_score(make_pipeline(StandardScaler(), regressor), x, y, cv=2).shape == (2,)
    regressor.fit(x, y)
    # What was fitted predicts, until there is another fit.
    mean = regressor.predict(x)
    np.testing.assert_array_equal(regressor.set_params(counts=False).predict(x), mean)
    regressor.set_params(candidates=["linear"]).fit(x, y)
    assert not hasattr(regressor, "models_")
    assert not np.array_equal(regressor.predict(x), mean)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda y: 0 * y, lambda y: 0 * y + 7, lambda y: np.where(np.arange(40) == 3, 1e6, y)],
    ids=["zeros", "a constant", "a million"],
)
def test_odd_counts(change):
    x, y = arrays()
    y = change(y)
    prediction = Regressor(FAST, counts=True).fit(x, y).predict_distribution(x)
    lower, upper = prediction.interval(0.9)
    assert torch.isfinite(prediction.mean).all()
    assert (lower <= upper).all()
    assert torch.isfinite(prediction.log_prob(y)).all()
    if y.max() == y.min():
        assert float(prediction.mean.mean()) == pytest.approx(y[0], abs=0.1)
