"""Every form of a Gaussian over weights against its dense covariance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import reference
from gpclml.errors import ArgumentError
from gpclml.linalg.gaussians import (
    DiagonalFamily,
    DiagonalGaussian,
    DualGaussian,
    FullFamily,
    FullGaussian,
    LowRankFamily,
    LowRankGaussian,
    WeightDistribution,
    gaussian_kl,
    linear_posterior,
)

R = 6
FORMS = ["diagonal", "low-rank", "full", "dual"]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def parameters(form: str, seed: int = 0) -> tuple[Tensor, ...]:
    """What a form is differentiable in."""
    if form == "diagonal":
        return numbers(R, seed=seed), numbers(R, seed=seed + 1).exp()
    if form == "low-rank":
        return numbers(R, seed=seed), numbers(R, 2, seed=seed + 1)
    if form == "full":
        return numbers(R, seed=seed), numbers(R, R, seed=seed + 1)
    features, residual = numbers(3, R, seed=seed), numbers(3, seed=seed + 1)
    return features, residual, numbers(R, seed=seed + 2).exp(), numbers(3, seed=seed + 3).exp()


def distribution(form: str, *given: Tensor) -> WeightDistribution:
    if form == "diagonal":
        return DiagonalGaussian(*given)
    if form == "low-rank":
        return LowRankGaussian(*given, epsilon=0.3)
    return FullGaussian(*given) if form == "full" else linear_posterior(*given)


def dense(form: str, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance by the textbook."""
    identity = torch.eye(R, dtype=torch.float64)
    if form == "diagonal":
        return given[0], torch.diag(given[1])
    if form == "low-rank":
        return given[0], given[1] @ given[1].mT + 0.3 * identity
    if form == "full":
        return given[0], given[1] @ given[1].mT
    return textbook(*given)


def textbook(features: Tensor, residual: Tensor, prior: Tensor, noise: Tensor):
    scaled = features / noise.unsqueeze(-1)
    covariance = torch.linalg.inv(scaled.mT @ features + torch.diag(1 / prior))
    covariance = 0.5 * (covariance + covariance.mT)
    return covariance @ scaled.mT @ residual, covariance


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_the_dense_covariance(form):
    given = parameters(form)
    q = distribution(form, *given)
    mean, covariance = dense(form, *given)
    features = numbers(4, R, seed=9)
    assert isinstance(q, DualGaussian) == (form == "dual")
    for answer, expected in (
        (q.mean, mean),
        (q.variance(), covariance.diagonal()),
        (q.log_det(), torch.linalg.slogdet(covariance)[1]),
        (q.predictive_variance(features), (features @ covariance @ features.mT).diagonal()),
        (q.predictive_covariance(features), features @ covariance @ features.mT),
    ):
        torch.testing.assert_close(answer, expected, rtol=1e-9, atol=1e-9)
    identity = torch.eye(R, dtype=torch.float64)
    torch.testing.assert_close(q.covariance().times(identity), covariance, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_draws_have_mean_and_covariance(form):
    given = parameters(form)
    q = distribution(form, *given)
    mean, covariance = dense(form, *given)
    S = 40_000
    draws = q.sample(S, seed=3)
    assert draws.shape == (S, R)
    error = (covariance.diagonal() / S).sqrt()
    assert bool(((draws.mean(0) - mean).abs() < 4.5 * error).all())
    # Var of a product of Gaussians: Σii Σjj + Σij².
    variances = covariance.diagonal()
    error = ((torch.outer(variances, variances) + covariance.square()) / S).sqrt()
    centered = draws - mean
    assert bool(((centered.mT @ centered / S - covariance).abs() < 4.5 * error).all())


def test_the_same_seed_makes_the_same_draws():
    q = distribution("dual", *parameters("dual"))
    assert torch.equal(q.sample(5, seed=7), q.sample(5, torch.Generator().manual_seed(7)))
    assert not torch.equal(q.sample(5, seed=7), q.sample(5, seed=8))
    state = torch.random.get_rng_state()
    assert not q.sample(2).requires_grad
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(ArgumentError, match="num_draws: got 0"):
        q.sample(0)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    given = [x.requires_grad_() for x in parameters(form)]
    features = numbers(3, R, seed=9)

    def function(*given):
        q = distribution(form, *given)
        return (
            q.variance(),
            q.log_det(),
            q.predictive_variance(features),
            q.predictive_covariance(features),
        )

    assert torch.autograd.gradcheck(function, given)


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_close_to_float64(form):
    given = parameters(form)
    features = numbers(4, R, seed=9)
    results = []
    for dtype in (torch.float64, torch.float32):
        q = distribution(form, *(x.to(dtype) for x in given))
        answers = (
            q.mean,
            q.variance(),
            q.log_det(),
            q.predictive_covariance(features.to(dtype)),
            q.sample(3),
        )
        assert all(answer.dtype == dtype for answer in answers)
        results.append([answer.double() for answer in answers])
    for double, single in zip(*results, strict=True):
        scale = float(double.abs().max())
        torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("form", FORMS)
def test_divergence_from_a_prior(form):
    given = [x.requires_grad_() for x in parameters(form)]
    prior = numbers(R, seed=30).exp().requires_grad_()
    value, (mean, covariance) = gaussian_kl(distribution(form, *given), prior), dense(form, *given)
    normal = MultivariateNormal(torch.zeros_like(prior), torch.diag(prior))
    expected = kl_divergence(MultivariateNormal(mean, covariance), normal)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    for answer, gradient in zip(
        reference.gradients(value, *given, prior),
        reference.gradients(expected, *given, prior),
        strict=True,
    ):
        torch.testing.assert_close(
            answer, gradient, rtol=1e-7, atol=1e-8 * float(1 + gradient.abs().max())
        )


@pytest.mark.parametrize(("n", "R"), [(3, 3), (7, 3), (3, 7), (1, 5), (5, 1)])
def test_the_posterior_is_that_of_the_textbook(n, R):
    given = [
        numbers(n, R), numbers(n, seed=1), numbers(R, seed=2).exp(), numbers(n, seed=3).exp(),
    ]  # fmt: skip
    given = [x.requires_grad_() for x in given]
    posterior = linear_posterior(*given)
    assert isinstance(posterior, FullGaussian if n >= R else DualGaussian)
    mean, covariance = textbook(*given)
    points = numbers(4, R, seed=5)
    ours = posterior.mean, posterior.predictive_covariance(points)
    theirs = mean, points @ covariance @ points.mT
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    gradients = [
        reference.gradients(both[0].sum() + 2 * both[1].sum(), *given) for both in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)
    posterior, (_, covariance) = linear_posterior(*given), textbook(*given)
    torch.testing.assert_close(posterior.log_det(), torch.linalg.slogdet(covariance)[1])


FAMILIES = [DiagonalFamily(), LowRankFamily(2, 0.1), FullFamily()]


def test_memory_is_asked_before_it_is_taken():
    million = torch.ones(1, dtype=torch.float64).expand(10**6)
    with pytest.raises(ArgumentError, match=r"22351\.7 GiB"):
        linear_posterior(million.expand(10**6, 10**6), million, million, million)


def test_bad_arguments():
    prior = torch.ones(3)
    for make, match in (
        (lambda: linear_posterior(torch.ones(2, 3), torch.ones(2), -prior, torch.ones(2)), "prior"),
        (lambda: linear_posterior(torch.ones(2, 3), torch.ones(2), prior, -torch.ones(2)), "noise"),
    ):
        with pytest.raises(ArgumentError, match=match):
            make()
