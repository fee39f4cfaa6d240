"""Models with a deep kernel for BoTorch, away from their start, and their members one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpytorch.kernels import AdditiveKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood

from gpclml.models.botorch import DeepKernelGP

BARE = {"input_transform": None, "outcome_transform": None}
KERNELS = ("deep", "deep_bottleneck")
SHAPES = [
    pytest.param(torch.Size(batch), m, id=f"batch{list(batch)}-outputs{m}")
    for batch, m in itertools.product([(), (2,)], [1, 2])
]


def data(batch_shape=(), m=1, n=8, dtype=torch.float64):
    """Inputs in the unit square and standardized outcomes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(*batch_shape, n, 2, generator=generator, dtype=dtype)
    noise = torch.randn(*batch_shape, n, m, generator=generator, dtype=dtype)
    y = (5 * x[..., :1] + torch.arange(m, dtype=dtype)).sin() + x[..., 1:] ** 2 + 0.1 * noise
    return x, (y - y.mean(-2, keepdim=True)) / y.std(-2, keepdim=True)


def points(*shape, dtype=torch.float64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=dtype)


def make(batch_shape=(), m=1, kernel="deep", observed_noise=False, dtype=torch.float64, **options):
    """A model whose networks count and whose members differ."""
    x, y = data(batch_shape, m, dtype=dtype)
    noise = 0.01 + 0.02 * points(*y.shape, dtype=dtype) if observed_noise else None
    options = {"feature_share": 0.4} | options
    return moved(DeepKernelGP(x, y, noise, kernel=kernel, **options))


@torch.no_grad()
def moved(model):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(0.3 * draw.to(parameter))
    return model


def on_data(model, x, y, noise=None, member=()):
    """A model of other data, its units left alone, with the parameters of one or of a member."""
    additive = any(isinstance(module, AdditiveKernel) for module in model.modules())
    kernel = KERNELS[0] if additive else KERNELS[1]
    other = DeepKernelGP(x, y, noise, kernel=kernel, **BARE)
    with torch.no_grad():
        for own, given in zip(other.parameters(), model.parameters(), strict=True):
            own.copy_(given[member])
    return other


def members(model, x, y, noise=None):
    """Each batch member and output: its places, and a model of it alone.

    Args:
        model: Its parameters count.
        x: Inputs, ``(*batch, n, d)``.
        y: Outcomes, ``(*batch, n, m)``.
        noise: Their noise variances.

    Yields:
        Its place in the batch, its output, and its model.
    """
    outputs = y.shape[-1]
    for place in itertools.product(*map(range, y.shape[:-2])):
        for output in range(outputs):
            one = slice(output, output + 1)
            own_noise = None if noise is None else noise[place][..., one]
            member = (*place, output) if outputs > 1 else place
            yield place, output, on_data(model, x[place], y[place][..., one], own_noise, member)


def noise_of(model):
    """The observed noise variances in the units of the outcomes that the model holds."""
    if not isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        return None
    noise = model.likelihood.noise.detach()
    return noise.mT if model.num_outputs > 1 else noise.unsqueeze(-1)
