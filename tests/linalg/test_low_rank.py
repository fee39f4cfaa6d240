"""Covariances of low rank plus a diagonal: tiny noise, masked points, bad features."""

from __future__ import annotations

import pytest
import torch

import reference
from gpclml.errors import NonFiniteError
from gpclml.linalg import DenseCovariance, LowRankPlusDiagonal


def problem(n: int, R: int, batch: tuple[int, ...] = (), seed: int = 0, noise: float = 0.1):
    """Features ``(*batch, n, R)``, noise variances ``(n,)`` and residuals ``(*batch, n)``."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*batch, n, R, generator=generator, dtype=torch.float64)
    variances = noise * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    return features, variances, reference.random_residual(n, batch, seed + 1)


@pytest.mark.parametrize("noise", [1e-2, 1e-8])
@pytest.mark.parametrize("R", [1, 18])
def test_tiny_noise(noise, R):
    """Values and gradients, low rank against dense."""
    # Residuals as the model makes them: those of no model are worth 1e8 nats.
    features, variances, _ = problem(20, R, noise=noise)
    generator = torch.Generator().manual_seed(5)
    weights, errors = torch.randn(R).double(), torch.randn(20, generator=generator).double()
    residual = features @ weights + variances.sqrt() * errors
    groups = [torch.arange(20).unsqueeze(-1), torch.arange(20).reshape(4, 5)]
    results = []
    for dense in (False, True):
        inputs = [x.clone().requires_grad_() for x in (features, variances, residual)]
        covariance = LowRankPlusDiagonal(*inputs[:2])
        covariance = DenseCovariance(covariance.to_dense()) if dense else covariance
        block = covariance.conditional_log_density(inputs[2], torch.arange(12, 20))
        blocks = covariance.block_log_densities(inputs[2], groups)
        value = torch.cat([block.unsqueeze(-1), blocks])
        weights = 1 + torch.arange(len(value), dtype=value.dtype)
        results.append((value, reference.gradients(weights * value, *inputs)))
    (value, gradients), (expected, others) = results
    # The dense function is the less accurate one: its covariance has condition 1 / noise.
    torch.testing.assert_close(value, expected, rtol=1e-12 / noise, atol=1e-12 / noise)
    for gradient, other in zip(gradients, others, strict=True):
        atol = 1e-11 / noise * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(gradient, other, rtol=1e-11 / noise, atol=atol)


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
@pytest.mark.parametrize("noise", [1e-4, 1e-8])
def test_predictions_at_a_tiny_noise(noise):
    features, variances, errors = problem(50, 4, noise=noise)
    residual = features @ reference.random_residual(4) + variances.sqrt() * errors
    orders = torch.stack([torch.randperm(50) for _ in range(3)])
    covariance = LowRankPlusDiagonal(features, variances)
    errors, predicted = covariance.predictions(residual, orders)
    assert errors.shape == predicted.shape == orders.shape
    assert (predicted >= variances[orders] * (1 - 1e-6)).all()
    expected = DenseCovariance(covariance.to_dense()).predictions(residual, orders)
    # The dense covariance is the less accurate: it has condition 1 / noise.
    tolerance = 1e-12 / noise
    torch.testing.assert_close(predicted, expected[1], rtol=tolerance, atol=0)
    z, expected_z = errors / predicted.sqrt(), expected[0] / expected[1].sqrt()
    torch.testing.assert_close(z, expected_z, rtol=tolerance, atol=tolerance)
    terms = torch.distributions.Normal(0, predicted.sqrt()).log_prob(errors)
    evidence = covariance.log_density(residual).expand(len(orders))
    torch.testing.assert_close(terms.sum(-1), evidence, rtol=max(1e-8, 1e-2 * tolerance), atol=1e-8)


def test_features_that_are_not_finite_are_an_error():
    features, noise, residual = problem(6, 2)
    covariance = LowRankPlusDiagonal(features * torch.nan, noise)
    with pytest.raises(NonFiniteError, match="covariance"):
        covariance.conditional_log_density(residual, torch.tensor([0]))
