"""Weights of a combination of models, against refitted models and the steps of autograd."""

import math

import gpytorch
import pytest
import torch

from benchmarks.evidence.ledger.training_speed_linear import (
    ModelPredictions,
    learned_weights,
    model_predictions,
)
from gpclml.evaluation import log_marginal_likelihood
from gpclml.evidence.training_speed import training_speed
from gpclml.models import GPRegression

N = 16
SCHEMES = ("prior", "posterior", "concurrent")


def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(N, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    return x, torch.sin(6 * x.squeeze(-1)) + 0.2 * noise


def gp(lengthscale, kernel="rbf"):
    model = GPRegression(*data(), kernel, "zero", standardize=False)
    model.likelihood.noise = torch.tensor(0.1, dtype=torch.float64)
    if kernel == "rbf":
        model.covar_module.base_kernel.lengthscale = torch.tensor(lengthscale, dtype=torch.float64)
    return model


def models():
    """A smooth one, as the data is, and one that takes neighbours to be unrelated."""
    return [gp(0.3), gp(0.01)]


def predictions():
    generator = torch.Generator().manual_seed(7)
    means = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    variances = torch.rand(6, 3, generator=generator, dtype=torch.float64)
    return ModelPredictions(means, variances, means.sum(-1) + 0.5)


def refitted(model, scheme):
    """Mean and variance of the function at each point, given what the scheme lets it see."""
    model.train()
    latent = model(*model.train_inputs)
    K, y, noise = latent.covariance_matrix.detach(), model.train_targets, model.likelihood.noise
    moments, order = [], torch.arange(N)
    for i, point in enumerate(order):
        seen = {"prior": order[:0], "posterior": order, "concurrent": order[:i]}[scheme]
        noisy = K[seen][:, seen] + noise.detach() * torch.eye(len(seen), dtype=torch.float64)
        gain = K[point, seen] @ torch.linalg.inv(noisy)
        moments.append(torch.stack([gain @ y[seen], K[point, point] - gain @ K[seen, point]]))
    return torch.stack(moments)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_predictions_are_those_of_refitted_models(scheme):
    linear = gp(1.0, gpytorch.kernels.LinearKernel())
    members = [*models(), linear]
    result = model_predictions(members, scheme)
    torch.testing.assert_close(result.target, data()[1])
    for j, model in enumerate(members):
        expected = refitted(model, scheme)
        torch.testing.assert_close(result.means[:, j], expected[:, 0], rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(result.variances[:, j], expected[:, 1], rtol=1e-7, atol=1e-8)


def optimal_weights(given):
    """Those of least expected squared error."""
    m, v, y = given.means, given.variances, given.target
    return torch.linalg.solve(m.mT @ m + v.sum(0).diag(), m.mT @ y)


def test_expected_descent_is_the_mean_of_sampled_descent():
    given = predictions()
    for passes in (1, 3):
        expected = learned_weights(given, 0.02, passes)
        runs = 20_000
        sampled = learned_weights(given, 0.02, passes, runs=runs, seed=0)
        assert sampled.shape == (runs, 3)
        off = (sampled.mean(0) - expected) / (sampled.std(0) / math.sqrt(runs))
        assert float(off.abs().max()) < 4
        again = learned_weights(given, 0.02, passes, runs=runs, seed=0)
        assert torch.equal(again, sampled)


def test_sampled_descent_takes_the_steps_of_autograd():
    given = ModelPredictions(predictions().means, torch.zeros(6, 3).double(), predictions().target)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.03)
    for _ in range(2):
        for f, y in zip(given.means, given.target, strict=True):
            optimizer.zero_grad()
            (weights @ f - y).square().backward()
            optimizer.step()
    sampled = learned_weights(given, 0.03, 2, runs=2, seed=0)
    torch.testing.assert_close(sampled, weights.detach().expand(2, 3))
    torch.testing.assert_close(learned_weights(given, 0.03, 2), weights.detach())


def test_concurrent_draws_weigh_the_model_of_higher_evidence_more():
    members = models()
    evidences = torch.stack([log_marginal_likelihood(model) for model in members])
    bounds = [training_speed(model, 2).expected.value for model in members]
    assert evidences[0] > evidences[1] + 3
    assert bounds[0] > bounds[1]
    given = model_predictions(members, "concurrent")
    smooth, rough = optimal_weights(given).tolist()
    assert smooth > rough + 0.2
    for learned in (
        learned_weights(given, 0.02, 20),
        learned_weights(given, 0.02, 20, runs=200, seed=0).mean(0),
    ):
        assert float(learned[0] - learned[1]) > 0.2
    # Once it has seen a point, the rough model too predicts it: they are told apart less.
    after = optimal_weights(model_predictions(members, "posterior"))
    assert float(after[0] - after[1]) < smooth - rough
