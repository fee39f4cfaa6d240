"""Covariances of low rank plus a diagonal: tiny noise, masked points, bad features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from gpclml.errors import NonFiniteError
from gpclml.linalg import DenseCovariance, LowRankPlusDiagonal


def problem(n: int, R: int, batch: tuple[int, ...] = (), seed: int = 0, noise: float = 0.1):
    """Features ``(*batch, n, R)``, noise variances ``(n,)`` and residuals ``(*batch, n)``."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*batch, n, R, generator=generator, dtype=torch.float64)
    variances = noise * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    return features, variances, reference.random_residual(n, batch, seed + 1)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def random_rows(n: int, b: int, seed: int = 3) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:b]


def assert_same(function, inputs, rtol: float = 1e-9, gradient_rtol: float = 1e-7):
    """Value and gradient of a function of covariance and residual, low rank against dense."""
    results = []
    for dense in (False, True):
        features, noise, residual = leaves(*inputs)
        covariance = LowRankPlusDiagonal(features, noise)
        value = function(DenseCovariance(covariance.to_dense()) if dense else covariance, residual)
        weights = 1 + torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape)
        gradients = reference.gradients(weights * value, features, noise, residual)
        results.append((value, gradients))
    (value, gradients), (expected, expected_gradients) = results
    assert value.shape == expected.shape
    torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        atol = gradient_rtol * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(gradient, other, rtol=gradient_rtol, atol=atol)


@pytest.mark.parametrize("noise", [1e-2, 1e-8])
@pytest.mark.parametrize("R", [1, 18])
def test_tiny_noise(noise, R):
    # Residuals as the model makes them: those of no model are worth 1e8 nats.
    features, variances, _ = problem(20, R, noise=noise)
    generator = torch.Generator().manual_seed(5)
    weights, errors = torch.randn(R).double(), torch.randn(20, generator=generator).double()
    residual = features @ weights + variances.sqrt() * errors
    groups = [torch.arange(20).unsqueeze(-1), torch.arange(20).reshape(4, 5)]

    def function(covariance, residual):
        block = covariance.conditional_log_density(residual, torch.arange(12, 20))
        return torch.cat([block.unsqueeze(-1), covariance.block_log_densities(residual, groups)])

    # The dense function is the less accurate one: its covariance has condition 1 / noise.
    assert_same(function, (features, variances, residual), 1e-12 / noise, 1e-11 / noise)


def test_masked_points_change_no_density():
    features, noise, residual = problem(8, 3, (2,))
    missing = torch.zeros(2, 8, dtype=torch.bool)
    missing[0, 2] = missing[1, 0] = missing[1, 5] = True
    masked = LowRankPlusDiagonal(features, noise).masked(missing)
    zeroed = residual.masked_fill(missing, 0.0)
    held_out = torch.tensor([2, 5, 7])
    together = masked.conditional_log_density(zeroed, held_out)
    singles = masked.block_log_densities(zeroed, [torch.arange(8).unsqueeze(-1)])
    term = torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(0.0).double())
    for member in range(2):
        kept = (~missing[member]).nonzero().squeeze(-1)
        alone = LowRankPlusDiagonal(features[member], noise).take(kept).to_dense()
        index = torch.tensor([i for i, row in enumerate(kept) if row in held_out])
        expected = reference.conditional_log_density(alone, residual[member, kept], index)
        gone = int(missing[member, held_out].sum())
        torch.testing.assert_close(together[member], expected + gone * term)
        for i, row in enumerate(kept):
            expected = reference.conditional_log_density(
                alone, residual[member, kept], torch.tensor([i])
            )
            torch.testing.assert_close(singles[member, row], expected)
        torch.testing.assert_close(singles[member, missing[member]], term.expand(1 + member))


@torch.no_grad()
def assert_predictions_are_those_of_the_dense(features, noise, residual, orders, tolerance):
    covariance = LowRankPlusDiagonal(features, noise)
    errors, variances = covariance.predictions(residual, orders)
    assert errors.shape == variances.shape == orders.shape
    assert (variances >= noise[orders] * (1 - 1e-6)).all()
    expected = DenseCovariance(covariance.to_dense()).predictions(residual, orders)
    torch.testing.assert_close(variances, expected[1], rtol=tolerance, atol=0)
    z, expected_z = errors / variances.sqrt(), expected[0] / expected[1].sqrt()
    torch.testing.assert_close(z, expected_z, rtol=tolerance, atol=tolerance)
    terms = torch.distributions.Normal(0, variances.sqrt()).log_prob(errors)
    evidence = covariance.log_density(residual).expand(len(orders))
    torch.testing.assert_close(terms.sum(-1), evidence, rtol=max(1e-8, 1e-2 * tolerance), atol=1e-8)


@pytest.mark.parametrize("noise", [1e-4, 1e-8])
def test_predictions_at_a_tiny_noise(noise):
    features, variances, errors = problem(50, 4, noise=noise)
    residual = features @ reference.random_residual(4) + variances.sqrt() * errors
    orders = torch.stack([random_rows(50, 50, seed) for seed in range(3)])
    # The dense covariance is the less accurate: it has condition 1 / noise.
    assert_predictions_are_those_of_the_dense(features, variances, residual, orders, 1e-12 / noise)


def test_features_that_are_not_finite_are_an_error():
    features, noise, residual = problem(6, 2)
    covariance = LowRankPlusDiagonal(features * torch.nan, noise)
    with pytest.raises(NonFiniteError, match="covariance"):
        covariance.conditional_log_density(residual, torch.tensor([0]))
