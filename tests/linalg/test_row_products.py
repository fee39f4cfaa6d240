"""Products with a covariance that is evaluated in chunks of rows, and their preconditioner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml.linalg import LowRankPlusDiagonal, RowProducts
from gpclml.linalg.iterative import pivoted_cholesky

STATE = "gpclml.linalg.iterative._NUMBERS_AT_ONCE"


class Rows:
    """A symmetric matrix, given by its rows, that remembers what was asked for."""

    def __init__(self, batch, n, seed=0):
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)
        self.matrix = root @ root.mT
        self.asked = []

    def __call__(self, start, stop, columns):
        self.asked.append((start, stop, columns))
        return self.matrix[..., start:stop, :columns]

    def products(self, kept_bytes=0, multiple=1):
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1)
        return RowProducts(self, diagonal, kept_bytes, multiple)


@torch.no_grad()
def without_gradient(products, right):
    return products @ right


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 12),
    k=st.integers(1, 4),
    batch=st.sampled_from([(), (2,), (3, 1)]),
    of_right=st.sampled_from([(), (2,), (3, 2)]),
    chunk=st.integers(1, 60),
    multiple=st.integers(1, 3),
    kept=st.booleans(),
)
def test_products_are_those_of_the_matrix(n, k, batch, of_right, chunk, multiple, kept):
    rows = Rows(batch, n * multiple)
    right = torch.randn(*of_right, n * multiple, k, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STATE, chunk)
        try:
            expected = rows.matrix @ right
        except RuntimeError:
            return  # batches that do not broadcast
        products = rows.products(10**9 if kept else 0, multiple)
        for _ in range(2):
            torch.testing.assert_close(without_gradient(products, right), expected)
        torch.testing.assert_close(products @ right, expected)
        torch.testing.assert_close(products.row(n - 1), rows.matrix[..., n - 1, :])
    assert all(bound % multiple == 0 for asked in rows.asked for bound in asked)


def test_half_is_evaluated_and_half_is_kept(monkeypatch):
    monkeypatch.setattr(STATE, 8 * 64)
    rows, right = Rows((), 64), torch.ones(64, 1, dtype=torch.float64)
    products = rows.products(8 * 64 * 36)
    assert products.kept_numbers == 64 * 36  # 8 chunks: 1 + 2 + ... + 8 squares of 8 by 8
    without_gradient(products, right)
    assert sum((stop - start) * columns for start, stop, columns in rows.asked) == 64 * 36
    without_gradient(products, right)
    assert len(rows.asked) == 8
    anew = rows.products(8 * 64 * 36 - 1)
    assert anew.kept_numbers == 0
    rows.asked.clear()
    for count in (8, 16):
        without_gradient(anew, right)
        assert len(rows.asked) == count


def test_a_product_that_was_interrupted_is_taken_anew(monkeypatch):
    monkeypatch.setattr(STATE, 8 * 16)
    rows, right = Rows((), 16), torch.ones(16, 1, dtype=torch.float64)

    def interrupted(start, stop, columns):
        if start == 8 and len(rows.asked) == 1:
            rows.asked.append(None)
            raise KeyboardInterrupt
        return rows(start, stop, columns)

    products = RowProducts(interrupted, rows.matrix.diagonal(), 10**9)
    with pytest.raises(KeyboardInterrupt):
        without_gradient(products, right)
    torch.testing.assert_close(without_gradient(products, right), rows.matrix @ right)


def kernel(n, dtype):
    """An RBF covariance of n points in the plane, by its rows."""
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = torch.exp(-0.5 * torch.cdist(x, x).square() / 0.3**2).to(dtype)
    return RowProducts(lambda i, j, k: matrix[i:j, :k], matrix.diagonal(), 0), matrix


def test_a_pivoted_cholesky_factor_is_below_the_matrix_and_nears_it():
    latent, matrix = kernel(200, torch.float64)
    remaining = []
    for rank in (0, 5, 15, 200):
        factor = pivoted_cholesky(latent.row, latent.diagonal(), rank)
        difference = matrix - factor @ factor.mT
        assert torch.linalg.eigvalsh(difference).min() > -1e-13
        remaining.append(float(difference.diagonal().sum()))
    assert remaining[0] == 200
    assert remaining == sorted(remaining, reverse=True)
    assert remaining[-1] < 1e-12
    assert factor.shape[-1] < 200  # the others are rounding


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_preconditioner_is_exact_at_a_small_noise(dtype, rank, missing):
    # Woodbury's identity in single precision has no correct digit here.
    latent, full = kernel(100, dtype)
    noise = torch.linspace(1e-6, 2e-6, 100, dtype=dtype)
    gone = torch.arange(100) % 7 == 0 if missing else None
    factor = pivoted_cholesky(latent.row, latent.diagonal(), rank)
    covariance = LowRankPlusDiagonal(factor, noise)
    preconditioner = (covariance.masked(gone) if missing else covariance).weights()
    matrix = factor @ factor.mT + noise.double().diag()
    if gone is not None:
        matrix = matrix.masked_fill(gone | gone.unsqueeze(-1), 0.0) + gone.double().diag()
    right = full[:, :3] if gone is None else full[:, :3].masked_fill(gone.unsqueeze(-1), 0.0)
    expected = torch.linalg.solve(matrix, right.double())
    product, whitened = preconditioner.solve(right), preconditioner.whiten(right)
    assert product.dtype == dtype
    assert (product.double() - expected).norm() < 1e-5 * expected.norm()
    torch.testing.assert_close(
        whitened.mT @ whitened, right.double().mT @ expected, rtol=1e-5, atol=1.0
    )
