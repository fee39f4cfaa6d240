"""Losses that optimizers minimize: an objective on its model's own training data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import gpytorch
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from torch import Tensor

from gpclml.inference.observations import likelihood_parameters

__all__ = ["fixed_loss", "fresh_loss", "has_shared_parameters", "training_loss"]


def fresh_loss(mll: MarginalLogLikelihood) -> Tensor:
    """The negative objective, summed over a batch; held-out points are drawn anew.

    Args:
        mll: Any objective ``mll(output, target)``; for a ``SumMarginalLogLikelihood`` the mean
            over its members, as it defines itself.

    Returns:
        A scalar.
    """
    if isinstance(mll, SumMarginalLogLikelihood):
        members = cast(Any, mll.mlls)
        return torch.stack([fresh_loss(member) for member in members]).mean()
    return training_loss(mll).sum()


def training_loss(mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
    """The negative objective on the model's own training data, as a training loop calls it.

    Args:
        mll: Any objective of one model.
        **kwargs: Passed on to the objective.

    Returns:
        The loss, ``(*batch,)``.
    """
    model = cast(Any, mll.model)
    params = likelihood_parameters(model, cast(Likelihood, mll.likelihood))
    return -cast(Tensor, mll(model(*model.train_inputs), model.train_targets, *params, **kwargs))


def fixed_loss(mll: MarginalLogLikelihood) -> Tensor:
    """The negative objective, summed over a batch, as a function that stays the same.

    Args:
        mll: Any objective; one with random held-out points says by ``compute_custom_loss``
            which ones stay.

    Returns:
        A scalar.
    """
    if isinstance(mll, SumMarginalLogLikelihood):
        members = cast(Any, mll.mlls)
        return torch.stack([fixed_loss(member) for member in members]).mean()
    custom: Callable[[], Tensor] | None = getattr(mll, "compute_custom_loss", None)
    return fresh_loss(mll) if custom is None else custom().sum()


def has_shared_parameters(model: torch.nn.Module, batch_shape: torch.Size) -> bool:
    """Whether members of a batch share a trainable parameter.

    Parameters of plain torch modules (networks) count as shared whatever their shape: a weight
    may have the batch's size by chance.

    Args:
        model: A batched model.
        batch_shape: The shape that a parameter of its own has in front for each member.
    """
    for module in model.modules():
        of_gpytorch = isinstance(module, gpytorch.Module)
        for parameter in module.parameters(recurse=False):
            leading = parameter.shape[: len(batch_shape)]
            if parameter.requires_grad and not (of_gpytorch and leading == batch_shape):
                return True
    return False
