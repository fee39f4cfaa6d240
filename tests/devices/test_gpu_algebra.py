"""What a GPU computes in its own way: inverses by halves, symmetric products by wide panels."""

from __future__ import annotations

import pytest
import torch
from device_steps import objective
from pretended_gpu import GPU, pretended_gpu

from gpclml.linalg import matrices, symmetric_product
from gpclml.linalg.matrices import inverse_of_factor

CPU = torch.device("cpu")


def factors(*shape):
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    one = torch.eye(shape[-1], dtype=torch.float64)
    return torch.linalg.cholesky(root @ root.mT / shape[-1] + 0.1 * one)


@pytest.mark.parametrize("n", [1, 7, 16, 37, 64])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_an_inverse_by_halves(n, batch, monkeypatch):
    monkeypatch.setattr(matrices, "_UNDIVIDED_ON_GPU", 4)
    L = factors(*batch, n)
    expected = torch.cholesky_inverse(L)
    with pretended_gpu():
        found = inverse_of_factor(L.cuda()).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found, found.mT, rtol=0, atol=1e-12)


def test_a_factor_that_failed_has_no_finite_inverse(monkeypatch):
    monkeypatch.setattr(matrices, "_UNDIVIDED_ON_GPU", 4)
    L = factors(20)
    L[3, 3] = torch.nan
    with pretended_gpu():
        assert inverse_of_factor(L.cuda()).isnan().any().item()


@pytest.mark.parametrize("name", ["lml", "tenth", "folds", "loo", "orders", "chosen"])
def test_a_step_by_halves_is_that_of_a_cpu(name, monkeypatch):
    monkeypatch.setattr(matrices, "_UNDIVIDED_ON_GPU", 4)
    monkeypatch.setattr(matrices, "_PANEL", {"cpu": 256, "other": 4})
    here = step(CPU, name)
    with pretended_gpu():
        there = [one.cpu() for one in step(GPU, name)]
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def step(device, name):
    mll, x, y = objective(device, torch.float64, "rbf", name)
    value = mll(mll.model(x), y)
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in mll.parameters())]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_large_inverse_on_a_gpu(dtype):
    n = 5000
    L = factors(n).to(GPU)
    expected = torch.cholesky_inverse(L)
    found = inverse_of_factor(L.to(dtype)).double()
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_large_symmetric_product_on_a_gpu():
    left = torch.randn(5000, 300, dtype=torch.float64, device=GPU)
    expected = left @ left.mT
    torch.testing.assert_close(symmetric_product(left, left), expected, rtol=1e-10, atol=1e-9)
