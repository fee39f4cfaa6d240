from __future__ import annotations

import math

import gpytorch
import pytest
import torch

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnknownNameError
from gpclml.evaluation import log_marginal_likelihood
from gpclml.evidence.training_speed import (
    ModelPredictions,
    expected_combination,
    model_predictions,
    model_weights,
    optimal_combination,
    sampled_combination,
    training_speed,
)
from gpclml.models import GPRegression

N = 16
SCHEMES = ("prior", "posterior", "concurrent")


def data(seed=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(N, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    return x, torch.sin(6 * x.squeeze(-1)) + 0.2 * noise


def gp(lengthscale, kernel="rbf", y=None, x=None):
    points, target = data()
    x, y = points if x is None else x, target if y is None else y
    model = GPRegression(x, y, kernel, "zero", standardize=False)
    model.likelihood.noise = torch.tensor(0.1, dtype=torch.float64)
    if kernel == "rbf":
        model.covar_module.base_kernel.lengthscale = torch.tensor(lengthscale, dtype=torch.float64)
    return model


def models():
    """A smooth one, as the data is, and one that takes neighbours to be unrelated."""
    return [gp(0.3), gp(0.01)]


def predictions(seed=7, n=6, count=3):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(n, count, generator=generator, dtype=torch.float64)
    variances = torch.rand(n, count, generator=generator, dtype=torch.float64)
    return ModelPredictions(means, variances, means.sum(-1) + 0.5)


def refitted(model, scheme, order):
    """Mean and variance of the function at each point, given what the scheme lets it see."""
    model.train()
    latent = model(*model.train_inputs)
    K, y, noise = latent.covariance_matrix.detach(), model.train_targets, model.likelihood.noise
    moments = []
    for i, point in enumerate(order):
        seen = {"prior": order[:0], "posterior": order, "concurrent": order[:i]}[scheme]
        noisy = K[seen][:, seen] + noise.detach() * torch.eye(len(seen), dtype=torch.float64)
        gain = K[point, seen] @ torch.linalg.inv(noisy)
        moments.append(torch.stack([gain @ y[seen], K[point, point] - gain @ K[seen, point]]))
    return torch.stack(moments)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ordered", [True, False])
def test_predictions_are_those_of_refitted_models(scheme, ordered):
    linear = gp(1.0, gpytorch.kernels.LinearKernel())
    members = [*models(), linear]
    order = torch.arange(N) if ordered else torch.randperm(N)
    result = model_predictions(members, scheme, None if ordered else order)
    torch.testing.assert_close(result.target, data()[1][order])
    for j, model in enumerate(members):
        expected = refitted(model, scheme, order)
        torch.testing.assert_close(result.means[:, j], expected[:, 0], rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(result.variances[:, j], expected[:, 1], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_missing_targets_are_left_out(scheme):
    x, y = data()
    holes = y.clone()
    holes[[0, 5]] = math.nan
    there = ~holes.isnan()
    with gpytorch.settings.observation_nan_policy("mask"):
        result = model_predictions([gp(0.3, y=holes)], scheme)
    expected = model_predictions([gp(0.3, y=y[there], x=x[there])], scheme)
    for name in ("means", "variances", "target"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))


def test_optimal_weights_minimize_the_expected_squared_error():
    given = predictions()
    weights = optimal_combination(given).requires_grad_()
    error = given.target - given.means @ weights
    loss = error.square().sum() + (given.variances * weights.square()).sum()
    (gradient,) = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64))


def test_optimal_weights_are_of_least_norm_where_several_are_best():
    column = torch.ones(4, 1, dtype=torch.float64)
    twice = ModelPredictions(column.expand(4, 2), torch.zeros(4, 2).double(), 3 * column[:, 0])
    torch.testing.assert_close(optimal_combination(twice), torch.full((2,), 1.5).double())
    # Draws of a prior of mean zero know nothing of the targets.
    weights = optimal_combination(model_predictions(models(), "prior"))
    torch.testing.assert_close(weights, torch.zeros(2, dtype=torch.float64))


def test_orthogonal_predictions_of_one_size_weigh_as_the_bound_ranks():
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(8, 4, generator=generator, dtype=torch.float64))
    variances = torch.full((8, 4), 0.05, dtype=torch.float64)
    y = torch.randn(8, generator=generator, dtype=torch.float64)
    given = ModelPredictions(basis, variances, y)
    bounds = -0.5 * ((y.unsqueeze(-1) - basis).square() + variances).sum(0)  # noise one
    assert torch.equal(optimal_combination(given).argsort(), bounds.argsort())


