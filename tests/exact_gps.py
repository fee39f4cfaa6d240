"""Exact GPs as GPyTorch's users write them."""

from __future__ import annotations

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean
from gpytorch.models import ExactGP


class PlainGP(ExactGP):
    """A mean and a kernel, a constant and a scaled RBF kernel by default."""

    def __init__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        kernel: Kernel | None = None,
        likelihood: Likelihood | None = None,
        mean: Mean | None = None,
    ) -> None:
        super().__init__(x, y, likelihood or GaussianLikelihood())
        self.mean_module = mean or ConstantMean()
        self.covar_module = kernel or ScaleKernel(RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class MultitaskGP(ExactGP):
    """Several tasks at the same points."""

    def __init__(self, x, y, likelihood, kernel=None, *, rank=1, interleaved=True):
        super().__init__(x, y, likelihood)
        self.interleaved = interleaved
        t, batch = y.shape[-1], x.shape[:-2]
        self.mean_module = MultitaskMean(ConstantMean(batch_shape=batch), t)
        # GPyTorch repeats the covariance of tasks for each member of the inputs' batch.
        kernel = kernel or RBFKernel(batch_shape=batch)
        self.covar_module = MultitaskKernel(kernel, num_tasks=t, rank=rank)

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        if not self.interleaved:
            n, t = mean.shape[-2:]
            order = torch.arange(n * t).view(n, t).mT.flatten()
            covariance = covariance.to_dense()[..., order.unsqueeze(-1), order]
        return MultitaskMultivariateNormal(mean, covariance, interleaved=self.interleaved)
