from __future__ import annotations

import pytest
import torch
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

import reference
from gpclml.errors import ArgumentError, NonFiniteError
from gpclml.gram import DOUBLE_UP_TO
from gpclml.linalg import (
    factorization_dtype,
    permute,
    safe_cholesky,
    take,
    take_rows,
)


def test_policy_of_precision():
    small = torch.eye(DOUBLE_UP_TO)
    large = torch.eye(DOUBLE_UP_TO + 1)
    assert factorization_dtype(small) == torch.float64
    assert factorization_dtype(large) == torch.float32
    assert factorization_dtype(large.double()) == torch.float64
    assert factorization_dtype(small, torch.float32) == torch.float32
    with pytest.raises(ArgumentError, match="factor_dtype"):
        factorization_dtype(small, torch.float16)


def test_a_good_matrix_is_factored_without_jitter():
    K = reference.random_covariance(20, (3,))
    L = safe_cholesky(K)
    torch.testing.assert_close(L @ L.mT, K, rtol=0, atol=1e-13)


def test_float32_failure_is_repeated_in_float64_without_jitter():
    # Positive definite in float64, indefinite to a float32 factorization.
    x = torch.linspace(0, 1, 200, dtype=torch.float64)
    K = torch.exp(-0.5 * (x[:, None] - x).square()).float() + 1.5e-6 * torch.eye(200)
    assert torch.linalg.cholesky_ex(K)[1] > 0
    assert torch.linalg.cholesky_ex(K.double())[1] == 0
    assert safe_cholesky(K, torch.float32).dtype == torch.float64


def test_jitter_goes_to_the_failing_member_only_and_scales_with_it():
    good = reference.random_covariance(6)
    singular = 1e6 * torch.ones(6, 6, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match="jitter"):
        L = safe_cholesky(torch.stack([good, singular]))
    torch.testing.assert_close(L[0] @ L[0].mT, good, rtol=0, atol=1e-13)
    torch.testing.assert_close(L[1] @ L[1].mT, singular, rtol=1e-6, atol=0)


def test_an_indefinite_matrix_raises_the_error_botorch_retries_on():
    K = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    with pytest.raises(NotPSDError, match=r"shape \(2, 2\)"):
        safe_cholesky(K)


def singular_in_single_precision(seed):
    """Ten points and one of them twice, with a noise that float32 loses beside the kernel.

    The last pivot is rounding: zero, or one or two spacings of the variance, which then pass for
    the variance of the second copy given the first.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x[:1]])
    rounding = 6e-8 * torch.randn(11, 11, generator=generator, dtype=torch.float64).tril(-1)
    K = 1e5 * torch.exp(-0.5 * torch.cdist(x, x).square()) * (1 + rounding + rounding.mT)
    return K.float() + 1e-4 * torch.eye(11)


@pytest.mark.parametrize("seed", range(16))
def test_a_matrix_that_is_singular_to_its_own_rounding_is_not_factored_in_silence(seed):
    K = singular_in_single_precision(seed)
    with pytest.warns(NumericalWarning, match="singular to rounding: jitter of"):
        L = safe_cholesky(K)
    assert (L.diagonal().square() > 2 * torch.finfo(K.dtype).eps * K.diagonal()).all()
    torch.testing.assert_close(L @ L.mT, K.double(), rtol=0, atol=1e-5 * 1e5)
    assert safe_cholesky(K, checked=False).diagonal().isnan().all()


def test_jitter_of_a_singular_member_leaves_the_others_as_they_are():
    good = reference.random_covariance(11).float()
    bad = singular_in_single_precision(0)
    with pytest.warns(NumericalWarning, match="jitter"):
        L = safe_cholesky(torch.stack([good, bad]).unsqueeze(1))
    assert L.shape == (2, 1, 11, 11)
    torch.testing.assert_close(L[0, 0] @ L[0, 0].mT, good.double(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite(value):
    K = reference.random_covariance(4)
    K[2, 1] = K[1, 2] = value
    with pytest.raises(NonFiniteError, match="2 non-finite of 16 entries") as caught:
        safe_cholesky(K)
    assert isinstance(caught.value, NanError)  # BoTorch steps back on it


N, BATCH = 5, (2, 3)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("b", [1, 3, N])
def test_orders_are_those_of_plain_indexing(own, b):
    orders = [torch.randperm(N)[:b] for _ in range(6)] if own else [torch.randperm(N)[:b]] * 6
    order = torch.stack(orders).reshape(*BATCH, b) if own else orders[0]
    vector, matrix = torch.randn(*BATCH, N), torch.randn(*BATCH, N, N)
    rectangle = torch.randn(*BATCH, N, 2)
    members = zip(orders, vector.reshape(6, N), matrix.reshape(6, N, N), strict=True)
    for place, (one, v, M) in enumerate(members):
        member = divmod(place, BATCH[1])
        assert torch.equal(take(vector, order)[member], v[one])
        assert torch.equal(permute(matrix, order)[member], M[one][:, one])
        assert torch.equal(take_rows(rectangle, order)[member], rectangle[member][one])
