"""Whether a line search left the range of the targets, under objectives that leave it open."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from gpytorch.kernels import ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.mlls.fixed_loss import scores_first_points
from gpclml.models.weak_priors import scales_of

_TOO_LARGE = 1e3  # outputscale over the variance of targets
_TOO_FAR = 30.0  # of the mean from that of targets, in their deviations


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
    for kernel in scales_of(cast(Any, getattr(model, "covar_module", None))):
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