def test_expected_descent_is_the_mean_of_sampled_descent():
    given = predictions()
    options = {"learning_rate": 0.02, "passes": 3}
    expected = expected_combination(given, **options)
    runs = 20_000
    sampled = sampled_combination(given, **options, runs=runs)
    assert expected.course.shape == (19, 3)
    assert sampled.course.shape == (runs, 19, 3)
    assert sampled.weights.shape == (runs, 3)
    assert torch.equal(sampled.course[:, -1], sampled.weights)
    assert torch.equal(expected.course[-1], expected.weights)
    assert expected.course[0].tolist() == [1 / 3] * 3
    error = sampled.course[:, 1:].std(0) / math.sqrt(runs)
    off = (sampled.course[:, 1:].mean(0) - expected.course[1:]) / error
    assert float(off.abs().max()) < 4.5  # of 54 numbers
    again = sampled_combination(given, **options, runs=runs)
    assert torch.equal(again.weights, sampled.weights)


def test_sampled_descent_takes_the_steps_of_autograd():
    given = ModelPredictions(predictions().means, torch.zeros(6, 3).double(), predictions().target)
    start = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.03)
    for _ in range(2):
        for f, y in zip(given.means, given.target, strict=True):
            optimizer.zero_grad()
            (weights @ f - y).square().backward()
            optimizer.step()
    options = {"learning_rate": 0.03, "passes": 2, "start": start}
    sampled = sampled_combination(given, **options, runs=2)
    torch.testing.assert_close(sampled.weights, weights.detach().expand(2, 3))
    torch.testing.assert_close(expected_combination(given, **options).weights, weights.detach())


def test_many_small_steps_reach_the_optimal_weights():
    given = predictions()
    learned = expected_combination(given, learning_rate=4e-3, passes=800)
    torch.testing.assert_close(learned.weights, optimal_combination(given), rtol=2e-2, atol=1e-2)


def test_concurrent_draws_weigh_the_model_of_higher_evidence_more():
    members = models()
    evidences = torch.stack([log_marginal_likelihood(model) for model in members])
    bounds = [training_speed(model, 2).expected.value for model in members]
    assert evidences[0] > evidences[1] + 3
    assert bounds[0] > bounds[1]
    given = model_predictions(members, "concurrent")
    smooth, rough = optimal_combination(given).tolist()
    assert smooth > rough + 0.2
    for learned in (
        expected_combination(given, passes=20).weights,
        sampled_combination(given, passes=20, runs=200).weights.mean(0),
    ):
        assert float(learned[0] - learned[1]) > 0.2
    posterior = model_weights(evidences)
    assert float(posterior[0]) > 0.95
    # Once it has seen a point, the rough model too predicts it: they are told apart less.
    after = optimal_combination(model_predictions(members, "posterior"))
    assert float(after[0] - after[1]) < smooth - rough


