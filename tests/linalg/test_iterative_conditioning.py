"""The errors of moments are what the residuals of any solve say, however it came about."""

import math

import pytest
import torch
from linear_operator import to_linear_operator

from gpclml.linalg import ConjugateGradients, NoisyCovariance, OperatorProducts
from gpclml.linalg.conjugate_gradients import Solution
from gpclml.linalg.covariance_solver import CovarianceSolver
from gpclml.linalg.iterative_conditioning import IterativeConditioning
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
