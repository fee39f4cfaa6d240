"""The errors of moments are what the residuals of any solve say, however it came about."""

import math
import warnings

import numpy as np
import pytest
import torch
from linear_operator import to_linear_operator

from benchmarks.robustness.accuracy import cholesky, extended, forward
from gpclml.linalg import (
    ConjugateGradients,
    NoisyCovariance,
    NotConvergedWarning,
    OperatorProducts,
)
from gpclml.linalg.conjugate_gradients import Solution
from gpclml.linalg.covariance_solver import CovarianceSolver, IterativeConditioning
from reference import random_covariance, random_residual

N, M, NOISE = 30, 4, 0.1


class Rough(ConjugateGradients):
    """Solutions that are off by a tenth in any direction, not only where CG leaves something."""

    def solve(self, multiply, right, precondition=None, start=None, tolerance=None):
        one = torch.eye(right.shape[-2], dtype=right.dtype)
        exact = torch.linalg.solve(multiply(one), right)
        noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(right)
        values = exact + 0.1 * noise
        return Solution(values, right - multiply(values), 1)


def problem():
    latent = random_covariance(N + M, noise=0.0)
    noise = torch.full((N,), NOISE, dtype=torch.float64)
    covariance = NoisyCovariance(OperatorProducts(to_linear_operator(latent[:N, :N])), noise)
    K = latent[:N, :N] + NOISE * torch.eye(N)
    return covariance, K, latent[:N, N:], random_residual(N)


@pytest.mark.parametrize("rank", [0, 10])
def test_the_errors_are_those_of_the_equations(rank):
    covariance, K, cross, residual = problem()
    given = IterativeConditioning(covariance, residual, Rough(0.99, preconditioner_rank=rank))
    block = given.given(cross, keep=True)
    _, V, R = block.vectors
    rho = residual - K @ given.weights.squeeze(-1)
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


def test_without_independent_noise_nothing_bounds_the_error():
    covariance, K, cross, _ = problem()
    whole = NoisyCovariance(OperatorProducts(to_linear_operator(K)))
    solved = CovarianceSolver(whole, ConjugateGradients(1e-8)).solve(cross)
    torch.testing.assert_close(solved.values, torch.linalg.solve(K, cross))
    assert torch.equal(solved.errors, torch.full((M,), math.inf, dtype=torch.float64))
    silent = NoisyCovariance(covariance.latent, torch.zeros(N, dtype=torch.float64))
    rough = CovarianceSolver(silent, Rough(0.99))
    assert rough.solve(cross).errors.isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_allow_for_rounding(dtype, ratio, seed):
    # With copies among the points, and noise down to what rounding takes from the kernel.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 2, generator=generator)
    x = torch.cat([x, x[:20], x[:20] + 0.01 * torch.randn(20, 2, generator=generator)])
    x = x.to(dtype)
    kernel = ratio * torch.exp(-0.5 * (x[:, None] - x).square().sum(-1))
    latent, cross = kernel[:80, :80], kernel[:80, 80:]
    residual = ratio**0.5 * (2 * x[:80]).sin().sum(-1)
    covariance = NoisyCovariance(
        OperatorProducts(to_linear_operator(latent)), torch.ones(80, dtype=dtype)
    )
    solver = ConjugateGradients(on_failure="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        given = IterativeConditioning(covariance, residual, solver)
        block = given.given(cross)
    factor = cholesky(extended(latent) + np.eye(80))
    if factor is None:  # the noise is lost, and no bound is claimed
        assert block.errors.isinf().all()
        return
    z = forward(factor, extended(torch.cat([cross, residual[:, None]], -1)))
    shift, reduction = z[:, :-1].T @ z[:, -1], (z[:, :-1] ** 2).sum(0)
    excess = (block.reduction - torch.from_numpy(reduction.astype(float))).abs()
    assert (excess <= block.errors.square() + block.reduction_rounding).all()
    error = (block.shift - torch.from_numpy(shift.astype(float))).abs()
    assert (error <= block.errors * given.error + block.shift_rounding).all()
    if dtype == torch.float64:  # and they are of use
        assert (block.errors.square() + block.reduction_rounding < 1e-3 * ratio).all()
