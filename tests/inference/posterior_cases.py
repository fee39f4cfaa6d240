"""Exact GPs and points that tests of posteriors share."""

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import (
    GaussianLikelihood,
)
from gpytorch.means import ConstantMean
from gpytorch.models import ExactGP

from gpclml.inference import evaluating, exact_posterior
from gpclml.kernels import DeepKernel
from gpclml.kernels.networks import MLP
from gpclml.linalg import ConjugateGradients

N, M, D = 90, 13, 2
TIGHT = ConjugateGradients(tolerance=1e-10, preconditioner_rank=20)
LOOSE = ConjugateGradients(tolerance=1e-2, preconditioner_rank=5)


class PlainGP(ExactGP):
    """An exact GP in its own units."""

    def __init__(self, x, y, kernel, likelihood=None):
        super().__init__(x, y, (likelihood or GaussianLikelihood()).to(x))
        self.mean_module, self.covar_module = ConstantMean(), kernel
        self.to(x)
        self.mean_module.constant.data.fill_(0.3)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(n=N, batch=(), d=D, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(*batch, n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    return x.to(dtype), (torch.sin(4 * x.sum(-1)) + 0.2 * noise).to(dtype)


def plain(kernel=None, noise=0.05, missing=False, **options):
    x, y = data(**options)
    if missing:
        y[..., ::5] = torch.nan
    model = PlainGP(x, y, kernel or ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1])))
    model.likelihood.noise = noise
    for name, parameter in model.named_parameters():
        if name.endswith("raw_lengthscale"):
            parameter.data.fill_(-1.0)
    return model


def exact(model, x, marginal=False):
    with torch.no_grad(), evaluating(model):
        return exact_posterior(model, x, marginal)


def new_x(m=M, batch=(), seed=1, dtype=torch.float64):
    return data(m, batch, dtype=dtype, seed=seed)[0]


def deep():
    network = MLP([D, 6, 2], generator=torch.Generator().manual_seed(0))
    return ScaleKernel(DeepKernel(network, RBFKernel(), False))
