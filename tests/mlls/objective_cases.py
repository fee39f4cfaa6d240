"""Models, data and strategies that tests of the conditional objective share."""

import gpytorch
import torch
from gpytorch.priors import GammaPrior, NormalPrior

from gpclml.conditioning import (
    HeldOut,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
)


class RBFModel(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, batch=(), priors=False):
        super().__init__(x, y, likelihood)
        batch = torch.Size(batch)
        d = x.shape[-1]
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(
                ard_num_dims=d,
                batch_shape=batch,
                lengthscale_prior=GammaPrior(3.0, 6.0) if priors else None,
            ),
            batch_shape=batch,
            outputscale_prior=GammaPrior(2.0, 0.15) if priors else None,
        )
        if priors:
            self.mean_module.register_prior(
                "mean_prior",
                NormalPrior(0.0, 1.0),
                lambda module: module.constant,
                lambda module, value: None,
            )

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(n=12, d=2, batch=(), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(*batch, n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    y = torch.sin(4.0 * x.sum(-1)) + 0.2 * noise + 0.3
    return x.to(dtype), y.to(dtype)


def make(x, y, batch=(), priors=False, likelihood=None):
    noise_prior = GammaPrior(1.1, 0.5) if priors else None
    if likelihood is None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood(
            noise_prior=noise_prior, batch_shape=torch.Size(batch)
        )
    model = RBFModel(x, y, likelihood, batch, priors).to(x)
    likelihood.to(x)
    model.train()
    return model, likelihood


def dense(model, likelihood, x, y):
    output = likelihood(model(x), x)
    return output.lazy_covariance_matrix.to_dense(), y - output.mean


def gradients_of(value, model):
    return torch.autograd.grad(value.sum(), list(model.parameters()), allow_unused=True)


STRATEGIES = [
    RandomHoldout(0.3, seed=4),
    KFold(5, seed=4),
    LeaveOneOut(),
    LastPoints(m=7),
    LastPoints(m=0),
    RandomOrderings(3, m=6, seed=4),
    HeldOut([0, 3], [5], [7, 2, 9]),
]
