"""Densities by a Cholesky factor against explicit conditionals, and the matrices they take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

import reference
from gpclml.errors import ArgumentError, NonFiniteError
from gpclml.gram import DOUBLE_UP_TO
from gpclml.linalg import (
    DenseCovariance,
    dense,
    factorization_dtype,
    permute,
    safe_cholesky,
    symmetric_product,
    take,
    take_rows,
)
from gpclml.linalg.matrices import inverse_of_factor

N = 7
BLOCKS = {
    "partition": [torch.tensor([[3, 0], [5, 1], [2, 4]])],
    "overlap": [torch.tensor([[3, 0, 1], [1, 4, 0], [2, 5, 3]])],
    "singles": [torch.arange(N).unsqueeze(-1)],
    "sizes": [torch.tensor([[1, 2], [4, 0]]), torch.tensor([[6, 3, 5]])],
    "overlapping sizes": [torch.tensor([[1, 2], [4, 0]]), torch.tensor([[0, 3, 5]])],
    "one": [torch.tensor([[4]])],
    "two": [torch.tensor([[6, 1]])],  # few enough for triangular solves
    "most": [torch.tensor([[5, 0, 2, 3, 1, 6]])],
    "all": [torch.randperm(N, generator=torch.Generator().manual_seed(0)).unsqueeze(0)],
}
BATCHES = [
    ((), (4,)), ((2, 3), (2, 3)), ((2, 1), (2, 3)), ((1, 3), (2, 1)), ((3,), ()),
    ((2, 1, 3), (2, 2, 3)),
]  # fmt: skip


def problem(n=N, batch=(), residual_batch=None, seed=0):
    K = reference.random_covariance(n, batch, seed).requires_grad_()
    batch = batch if residual_batch is None else residual_batch
    return K, reference.random_residual(n, batch, seed + 1).requires_grad_()


def assert_close(ours, theirs, tolerance):
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def random_rows(n, b, seed=3):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:b]


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
def test_values_and_gradients_are_those_of_explicit_conditionals(blocks):
    K, r = problem()
    values = DenseCovariance(K).block_log_densities(r, blocks)
    expected = torch.stack(
        [reference.conditional_log_density(K, r, block) for group in blocks for block in group]
    )
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-10)
    total = DenseCovariance(K).held_out_log_density(r, blocks)
    torch.testing.assert_close(total, expected.sum(), rtol=1e-10, atol=1e-10)
    weights = 1.0 + torch.arange(len(values), dtype=torch.float64)
    both = (weights * values).sum() + 3.0 * total, ((weights + 3.0) * expected).sum()
    ours, (grad_K, grad_r) = (reference.gradients(value, K, r) for value in both)
    assert_close(ours, (reference.symmetrized(grad_K), grad_r), 1e-8)


@pytest.mark.parametrize("blocks", ["partition", "overlap", "two", "most", "all"])
@pytest.mark.parametrize(("covariances", "residuals"), BATCHES)
def test_members_of_a_batch_are_as_alone(covariances, residuals, blocks):
    """Also where a covariance is shared by several residuals, or a residual by covariances."""
    K, r = problem(N, covariances, residuals)
    batch = torch.broadcast_shapes(covariances, residuals)
    together = DenseCovariance(K).held_out_log_density(r, BLOCKS[blocks])
    assert together.shape == batch
    every_K, every_r = K.expand(*batch, N, N).flatten(0, -3), r.expand(*batch, N).flatten(0, -2)
    alone = torch.stack(
        [
            DenseCovariance(matrix).held_out_log_density(residual, BLOCKS[blocks])
            for matrix, residual in zip(every_K, every_r, strict=True)
        ]
    )
    torch.testing.assert_close(together.flatten(), alone, rtol=1e-10, atol=1e-10)
    values = DenseCovariance(K).block_log_densities(r, BLOCKS[blocks])
    torch.testing.assert_close(values.sum(-1), together, rtol=1e-10, atol=1e-10)
    weights = 1.0 + torch.arange(len(alone), dtype=torch.float64)
    ours = reference.gradients(weights * together.flatten(), K, r)
    assert_close(ours, reference.gradients(weights * alone, K, r), 1e-8)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("b", [1, 4, N])
def test_members_with_held_out_points_of_their_own_are_as_alone(batch, b):
    count = torch.Size(batch).numel()
    K, r = problem(N, batch)
    held_out = torch.stack([random_rows(N, b, seed) for seed in range(count)])
    together = DenseCovariance(K).conditional_log_density(r, held_out.reshape(*batch, b)).flatten()
    members = zip(K.flatten(0, -3), r.flatten(0, -2), held_out, strict=True)
    alone = torch.stack(
        [DenseCovariance(k).conditional_log_density(y, rows) for k, y, rows in members]
    )
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    weights = 1.0 + torch.arange(count, dtype=torch.float64)
    ours = reference.gradients(weights * together, K, r)
    assert_close(ours, reference.gradients(weights * alone, K, r), 1e-10)


@pytest.mark.parametrize("blocks", ["partition", "overlap", "two", "most", "all", "curve"])
def test_gradcheck(blocks):
    A = torch.randn(2, N, N, dtype=torch.float64, requires_grad=True)
    _, r = problem(N, (2,))

    def function(A, r):
        covariance = DenseCovariance(A @ A.mT + torch.eye(N, dtype=torch.float64))
        if blocks == "curve":
            return covariance.sequential(r, random_rows(N, N).unsqueeze(0))
        return covariance.held_out_log_density(r, BLOCKS[blocks])

    assert torch.autograd.gradcheck(function, (A, r))


@given(
    n=st.integers(1, 12),
    k=st.integers(1, 4),
    share=st.floats(0.01, 1.0),
    batch=st.sampled_from([(), (1,), (2, 3)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_blocks_conditionals_and_learning_curves_agree_in_any_shape(n, k, share, batch, seed):
    b = max(1, round(share * n))
    orders = torch.stack([random_rows(n, n, seed + i) for i in range(k)])
    blocks = orders[:, n - b :]
    K, r = problem(n, batch, seed=seed)
    covariance = DenseCovariance(K)
    values = covariance.block_log_densities(r, [blocks])
    expected = torch.stack([covariance.conditional_log_density(r, rows) for rows in blocks], -1)
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-8)
    tails = covariance.sequential(r, orders)[..., n - b :].sum(-1)
    torch.testing.assert_close(tails, expected, rtol=1e-8, atol=1e-8)
    total = covariance.held_out_log_density(r, [blocks])
    torch.testing.assert_close(total, expected.sum(-1), rtol=1e-8, atol=1e-8)
    wanted = reference.gradients(expected, K, r)
    for value in (total, tails):
        assert_close(reference.gradients(value, K, r), wanted, 1e-6)


def test_each_term_of_a_learning_curve_is_an_explicit_conditional():
    K, r = problem()
    order = random_rows(N, N)
    terms = DenseCovariance(K).sequential(r, order.unsqueeze(0)).squeeze(-2)
    expected = reference.sequential_log_densities(K, r, order)
    torch.testing.assert_close(terms, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [100, 600])  # below and above the bound of float64 factors
@pytest.mark.parametrize("b", [1, 10, "some", "all", "loo"])
def test_float32_is_close_to_float64(n, b):
    K, r = problem(n)
    order = random_rows(n, n)
    blocks = {"some": order[: n // 10].unsqueeze(0), "all": order.unsqueeze(0)}.get(b)
    results = []
    for dtype in (torch.float64, torch.float32):
        K_, r_ = (values.detach().to(dtype).requires_grad_() for values in (K, r))
        if b == "loo":
            results.append(DenseCovariance(K_).leave_one_out(r_, order[:20]))
            continue
        block = order.view(-1, b) if blocks is None else blocks
        value = DenseCovariance(K_).held_out_log_density(r_, [block])
        results.append([value, *reference.gradients(value, K_, r_)])
    for double, single in zip(*results, strict=True):
        assert single.dtype == torch.float32
        atol = 2e-3 * float(double.detach().abs().max())
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=atol)


def test_a_shared_covariance_is_factored_once(monkeypatch):
    shapes = []

    def counted(covariance, *arguments, **options):
        shapes.append(covariance.shape)
        return safe_cholesky(covariance, *arguments, **options)

    monkeypatch.setattr(dense, "safe_cholesky", counted)
    K, r = problem(N, (4, 1), (4, 5))
    DenseCovariance(K).conditional_log_density(r, random_rows(N, 3))
    assert shapes == [(4, N, N)]


def test_policy_of_precision():
    small, large = torch.eye(DOUBLE_UP_TO), torch.eye(DOUBLE_UP_TO + 1)
    assert factorization_dtype(small) == torch.float64
    assert factorization_dtype(large) == torch.float32
    assert factorization_dtype(large.double()) == torch.float64
    assert factorization_dtype(small, torch.float32) == torch.float32
    with pytest.raises(ArgumentError, match="factor_dtype"):
        factorization_dtype(small, torch.float16)


def test_float32_failure_is_repeated_in_float64_without_jitter():
    # Positive definite in float64, indefinite to a float32 factorization.
    x = torch.linspace(0, 1, 200, dtype=torch.float64)
    K = torch.exp(-0.5 * (x[:, None] - x).square()).float() + 1.5e-6 * torch.eye(200)
    assert torch.linalg.cholesky_ex(K)[1] > 0
    assert torch.linalg.cholesky_ex(K.double())[1] == 0
    assert safe_cholesky(K, torch.float32).dtype == torch.float64


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite(value):
    K = reference.random_covariance(4)
    K[2, 1] = K[1, 2] = value
    with pytest.raises(NonFiniteError, match="2 non-finite of 16 entries") as caught:
        safe_cholesky(K)
    assert isinstance(caught.value, NanError)  # BoTorch steps back on it


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("n", "batch"), [(1, ()), (5, (2,)), (300, (2,)), (600, ())])
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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("b", [1, 3, 5])
def test_orders_are_those_of_plain_indexing(shared, b):
    n, batch = 5, (2, 3)
    orders = [random_rows(n, b, 0 if shared else seed) for seed in range(6)]
    order = orders[0] if shared else torch.stack(orders).reshape(*batch, b)
    vector, matrix = torch.randn(*batch, n), torch.randn(*batch, n, n)
    rectangle = torch.randn(*batch, n, 2)
    for i, rows in enumerate(orders):
        member = divmod(i, batch[1])
        assert torch.equal(take(vector, order)[member], vector[member][rows])
        assert torch.equal(permute(matrix, order)[member], matrix[member][rows][:, rows])
        assert torch.equal(take_rows(rectangle, order)[member], rectangle[member][rows])
