"""Scale, mean and lengthscales of a model under objectives that do not score first points.

The density of a point given others hardly depends on the prior's variance and mean. Under the
conditional marginal likelihood and leave-one-out a line search can therefore raise the scale of a
kernel together with its lengthscales for as long as it likes; predictions between the points stay,
and those beside them are lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

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
from gpytorch.mlls import LeaveOneOutPseudoLikelihood, MarginalLogLikelihood
from gpytorch.models import ExactGP
from gpytorch.priors import LogNormalPrior, NormalPrior, Prior
from torch import Tensor

from gpclml.conditioning import LastPoints, RandomOrderings
from gpclml.kernels import DeepKernel
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

_NAME = "weak_prior"
_LOG_SCALE = 1.5  # standard deviation of the logarithm of a scale, targets having variance 1
_LOG_LENGTHSCALE = 1.0  # of a lengthscale's, around the root of the number of standardized inputs
_TOO_LARGE = 1e3  # outputscale over the variance of targets
_TOO_FAR = 30.0  # of the mean from that of targets, in their deviations


def scores_first_points(mll: MarginalLogLikelihood) -> bool:
    """Whether every point is scored, also the first, given no other."""
    if isinstance(mll, LeaveOneOutPseudoLikelihood):
        return False
    if isinstance(mll, ConditionalMarginalLogLikelihood):
        given = mll.conditioning
        return isinstance(given, LastPoints | RandomOrderings) and given.m == 0
    return True


@contextmanager
def weak_priors(mll: MarginalLogLikelihood) -> Iterator[bool]:
    """Within the block hyperparameters have weak priors where the objective leaves them open.

    The model has to be a ``GPRegression`` that standardizes its data, so that its numbers have a
    scale. Parts with priors of their own keep these alone.

    Yields:
        Whether there are any.
    """
    model = mll.model
    open_ = isinstance(model, GPRegression) and model.standardizes and not scores_first_points(mll)
    added: list[torch.nn.Module] = []
    try:
        for module, name, prior in _weak_priors(cast(GPRegression, model)) if open_ else ():
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
    for kernel in _scales(model.covar_module):
        if isinstance(kernel, SpectralMixtureKernel):
            share = -math.log(cast(int, kernel.num_mixtures))
            yield kernel, "mixture_weights", LogNormalPrior(share, _LOG_SCALE)
        else:
            yield kernel, "outputscale", LogNormalPrior(0.0, _LOG_SCALE)
    parts = list(model.covar_module.modules())
    if any(isinstance(part, DeepKernel) for part in parts):
        return  # distances between features have no scale that is known
    dimensions = cast(Any, model.train_inputs)[0].shape[-1]
    for kernel in parts:
        if isinstance(kernel, RBFKernel | MaternKernel | RQKernel):
            start = 0.5 * math.log(kernel.ard_num_dims or dimensions)
            yield kernel, "lengthscale", LogNormalPrior(start, _LOG_LENGTHSCALE)


def _scales(kernel: Kernel) -> Iterator[Kernel]:
    """The outermost parts of a kernel that have a scale."""
    if isinstance(kernel, ScaleKernel | SpectralMixtureKernel):
        yield kernel
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for summand in cast(Any, kernel.kernels):
            yield from _scales(summand)


@torch.no_grad()
def ran_away(mll: MarginalLogLikelihood) -> str:
    """What has left the range of the targets, in words; empty if nothing has.

    Only objectives that do not score first points are asked: under others a large scale is what the
    targets say.
    """
    model = mll.model
    if not isinstance(model, ExactGP) or scores_first_points(mll):
        return ""
    targets = cast(Tensor, model.train_targets)
    centre = targets.nanmean().item()
    variance = (targets - centre).square().nanmean().item()
    if not variance > 0:
        return ""
    for kernel in _scales(cast(Any, getattr(model, "covar_module", None))):
        if isinstance(kernel, ScaleKernel) and kernel.is_stationary:
            largest = kernel.outputscale.max().item() / variance
            if kernel.raw_outputscale.requires_grad and largest > _TOO_LARGE:
                return f"the outputscale at {largest:.2g} times the variance of the targets"
    mean = getattr(model, "mean_module", None)
    if isinstance(mean, ConstantMean) and mean.raw_constant.requires_grad:
        farthest = (cast(Tensor, mean.constant) - centre).abs().max().item() / math.sqrt(variance)
        if farthest > _TOO_FAR:
            return f"the mean {farthest:.2g} deviations from that of the targets"
    return ""


def sentence(ran: str) -> str:
    """What a fit says that ended so, and what to do."""
    return (
        f"The fit ended with {ran}. The objective does not score first points, so that the scale, "
        "the mean and the lengthscales of a kernel may grow together, and predictions beside the "
        "data are lost. Register priors, such as LogNormalPrior(0, 1.5) of the outputscale and "
        "NormalPrior(0, 1) of the mean for standardized targets, take a GPRegression, whose line "
        "searches have them, or train by the log marginal likelihood, LastPoints(m=0)."
    )
