"""Every kind of covariance answers as the matrix that it stands for."""

from __future__ import annotations

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


def parts(n=N, seed=0):
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


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [[[[4, 1]]], [[[0], [3]], [[5, 2, 8]]]], ids=["one", "three"])
def test_held_out_densities_and_their_gradients(kind, blocks):
    blocks = [torch.tensor(group) for group in blocks]
    features, noise = parts()
    features.requires_grad_()
    noise.requires_grad_()
    residual = reference.random_residual(N).requires_grad_()
    inputs = features, noise, residual
    covariance = KINDS[kind](features, noise)
    values = covariance.block_log_densities(residual, blocks)
    K = features @ features.mT + torch.diag_embed(noise)
    expected = torch.stack(
        [
            reference.conditional_log_density(K, residual, block)
            for group in blocks
            for block in group
        ]
    )
    close(values, expected)
    weights = torch.arange(1.0, 1 + len(values), dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((weights * values).sum(), inputs),
        torch.autograd.grad((weights * expected).sum(), inputs),
        strict=True,
    ):
        close(one, other, 1e-7)
    reports = len(values) if kind == "iterative" else 0
    assert len(covariance.reports) == reports


@pytest.mark.parametrize("kind", EXACT)
def test_learning_curves_add_up_and_are_single_predictions(kind):
    covariance, residual = KINDS[kind](*parts()), reference.random_residual(N)
    orders = torch.stack([torch.arange(N).roll(2), torch.arange(N).flip(0)])
    with torch.no_grad():
        curves = covariance.sequential(residual, orders)
        errors, variances = covariance.predictions(residual, orders)
    close(curves, torch.distributions.Normal(0.0, variances.sqrt()).log_prob(errors))
    close(curves.sum(-1), covariance.log_density(residual).expand(2))
    close(covariance.sequential(residual).sum(-1), covariance.log_density(residual).unsqueeze(0))
    batch = residual + torch.arange(3.0).double().unsqueeze(-1)
    for one, other in zip(covariance.sequential(batch, orders), batch, strict=True):
        close(one, covariance.sequential(other, orders))
    with torch.enable_grad():  # with a gradient each order is factored by itself
        close(covariance.sequential(residual, orders), curves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [False, True])
def test_predictions_of_other_values(kind, missing):
    features, noise = parts()
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
def test_parts_of_a_covariance(kind):
    features = torch.stack([parts(seed=i)[0] for i in range(2)])
    noise = torch.stack([parts(seed=i)[1] for i in range(2)])
    covariance = KINDS[kind](features, noise)
    matrix = covariance.to_dense()
    rows = torch.tensor([4, 0, 7])
    close(covariance.diagonal(), matrix.diagonal(dim1=-2, dim2=-1))
    close(covariance.take(rows).to_dense(), matrix[:, rows][:, :, rows])
    close(covariance[1].to_dense(), matrix[1])
    # Of a dense covariance an estimate in another norm, of low rank a bound of the eigenvalues.
    condition = float(torch.linalg.cond(matrix[0]))
    assert condition / N <= covariance[0].condition_number() <= N * condition
    mean, variance = covariance.leave_one_out(reference.random_residual(N), rows)
    for member in range(2):
        for place, row in enumerate(rows):
            expected = reference.conditional_moments(
                matrix[member], reference.random_residual(N), row.unsqueeze(0)
            )
            close(mean[member, place], expected[0].squeeze())
            close(variance[member, place], expected[1].squeeze())
