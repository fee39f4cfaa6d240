from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpclml.errors import UnsupportedError
from gpclml.linalg import DenseCovariance, safe_cholesky


def held_out_of(n, b, seed=3):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:b]


@pytest.mark.parametrize(("n", "b"), [(1, 1), (2, 1), (2, 2), (9, 1), (9, 2), (9, 5), (9, 9)])
def test_conditional_matches_the_explicit_conditional(n, b):
    K = reference.random_covariance(n).requires_grad_()
    r = reference.random_residual(n).requires_grad_()
    held_out = held_out_of(n, b)
    value = DenseCovariance(K).conditional_log_density(r, held_out)
    expected = reference.conditional_log_density(K, r, held_out)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    of_K, of_r = reference.gradients(value, K, r)
    expected_K, expected_r = reference.gradients(expected, K, r)
    torch.testing.assert_close(of_K, reference.symmetrized(expected_K), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(of_r, expected_r, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("b", [1, 2, 4, 7])
def test_conditional_gradcheck(batch, b):
    n = 7
    A = torch.randn(*batch, n, n, dtype=torch.float64, requires_grad=True)
    r = reference.random_residual(n, batch).requires_grad_()
    eye = torch.eye(n, dtype=torch.float64)
    weights = 1.0 + torch.arange(torch.Size(batch).numel(), dtype=torch.float64).view(batch)

    def function(A, r):
        return weights * DenseCovariance(A @ A.mT + eye).conditional_log_density(
            r, held_out_of(n, b)
        )

    assert torch.autograd.gradcheck(function, (A, r))


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("b", [1, 4, 9])
def test_members_with_held_out_points_of_their_own_are_as_alone(batch, b):
    n, count = 9, torch.Size(batch).numel()
    K = torch.stack([reference.random_covariance(n, seed=seed) for seed in range(count)])
    K = K.reshape(*batch, n, n).requires_grad_()
    r = reference.random_residual(n, batch).requires_grad_()
    held_out = torch.stack([held_out_of(n, b, seed) for seed in range(count)])
    weights = 1.0 + torch.arange(count, dtype=torch.float64)
    together = DenseCovariance(K).conditional_log_density(r, held_out.reshape(*batch, b)).flatten()
    alone = torch.stack(
        [
            DenseCovariance(K.flatten(0, -3)[i]).conditional_log_density(
                r.flatten(0, -2)[i], held_out[i]
            )
            for i in range(count)
        ]
    )
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        reference.gradients(weights @ together, K, r),
        reference.gradients(weights @ alone, K, r),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("permuted", [False, True])
def test_sequential_gradcheck_for_any_weights(batch, permuted):
    n = 5
    A = torch.randn(*batch, n, n, dtype=torch.float64, requires_grad=True)
    r = reference.random_residual(n, batch).requires_grad_()
    eye = torch.eye(n, dtype=torch.float64)
    orders = held_out_of(n, n).unsqueeze(0) if permuted else None

    def function(A, r):
        return DenseCovariance(A @ A.mT + eye).sequential(r, orders).squeeze(-2)

    assert torch.autograd.gradcheck(function, (A, r))


def test_sequential_matches_one_conditional_a_point():
    n = 8
    K, r, order = reference.random_covariance(n), reference.random_residual(n), held_out_of(n, n)
    terms = DenseCovariance(K).sequential(r, order.unsqueeze(0)).squeeze(-2)
    expected = reference.sequential_log_densities(K, r, order)
    torch.testing.assert_close(terms, expected, rtol=1e-10, atol=1e-10)


@given(
    n=st.integers(1, 12),
    share=st.floats(0.01, 1.0),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_tail_sums_of_the_terms_are_the_conditional(n, share, batch, seed):
    b = max(1, round(share * n))
    K = reference.random_covariance(n, batch, seed).requires_grad_()
    r = reference.random_residual(n, batch, seed + 1).requires_grad_()
    held_out = held_out_of(n, b, seed)
    kept = torch.tensor([i for i in range(n) if i not in held_out.tolist()], dtype=torch.long)
    terms = DenseCovariance(K).sequential(r, torch.cat([kept, held_out]).unsqueeze(0)).squeeze(-2)
    value = DenseCovariance(K).conditional_log_density(r, held_out)
    torch.testing.assert_close(terms[..., n - b :].sum(-1), value, rtol=1e-9, atol=1e-9)
    of_terms = reference.gradients(terms[..., n - b :], K, r)
    of_value = reference.gradients(value, K, r)
    for one, other in zip(of_terms, of_value, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
    # All terms together are the log marginal likelihood, in any order.
    everything = DenseCovariance(K).conditional_log_density(r, torch.arange(n))
    torch.testing.assert_close(terms.sum(-1), everything, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("b", [2, 6, 10])
def test_batch_is_a_stack_of_singles(b):
    n, batch = 10, (2, 3)
    K, r = reference.random_covariance(n, batch), reference.random_residual(n, batch)
    K.requires_grad_()
    held_out = held_out_of(n, b)
    value = DenseCovariance(K).conditional_log_density(r, held_out)
    (gradient,) = reference.gradients(value, K)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)):
        i, j = index.tolist()
        single = K[i, j].detach().requires_grad_()
        one = DenseCovariance(single).conditional_log_density(r[i, j], held_out)
        torch.testing.assert_close(value[i, j], one)
        torch.testing.assert_close(gradient[i, j], *reference.gradients(one, single))


def test_covariance_and_residual_broadcast():
    n = 6
    K = reference.random_covariance(n).requires_grad_()
    r = reference.random_residual(n, (4,))
    value = DenseCovariance(K).conditional_log_density(r, torch.tensor([1, 4]))
    assert value.shape == (4,)
    for i in range(4):
        one = DenseCovariance(K).conditional_log_density(r[i], torch.tensor([1, 4]))
        torch.testing.assert_close(value[i], one)
    assert reference.gradients(value, K)[0].shape == (n, n)


@pytest.mark.parametrize("n", [100, 600])  # below and above the bound of float64 factors
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_float32_is_close_to_float64(n, share):
    K, r = reference.random_covariance(n), reference.random_residual(n)
    held_out = held_out_of(n, round(share * n))
    results = []
    for dtype in (torch.float64, torch.float32):
        K_, r_ = K.to(dtype).requires_grad_(), r.to(dtype).requires_grad_()
        value = DenseCovariance(K_).conditional_log_density(r_, held_out)
        assert value.dtype == dtype
        results.append([t.detach().double() for t in (value, *reference.gradients(value, K_, r_))])
    for double, single in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-3, atol=2e-3 * float(double.abs().max()))


def test_a_second_derivative_is_refused():
    K = reference.random_covariance(4).requires_grad_()
    value = DenseCovariance(K).log_density(reference.random_residual(4))
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(value, K, create_graph=True)


@pytest.mark.parametrize(
    ("covariances", "batch"),
    [((), (3,)), ((2, 1), (2, 3)), ((1, 3), (2, 3)), ((3,), (2, 3)), ((2, 1, 1), (2, 3, 2))],
)
@pytest.mark.parametrize("b", [1, 4, 7])
def test_residuals_that_share_a_covariance_are_as_alone(covariances, batch, b):
    n, held_out = 7, held_out_of(7, b)
    K = reference.random_covariance(n, covariances).requires_grad_()
    r = reference.random_residual(n, batch).requires_grad_()
    weights = 1.0 + torch.arange(torch.Size(batch).numel(), dtype=torch.float64).view(batch)
    value = DenseCovariance(K).conditional_log_density(r, held_out)
    apart = K.expand(*batch, n, n).clone()  # a covariance of its own for each
    expected = DenseCovariance(apart).conditional_log_density(r, held_out)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    gradients = reference.gradients((weights * value).sum(), K, r)
    expected = reference.gradients((weights * expected).sum(), K, r)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_shared_covariance_is_factored_once(monkeypatch):
    from gpclml.linalg import dense

    shapes = []

    def counted(covariance, factor_dtype=None, **options):
        shapes.append(covariance.shape)
        return safe_cholesky(covariance, factor_dtype, **options)

    monkeypatch.setattr(dense, "safe_cholesky", counted)
    K, r = reference.random_covariance(7, (4, 1)), reference.random_residual(7, (4, 5))
    DenseCovariance(K).conditional_log_density(r, held_out_of(7, 3))
    assert shapes == [(4, 7, 7)]
