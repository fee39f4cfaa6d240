"""Covariances of low rank plus a diagonal against the dense functions and explicit conditionals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_entries_are_those_of_the_dense_covariance():
    features, noise, _ = problem(5, 2, (3,))
    covariance = LowRankPlusDiagonal(features, noise)
    dense = features @ features.mT + torch.diag(noise)
    torch.testing.assert_close(covariance.to_dense(), dense)
    assert covariance.shape == dense.shape
    assert (covariance.dtype, covariance.device) == (dense.dtype, dense.device)
    rows = torch.tensor([[0, 3], [2, 1], [4, 2]])
    expected = torch.stack([dense[i][rows[i]][:, rows[i]] for i in range(3)])
    torch.testing.assert_close(covariance.take(rows).to_dense(), expected)


def test_members_share_what_has_no_batch():
    features, noise, _ = problem(5, 2, (3,))
    for covariance in (
        LowRankPlusDiagonal(features, noise),
        LowRankPlusDiagonal(features[0], noise * torch.rand(3, 1, dtype=torch.float64)),
    ):
        dense = covariance.to_dense()
        torch.testing.assert_close(covariance[2].to_dense(), dense[2])
        torch.testing.assert_close(covariance[1:].to_dense(), dense[1:])


GROUPS = {
    "singles": [torch.arange(8).unsqueeze(-1)],
    "folds": [torch.tensor([[3, 0], [5, 1], [2, 4], [7, 6]])],
    "large": [torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])],
    "mixed": [torch.tensor([[7, 0, 3, 1]]), torch.tensor([[2, 4], [6, 5]]), torch.tensor([[1]])],
    "overlapping": [torch.tensor([[0, 1, 2], [2, 1, 5], [7, 2, 6]])],
    "everything": [torch.randperm(8).unsqueeze(0), torch.tensor([[4]])],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("R", [1, 3, 8])
def test_blocks_are_those_of_the_dense_covariance(groups, R):
    assert_same(lambda covariance, r: covariance.block_log_densities(r, groups), problem(8, R))


@pytest.mark.parametrize("noise_batch", [(), (2, 3)])
@pytest.mark.parametrize("groups", ["singles", "mixed"])
def test_classes_of_a_task_share_its_features(groups, noise_batch):
    features, noise, _ = problem(8, 3, (2, 1))
    noise = noise * (1 + torch.rand(*noise_batch, 1, dtype=torch.float64))
    residual = reference.random_residual(8, (2, 3))

    def densities(covariance, residual):
        block = covariance.conditional_log_density(residual, torch.tensor([6, 2, 1, 5]))
        many = covariance.block_log_densities(residual, GROUPS[groups])
        return torch.cat([block.unsqueeze(-1), many], dim=-1)

    assert_same(densities, (features, noise, residual))


@pytest.mark.parametrize("features_batch", [(2, 3), (2, 1), ()])
@pytest.mark.parametrize("b", [4, 9])
def test_members_with_held_out_points_of_their_own(features_batch, b):
    features, noise, _ = problem(9, 3, features_batch)
    residual = reference.random_residual(9, (2, 3))
    held_out = torch.stack([random_rows(9, b, seed) for seed in range(6)]).reshape(2, 3, b)

    def density(covariance, residual):
        return covariance.conditional_log_density(residual, held_out)

    assert_same(density, (features, noise, residual))


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
        places = torch.tensor([i for i, row in enumerate(kept) if row in held_out])
        expected = reference.conditional_log_density(alone, residual[member, kept], places)
        gone = int(missing[member, held_out].sum())
        torch.testing.assert_close(together[member], expected + gone * term)
        for i, row in enumerate(kept):
            expected = reference.conditional_log_density(
                alone, residual[member, kept], torch.tensor([i])
            )
            torch.testing.assert_close(singles[member, row], expected)
        torch.testing.assert_close(singles[member, missing[member]], term.expand(1 + member))


@pytest.mark.parametrize("R", [3, 40])
@pytest.mark.parametrize("noise", [1e-1, 1e-4])
def test_float32_is_close_to_float64(R, noise):
    features, variances, residual = problem(60, R, noise=noise)
    groups = [torch.arange(60).unsqueeze(-1), torch.arange(60).reshape(2, 30)]
    results = []
    for dtype in (torch.float64, torch.float32):
        # Rounded first: the same numbers in either precision.
        given = leaves(*(x.float().to(dtype) for x in (features, variances, residual)))
        covariance = LowRankPlusDiagonal(*given[:2])
        values = [
            covariance.conditional_log_density(given[2], torch.arange(50, 60)),
            covariance.conditional_log_density(given[2], torch.arange(60)),
            covariance.block_log_densities(given[2], groups).sum(),
        ]
        assert all(value.dtype == dtype for value in values)
        gradients = reference.gradients(torch.stack(values), *given)
        results.append([torch.stack(values).detach(), *gradients])
    for double, single in zip(*results, strict=True):
        assert single.dtype == torch.float32
        scale = float(double.abs().max())
        torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-6 * scale)


def test_terms_of_a_learning_curve_add_up():
    inputs = problem(10, 3, (2,))
    orders = random_rows(10, 10).unsqueeze(0)
    assert_same(lambda covariance, residual: covariance.sequential(residual, orders), inputs)
    covariance = LowRankPlusDiagonal(*inputs[:2])
    total = covariance.log_density(inputs[2])
    torch.testing.assert_close(covariance.sequential(inputs[2], orders).sum((-2, -1)), total)


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


@given(n=st.integers(1, 50), R=st.integers(1, 60), k=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_predictions_of_each_point_from_those_before_it(n, R, k, seed):
    orders = torch.stack([random_rows(n, n, seed + i) for i in range(k)])
    assert_predictions_are_those_of_the_dense(*problem(n, R, seed=seed), orders, 1e-8)


@pytest.mark.parametrize("noise", [1e-4, 1e-8])
def test_predictions_at_a_tiny_noise(noise):
    features, variances, errors = problem(50, 4, noise=noise)
    residual = features @ reference.random_residual(4) + variances.sqrt() * errors
    orders = torch.stack([random_rows(50, 50, seed) for seed in range(3)])
    # The dense covariance is the less accurate: it has condition 1 / noise.
    assert_predictions_are_those_of_the_dense(features, variances, residual, orders, 1e-12 / noise)


@given(
    n=st.integers(1, 14),
    R=st.integers(1, 16),
    k=st.integers(1, 4),
    share=st.floats(0.01, 1.0),
    batch=st.sampled_from([(), (1,), (2, 3)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(n, R, k, share, batch, seed):
    b = max(1, round(share * n))
    groups = [torch.stack([random_rows(n, b, seed + i) for i in range(k)])]

    def function(covariance, residual):
        block = covariance.conditional_log_density(residual, groups[0][0])
        many = covariance.block_log_densities(residual, groups)
        torch.testing.assert_close(many[..., 0], block, rtol=1e-8, atol=1e-8)
        return many

    assert_same(function, problem(n, R, batch, seed), 1e-8, 1e-6)


def test_features_that_are_not_finite_are_an_error():
    features, noise, residual = problem(6, 2)
    covariance = LowRankPlusDiagonal(features * torch.nan, noise)
    with pytest.raises(NonFiniteError, match="covariance"):
        covariance.conditional_log_density(residual, torch.tensor([0]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_as_on_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        given = leaves(*(x.to(device) for x in problem(30, 4, (2,))))
        covariance = LowRankPlusDiagonal(*given[:2])
        value = covariance.conditional_log_density(given[2], torch.arange(20, 30))
        groups = [torch.arange(30).unsqueeze(-1), torch.arange(30).reshape(2, 15)]
        blocks = covariance.block_log_densities(given[2], groups)
        total = value.sum() + blocks.sum()
        gradients = reference.gradients(total, *given)
        results.append([x.detach().cpu() for x in (total, *gradients)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
