"""What objectives share: priors and added losses, and a check of the model's mode."""

from __future__ import annotations

from collections.abc import Sequence

import gpytorch
import torch
from gpytorch.likelihoods.noise_models import _HomoskedasticNoiseBase
from gpytorch.models import GP
from gpytorch.priors import Prior
from torch import Tensor

from gpclml.errors import ModelModeError

__all__ = ["check_train_mode", "prior_and_added_loss"]


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
    if not _has_terms(model):
        return total
    for added_loss in model.added_loss_terms():
        total = total + added_loss.loss(*params)
    for _, module, prior, closure, _ in model.named_priors():
        value = closure(module)
        log_prob = prior.log_prob(value)
        if _is_batched(prior, log_prob, value):
            own = log_prob.shape[: len(batch_shape)]
        else:
            own = _own_batch_shape(module, value, batch_shape)
        total = total + _sum_beyond(log_prob, own, batch_shape)
    return total


def _has_terms(model: GP) -> bool:
    """One walk over the modules, where GPyTorch's own way of naming terms takes longer."""
    return any(
        module._priors or module._added_loss_terms
        for module in model.modules()
        if isinstance(module, gpytorch.Module)
    )


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
