"""What objectives share: priors and added losses, and a check of the model's mode."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import gpytorch
import torch
from gpytorch.likelihoods.noise_models import _HomoskedasticNoiseBase
from gpytorch.models import GP, ExactGP
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior, Prior
from torch import Tensor

from gpclml.errors import ModelModeError
from gpclml.gram import Gradients, Hyperparameter

__all__ = ["FixedTerms", "check_train_mode", "has_terms", "prior_and_added_loss", "sum_of_priors"]


def prior_and_added_loss(
    model: GP,
    batch_shape: torch.Size,
    params: Sequence[Tensor] = (),
) -> Tensor | float:
    """Log priors of the hyperparameters plus added loss terms, one sum a batch member.

    A prior belongs to the batch members its module is for: everything beyond the module's own
    batch shape is summed, so a kernel shared by a batch counts its whole prior in every
    member, whatever its number of ARD dimensions. A prior with a batch shape of its own gives
    each member its own density of a parameter that the batch shares, as in GPyTorch.

    Args:
        model: The model whose ``named_priors`` and ``added_loss_terms`` count. Priors of a
            likelihood count where the model holds that likelihood, as GPyTorch's models do.
        batch_shape: Batch shape of the objective.
        params: Passed on to the added losses, as GPyTorch does.

    Returns:
        The sum in nats, broadcastable to ``batch_shape``; 0.0 where there is none.
    """
    total: Tensor | float = 0.0
    for added_loss in model.added_loss_terms():
        total = total + added_loss.loss(*params)
    for _, module, prior, closure, _ in model.named_priors():
        value = closure(module)
        log_prob = _log_density(prior, value)
        if _is_batched(prior, log_prob, value):
            own = log_prob.shape[: len(batch_shape)]
        else:
            own = _own_batch_shape(module, value, batch_shape)
        total = total + _sum_beyond(log_prob, own, batch_shape)
    return total


def _log_density(prior: Prior, value: Tensor) -> Tensor:
    """That of a prior, minus infinity outside its support, where PyTorch raises an error."""
    try:
        return prior.log_prob(value)
    except ValueError:  # the support is not asked before, for which a GPU would wait at each step
        if bool(cast(Any, prior.support).check(value).all()):
            raise
        return torch.full_like(value, -math.inf)


def has_terms(model: GP) -> bool:
    """Whether there are priors or added losses.

    GPyTorch's own way of naming them takes longer, and so do PyTorch's generators of modules.
    """
    modules: list[Any] = [model]
    while modules:
        module = modules.pop()
        if isinstance(module, gpytorch.Module) and (module._priors or module._added_loss_terms):
            return True
        modules += [one for one in module._modules.values() if one is not None]
    return False


def _is_batched(prior: Prior, log_prob: Tensor, value: Tensor) -> bool:
    """Whether the prior's own batch shape made more densities than the value has parameters."""
    # Priors of matrices, GPyTorch's LKJCovariancePrior, need not say what an event is.
    event = getattr(prior, "event_shape", value.shape[-2:])
    return log_prob.numel() > value.shape[: max(0, value.ndim - len(event))].numel()


def _own_batch_shape(module: torch.nn.Module, value: Tensor, batch_shape: torch.Size) -> torch.Size:
    if isinstance(module, _HomoskedasticNoiseBase):
        return value.shape[:-1]  # (*batch, num_tasks)
    own = getattr(module, "batch_shape", None)
    return own if isinstance(own, torch.Size) else batch_shape


def _sum_beyond(log_prob: Tensor, own: torch.Size, batch_shape: torch.Size) -> Tensor:
    k = len(own)
    if log_prob.shape[:k] != own or not _fits(own, batch_shape):
        return log_prob.sum()
    return log_prob.reshape(*own, -1).sum(-1)