def test_model_weights_are_bayes_rule():
    evidences = torch.tensor([-3.0, -1.0, -700.0], dtype=torch.float64)
    prior = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    joint = prior * evidences.exp()
    torch.testing.assert_close(model_weights(evidences, prior), joint / joint.sum())
    torch.testing.assert_close(
        model_weights(evidences - 5000, prior), model_weights(evidences, prior)
    )
    assert model_weights([-2.0, -2.0]).tolist() == [0.5, 0.5]
    assert model_weights([-2.0, -math.inf]).tolist() == [1.0, 0.0]
    assert model_weights(torch.tensor([0, 0])).tolist() == [0.5, 0.5]
    assert model_weights([0, 0], [1.0, 0.0]).tolist() == [1.0, 0.0]
    assert model_weights([-1e5, -1e5 - 1]).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([-1.0, -2.0], [0.5, 0.6]), ArgumentError, "prior: .* with sum 1.1, .* by their sum"),
        (([-1.0, -2.0], [1.5, -0.5]), ArgumentError, "prior: .* expected probabilities, not neg"),
        (([-1.0, -2.0], [math.nan, 1.0]), ArgumentError, "prior: .* with sum nan"),
        (([-1.0, -2.0], [1.0]), ShapeError, r"prior: got \(1,\), expected \(2,\)"),
        (([],), ShapeError, r"log_evidences: got \(0,\)"),
        ((torch.zeros(2, 2),), ShapeError, r"log_evidences: got \(2, 2\)"),
        (([math.nan, 0.0],), NonFiniteError, "log_evidences"),
        (([math.inf, 0.0],), NonFiniteError, "log_evidences"),
        (([-math.inf, -math.inf],), NonFiniteError, "log_evidences"),
    ],
)
def test_bad_evidences_and_priors_are_named(arguments, error, match):
    with pytest.raises(error, match=match):
        model_weights(*arguments)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"means": torch.ones(3)}, ShapeError, r"means: got \(3,\)"),
        ({"variances": torch.ones(6, 2)}, ShapeError, r"variances: got \(6, 2\)"),
        ({"target": torch.ones(5)}, ShapeError, r"target: got \(5,\), expected \(n,\) with n = 6"),
        (
            {"target": torch.full((6,), math.nan)},
            NonFiniteError,
            "target: got 6 of 6 values not finite",
        ),
        ({"variances": torch.full((6, 3), -0.5)}, ArgumentError, "variances: got -0.5"),
    ],
)
def test_bad_predictions_are_named(change, error, match):
    given = vars(predictions())
    with pytest.raises(error, match=match):
        ModelPredictions(**{**given, **change})


@pytest.mark.parametrize("learn", [expected_combination, sampled_combination])
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"passes": 0}, ArgumentError, "passes: got 0"),
        ({"learning_rate": 0.0}, ArgumentError, "learning_rate: got 0.0"),
        ({"learning_rate": math.inf}, ArgumentError, "learning_rate: got inf"),
        ({"start": torch.ones(2)}, ShapeError, r"start: got \(2,\), expected \(3,\)"),
        (
            {"learning_rate": 1e3, "passes": 200},
            NonFiniteError,
            r"learning_rate: got weights that diverge at 1e\+03",
        ),
    ],
)
def test_bad_options_are_named(learn, options, error, match):
    with pytest.raises(error, match=match):
        learn(predictions(), **options)
    with pytest.raises(ArgumentError, match="runs: got 0"):
        sampled_combination(predictions(), runs=0)


def test_models_that_cannot_be_combined_are_named():
    x, y = data()
    with pytest.raises(UnknownNameError, match=r"scheme: got 'priors'.*Did you mean 'prior'"):
        model_predictions(models(), "priors")
    with pytest.raises(ArgumentError, match="models: got none"):
        model_predictions([], "prior")
    for other in (gp(0.3, y=2 * y), gp(0.3, x=x[1:], y=y[1:])):
        with pytest.raises(ArgumentError, match=r"models: got training targets of models\[1\]"):
            model_predictions([gp(0.3), other], "prior")
    empty = gp(0.3)
    empty.set_train_data(None, None, strict=False)
    empty.train_inputs = empty.train_targets = None
    with pytest.raises(ArgumentError, match=r"models: got models\[0\] without data"):
        model_predictions([empty], "prior")
    every = torch.arange(N)
    for order in (torch.zeros_like(every), every[1:], torch.eye(N), every.double()):
        with pytest.raises(
            ArgumentError,
            match=r"order: got (shape .* a permutation|a tensor of)",
        ):
            model_predictions(models(), "prior", order)
