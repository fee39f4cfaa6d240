"""Weak priors of a regression under objectives that do not score first points.

The density of a point given others hardly depends on the prior's variance and mean. Under the
conditional marginal likelihood and leave-one-out a line search can therefore raise the scale of a
kernel together with its lengthscales for as long as it likes; predictions between the points stay,
and those beside them are lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.means import ConstantMean
from gpytorch.priors import LogNormalPrior, NormalPrior, Prior
from torch import Tensor

from gpclml.kernels import DeepKernel

if TYPE_CHECKING:
    from gpclml.models.regression import GPRegression

_NAME = "weak_prior"
_LOG_SCALE = 1.5  # standard deviation of the logarithm of a scale, targets having variance 1
_LOG_LENGTHSCALE = 1.0  # of a lengthscale's, around the root of the number of standardized inputs


@contextmanager
def weak_priors(model: GPRegression) -> Iterator[bool]:
    """Within the block the hyperparameters of a model have weak priors.

    The model has to standardize its data, so that its numbers have a scale. Parts with priors of
    their own keep these alone.

    Yields:
        Whether there are any.
    """
    added: list[torch.nn.Module] = []
    try:
        for module, name, prior in _weak_priors(model) if model.standardizes else ():
            parameter = cast(Tensor, getattr(module, f"raw_{name}"))
            if parameter.requires_grad and not module._priors:
                module.register_prior(_NAME, prior.to(parameter), name)
                added.append(module)
        yield bool(added)
    finally:
        for module in added:
            del module._modules[_NAME], cast(Any, module)._priors[_NAME]


def _weak_priors(model: GPRegression) -> Iterator[tuple[Any, str, Prior]]:
    if isinstance(model.mean_module, ConstantMean):
        yield model.mean_module, "constant", NormalPrior(0.0, 1.0)
    for kernel in scales_of(model.covar_module):
        if isinstance(kernel, SpectralMixtureKernel):
            share = -math.log(cast(int, kernel.num_mixtures))
            yield kernel, "mixture_weights", LogNormalPrior(share, _LOG_SCALE)
        else:
            yield kernel, "outputscale", LogNormalPrior(0.0, _LOG_SCALE)
    kernels = list(model.covar_module.modules())
    if any(isinstance(kernel, DeepKernel) for kernel in kernels):
        return  # distances between features have no scale that is known
    dimensions = cast(Any, model.train_inputs)[0].shape[-1]
    for kernel in kernels:
        if isinstance(kernel, RBFKernel | MaternKernel | RQKernel):
            start = 0.5 * math.log(kernel.ard_num_dims or dimensions)
            yield kernel, "lengthscale", LogNormalPrior(start, _LOG_LENGTHSCALE)


def scales_of(kernel: Kernel) -> Iterator[Kernel]:
    """The outermost parts of a kernel that have a scale."""
    if isinstance(kernel, ScaleKernel | SpectralMixtureKernel):
        yield kernel
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for summand in cast(Any, kernel.kernels):
            yield from scales_of(summand)
