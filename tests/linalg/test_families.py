"""The best member of a family: stationary, maximal, and what an optimizer finds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gpclml.errors import ArgumentError
from gpclml.linalg.gaussians import (
    DiagonalFamily,
    DiagonalGaussian,
    FullFamily,
    FullGaussian,
    LowRankFamily,
    LowRankGaussian,
    WeightDistribution,
    gaussian_kl,
)

FAMILIES = {
    "diagonal": DiagonalFamily(),
    "rank-1": LowRankFamily(1, 0.02),
    "rank-2": LowRankFamily(2, 0.02),
    "rank-3": LowRankFamily(3, 0.02),
    "full": FullFamily(),
}
# n, R: fewer features than points, as many, few more (less than n + rank), many more.
SHAPES = [(9, 4), (5, 5), (4, 6), (3, 8)]


def problem(n: int, R: int, own_variances: bool, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    features, residual = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, R), (n,))
    )
    prior = torch.full((R,), 0.7, dtype=torch.float64)
    if own_variances:
        prior = prior * (0.5 + torch.rand(R, generator=generator, dtype=torch.float64))
    noise = 0.2 + 0.2 * torch.rand(n, generator=generator, dtype=torch.float64)
    return features, residual, prior, noise


def bound(q: WeightDistribution, features, residual, prior, noise) -> Tensor:
    """E_q log p(y | w) - KL(q | p), from dense covariances alone."""
    covariance = q.predictive_covariance(torch.eye(len(q.mean), dtype=torch.float64))
    errors = (residual - features @ q.mean).square() + (features @ covariance @ features.mT).diag()
    likelihood = -0.5 * (errors / noise + (2 * torch.pi * noise).log()).sum()
    precision = torch.diag(1 / prior)
    log_dets = prior.log().sum() - torch.linalg.slogdet(covariance)[1]
    moments = torch.trace(precision @ covariance) + q.mean @ precision @ q.mean - len(prior)
    return likelihood - 0.5 * (moments + log_dets)


@pytest.mark.parametrize("own_variances", [False, True])
@pytest.mark.parametrize(("n", "R"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_the_best_is_stationary(family, n, R, own_variances):
    given = problem(n, R, own_variances)
    best = family.best(*given)
    mean = best.mean.clone().requires_grad_()
    if isinstance(best, DiagonalGaussian):
        trained = [best.variances.clone().requires_grad_()]
        q: WeightDistribution = DiagonalGaussian(mean, trained[0])
    elif isinstance(best, LowRankGaussian):
        trained = [best.factor.clone().requires_grad_()]
        q = LowRankGaussian(mean, trained[0], best.epsilon)
    else:
        covariance = best.predictive_covariance(torch.eye(R, dtype=torch.float64))
        trained = [torch.linalg.cholesky(covariance).requires_grad_()]
        q = FullGaussian(mean, trained[0])
    gradients = torch.autograd.grad(bound(q, *given), [mean, *trained])
    for gradient in gradients:
        assert float(gradient.abs().max()) < 1e-8


@pytest.mark.parametrize(("n", "R"), SHAPES)
def test_a_rank_of_all_weights_is_the_full_family(n, R):
    given = problem(n, R, own_variances=True)
    full = FullFamily().best(*given)
    low_rank = LowRankFamily(R, 1e-7).best(*given)
    covariances = (q.predictive_covariance(torch.eye(R).double()) for q in (low_rank, full))
    torch.testing.assert_close(*covariances, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(bound(low_rank, *given), bound(full, *given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n", "R"), SHAPES)
def test_larger_families_have_larger_bounds(n, R):
    given = problem(n, R, own_variances=False)
    values = [bound(LowRankFamily(k, 0.02).best(*given), *given).item() for k in range(1, R + 1)]
    assert all(b >= a - 1e-10 for a, b in pairwise(values))
    full = bound(FullFamily().best(*given), *given).item()
    assert max(values) <= full + 1e-10
    assert bound(DiagonalFamily().best(*given), *given).item() <= full + 1e-10


@pytest.mark.parametrize("rank", [1, 5])
def test_unseen_directions_are_those_of_the_eigenvectors(rank):
    features, residual, prior, noise = problem(3, 8, own_variances=False)
    given = features, residual, prior, noise
    projected = LowRankFamily(rank, 0.02).best(*given)
    assert float((features @ projected.factor).abs().max()) < 1e-12
    other = prior.clone()
    other[0] += 1e-12  # prior variances that differ need the eigenvectors
    eigen = LowRankFamily(rank, 0.02).best(features, residual, other, noise)
    torch.testing.assert_close(bound(projected, *given), bound(eigen, *given))


def test_points_that_repeat_see_fewer_directions():
    features, residual, prior, noise = problem(3, 8, own_variances=False)
    features = torch.cat([features, features[:1], torch.zeros(1, 8)])
    given = features, residual[[0, 1, 2, 0, 1]], prior, noise[[0, 1, 2, 0, 1]]
    best = LowRankFamily(3, 0.02).best(*given)
    assert float((features @ best.factor).abs().max()) < 1e-10
    torch.testing.assert_close(
        best.factor.mT @ best.factor, (0.7 - 0.02) * torch.eye(3, dtype=torch.float64)
    )


def test_an_epsilon_beyond_the_posterior_leaves_no_factor():
    given = problem(3, 8, own_variances=False)
    best = LowRankFamily(2, 0.9).best(*given)
    assert not best.factor.any()
    torch.testing.assert_close(best.variance(), torch.full((8,), 0.9, dtype=torch.float64))


@pytest.mark.parametrize(("n", "R"), [(20, 5), (5, 20)])
@pytest.mark.parametrize("family", ["diagonal", "rank-2", "full"])
def test_the_best_in_float32_is_close_to_that_in_float64(family, n, R):
    given = problem(n, R, own_variances=False)
    double = FAMILIES[family].best(*given)
    single = FAMILIES[family].best(*(x.float() for x in given))
    assert single.mean.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-3, atol=1e-4)
    divergence = gaussian_kl(single, given[2].float()).item()
    assert divergence == pytest.approx(gaussian_kl(double, given[2]).item(), rel=1e-3)


def test_bad_arguments():
    for make, match in (
        (lambda: LowRankFamily(0), "rank: got 0"),
        (lambda: LowRankFamily(1, 0.0), r"epsilon: got 0\.0"),
        (lambda: LowRankFamily(1, float("nan")), "epsilon: got nan"),
        (lambda: LowRankFamily(5).best(*problem(9, 4, False)), "rank: got 5, expected at most 4"),
    ):
        with pytest.raises(ArgumentError, match=match):
            make()
    for family in FAMILIES.values():
        features, residual, prior, noise = problem(3, 8, own_variances=False)
        with pytest.raises(ArgumentError, match=r"prior_variance: got as low as -0\.7"):
            family.best(features, residual, -prior, noise)
        noise[1] = 0.0
        with pytest.raises(ArgumentError, match="noise: got as low as 0"):
            family.best(features, residual, prior, noise)


def test_more_features_than_memory(monkeypatch):
    def there_is_memory_for(numbers):
        patched = "gpclml._utils.environment.available_memory"
        monkeypatch.setattr(patched, lambda device: 8 * numbers)

    given = problem(3, 40, own_variances=True)
    there_is_memory_for(3 * 40 * 40 - 1)
    with pytest.raises(ArgumentError, match=r"features: got 40, which needs .*fewer features"):
        LowRankFamily(1).best(*given)
    # One prior variance needs no matrix of that size.
    given = problem(3, 40, own_variances=False)
    for family in FAMILIES.values():
        family.best(*given)
    there_is_memory_for(3 * 3 * 3 - 1)
    for family in FAMILIES.values():
        with pytest.raises(ArgumentError, match=r"features: got \(3, 40\), which needs"):
            family.best(*given)
