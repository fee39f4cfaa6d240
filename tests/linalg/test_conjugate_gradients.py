"""Solving for many columns: what is shown, what is left by an interrupt."""

from __future__ import annotations

import pytest
import torch

from gpclml.linalg import ConjugateGradients

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
