"""The errors of densities and predictions are what the residuals of a solve say, any solve."""

import math
import warnings

import pytest
import torch
from linear_operator import to_linear_operator

from gpclml.linalg import (
    ConjugateGradients,
    DenseCovariance,
    IterativeCovariance,
    NotConvergedWarning,
)
from reference import random_covariance, random_residual

N, M, NOISE = 30, 4, 0.1


def rough(multiply, right, **_):
    """Solutions that are off by a tenth in any direction, not only where CG leaves something."""
    exact = torch.linalg.solve(multiply(torch.eye(N, dtype=right.dtype)), right)
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(right)
    return exact + 0.1 * noise


def problem():
    latent = random_covariance(N + M, noise=0.0)
    noise = torch.full((N,), NOISE, dtype=torch.float64)
    covariance = to_linear_operator(latent[:N, :N]), noise
    K = latent[:N, :N] + noise.diag()
    return covariance, K, latent[:N, N:], random_residual(N)


@pytest.mark.parametrize("rank", [0, 10])
def test_the_errors_are_those_of_the_equations(rank, monkeypatch):
    covariance, K, cross, residual = problem()
    monkeypatch.setattr("gpclml.linalg.iterative.linear_cg", rough)
    solver = ConjugateGradients(0.99, preconditioner_rank=rank, max_iterations=3)
    given = IterativeCovariance(*covariance, solver).predictor(residual)
    block = given.given(cross, keep=True)
    V, R = block.vectors.values, block.vectors.residuals
    rho = residual - K @ given.solution.values.squeeze(-1)
    torch.testing.assert_close(R, cross - K @ V)
    inverse = torch.linalg.inv(K)
    gain = cross.mT @ inverse
    torch.testing.assert_close(block.shift - gain @ residual, -R.mT @ inverse @ rho)
    excess = R.mT @ inverse @ R
    torch.testing.assert_close(gain @ cross - block.joint_reduction(block), excess)
    torch.testing.assert_close((gain @ cross).diagonal() - block.reduction, excess.diagonal())
    assert (excess.diagonal() <= block.errors.square()).all()
    assert (block.errors.square() <= R.square().sum(0) / NOISE + 1e-12).all()
    assert rho @ inverse @ rho <= given.error.square()
    assert block.residual == pytest.approx(float((R.norm(dim=0) / cross.norm(dim=0)).max()))


@pytest.mark.parametrize("off", [(0.02, 0.0), (0.0, 0.3), (0.01, 0.3), (-0.01, 0.3)])
@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_a_density_is_below_its_bound(off, seed, monkeypatch):
    covariance, K, _, _ = problem()
    direction = torch.randn(N, 1, generator=torch.Generator().manual_seed(seed)).double()

    def along_one_direction(multiply, right, **_):
        exact = torch.linalg.solve(multiply(torch.eye(N, dtype=right.dtype)), right)
        columns = torch.tensor([off[0]] * (right.shape[-1] - 1) + [off[1]], dtype=right.dtype)
        return exact + columns * direction.index_fill(0, held_out, 0.0)

    held_out, residual = torch.tensor([2, 11, 20]), random_residual(N, seed=seed)
    monkeypatch.setattr("gpclml.linalg.iterative.linear_cg", along_one_direction)
    solver = ConjugateGradients(0.99, max_error=None, max_iterations=3, on_failure="warn")
    iterative = IterativeCovariance(*covariance, solver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        value = iterative.conditional_log_density(residual, held_out)
    error = (
        float((value - DenseCovariance(K).conditional_log_density(residual, held_out)).abs()) / 3
    )
    [report] = iterative.reports
    assert error <= report.error_bound + 1e-12
    assert math.isfinite(report.error_bound)


@pytest.mark.parametrize("noise", [None, 1e-8])
def test_dependent_noise_and_noise_that_is_lost_in_rounding_have_no_bound(noise):
    _, K, cross, residual = (part.float() if torch.is_tensor(part) else part for part in problem())
    noise = None if noise is None else torch.full((N,), noise)
    covariance = IterativeCovariance(to_linear_operator(K), noise, ConjugateGradients(1e-4))
    given = covariance.predictor(residual)
    block = given.given(cross, keep=True)
    expected = torch.linalg.solve(K.double(), cross.double()).float()
    torch.testing.assert_close(block.vectors.values, expected, rtol=1e-3, atol=1e-3)
    for errors in (given.error, block.errors):
        assert torch.equal(errors, torch.full_like(errors, math.inf))