def _fits(own: torch.Size, batch_shape: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(own, batch_shape) == batch_shape
    except RuntimeError:
        return False


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


class FixedTerms:
    """Log priors and added losses, with gradients; the modules are searched once.

    Attributes:
        plain: Whether they are sums over priors alone, of a model without a batch.
    """

    def __init__(self, model: ExactGP, batch_shape: torch.Size, params: Sequence[Tensor]) -> None:
        self._model, self._batch_shape, self._params = model, batch_shape, params
        of_priors = not any(True for _ in model.added_loss_terms())
        self.plain = of_priors and not len(batch_shape)
        self.priors = [
            _PriorTerm(module, cast(Any, prior), cast(Any, closure))
            for _, module, prior, closure, _ in model.named_priors()
        ]

    def __call__(self) -> tuple[float, Gradients]:
        if not self.plain:
            terms = prior_and_added_loss(self._model, self._batch_shape, self._params)
            if not isinstance(terms, Tensor):
                return float(terms), []
            total = terms.expand(self._batch_shape).sum()
            return total.item(), [(total, torch.ones_like(total))] if total.requires_grad else []
        return sum_of_priors(self.priors)


def sum_of_priors(priors: Sequence[_PriorTerm]) -> tuple[float, Gradients]:
    """The sum of log priors, and its gradients."""
    total: Any = 0.0
    gradients: Gradients = []
    for prior in priors:
        value, pairs = prior()
        total = total + value
        gradients += pairs
    return float(total), gradients


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

_Formula = Callable[[Tensor], tuple[Tensor, Tensor]]


class _PriorTerm:
    """The log density of a hyperparameter under its prior.

    In closed form for the kinds of priors that most models have.

    Attributes:
        hyperparameter: Module and name of the hyperparameter that is known in closed form, or None.
    """

    def __init__(self, module: torch.nn.Module, prior: Prior, closure: Callable) -> None:
        self._module, self._prior, self._closure = module, prior, closure
        self._formula = _formula_of(prior)
        self.hyperparameter = None
        if self._formula is not None:
            value = cast(Tensor, closure(module))
            for raw in module._parameters:
                name = raw.removeprefix("raw_")
                if name != raw and Hyperparameter(module, name, value.dtype).is_value(value):
                    self.hyperparameter = module, name

    def copied(self, memo: dict[int, Any]) -> _PriorTerm:
        """That of the copy of its module which ``memo`` notes."""
        term = copy.copy(self)
        module, name = cast(Any, self.hyperparameter)
        term.hyperparameter = memo.get(id(module), module), name
        return term

    def is_of(self, modules: Collection[torch.nn.Module]) -> bool:
        """Whether it is in closed form, of a hyperparameter of one of these, the same for all."""
        if self.hyperparameter is None or self.hyperparameter[0] not in modules:
            return False
        return all(one.numel() == 1 for one in self._prior.buffers())

    def __call__(self) -> tuple[Tensor, Gradients]:
        """Its sum over all numbers, in double precision, and the gradient."""
        if self._formula is None or self.hyperparameter is None:
            with torch.enable_grad():
                density = _log_density(self._prior, self._closure(self._module)).sum()
            gradients = [(density, torch.ones_like(density))] if density.requires_grad else []
            return density.detach().double(), gradients
        hyperparameter = Hyperparameter(*self.hyperparameter, torch.float64)
        density, slope = self._formula(hyperparameter.value)
        return density, hyperparameter.gradients(slope)


def _formula_of(prior: Prior) -> _Formula | None:
    """The sum of a prior's log densities and their slopes, of kinds that most models have."""
    make = _FORMULAS.get(type(prior))
    return None if make is None or getattr(prior, "_transform", None) is not None else make(prior)


def _normal(prior: Any) -> _Formula:
    loc, variance, log_scale = _in_double(prior.loc, prior.scale**2, prior.scale.log())
    constant = log_scale + _HALF_LOG_2PI

    def formula(value: Tensor) -> tuple[Tensor, Tensor]:
        t = value - loc
        slope = t / -variance
        return (t * slope).mul_(0.5).sub_(constant).sum(), slope

    return formula


def _log_normal(prior: Any) -> _Formula:
    of_log = prior.base_dist
    loc, variance, log_scale = _in_double(of_log.loc, of_log.scale**2, of_log.scale.log())
    constant = log_scale + _HALF_LOG_2PI

    def formula(value: Tensor) -> tuple[Tensor, Tensor]:
        log = value.log()
        t = log - loc
        slope = t / -variance
        density = torch.add(log, t * slope, alpha=-0.5).add_(constant).sum().neg_()
        return density, slope.sub_(1.0).div_(value)

    return formula


def _gamma(prior: Any) -> _Formula:
    a, b = prior.concentration, prior.rate
    less, b, power, log_gamma = _in_double(a - 1.0, b, torch.xlogy(a, b), torch.lgamma(a))
    normalizer = power - log_gamma

    def formula(value: Tensor) -> tuple[Tensor, Tensor]:
        return (less * value.log() - b * value + normalizer).sum(), less / value - b

    return formula


def _in_double(*tensors: Tensor) -> list[Any]:
    """Numbers in double precision; what depends on them alone upstream computes in their own."""
    return [
        tensor.item() if tensor.numel() == 1 else tensor.detach().double() for tensor in tensors
    ]


_FORMULAS: dict[type[Prior], Callable[[Any], _Formula]] = {
    GammaPrior: _gamma, LogNormalPrior: _log_normal, NormalPrior: _normal,
}  # fmt: skip
