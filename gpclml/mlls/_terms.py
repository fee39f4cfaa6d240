"""What objectives share: log priors, added losses, and a check of the model's mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.likelihoods.noise_models import _HomoskedasticNoiseBase
from gpytorch.mlls import AddedLossTerm
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior, Prior
from torch import Tensor

from gpclml.errors import ModelModeError
from gpclml.gram import Evaluated, Gradients, precomputed
from gpclml.linalg.matrices import HALF_LOG_2PI

PriorTerm = tuple[torch.nn.Module, Prior, Callable[[Any], Any]]
"""A module, a prior, and the function of the module that it is a prior of."""


def plus_priors(
    value: Tensor, model: torch.nn.Module, num_data: Tensor | int, params: Sequence[Tensor] = ()
) -> Tensor:
    """A value with log priors of the hyperparameters and added loss terms, over a number of data.

    A prior belongs to the batch members its module is for: everything beyond the module's own
    batch shape is summed, so a kernel shared by a batch counts its whole prior in every
    member, whatever its number of ARD dimensions. A prior with a batch shape of its own gives
    each member its own density of a parameter that the batch shares, as in GPyTorch. Priors of a
    likelihood count where the model holds it; ``params`` are for the added losses.
    """
    priors, losses = registered(model)
    for added_loss in losses:
        value = value + added_loss.loss(*params) / num_data
    if not priors:
        return value
    evaluated = log_priors(priors, value.shape)
    total = evaluated.value.nan_to_num(-math.inf, math.inf, -math.inf)  # NaN outside of a support
    return value + precomputed(evaluated._replace(value=total), value.dtype) / num_data


def registered(model: torch.nn.Module) -> tuple[list[PriorTerm], list[AddedLossTerm]]:
    """Priors and added losses of a model; GPyTorch finds the same in several times as long."""
    priors: list[PriorTerm] = []
    losses: dict[int, AddedLossTerm] = {}
    modules: list[Any] = [model]
    for module in modules:
        if isinstance(module, gpytorch.Module):
            for prior, closure, _ in module._priors.values():
                priors.append((module, prior, closure))
            for loss in module._added_loss_terms.values():
                if loss is not None:
                    losses[id(loss)] = loss
        # As in GPyTorch a module counts once for each parent, whatever names that has for it.
        if module._modules:
            modules.extend(filter(None, dict.fromkeys(module._modules.values())))
    return priors, list(losses.values())


def log_priors(priors: Sequence[PriorTerm], batch_shape: torch.Size) -> Evaluated:
    """Their sum in double precision, broadcastable to the batch; NaN outside of a support."""
    total: Any = 0.0
    tensors: list[Tensor] = []
    terms: list[tuple[Tensor, torch.Size]] = []
    for module, prior, closure in priors:
        with torch.enable_grad():
            value = closure(module)
            tensor, density, slope = _density_and_slope(prior, value)
        # What is beyond the shape of the members is summed, as dimensions of a lengthscale.
        shape = batch_shape and _member_shape(module, prior, density, value, batch_shape)
        total = total + (density.reshape((*shape, -1)).sum(-1) if shape else density.sum())
        if tensor.requires_grad:
            tensors.append(tensor)
            terms.append((slope, shape))

    def vjp(grad: Tensor) -> Gradients:
        gradients: Gradients = []
        for tensor, (slope, shape) in zip(tensors, terms, strict=True):
            weight = grad.sum_to_size(shape)
            if shape:
                weight = weight.reshape((*shape, *[1] * (slope.ndim - len(shape))))
            gradient = (weight * slope).sum_to_size(tensor.shape)
            gradients.append((tensor, gradient.to(tensor.dtype)))
        return gradients

    return Evaluated(total, tensors, vjp)


def _density_and_slope(prior: Any, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities, elementwise, and their slopes with respect to the tensor that comes first.

    That is the value for common priors, which take a tenth of PyTorch's time in closed form.
    """
    kind, x = type(prior), value.detach().double()
    if getattr(prior, "_transform", None) is not None:
        kind = None
    if kind is NormalPrior or kind is LogNormalPrior:
        is_log = kind is LogNormalPrior
        normal, z = (prior.base_dist, x.log()) if is_log else (prior, x)
        # As in PyTorch, what depends on the prior alone is computed in the prior's own type.
        constant, difference = normal.scale.log().double() + HALF_LOG_2PI, z - normal.loc
        slope = difference / -(normal.scale**2)
        density = 0.5 * difference * slope - constant
        return (value, density - z, (slope - 1) / x) if is_log else (value, density, slope)
    if kind is GammaPrior:
        a, b = prior.concentration, prior.rate
        constant = torch.xlogy(a, b).double() - torch.lgamma(a)
        return value, torch.xlogy(a - 1, x) - b * x + constant, (a - 1) / x - b
    try:
        density = prior.log_prob(value)
    except ValueError:  # the support is not asked before, for which a GPU would wait at each step
        if bool(prior.support.check(value).all()):
            raise
        density = torch.full_like(value, -math.inf)
    return density, density.detach().double(), torch.ones_like(density)


def _member_shape(
    module: torch.nn.Module, prior: Prior, density: Tensor, value: Tensor, batch_shape: torch.Size
) -> torch.Size:
    """The leading dimensions of a prior's densities that are those of members of the batch."""
    # Priors of matrices, GPyTorch's LKJCovariancePrior, need not say what an event is.
    event = getattr(prior, "event_shape", value.shape[-2:])
    if density.numel() > value.shape[: max(0, value.ndim - len(event))].numel():
        shape = density.shape[: len(batch_shape)]
    elif isinstance(module, _HomoskedasticNoiseBase):
        shape = value.shape[:-1]  # (*batch, num_tasks)
    else:
        shape = getattr(module, "batch_shape", batch_shape)
    # From the last dimension on, as shapes are broadcast.
    pairs = zip(shape[::-1], batch_shape[::-1], strict=False)
    fits = len(shape) <= len(batch_shape) and all(size in (1, whole) for size, whole in pairs)
    return shape if fits and density.shape[: len(shape)] == shape else torch.Size()


def check_train_mode(model: torch.nn.Module) -> None:
    """Refuses, by a ModelModeError, a model in eval mode, whose output is its posterior."""
    if not model.training:
        raise ModelModeError(
            "model", "a model in eval mode, whose output is its posterior", "a model in train mode",
            "Call model.train() before the objective; for scores of a fitted model use "
            "gpclml.evaluation.",
        )  # fmt: skip
