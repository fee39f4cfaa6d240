"""Random regression problems on which float32 Gaussian processes go wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import gpytorch
import torch
from torch import Tensor

KERNELS = {
    "RBF": gpytorch.kernels.RBFKernel,
    "Matern 1/2": partial(gpytorch.kernels.MaternKernel, nu=0.5),
    "Matern 3/2": partial(gpytorch.kernels.MaternKernel, nu=1.5),
    "Matern 5/2": partial(gpytorch.kernels.MaternKernel, nu=2.5),
    "RQ": gpytorch.kernels.RQKernel,
}
"""Stationary kernels by name, each taking ``ard_num_dims``."""

# softplus of this vanishes in float32: the noise is at its lower bound, 1e-4, as it is after an
# optimizer pushed against it.
_RAW_NOISE_AT_BOUND = -30.0


@dataclass(frozen=True)
class HardProblem:
    """Data and hyperparameters, all exactly representable in float32.

    Inputs ``(n, d)``, some rows copies of others, standardized targets ``(n,)``, a lengthscale for
    each feature.
    """

    index: int
    kernel: str
    x: Tensor
    y: Tensor
    lengthscale: Tensor
    outputscale: float
    mean: float
    num_duplicates: int

    def model(self, dtype: torch.dtype, noise: float | None = None) -> ExactModel:
        """The same problem in any type: built in float32, then cast; the noise is at its bound."""
        model = ExactModel(self.x, self.y, KERNELS[self.kernel](ard_num_dims=self.x.shape[-1]))
        model.covar_module.base_kernel.lengthscale = self.lengthscale
        model.covar_module.outputscale = self.outputscale
        model.mean_module.constant = self.mean
        if noise is None:
            torch.nn.init.constant_(model.likelihood.raw_noise, _RAW_NOISE_AT_BOUND)
        else:
            model.likelihood.noise = noise
        model = model.to(dtype)
        model.set_train_data(self.x.to(dtype), self.y.to(dtype), strict=False)
        return model.train()


class ExactModel(gpytorch.models.ExactGP):
    """An exact GP with constant mean and a scaled kernel."""

    def __init__(self, x: Tensor, y: Tensor, kernel: gpytorch.kernels.Kernel) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior at x."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def draw_problem(seed: int, index: int) -> HardProblem:
    """One problem, the same for the same seed and index.

    Log-uniform: n from 2 to 200, lengthscales from 1e-3 to 1e3 (one for all features, or, in
    half of the problems, one each), outputscale from 0.1 to 10. Uniform: 1 to 8 features, the
    kernel, and a share of up to 0.9 of the rows that copy another. Inputs are standard normal;
    targets are a sum of cosines with noise, standardized. The noise variance is at GPyTorch's
    bound of 1e-4.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    n = int(_log_uniform(2, 201, uniform(1)))
    d = 1 + int(8 * uniform(1))
    kernel = list(KERNELS)[int(len(KERNELS) * uniform(1))]
    # At least one copy: singular without the noise.
    num_duplicates = min(int(0.9 * float(uniform(1)) * n) + 1, n - 1)
    originals = normal(n - num_duplicates, d)
    # Copies of random rows, which a permutation then hides.
    copies = (len(originals) * uniform(num_duplicates)).long()
    x = torch.cat([originals, originals[copies]])[torch.randperm(n, generator=generator)]
    one_each = bool(uniform(1) < 0.5)
    lengthscale = _log_uniform(1e-3, 1e3, uniform(d if one_each else 1)).expand(d)
    waves = normal(d, 10) * _log_uniform(0.1, 10.0, uniform(1))
    y = _targets(x @ waves + 2 * math.pi * uniform(10), normal(n))
    outputscale = float(_log_uniform(0.1, 10.0, uniform(1)))
    lengthscale, mean = lengthscale.float(), float(normal(1))
    return HardProblem(index, kernel, x.float(), y, lengthscale, outputscale, mean, num_duplicates)


def _log_uniform(low: float, high: float, draw: Tensor) -> Tensor:
    return low * (high / low) ** draw


def _targets(phases: Tensor, noise: Tensor) -> Tensor:
    y = phases.cos().sum(-1) + 0.1 * noise
    return ((y - y.mean()) / y.std()).float()


def draw_duplicates(seed: int, index: int) -> HardProblem:
    """A problem with copies among its rows and a kernel far above its noise of 1e-4.

    Log-uniform: n from 4 to 200, the lengthscale from 0.05 to 10, the outputscale from 1e2 to 1e6.
    Uniform: 1 to 5 features, the kernel, and a share of up to 0.9 of the rows that copy another.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)

    def uniform() -> float:
        return float(torch.rand(1, generator=generator, dtype=torch.float64))

    n, d = int(4 * (201 / 4) ** uniform()), 1 + int(5 * uniform())
    kernel = list(KERNELS)[int(len(KERNELS) * uniform())]
    copies = max(1, min(n - 2, int(0.9 * uniform() * n)))
    x = normal(n - copies, d)
    picked = torch.randint(len(x), (copies,), generator=generator)
    x = torch.cat([x, x[picked]])[torch.randperm(n, generator=generator)]
    # The kernel is up to 1e10 times its noise, beyond what float32 resolves.
    lengthscale, outputscale = 0.05 * 200 ** uniform(), 1e2 * 1e4 ** uniform()
    waves = normal(d, 10) * 0.1 * 30 ** uniform()
    y = _targets(x @ waves + 2 * math.pi * normal(10), normal(n))
    scales = torch.full((d,), lengthscale, dtype=torch.float32)
    return HardProblem(index, kernel, x.float(), y, scales, outputscale, 0.0, copies)
