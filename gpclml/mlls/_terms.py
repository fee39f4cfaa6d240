"""What objectives share: log priors, added losses, and a check of the model's mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import gpytorch
import torch
from gpytorch.likelihoods.noise_models import _HomoskedasticNoiseBase
from gpytorch.mlls import AddedLossTerm
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior, Prior
from torch import Tensor

from gpclml.errors import ModelModeError
from gpclml.gram import Evaluated, Gradients, Hyperparameter, precomputed

__all__ = ["PriorTerm", "check_train_mode", "log_priors", "plus_priors", "registered"]

_Formula = Callable[[Tensor], tuple[Tensor, Tensor]]


class PriorTerm(NamedTuple):
    """A prior of a function of a module.

    Attributes:
        module: The module.
        prior: The prior.
        closure: The function.
        name: Of the hyperparameter that the function is, where the prior is of a known kind.
        formula: Log densities and slopes, elementwise, of that hyperparameter; else None.
    """

    module: torch.nn.Module
    prior: Prior
    closure: Callable[[Any], Any]
    name: str = ""
    formula: _Formula | None = None


def plus_priors(
    value: Tensor, model: torch.nn.Module, num_data: Tensor | int, params: Sequence[Tensor] = ()
) -> Tensor:
    """A value with log priors of the hyperparameters and added loss terms, over a number of data.

    A prior belongs to the batch members its module is for: everything beyond the module's own
    batch shape is summed, so a kernel shared by a batch counts its whole prior in every
    member, whatever its number of ARD dimensions. A prior with a batch shape of its own gives
    each member its own density of a parameter that the batch shares, as in GPyTorch.

    Args:
        value: What they are added to, ``(*batch,)``.
        model: The model whose priors and added losses count. Priors of a likelihood count where
            the model holds that likelihood, as GPyTorch's models do.
        num_data: What their sum is divided by.
        params: Passed on to the added losses, as GPyTorch does.
    """
    priors, losses = registered(model)
    for added_loss in losses:
        value = value + added_loss.loss(*params) / num_data
    if not priors:
        return value
    evaluated = log_priors(priors, value.shape)
    total = evaluated.value.nan_to_num(-math.inf, math.inf, -math.inf)  # outside of a support
    return value + precomputed(evaluated._replace(value=total), value.dtype) / num_data


def registered(model: torch.nn.Module) -> tuple[list[PriorTerm], list[AddedLossTerm]]:
    """Priors and added losses of a model; GPyTorch finds the same in several times as long."""
    priors: list[PriorTerm] = []
    losses: dict[int, AddedLossTerm] = {}
    modules: list[Any] = [model]
    for module in modules:
        if isinstance(module, gpytorch.Module):
            for prior, closure, _ in module._priors.values():
                priors.append(_closed_form(module, prior, closure))
            for loss in module._added_loss_terms.values():
                if loss is not None:
                    losses[id(loss)] = loss
        for child in dict.fromkeys(module._modules.values()):
            if child is not None:
                modules.append(child)
    return priors, list(losses.values())


def log_priors(priors: Sequence[PriorTerm], batch_shape: torch.Size) -> Evaluated:
    """Their sum in double precision, broadcastable to the batch; there is at least one.

    It may be NaN outside the support of a prior.
    """
    total: Any = 0.0
    tensors: list[Tensor] = []
    terms: list[tuple[Hyperparameter, Tensor, torch.Size]] = []
    for module, prior, closure, name, formula in priors:
        if formula is not None:
            parameter = Hyperparameter(module, name, torch.float64)
            value = parameter.value
            density, slope = formula(value)
        else:
            with torch.enable_grad():
                value = closure(module)
                parameter = Hyperparameter.of(_log_density(prior, value), "", torch.float64)
            density = parameter.value
            slope = torch.ones_like(density)
        shape = batch_shape and _member_shape(module, prior, density, value, batch_shape)
        total = total + (density.reshape((*shape, -1)).sum(-1) if shape else density.sum())
        terms.append((parameter, slope, shape))
        if parameter.tensor.requires_grad:
            tensors.append(parameter.tensor)

    def vjp(grad: Tensor) -> Gradients:
        gradients: Gradients = []
        for parameter, slope, shape in terms:
            weight = grad if grad.shape == shape else grad.sum_to_size(shape)
            if shape:
                weight = weight.reshape((*shape, *[1] * (slope.ndim - len(shape))))
            gradients += parameter.gradients(weight * slope)
        return gradients

    return Evaluated(total, tensors, vjp)


def _closed_form(module: Any, prior: Prior, closure: Callable[[Any], Any]) -> PriorTerm:
    """With the formula, if it is of a hyperparameter of its module, and of a known kind."""
    unknown = PriorTerm(module, prior, closure)
    make = _FORMULAS.get(type(prior))
    if make is None or getattr(prior, "_transform", None) is not None:
        return unknown
    try:
        name = closure(_NAMES)
    except Exception:  # it does more than to take an attribute
        return unknown
    if not isinstance(name, str) or f"raw_{name}" not in module._parameters:
        return unknown
    getter = getattr(getattr(type(module), name, None), "fget", None)
    # A class of the user's own may compute its hyperparameter from the raw one in any way.
    if not getattr(getter, "__module__", "").startswith(("gpytorch.", "gpclml.")):
        return unknown
    return PriorTerm(module, prior, closure, name, make(prior))


class _Names:
    """Stands for a module whose attributes are their names."""

    def __getattr__(self, name: str) -> str:
        return name


_NAMES = _Names()


def _log_density(prior: Prior, value: Tensor) -> Tensor:
    """That of a prior, minus infinity outside its support, where PyTorch raises an error."""
    try:
        return prior.log_prob(value)
    except ValueError:  # the support is not asked before, for which a GPU would wait at each step
        if bool(cast(Any, prior.support).check(value).all()):
            raise
        return torch.full_like(value, -math.inf)


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
    """Refuses a model whose output is its posterior.

    Raises:
        ModelModeError: It is in eval mode.
    """
    if not model.training:
        raise ModelModeError(
            "model",
            "a model in eval mode, whose output is its posterior",
            "a model in train mode",
            "Call model.train() before the objective; for scores of a fitted model use "
            "gpclml.evaluation.",
        )


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def _normal(prior: Any) -> _Formula:
    loc, variance, log_scale = _numbers(prior.loc, prior.scale**2, prior.scale.log())
    constant = log_scale + _HALF_LOG_2PI

    def formula(value: Tensor) -> tuple[Tensor, Tensor]:
        t = value - loc
        slope = t / -variance
        return (t * slope).mul_(0.5).sub_(constant), slope

    return formula


def _log_normal(prior: Any) -> _Formula:
    normal = prior.base_dist
    loc, variance, log_scale = _numbers(normal.loc, normal.scale**2, normal.scale.log())
    constant = log_scale + _HALF_LOG_2PI

    def formula(value: Tensor) -> tuple[Tensor, Tensor]:
        log = value.log()
        t = log - loc
        slope = t / -variance
        density = torch.addcmul(log + constant, t, slope, value=-0.5).neg_()
        return density, slope.sub_(1.0).div_(value)

    return formula


def _gamma(prior: Any) -> _Formula:
    a, b = prior.concentration, prior.rate
    less, rate, power, log_gamma = _numbers(a - 1.0, b, torch.xlogy(a, b), torch.lgamma(a))
    constant = power - log_gamma

    def formula(value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.xlogy(less, value) - rate * value + constant, less / value - rate

    return formula


def _numbers(*values: Tensor) -> list[Any]:
    """In double precision; what depends on a prior alone upstream computes in its type."""
    numbers: list[Any] = []
    for value in values:
        readable = value.numel() == 1 and value.is_cpu
        numbers.append(value.item() if readable else value.detach().double())
    return numbers


_FORMULAS: dict[type[Prior], Callable[[Any], _Formula]] = {
    GammaPrior: _gamma, LogNormalPrior: _log_normal, NormalPrior: _normal,
}  # fmt: skip
