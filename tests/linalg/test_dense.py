"""Cholesky factors: their precision, jitter and errors, and matrices made of them."""

import pytest
import torch
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

import reference
from gpclml.errors import NonFiniteError
from gpclml.gram import DOUBLE_UP_TO
from gpclml.linalg import DenseCovariance, safe_cholesky, symmetric_product
from gpclml.linalg.matrices import inverse_of_factor


@pytest.mark.parametrize("blocks", ["some", "all", "each", "leave-one-out"])
def test_factors_in_single_precision(blocks):
    """Of more points than are factored in double precision."""
    n = DOUBLE_UP_TO + 50
    order = torch.randperm(n)
    held_out = {"some": order[:50].unsqueeze(0), "all": order.unsqueeze(0)}
    results = []
    for dtype in (torch.float64, torch.float32):
        K = reference.random_covariance(n).to(dtype).requires_grad_()
        residual = reference.random_residual(n).to(dtype).requires_grad_()
        covariance = DenseCovariance(K)
        if blocks == "leave-one-out":
            results.append(covariance.leave_one_out(residual, order[:20]))
            continue
        rows = held_out.get(blocks, order.unsqueeze(-1))
        value = covariance.held_out_log_density(residual, [rows])
        results.append([value, *reference.gradients(value, K, residual)])
    for double, single in zip(*results, strict=True):
        assert single.dtype == torch.float32
        atol = 2e-3 * float(double.detach().abs().max())
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=atol)


def test_policy_of_precision():
    small, large = torch.eye(DOUBLE_UP_TO), torch.eye(DOUBLE_UP_TO + 1)
    assert safe_cholesky(small).dtype == torch.float64
    assert safe_cholesky(large).dtype == torch.float32
    assert safe_cholesky(large.double()).dtype == torch.float64


def test_float32_failure_is_repeated_in_float64_without_jitter(monkeypatch):
    monkeypatch.setattr("gpclml.linalg.matrices.DOUBLE_UP_TO", 100)
    # Positive definite in float64, indefinite to a float32 factorization.
    x = torch.linspace(0, 1, 200, dtype=torch.float64)
    K = torch.exp(-0.5 * (x[:, None] - x).square()).float() + 1.5e-6 * torch.eye(200)
    assert torch.linalg.cholesky_ex(K)[1] > 0
    assert torch.linalg.cholesky_ex(K.double())[1] == 0
    assert safe_cholesky(K).dtype == torch.float64


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


@pytest.mark.parametrize("seed", range(4))
def test_a_matrix_that_is_singular_to_its_own_rounding_is_not_factored_in_silence(seed):
    K = singular_in_single_precision(seed)
    with pytest.warns(NumericalWarning, match="singular to rounding: jitter of"):
        L = safe_cholesky(K)
    assert (L.diagonal().square() > 2 * torch.finfo(K.dtype).eps * K.diagonal()).all()
    torch.testing.assert_close(L @ L.mT, K.double(), rtol=0, atol=1e-5 * 1e5)
    assert safe_cholesky(K, checked=False).diagonal().isnan().all()


def test_jitter_goes_to_the_failing_member_alone_and_scales_with_it():
    good = reference.random_covariance(11)
    singular = 1e6 * torch.ones(11, 11, dtype=torch.float64)
    for pair in ([good, singular], [good.float(), singular_in_single_precision(0)]):
        with pytest.warns(NumericalWarning, match="jitter"):
            L = safe_cholesky(torch.stack(pair).unsqueeze(1)).squeeze(1)
        product = L @ L.mT
        torch.testing.assert_close(product[0], pair[0].double(), rtol=0, atol=1e-13)
        torch.testing.assert_close(product[1], pair[1].double(), rtol=2e-6, atol=1.0)


def test_jitter_grows_tenfold():
    # Eigenvalues 1 and -3e-7: of jitters 1e-8, 1e-7, ... of the mean diagonal 1/2 the third helps.
    K = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).double() - 1.5e-7 * torch.tensor([[1, -1], [-1, 1]])
    with pytest.warns(NumericalWarning, match=r"jitter of 5\.0e-07 was added"):
        safe_cholesky(K)


@pytest.mark.parametrize(
    ("variance", "dtype", "jitter"),
    [
        (2.0, torch.float64, "2.0e-08"),
        (2.0, torch.float32, "2.0e-06"),
        (0.0, torch.float64, "1.0e-08"),
    ],
)
def test_the_first_jitter_is_that_of_the_type_of_the_entries(variance, dtype, jitter):
    K = variance * torch.ones(3, 3, dtype=dtype)
    with pytest.warns(NumericalWarning, match=f"jitter of {jitter} was added"):
        L = safe_cholesky(K)
    expected = K.double() + float(jitter) * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(L @ L.mT, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite(value):
    K = reference.random_covariance(4)
    K[2, 1] = K[1, 2] = value
    with pytest.raises(NonFiniteError, match="2 non-finite of 16 entries") as caught:
        safe_cholesky(K)
    assert isinstance(caught.value, NanError)  # BoTorch steps back on it


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("n", "batch"), [(1, ()), (5, (2,)), (300, (2,)), (1025, ())])
def test_inverse_of_a_factor(n, batch, in_place):
    K = reference.random_covariance(n, batch)
    inverse = inverse_of_factor(safe_cholesky(K), in_place=in_place)
    identity = torch.eye(n, dtype=torch.float64).expand(K.shape)
    torch.testing.assert_close(inverse @ K, identity, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("n", "k", "batch"), [(5, 3, ()), (600, 20, ()), (513, 7, (2,))])
def test_symmetric_product(n, k, batch):
    left = torch.randn(*batch, n, k, dtype=torch.float64)
    middle = torch.randn(*batch, k, k, dtype=torch.float64)
    right = left @ (middle + middle.mT)
    torch.testing.assert_close(symmetric_product(left, right), left @ right.mT)
