from __future__ import annotations

import math

import pytest
import torch
from gpytorch.kernels import SpectralMixtureKernel

from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.kernels import JointSpectralMixtureKernel


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel(num_mixtures=3, d=2):
    made = JointSpectralMixtureKernel(num_mixtures, d).double()
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.add_(0.3 * drawn(*parameter.shape, seed=seed))
    return made


def by_definition(made, x, other):
    tau = x.unsqueeze(-2) - other.unsqueeze(-3)
    terms = [
        weight
        * (-2 * math.pi**2 * (scale * tau).square().sum(-1)).exp()
        * (2 * math.pi * tau @ mean).cos()
        for weight, scale, mean in zip(
            made.mixture_weights, made.mixture_scales, made.mixture_means, strict=True
        )
    ]
    return sum(terms)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
def test_value_and_gradient_of_the_definition(batch):
    made = kernel()
    x, other = drawn(*batch, 5, 2).requires_grad_(), drawn(*batch, 4, 2, seed=1)
    value, expected = made(x, other).to_dense(), by_definition(made, x, other)
    torch.testing.assert_close(value, expected)
    inputs = [x, *made.parameters()]
    for one, two in zip(
        torch.autograd.grad(value.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(made(x, x, diag=True), made(x).to_dense().diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(
        made(x[..., :4, :], other, diag=True), value[..., :4, :].diagonal(dim1=-2, dim2=-1)
    )


def test_of_one_column_it_is_gpytorchs():
    made = kernel(d=1)
    theirs = SpectralMixtureKernel(3, ard_num_dims=1).double()
    theirs.mixture_weights = made.mixture_weights.detach()
    theirs.mixture_scales = made.mixture_scales.detach().unsqueeze(-2)
    theirs.mixture_means = made.mixture_means.detach().abs().unsqueeze(-2)  # cos is even
    x = drawn(6, 1)
    torch.testing.assert_close(made(x).to_dense(), theirs(x).to_dense())


def test_its_start():
    made = JointSpectralMixtureKernel(4, 3000)
    x = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made(x, diag=True), torch.ones(3))
    lengthscales = 1 / (2 * math.pi * made.mixture_scales)
    torch.testing.assert_close(lengthscales, torch.full((4, 3000), math.sqrt(3000)))
    same, other = (
        JointSpectralMixtureKernel(4, 3000, torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    assert torch.equal(made.mixture_means, same.mixture_means)
    assert not torch.equal(made.mixture_means, other.mixture_means)


def test_bad_arguments():
    with pytest.raises(ArgumentError, match="num_mixtures"):
        JointSpectralMixtureKernel(0, 1)
    with pytest.raises(ArgumentError, match="ard_num_dims"):
        JointSpectralMixtureKernel(1, 0)
    with pytest.raises(UnsupportedError, match="last_dim_is_batch"):
        kernel().forward(drawn(2, 2), drawn(2, 2), last_dim_is_batch=True)
