"""Scores of single models against definitions, refits and the functions of gpclml.evaluation."""

import gpytorch
import pytest
import torch

from gpclml.conditioning import RandomOrderings
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    learning_curve,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
    score_models,
)
from gpclml.kernels import PolynomialFeatures
from gpclml.models import BayesianLinearModel, GPRegression

CLOSE = {"atol": 1e-8, "rtol": 1e-8}


@pytest.mark.parametrize("units", ["original", "training"])
def test_scores_are_those_of_the_single_functions(models, units):
    for name, model in models.items():
        scores = score_models({name: model}, m=20, orderings=30, units=units, seed=4).scores[name]
        assert scores.lml == pytest.approx(float(log_marginal_likelihood(model, units=units)))
        torch.testing.assert_close(scores.loo, leave_one_out(model, units=units), **CLOSE)
        clml = conditional_log_marginal_likelihood(
            model, RandomOrderings(30, 20), units=units, seed=4
        )
        torch.testing.assert_close(scores.clml, clml, **CLOSE)
        curves = learning_curve(model, 30, units=units, seed=4)
        torch.testing.assert_close(scores.curves, curves, **CLOSE)


@pytest.mark.parametrize("m", [1, 12, 24])
def test_long_tails_are_taken_one_by_one_to_the_same_end(models, m, monkeypatch):
    usual = score_models(models, m=m, orderings=6)
    monkeypatch.setattr("gpclml.evaluation.model_scores._NUMBERS_IN_BLOCKS", 1)
    for name, scores in score_models(models, m=m, orderings=6).scores.items():
        torch.testing.assert_close(scores.clml, usual.scores[name].clml, **CLOSE)


def test_leave_one_out_is_that_of_refits(data):
    x, y = data(n=12)

    def make(rows):
        model = GPRegression(x[rows], y[rows], standardize=False, mean="zero")
        model.covar_module.outputscale, model.likelihood.noise = 900.0, 40.0
        return model

    scores = score_models({"a": make(torch.arange(12))}).scores["a"]
    for i in range(12):
        refit = make(torch.tensor([j for j in range(12) if j != i]))
        density = marginal_log_predictive(refit, x[i : i + 1], y[i : i + 1])
        torch.testing.assert_close(scores.loo[i : i + 1], density, **CLOSE)
        with torch.no_grad():
            normal = refit.predict(x[i : i + 1])
        torch.testing.assert_close(scores.loo_mean[i : i + 1], normal.mean, **CLOSE)
        torch.testing.assert_close(scores.loo_variance[i : i + 1], normal.variance, **CLOSE)


def test_condition_numbers(models, data):
    x, y = data(n=14)
    features = PolynomialFeatures(2)
    models["few features"] = BayesianLinearModel(x, y, features, prior_variance=400.0, noise=60.0)
    for name, order in (("few features", 2), ("good", 1)):
        model = models[name]
        scores = score_models({name: model}).scores[name]
        with torch.no_grad():
            K = model.likelihood(model(*model.train_inputs)).covariance_matrix
        exact = float(torch.linalg.cond(K, order))
        assert exact / 3 ** (order == 1) < scores.condition_number * (1 + 1e-6) < exact * (1 + 2e-6)
        assert scores.rounding == pytest.approx(scores.condition_number * 2.0**-52)


def test_missing_targets_are_left_out(data):
    x, y = data(n=16)
    y[[2, 9]] = float("nan")
    kept = ~y.isnan()

    def make(rows):
        return {
            "gp": GPRegression(x[rows], y[rows], standardize=False),
            "linear": BayesianLinearModel(x[rows], y[rows], prior_variance=400.0, noise=60.0),
        }

    everything = slice(None)
    with gpytorch.settings.observation_nan_policy("mask"):
        orders = torch.stack([torch.randperm(16) for _ in range(5)])
        masked = score_models(make(everything), m=9, orderings=orders)
    index = kept.cumsum(0) - 1
    observed = torch.stack([index[order[kept[order]]] for order in orders])
    complete = score_models(make(kept), m=9, orderings=observed)
    assert masked.rows.tolist() == kept.nonzero().squeeze(-1).tolist()
    torch.testing.assert_close(masked.targets, y[kept])
    for name, scores in masked.scores.items():
        for field in ("clml", "loo", "loo_mean", "loo_variance", "curves"):
            expected = getattr(complete.scores[name], field)
            torch.testing.assert_close(getattr(scores, field), expected, **CLOSE)
        for field in ("lml", "condition_number"):
            assert getattr(scores, field) == pytest.approx(getattr(complete.scores[name], field))


def test_single_precision_is_near_double(data):
    x, y = data(n=60)
    both = {"double": GPRegression(x, y), "single": GPRegression(x.float(), y.float())}
    single, double = (score_models(both).scores[name] for name in ("single", "double"))
    assert single.loo.dtype == torch.float64
    torch.testing.assert_close(single.loo, double.loo, atol=1e-4, rtol=1e-4)
    assert single.lml == pytest.approx(double.lml, rel=1e-5)
    assert single.rounding > 1e8 * double.rounding
