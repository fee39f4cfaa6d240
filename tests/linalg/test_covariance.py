"""Every kind of covariance answers as the matrix that it stands for."""

from __future__ import annotations

import itertools

import pytest
import torch
from linear_operator import to_linear_operator

import reference
from gpclml.linalg import (
    ConjugateGradients,
    DenseCovariance,
    IterativeCovariance,
    LowRankPlusDiagonal,
)

N, R = 9, 3
TIGHT = ConjugateGradients(tolerance=1e-12, max_error=1e-9, preconditioner_rank=4)


def problem(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, R, generator=generator, dtype=torch.float64)
    noise = 0.1 + torch.rand(n, generator=generator, dtype=torch.float64)
    return features, noise


def dense(features, noise):
    return DenseCovariance(features @ features.mT + torch.diag_embed(noise))


def iterative(features, noise):
    return IterativeCovariance(to_linear_operator(features @ features.mT), noise, TIGHT)


KINDS = {"dense": dense, "low rank": LowRankPlusDiagonal, "iterative": iterative}
EXACT = ["dense", "low rank"]


def close(value, expected):
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [False, True])
def test_predictions_of_other_values(kind, missing):
    features, noise = problem()
    cross = features @ torch.randn(R, 4, generator=torch.Generator().manual_seed(1)).double()
    residual, gone, seen = reference.random_residual(N), None, torch.arange(N)
    if missing:
        gone = torch.zeros(N, dtype=torch.bool)
        gone[[2, 5]] = True
        seen = (~gone).nonzero().squeeze(-1)
        residual = residual.masked_fill(gone, 0.0)
        features, noise = features.masked_fill(gone[:, None], 0.0), noise.masked_fill(gone, 1.0)
    covariance = KINDS[kind](features, noise)
    block = covariance.predictor(residual, gone).given(cross, keep=True)
    K = (features @ features.mT + torch.diag(noise))[seen][:, seen]
    gain = torch.linalg.solve(K, cross[seen]).mT
    close(block.shift, gain @ residual[seen])
    close(block.reduction, (gain @ cross[seen]).diagonal())
    close(block.joint_reduction(block), gain @ cross[seen])


@pytest.mark.parametrize("kind", EXACT)
def test_entries_and_members(kind):
    features = torch.stack([problem(seed=i)[0] for i in range(2)])
    noise = torch.stack([problem(seed=i)[1] for i in range(2)])
    covariance = KINDS[kind](features, noise)
    matrix = covariance.to_dense()
    rows = torch.tensor([4, 0, 7])
    close(covariance.diagonal(), matrix.diagonal(dim1=-2, dim2=-1))
    close(covariance.take(rows).to_dense(), matrix[:, rows][:, :, rows])
    close(covariance[1].to_dense(), matrix[1])
    # Of a dense covariance an estimate in another norm, of low rank a bound of the eigenvalues.
    condition = float(torch.linalg.cond(matrix[0]))
    assert condition / N <= covariance[0].condition_number() <= N * condition
    residual = reference.random_residual(N)
    mean, variance = covariance.leave_one_out(residual, rows)
    for member, i in itertools.product(range(2), range(len(rows))):
        expected = reference.conditional_moments(matrix[member], residual, rows[i].unsqueeze(0))
        close(mean[member, i], expected[0].squeeze())
        close(variance[member, i], expected[1].squeeze())
