"""Solving for many columns: what is shown, what is left by an interrupt."""

from __future__ import annotations

import pytest
import torch

from gpclml.linalg import (
    ConjugateGradients,
    CovarianceSolver,
    NoisyCovariance,
    RowProducts,
)

N = 60


def system():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(N, N, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT / N + 0.1 * torch.eye(N, dtype=torch.float64)
    return matrix, torch.randn(N, 5, generator=generator, dtype=torch.float64)


def test_progress_is_shown_where_it_is_asked_for(capsys):
    matrix, right = system()
    solved = ConjugateGradients(1e-8).solve(matrix.matmul, right)
    assert capsys.readouterr() == ("", "")
    shown = ConjugateGradients(1e-8, progress=True).solve(matrix.matmul, right)
    out, err = capsys.readouterr()
    assert out == ""
    assert "products" in err
    assert "of 1.0e-08" in err
    assert torch.equal(shown.values, solved.values)
    assert shown.iterations == solved.iterations


def test_what_was_solved_is_gone_on_from():
    matrix, right = system()
    rough = ConjugateGradients(1e-2).solve(matrix.matmul, right)
    before = rough.iterations
    fine = ConjugateGradients(1e-10).solve(matrix.matmul, right, start=rough)
    at_once = ConjugateGradients(1e-10).solve(matrix.matmul, right)
    torch.testing.assert_close(fine.values, torch.linalg.solve(matrix, right))
    assert before < fine.iterations < 2 * at_once.iterations


def test_an_interrupt_passes_through(capsys):
    matrix, right = system()
    products = 0

    def interrupted(vectors):
        nonlocal products
        products += 1
        if products == 3:
            raise KeyboardInterrupt
        return matrix @ vectors

    with pytest.raises(KeyboardInterrupt):
        ConjugateGradients(1e-8, progress=True).solve(interrupted, right)
    assert capsys.readouterr().err.endswith(" \r")  # the bar is gone


def test_single_precision_solves_at_a_small_noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1200, 2, generator=generator, dtype=torch.float64)
    kernel = torch.exp(-0.5 * torch.cdist(x, x).square() / 0.3**2)
    right = torch.randn(1200, 1, generator=generator, dtype=torch.float64)
    products = {}
    for dtype in (torch.float32, torch.float64):
        matrix = kernel.to(dtype)
        latent = RowProducts(
            lambda i, j, k, matrix=matrix: matrix[i:j, :k], matrix.diagonal(), matrix.shape, 10**9
        )
        covariance = NoisyCovariance(latent, torch.full((1200,), 1e-4, dtype=dtype))
        solver = CovarianceSolver(covariance, ConjugateGradients(1e-2, preconditioner_rank=40))
        products[dtype] = solver.solve(right.to(dtype)).iterations
    # It starts again from the residual as it is. Were the preconditioner single too, it took many.
    assert products[torch.float32] <= 3 * products[torch.float64]
