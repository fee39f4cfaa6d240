"""Densities by NumPy equal those by PyTorch, whose gradients are tested by finite differences."""

from __future__ import annotations

import pytest
import torch
from threadpoolctl import ThreadpoolController, threadpool_limits

from gpclml.linalg import DenseCovariance, lapack, profiles
from gpclml.linalg.matrices import inverse_of_factor

BLOCKS = {
    "all": [torch.arange(9).unsqueeze(0)],
    "last": [torch.tensor([[7, 8]])],
    "some": [torch.tensor([[6, 1, 4]])],
    "each": [torch.arange(9).unsqueeze(-1)],
    "folds": [torch.tensor([[0, 3], [8, 1]]), torch.tensor([[2, 4, 5]])],
    "overlapping": [torch.tensor([[0, 3], [3, 1]]), torch.tensor([[1]])],
}


def test_distances_in_few_and_in_many_dimensions(monkeypatch):
    z = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e3
    z[7] = z[2]
    expected = -0.5 * (z.unsqueeze(1) - z).square().sum(-1)
    for dimensions in (8, 0):
        monkeypatch.setattr(profiles, "_BY_DIFFERENCES", dimensions)
        work = torch.empty(len(z) ** 2, dtype=torch.float64).numpy()
        some = profiles.half_squared_distances(z[:5].numpy(), z.numpy(), work)
        torch.testing.assert_close(torch.from_numpy(some), expected[:5], rtol=1e-8, atol=1e-8)
        e = torch.from_numpy(profiles.half_squared_distances(z.numpy(), z.numpy(), work))
        torch.testing.assert_close(e, expected, rtol=1e-8, atol=1e-8)
        assert e[2, 7] == e[7, 2] == 0.0
        assert not bool(e.diagonal().any())


@pytest.mark.parametrize("blocks", [name for name in BLOCKS if name != "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_of_a_matrix_are_those_of_pytorch(monkeypatch, dtype, blocks):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(9, 9, generator=generator, dtype=torch.float64)
    matrix = (root @ root.mT + torch.eye(9)).to(dtype).requires_grad_()
    residual = torch.randn(9, generator=generator).to(dtype).requires_grad_()
    covariance = DenseCovariance(matrix)
    calls, by_lapack = [], lapack.lapack.dpotrf

    def counted(*arguments, **options):
        calls.append(arguments)
        return by_lapack(*arguments, **options)

    monkeypatch.setattr(lapack, "_BY_TORCH", 0)
    monkeypatch.setattr(lapack.lapack, "dpotrf", counted)
    density = covariance.density(BLOCKS[blocks])
    value, pairs = covariance.value_and_gradients(residual, density)
    assert len(calls) == 1
    expected = covariance.held_out_log_density(residual, BLOCKS[blocks])
    gradients = torch.autograd.grad(expected, [matrix, residual])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(value, expected.detach(), rtol=tolerance, atol=tolerance)
    for (_, ours), gradient in zip(pairs, gradients, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, gradient, rtol=tolerance, atol=tolerance)
    unchanged = (root @ root.mT + torch.eye(9)).to(dtype)
    assert torch.equal(matrix, unchanged)


@pytest.mark.parametrize("size", [1, 2])
def test_many_points_in_blocks_of_several_are_left_to_pytorch(size):
    covariance = DenseCovariance(torch.eye(130, dtype=torch.float64))
    residual = torch.ones(130, dtype=torch.float64)
    blocks = covariance.density([torch.arange(130).reshape(-1, size)]).for_lapack
    assert lapack.applies(residual, blocks) == (size == 1)
    found = lapack.matrix_density_and_gradients(covariance.matrix, residual, blocks)
    assert (found is None) == (size > 1)


def test_many_points_are_left_to_pytorch_where_it_has_several_threads(monkeypatch):
    few, many = (torch.ones(n, dtype=torch.float64) for n in (200, 600))
    assert lapack.applies(few, 10)
    assert lapack.applies(many, 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert lapack.applies(few, 10)
    assert not lapack.applies(many, 10)


def test_few_points_are_computed_by_one_thread_of_each_library():
    def threads():
        return [library["num_threads"] for library in ThreadpoolController().info()
                if library["user_api"] == "blas"]  # fmt: skip

    with threadpool_limits(2, user_api="blas"):
        before = threads()
        with lapack.one_thread(200):
            assert set(threads()) <= {1}
        assert threads() == before
        with lapack.one_thread(600):
            assert threads() == before
        first, second = lapack.one_thread(), lapack.one_thread(200)
        first.__enter__()
        second.__enter__()  # of another thread of Python, say, which ends later
        first.__exit__(None, None, None)
        assert set(threads()) <= {1}
        second.__exit__(None, None, None)
        assert threads() == before


@pytest.mark.parametrize("shape", [(300,), (2, 517)])
def test_an_inverse_is_computed_by_halves(shape):
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    covariance = root @ root.mT / shape[-1] + 0.1 * torch.eye(shape[-1], dtype=torch.float64)
    found = inverse_of_factor(torch.linalg.cholesky(covariance))
    torch.testing.assert_close(found, torch.linalg.inv(covariance), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, found.mT, rtol=0, atol=1e-12)
