"""Every form of a Gaussian over weights against its dense covariance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import reference
from gpclml.errors import ArgumentError
from gpclml.linalg.gaussians import (
    DiagonalGaussian,
    DualGaussian,
    FullGaussian,
    LowRankGaussian,
    gaussian_kl,
    linear_posterior,
)
from linear_evidence import drawn

R = 6


def problem(n: int, R: int) -> list[Tensor]:
    """Features, residuals, prior variances, noise."""
    return [drawn(n, R), drawn(n, seed=1), drawn(R, seed=2).exp(), drawn(n, seed=3).exp()]


def textbook(features: Tensor, residual: Tensor, prior: Tensor, noise: Tensor):
    scaled = features / noise.unsqueeze(-1)
    covariance = torch.linalg.inv(scaled.mT @ features + torch.diag(1 / prior))
    covariance = 0.5 * (covariance + covariance.mT)
    return covariance @ scaled.mT @ residual, covariance


# The form of what it is differentiable in, its mean and covariance by definition, and that.
FORMS = {
    "diagonal": (
        DiagonalGaussian,
        lambda m, v: (m, torch.diag(v)),
        [drawn(R), drawn(R, seed=1).exp()],
    ),
    "low-rank": (
        lambda m, V: LowRankGaussian(m, V, epsilon=0.3),
        lambda m, V: (m, V @ V.mT + 0.3 * torch.eye(R, dtype=torch.float64)),
        [drawn(R), drawn(R, 2, seed=1)],
    ),
    "full": (FullGaussian, lambda m, A: (m, A @ A.mT), [drawn(R), drawn(R, R, seed=1)]),
    "dual": (linear_posterior, textbook, problem(3, R)),
}
every_form = pytest.mark.parametrize("form", FORMS)


@every_form
def test_answers_are_those_of_the_dense_covariance(form):
    distribution, dense, given = FORMS[form]
    q, (mean, covariance), features = distribution(*given), dense(*given), drawn(4, R, seed=9)
    assert isinstance(q, DualGaussian) == (form == "dual")
    for answer, expected in (
        (q.mean, mean),
        (q.variance(), covariance.diagonal()),
        (q.log_det(), torch.linalg.slogdet(covariance)[1]),
        (q.predictive_variance(features), (features @ covariance @ features.mT).diagonal()),
        (q.predictive_covariance(features), features @ covariance @ features.mT),
    ):
        torch.testing.assert_close(answer, expected, rtol=1e-9, atol=1e-9)


@every_form
def test_draws_have_mean_and_covariance(form):
    distribution, dense, given = FORMS[form]
    (mean, covariance), S = dense(*given), 40_000
    draws, variances = distribution(*given).sample(S, seed=3), covariance.diagonal()
    assert draws.shape == (S, R)
    assert bool(((draws.mean(0) - mean).abs() < 4.5 * (variances / S).sqrt()).all())
    # Var of a product of Gaussians: Σii Σjj + Σij².
    error = ((torch.outer(variances, variances) + covariance.square()) / S).sqrt()
    centered = draws - mean
    assert bool(((centered.mT @ centered / S - covariance).abs() < 4.5 * error).all())


def test_the_same_seed_makes_the_same_draws():
    q = linear_posterior(*problem(3, R))
    assert torch.equal(q.sample(5, seed=7), q.sample(5, torch.Generator().manual_seed(7)))
    assert not torch.equal(q.sample(5, seed=7), q.sample(5, seed=8))
    state = torch.random.get_rng_state()
    assert not q.sample(2).requires_grad
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(ArgumentError, match="num_draws: got 0"):
        q.sample(0)


@every_form
def test_gradcheck(form):
    distribution, _, given = FORMS[form]
    given, features = [x.clone().requires_grad_() for x in given], drawn(3, R, seed=9)

    def function(*given):
        q = distribution(*given)
        predicted = q.predictive_variance(features), q.predictive_covariance(features)
        return q.variance(), q.log_det(), *predicted

    assert torch.autograd.gradcheck(function, given)


@every_form
def test_float32_is_close_to_float64(form):
    distribution, _, given = FORMS[form]
    results = []
    for dtype in (torch.float64, torch.float32):
        q, features = distribution(*(x.to(dtype) for x in given)), drawn(4, R, seed=9).to(dtype)
        predicted = q.predictive_covariance(features)
        results.append([q.mean, q.variance(), q.log_det(), predicted, q.sample(3)])
    for double, single in zip(*results, strict=True):
        assert single.dtype == torch.float32
        atol = 1e-4 * float(double.abs().max())
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=atol)


@every_form
def test_divergence_from_a_prior(form):
    distribution, dense, given = FORMS[form]
    given = [x.clone().requires_grad_() for x in given]
    prior = drawn(R, seed=30).exp().requires_grad_()
    value, (mean, covariance) = gaussian_kl(distribution(*given), prior), dense(*given)
    normal = MultivariateNormal(torch.zeros_like(prior), torch.diag(prior))
    expected = kl_divergence(MultivariateNormal(mean, covariance), normal)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    ours, theirs = (reference.gradients(each, *given, prior) for each in (value, expected))
    for gradient, other in zip(ours, theirs, strict=True):
        atol = 1e-8 * float(1 + other.abs().max())
        torch.testing.assert_close(gradient, other, rtol=1e-7, atol=atol)


@pytest.mark.parametrize(("n", "R"), [(3, 3), (7, 3), (3, 7), (1, 5), (5, 1)])
def test_the_posterior_is_that_of_the_textbook(n, R):
    given = [x.requires_grad_() for x in problem(n, R)]
    posterior, (mean, covariance) = linear_posterior(*given), textbook(*given)
    assert isinstance(posterior, FullGaussian if n >= R else DualGaussian)
    torch.testing.assert_close(posterior.log_det(), torch.linalg.slogdet(covariance)[1])
    points = drawn(4, R, seed=5)
    ours = posterior.mean, posterior.predictive_covariance(points)
    theirs = mean, points @ covariance @ points.mT
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    gradients = [
        reference.gradients(both[0].sum() + 2 * both[1].sum(), *given) for both in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)
