from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpclml.errors import UnsupportedError
from gpclml.linalg import DenseCovariance, symmetric_product

PARTITION = torch.tensor([[3, 0], [5, 1], [2, 4]])
OVERLAPPING = torch.tensor([[3, 0, 1], [1, 4, 0], [2, 5, 3], [5, 3, 4]])
SINGLES = torch.arange(6).unsqueeze(-1)
PART = torch.tensor([[1, 2], [4, 0]])
BLOCKS = [PARTITION, OVERLAPPING, SINGLES, PART]


@pytest.mark.parametrize("blocks", BLOCKS, ids=["partition", "overlap", "singles", "part"])
def test_matches_the_explicit_conditional(blocks):
    K = reference.random_covariance(6).requires_grad_()
    r = reference.random_residual(6).requires_grad_()
    weights = 1.0 + torch.arange(len(blocks), dtype=torch.float64)
    values = DenseCovariance(K).block_log_densities(r, [blocks])
    expected = torch.stack([reference.conditional_log_density(K, r, block) for block in blocks])
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-10)
    of_K, of_r = reference.gradients(weights * values, K, r)
    expected_K, expected_r = reference.gradients(weights * expected, K, r)
    torch.testing.assert_close(of_K, reference.symmetrized(expected_K), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(of_r, expected_r, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("blocks", BLOCKS, ids=["partition", "overlap", "singles", "part"])
def test_gradcheck(batch, blocks):
    A = torch.randn(*batch, 6, 6, dtype=torch.float64, requires_grad=True)
    r = reference.random_residual(6, batch).requires_grad_()
    eye = torch.eye(6, dtype=torch.float64)

    def function(A, r):
        return DenseCovariance(A @ A.mT + eye).held_out_log_density(r, [blocks])

    assert torch.autograd.gradcheck(function, (A, r))


@pytest.mark.parametrize(
    ("covariances", "residuals"),
    [((2, 1), (2, 3)), ((), (4,)), ((1, 3), (2, 1)), ((2, 1, 3), (2, 2, 3))],
)
@pytest.mark.parametrize("blocks", BLOCKS, ids=["partition", "overlap", "singles", "part"])
def test_shared_covariances_are_copies_of_one(blocks, covariances, residuals):
    K = reference.random_covariance(6, covariances).requires_grad_()
    r = reference.random_residual(6, residuals).requires_grad_()
    batch = torch.broadcast_shapes(covariances, residuals)
    shared = DenseCovariance(K).held_out_log_density(r, [blocks])
    copies = DenseCovariance(K.expand(*batch, 6, 6).clone()).held_out_log_density(
        r.expand(*batch, 6).clone(), [blocks]
    )
    assert shared.shape == batch
    values = DenseCovariance(K).block_log_densities(r, [blocks])
    torch.testing.assert_close(values.sum(-1), shared, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shared, copies, rtol=1e-10, atol=1e-10)
    weights = torch.rand(copies.shape, generator=torch.Generator().manual_seed(0)).double()
    of_shared = reference.gradients(weights * shared, K, r)
    of_copies = reference.gradients(weights * copies, K, r)
    for one, other in zip(of_shared, of_copies, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@given(
    n=st.integers(1, 14),
    k=st.integers(1, 5),
    share=st.floats(0.01, 1.0),
    batch=st.sampled_from([(), (1,), (2, 3)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_every_block_is_the_conditional_of_the_other_road(n, k, share, batch, seed):
    b = max(1, round(share * n))
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.stack([torch.randperm(n, generator=generator)[:b] for _ in range(k)])
    K = reference.random_covariance(n, batch, seed).requires_grad_()
    r = reference.random_residual(n, batch, seed + 1).requires_grad_()
    values = DenseCovariance(K).block_log_densities(r, [blocks])
    expected = torch.stack(
        [DenseCovariance(K).conditional_log_density(r, block) for block in blocks], -1
    )
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-8)
    total = DenseCovariance(K).held_out_log_density(r, [blocks])
    torch.testing.assert_close(total, expected.sum(-1), rtol=1e-8, atol=1e-8)
    pairs = zip(reference.gradients(total, K, r), reference.gradients(expected, K, r), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [100, 600])
@pytest.mark.parametrize("b", [1, 10])
def test_float32_is_close_to_float64(n, b):
    K, r = reference.random_covariance(n), reference.random_residual(n)
    blocks = torch.randperm(n, generator=torch.Generator().manual_seed(0)).view(-1, b)
    results = []
    for dtype in (torch.float64, torch.float32):
        K_ = K.to(dtype).requires_grad_()
        value = DenseCovariance(K_).held_out_log_density(r.to(dtype), [blocks])
        assert value.dtype == dtype
        results.append([value.detach().double(), reference.gradients(value, K_)[0].double()])
    for double, single in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-3, atol=2e-3 * float(double.abs().max()))


@pytest.mark.parametrize(("n", "k", "batch"), [(5, 3, ()), (600, 20, ()), (513, 7, (2,))])
def test_symmetric_product(n, k, batch):
    left = torch.randn(*batch, n, k, dtype=torch.float64)
    middle = torch.randn(*batch, k, k, dtype=torch.float64)
    right = left @ (middle + middle.mT)
    torch.testing.assert_close(symmetric_product(left, right), left @ right.mT)


def test_a_second_derivative_is_refused():
    K, r = reference.random_covariance(6).requires_grad_(), reference.random_residual(6)
    value = DenseCovariance(K).held_out_log_density(r, [PARTITION])
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(value, K, create_graph=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_of_different_sizes_share_one_factorization(overlap):
    n = 11
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    groups = [order[:8].view(2, 4), order[8 - overlap : 11 - overlap].view(1, 3)]
    K = reference.random_covariance(n, (2,)).requires_grad_()
    r = reference.random_residual(n, (2,)).requires_grad_()
    covariance = DenseCovariance(K)
    together = covariance.held_out_log_density(r, groups)
    values = [covariance.block_log_densities(r, [group]) for group in groups]
    torch.testing.assert_close(covariance.block_log_densities(r, groups), torch.cat(values, -1))
    alone = sum(covariance.held_out_log_density(r, [group]) for group in groups)
    torch.testing.assert_close(together, alone)
    pairs = zip(reference.gradients(together, K, r), reference.gradients(alone, K, r), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)
