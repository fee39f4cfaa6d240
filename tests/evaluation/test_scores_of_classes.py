"""Scores of models of classes and counts: evidences, cavities and learning curves agree."""

import pytest
import torch

from gpclml import (
    ConditionalMarginalLogLikelihood,
    GPClassification,
    GPCounts,
    IterativePosterior,
    KFold,
    LaplaceMarginalLogLikelihood,
    LastPoints,
    compare,
    conditional_log_marginal_likelihood,
    fit_mll,
    joint_log_predictive,
    learning_curve,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
    score_models,
)
from gpclml.errors import UnsupportedError

N = 40


@pytest.fixture(params=["classes", "counts"])
def model(request):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    f = 2 * (5 * x[:, 0]).sin()
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    if request.param == "classes":
        model = GPClassification(x, f + noise > 0, "rbf")
    else:
        model = GPCounts(x, torch.poisson((f / 2).exp(), generator=generator), "rbf")
    fit_mll(LaplaceMarginalLogLikelihood(model.likelihood, model))
    return model


def without(model, rows):
    """The model of the other points, with the same hyperparameters and units."""
    kept = torch.ones(N, dtype=torch.bool)
    kept[rows] = False
    (x,), y = model.train_inputs, model.train_targets
    other = type(model)(x[kept], y[kept], "rbf")
    other.load_state_dict(model.state_dict())
    return other


def test_conditionals_are_differences_of_evidences(model):
    whole = log_marginal_likelihood(model)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    priors = sum(
        prior.log_prob(get(module)).sum() for _, module, prior, get, _ in model.named_priors()
    )
    model.train()
    value = mll(model(*model.train_inputs), model.train_targets)
    assert (N * value - priors).item() == pytest.approx(whole.item(), rel=1e-9)
    last = conditional_log_marginal_likelihood(model, LastPoints(m=N - 6)).item()
    others = log_marginal_likelihood(without(model, slice(N - 6, N)))
    assert last == pytest.approx((whole - others).item(), abs=1e-8)
    folds = conditional_log_marginal_likelihood(model, KFold(5, seed=0))
    assert folds.shape == (5,)
    with torch.enable_grad():  # one after the other
        single = model_blocks(model, KFold(5, seed=0))
    torch.testing.assert_close(folds, single)


def model_blocks(model, conditioning):
    from gpclml.inference import training_observations

    data = training_observations(model)
    blocks = data.split(conditioning, None).held_out
    return data.covariance.block_log_densities(data.residual, blocks).detach()


def test_leave_one_out_is_near_refits_without_each_point(model):
    approximate = leave_one_out(model)
    (x,), y = model.train_inputs, model.train_targets
    exact = torch.cat([without(model, i).predict(x[[i]]).log_prob(y[[i]]) for i in range(0, N, 5)])
    torch.testing.assert_close(approximate[::5], exact, atol=0.05, rtol=0.05)


def test_learning_curves_sum_to_the_evidence(model):
    curves = learning_curve(model, 3)
    assert curves.shape == (3, N)
    whole = log_marginal_likelihood(model)
    torch.testing.assert_close(curves.sum(-1), whole.expand(3), rtol=1e-7, atol=1e-7)


def test_new_points_are_scored_jointly_and_by_themselves(model):
    x = torch.rand(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    single = joint_log_predictive(model, x[:1], y[:1]).item()
    assert single == pytest.approx(model.predict(x[:1]).log_prob(y[:1]).item(), abs=0.15)
    assert joint_log_predictive(model, x, y) < single
    with pytest.raises(UnsupportedError, match="predict"):
        marginal_log_predictive(model, x, y)
    with pytest.raises(UnsupportedError, match="Cholesky"):
        IterativePosterior(model)


@pytest.mark.slow
def test_models_of_classes_are_compared():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    models = {name: GPClassification(x, x[:, 0] > 0.5, name) for name in ("rbf", "matern")}
    scored = score_models(models, orderings=20)
    table = compare(models, orderings=20)
    assert set(table.index) == set(models)
    assert table[["lml", "clml", "loo"]].notna().all(axis=None)
    for name, scores in scored.scores.items():
        assert not scores.failures, scores.failures
        assert scores.lml == pytest.approx(log_marginal_likelihood(models[name]).item())
        assert ((scores.loo_mean > 0) & (scores.loo_mean < 1)).all()
