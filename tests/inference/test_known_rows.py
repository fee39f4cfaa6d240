"""Single rows of known kernels, of which a preconditioner takes hundreds one after the other."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    CosineKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood

from gpclml.inference import known_kernels
from gpclml.inference.covariances import observed_covariance
from gpclml.inference.known_kernels import known_row
from gpclml.linalg.covariance_products import pivoted_cholesky

BATCH = torch.Size([3])
KERNELS = {
    "rbf": lambda: RBFKernel(ard_num_dims=2),
    "scaled": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "scaled twice": lambda: ScaleKernel(ScaleKernel(MaternKernel(1.5))),
    "matern 1/2": lambda: MaternKernel(0.5),
    "matern 5/2": lambda: MaternKernel(2.5, ard_num_dims=2),
    "rq": lambda: ScaleKernel(RQKernel()),
    "periodic": lambda: PeriodicKernel(),
    "cosine": lambda: CosineKernel(),
    "one column": lambda: RBFKernel(active_dims=[1]),
    "batch": lambda: ScaleKernel(RQKernel(batch_shape=BATCH), batch_shape=BATCH),
}


def points(dtype=torch.float64):
    return torch.rand(40, 2, dtype=dtype)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_is_that_of_the_matrix(name, dtype):
    kernel = KERNELS[name]().to(dtype)
    for parameter in kernel.parameters():
        parameter.data.normal_()
    lazy = kernel(points(dtype))
    row = known_row(lazy)
    assert row is not None
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for index in (0, 17, 39):
        expected = lazy.to_dense()[..., index, :].detach().double()
        torch.testing.assert_close(row(index), expected, rtol=tolerance, atol=tolerance)
        assert not row(index).requires_grad


class OwnKernel(RBFKernel):
    """A subclass may be any kernel."""


@pytest.mark.parametrize(
    "kernel", [LinearKernel(), RBFKernel() + RBFKernel(), RBFKernel() * RQKernel(), OwnKernel()]
)
def test_other_kernels_have_no_row_of_their_own(kernel):
    assert known_row(kernel(points())) is None


def test_a_preconditioner_is_the_same_without_a_call_of_the_kernel(monkeypatch):
    kernel, x = ScaleKernel(MaternKernel(2.5)).double(), points()
    likelihood = GaussianLikelihood().double()

    def factor():
        prior = gpytorch.distributions.MultivariateNormal(torch.zeros(40).double(), kernel(x))
        return pivoted_cholesky(observed_covariance(likelihood, prior)[1].products(0).latent, 12)

    found = factor()
    monkeypatch.setattr(known_kernels, "_RADIAL", {})
    torch.testing.assert_close(found, factor(), rtol=1e-10, atol=1e-10)
