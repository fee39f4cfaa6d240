"""Predictions of each point from those before it, against explicit conditionals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpclml.linalg import (
    DenseCovariance,
    LowRankPlusDiagonal,
    low_rank,
)


def problem(n, R, seed=0, noise=0.1, k=3):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, R, generator=generator, dtype=torch.float64)
    variances = noise * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(k)])
    return LowRankPlusDiagonal(features, variances), reference.random_residual(n), orders


@pytest.mark.parametrize(("n", "R"), [(1, 1), (7, 1), (7, 3), (7, 7), (20, 3), (40, 18)])
def test_they_are_explicit_conditionals(n, R):
    covariance, residual, orders = problem(n, R)
    dense = covariance.to_dense()
    for form in (covariance, DenseCovariance(dense)):
        errors, variances = form.predictions(residual, orders)
        assert errors.shape == variances.shape == orders.shape
        for j, order in enumerate(orders):
            for i in range(n):
                seen = order[: i + 1]
                mean, expected = reference.conditional_moments(
                    dense[seen][:, seen], residual[seen], torch.tensor([i])
                )
                error = residual[order[i]] - mean[0]
                torch.testing.assert_close(errors[j, i], error, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(variances[j, i], expected[0, 0], rtol=1e-9, atol=1e-9)


@given(n=st.integers(1, 50), R=st.integers(1, 60), k=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_low_rank_is_dense_and_adds_up_to_the_evidence(n, R, k, seed):
    covariance, residual, orders = problem(n, R, seed, k=k)
    errors, variances = covariance.predictions(residual, orders)
    of_dense = DenseCovariance(covariance.to_dense()).predictions(residual, orders)
    for one, other in zip((errors, variances), of_dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    terms = torch.distributions.Normal(0, variances.sqrt()).log_prob(errors)
    expected = covariance.sequential(residual, orders)
    torch.testing.assert_close(terms, expected, rtol=1e-8, atol=1e-8)
    evidence = covariance.log_density(residual).expand(k)
    torch.testing.assert_close(terms.sum(-1), evidence, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("noise", [1e-4, 1e-8])
def test_tiny_noise(noise):
    covariance, _, orders = problem(50, 4, noise=noise)
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(54, generator=generator, dtype=torch.float64)
    residual = covariance.features @ draws[:4] + covariance.noise.sqrt() * draws[4:]
    errors, variances = covariance.predictions(residual, orders)
    assert (variances >= covariance.noise[orders] * (1 - 1e-6)).all()
    dense = DenseCovariance(covariance.to_dense()).predictions(residual, orders)
    torch.testing.assert_close(variances, dense[1], rtol=1e-12 / noise, atol=0)
    z = errors / variances.sqrt()
    of_dense = dense[0] / dense[1].sqrt()
    torch.testing.assert_close(z, of_dense, rtol=1e-12 / noise, atol=1e-12 / noise)
    terms = torch.distributions.Normal(0, variances.sqrt()).log_prob(errors).sum(-1)
    evidence = covariance.log_density(residual).expand(3)
    torch.testing.assert_close(terms, evidence, rtol=1e-6, atol=0)


def test_orders_in_parts_are_those_at_once(monkeypatch):
    covariance, residual, orders = problem(40, 5, k=7)
    at_once = covariance.predictions(residual, orders)
    monkeypatch.setattr(low_rank, "_NUMBERS_AT_ONCE", 200)
    in_parts = covariance.predictions(residual, orders)
    for one, other in zip(in_parts, at_once, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_float32_is_close_to_float64_and_without_gradient():
    covariance, residual, orders = problem(60, 5, noise=1e-3)
    features, noise = covariance.features.float(), covariance.noise.float()
    rounded = LowRankPlusDiagonal(features.double(), noise.double())
    expected = rounded.predictions(residual.float().double(), orders)
    single = LowRankPlusDiagonal(features.requires_grad_(), noise)
    for one, other in zip(single.predictions(residual.float(), orders), expected, strict=True):
        assert one.dtype == torch.float32
        assert not one.requires_grad
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
