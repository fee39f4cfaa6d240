"""Solving for many columns: what is shown, what is left by an interrupt."""

from __future__ import annotations

import pytest
import torch

from gpclml.errors import ArgumentError, NonFiniteError, NotConvergedError
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


@pytest.mark.parametrize("on_failure", ["error", "warn"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_matrix_that_is_not_finite_ends_the_solve_at_the_first_product(value, dtype, on_failure):
    matrix, right = (part.to(dtype) for part in system())
    matrix[3, 7] = matrix[7, 3] = value
    products = 0

    def multiply(vectors):
        nonlocal products
        products += 1
        return matrix @ vectors

    with pytest.raises(NonFiniteError, match=r"covariance: got .* non-finite of .* product"):
        ConjugateGradients(on_failure=on_failure).solve(multiply, right)
    assert products == 1


def test_vectors_that_overflow_leave_what_was_reached_before():
    matrix, right = (part.float() for part in system())
    settings = ConjugateGradients()
    solved = settings.solve(matrix.matmul, right, precondition=lambda vectors: 1e38 * vectors)
    assert torch.equal(solved.unsolved, right)
    assert torch.equal(solved.values, torch.zeros_like(right))
    with pytest.raises(NotConvergedError, match="relative residual of 1 "):
        settings.check(1.0, solved.iterations)


@pytest.mark.parametrize("on_failure", ["error", "warn"])
def test_what_is_no_number_reaches_no_tolerance(on_failure):
    settings = ConjugateGradients(on_failure=on_failure)
    with pytest.raises(NonFiniteError, match="residual of nan"):
        settings.check(torch.nan, 5)
    with pytest.raises(NonFiniteError, match="error bound of nan"):
        settings.check(1e-9, 5, torch.nan)
    settings.check(1e-9, 5)
    settings.check(1e-9, 5, 1e-9)


def test_settings_that_are_no_numbers_are_refused():
    for name in ("tolerance", "max_error", "max_iterations", "preconditioner_rank", "kept_bytes"):
        with pytest.raises(ArgumentError, match=f"{name}: got nan"):
            ConjugateGradients(**{name: torch.nan})
