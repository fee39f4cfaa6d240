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

SHAPES = [(1, 1), (2, 1), (9, 1), (9, 3), (9, 8), (9, 9)]  # n, R


def parts(n: int, R: int, batch: tuple[int, ...] = (), seed: int = 0, noise: float = 0.1):
    """Features ``(*batch, n, R)``, noise variances ``(n,)`` and residuals ``(*batch, n)``."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*batch, n, R, generator=generator, dtype=torch.float64)
    variances = noise * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    return features, variances, reference.random_residual(n, batch, seed + 1)


def with_gradient(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def random_indices(n: int, b: int, seed: int = 3) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:b]


def assert_same(function, parts, rtol: float = 1e-9, gradient_rtol: float = 1e-7):
    """Value and gradient of a function of covariance and residual, low rank against dense."""
    results = []
    for dense in (False, True):
        features, noise, residual = with_gradient(*parts)
        covariance = LowRankPlusDiagonal(features, noise)
        value = function(DenseCovariance(covariance.to_dense()) if dense else covariance, residual)
        weights = 1 + torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape)
        gradients = reference.gradients(weights * value, features, noise, residual)
        results.append((value, gradients))
    (value, gradients), (expected, expected_gradients) = results
    assert value.shape == expected.shape
    torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol)
    for one, other in zip(gradients, expected_gradients, strict=True):
        atol = gradient_rtol * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=gradient_rtol, atol=atol)


def test_its_parts_are_those_of_the_dense_covariance():
    features, noise, _ = parts(5, 2, (3,))
    covariance = LowRankPlusDiagonal(features, noise)
    dense = features @ features.mT + torch.diag(noise)
    torch.testing.assert_close(covariance.to_dense(), dense)
    torch.testing.assert_close(covariance.diagonal(), dense.diagonal(dim1=-2, dim2=-1))
    assert covariance.shape == dense.shape
    assert covariance.dtype == dense.dtype
    assert covariance.device == dense.device
    rows = torch.tensor([4, 0, 1])
    torch.testing.assert_close(covariance.take(rows).to_dense(), dense[:, rows][:, :, rows])
    own = torch.tensor([[0, 3], [2, 1], [4, 2]])
    expected = torch.stack([dense[i][own[i]][:, own[i]] for i in range(3)])
    torch.testing.assert_close(covariance.take(own).to_dense(), expected)


def test_members_share_what_has_no_batch():
    features, noise, _ = parts(5, 2, (3,))
    for covariance in (
        LowRankPlusDiagonal(features, noise),
        LowRankPlusDiagonal(features[0], noise * torch.rand(3, 1, dtype=torch.float64)),
    ):
        dense = covariance.to_dense()
        torch.testing.assert_close(covariance[2].to_dense(), dense[2])
        torch.testing.assert_close(covariance[1:].to_dense(), dense[1:])


@pytest.mark.parametrize(("n", "R"), SHAPES)
def test_the_conditional_is_the_explicit_one(n, R):
    for b in sorted({1, R, R + 1, n - 1, n} & set(range(1, n + 1))):
        held_out = random_indices(n, b)

        def of_low_rank(covariance, residual, held_out=held_out):
            return covariance.conditional_log_density(residual, held_out)

        features, noise, residual = parts(n, R)
        assert_same(of_low_rank, (features, noise, residual))
        dense = LowRankPlusDiagonal(features, noise).to_dense()
        torch.testing.assert_close(
            of_low_rank(LowRankPlusDiagonal(features, noise), residual),
            reference.conditional_log_density(dense, residual, held_out),
            rtol=1e-9,
            atol=1e-9,
        )


GROUPS = {
    "singles": [torch.arange(8).unsqueeze(-1)],
    "folds": [torch.tensor([[3, 0], [5, 1], [2, 4], [7, 6]])],
    "large": [torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])],
    "mixed": [torch.tensor([[7, 0, 3, 1]]), torch.tensor([[2, 4], [6, 5]]), torch.tensor([[1]])],
    "overlapping": [torch.tensor([[0, 1, 2], [2, 1, 5], [7, 2, 6]])],
    "everything": [torch.randperm(8).unsqueeze(0), torch.tensor([[4]])],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("R", [1, 3, 7, 8])
def test_blocks_are_the_explicit_conditionals(groups, R):
    features, noise, residual = parts(8, R)

    def of_blocks(covariance, residual):
        return covariance.block_log_densities(residual, groups)

    assert_same(of_blocks, (features, noise, residual))
    dense = LowRankPlusDiagonal(features, noise).to_dense()
    expected = [
        reference.conditional_log_density(dense, residual, block)
        for group in groups
        for block in group
    ]
    values = of_blocks(LowRankPlusDiagonal(features, noise), residual)
    torch.testing.assert_close(values, torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("b", [1, 2, 4, 6])
def test_gradcheck(batch, b):
    features, noise, residual = with_gradient(*parts(6, 2, batch))
    held_out = random_indices(6, b)
    groups = [torch.stack([held_out, (held_out + 1) % 6])]

    def function(features, noise, residual):
        covariance = LowRankPlusDiagonal(features, noise)
        return (
            covariance.conditional_log_density(residual, held_out),
            covariance.block_log_densities(residual, groups),
        )

    assert torch.autograd.gradcheck(function, (features, noise, residual))


@pytest.mark.parametrize("noise_batch", [(), (2, 1), (2, 3)])
@pytest.mark.parametrize("groups", ["singles", "mixed", "overlapping"])
def test_classes_of_a_task_share_its_features(groups, noise_batch):
    features, noise, _ = parts(8, 3, (2, 1))
    noise = noise * (1 + torch.rand(*noise_batch, 1, dtype=torch.float64))
    residual = reference.random_residual(8, (2, 3))

    def of_all(covariance, residual):
        one = covariance.conditional_log_density(residual, torch.tensor([6, 2, 1, 5]))
        many = covariance.block_log_densities(residual, GROUPS[groups])
        return torch.cat([one.unsqueeze(-1), many], dim=-1)

    assert_same(of_all, (features, noise, residual))
    together = of_all(LowRankPlusDiagonal(features, noise), residual)
    noise = noise.expand(2, 3, 8)
    for task in range(2):
        for way in range(3):
            alone = LowRankPlusDiagonal(features[task, 0], noise[task, way])
            values = of_all(alone, residual[task, way])
            torch.testing.assert_close(together[task, way], values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("features_batch", [(2, 3), (2, 1), ()])
@pytest.mark.parametrize("b", [1, 4, 9])
def test_members_with_held_out_points_of_their_own(features_batch, b):
    features, noise, _ = parts(9, 3, features_batch)
    residual = reference.random_residual(9, (2, 3))
    held_out = torch.stack([random_indices(9, b, seed) for seed in range(6)]).reshape(2, 3, b)

    def own(covariance, residual):
        return covariance.conditional_log_density(residual, held_out)

    assert_same(own, (features, noise, residual))


@pytest.mark.parametrize("noise", [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize("R", [1, 4, 18])
def test_tiny_noise(noise, R):
    # Residuals as the model makes them: those of no model are worth 1e8 nats.
    features, variances, _ = parts(20, R, noise=noise)
    generator = torch.Generator().manual_seed(5)
    weights, errors = torch.randn(R).double(), torch.randn(20, generator=generator).double()
    residual = features @ weights + variances.sqrt() * errors
    groups = [torch.arange(20).unsqueeze(-1), torch.arange(20).reshape(4, 5)]

    def function(covariance, residual):
        one = covariance.conditional_log_density(residual, torch.arange(12, 20))
        return torch.cat([one.unsqueeze(-1), covariance.block_log_densities(residual, groups)])

    # The dense function is the less accurate one: its covariance has condition 1 / noise.
    assert_same(function, (features, variances, residual), 1e-12 / noise, 1e-11 / noise)


def test_masked_points_change_no_density():
    features, noise, residual = parts(8, 3, (2,))
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
        for place, row in enumerate(kept):
            expected = reference.conditional_log_density(
                alone, residual[member, kept], torch.tensor([place])
            )
            torch.testing.assert_close(singles[member, row], expected)
        torch.testing.assert_close(singles[member, missing[member]], term.expand(1 + member))


@pytest.mark.parametrize("R", [3, 40])
@pytest.mark.parametrize("noise", [1e-1, 1e-4])
def test_float32_is_close_to_float64(R, noise):
    features, variances, residual = parts(60, R, noise=noise)
    groups = [torch.arange(60).unsqueeze(-1), torch.arange(60).reshape(2, 30)]
    results = []
    for dtype in (torch.float64, torch.float32):
        # Rounded first: the same numbers in either precision.
        given = with_gradient(*(part.float().to(dtype) for part in (features, variances, residual)))
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


def test_posterior_and_conditional_in_float32():
    features, noise, residual = (part.float() for part in parts(12, 3))
    L, mean = LowRankPlusDiagonal(features, noise).posterior(residual)
    precision = torch.eye(3) + (features / noise.unsqueeze(-1)).mT @ features
    torch.testing.assert_close((L @ L.mT).float(), precision, rtol=1e-4, atol=1e-4)
    right = (features / noise.unsqueeze(-1)).mT @ residual
    torch.testing.assert_close(precision @ mean.float(), right, rtol=1e-3, atol=1e-3)
    covariance, new = LowRankPlusDiagonal(features, noise), torch.arange(8, 12)
    matrix = covariance.to_dense().double()
    mean, given = reference.conditional_moments(matrix, residual.double(), new)
    normal = torch.distributions.MultivariateNormal(mean, 0.5 * (given + given.mT))
    found = covariance.conditional_log_density(residual, new)
    torch.testing.assert_close(
        found.double(), normal.log_prob(residual[new].double()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("held_out", [[0], [4, 1], [6, 0, 3], [3, 1, 0, 2, 6, 5, 4]])
def test_leave_one_out_moments(held_out):
    features, noise, residual = parts(7, 2, (2,))
    covariance, held_out = LowRankPlusDiagonal(features, noise), torch.tensor(held_out)
    moments = covariance.leave_one_out(residual, held_out)
    dense = covariance.to_dense()
    for member in range(2):
        for place, row in enumerate(held_out):
            expected = reference.conditional_moments(
                dense[member], residual[member], row.unsqueeze(0)
            )
            for one, other in zip(moments, expected, strict=True):
                torch.testing.assert_close(
                    one[member, place], other.squeeze(), rtol=1e-9, atol=1e-9
                )


def test_terms_of_a_learning_curve_add_up():
    features, noise, residual = parts(10, 3, (2,))
    order = random_indices(10, 10)

    def curve(covariance, residual):
        return covariance.sequential(residual, order.unsqueeze(0)).squeeze(-2)

    assert_same(curve, (features, noise, residual))
    covariance = LowRankPlusDiagonal(features, noise)
    everything = covariance.conditional_log_density(residual, torch.arange(10))
    torch.testing.assert_close(curve(covariance, residual).sum(-1), everything)


@given(
    n=st.integers(1, 14),
    R=st.integers(1, 16),
    k=st.integers(1, 4),
    share=st.floats(0.01, 1.0),
    batch=st.sampled_from([(), (1,), (2, 3)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_shape(n, R, k, share, batch, seed):
    b = max(1, round(share * n))
    groups = [torch.stack([random_indices(n, b, seed + i) for i in range(k)])]

    def function(covariance, residual):
        one = covariance.conditional_log_density(residual, groups[0][0])
        many = covariance.block_log_densities(residual, groups)
        torch.testing.assert_close(many[..., 0], one, rtol=1e-8, atol=1e-8)
        return many

    assert_same(function, parts(n, R, batch, seed), 1e-8, 1e-6)


def test_features_that_are_not_finite_are_an_error():
    features, noise, residual = parts(6, 2)
    covariance = LowRankPlusDiagonal(features * torch.nan, noise)
    with pytest.raises(NonFiniteError, match="covariance"):
        covariance.conditional_log_density(residual, torch.tensor([0]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_as_on_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        given = with_gradient(*(part.to(device) for part in parts(30, 4, (2,))))
        covariance = LowRankPlusDiagonal(*given[:2])
        value = covariance.conditional_log_density(given[2], torch.arange(20, 30))
        groups = [torch.arange(30).unsqueeze(-1), torch.arange(30).reshape(2, 15)]
        blocks = covariance.block_log_densities(given[2], groups)
        total = value.sum() + blocks.sum()
        gradients = reference.gradients(total, *given)
        results.append([part.detach().cpu() for part in (total, *gradients)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
