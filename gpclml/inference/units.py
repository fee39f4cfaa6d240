"""Units of the targets: those a model is trained in and the original ones."""

from __future__ import annotations

from typing import Literal

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.inference.missing import MISSING_TERM
from gpclml.inference.observations import Observations

__all__ = ["Units", "log_target_scale", "term_offset", "to_training_units", "units_of_targets"]

Units = Literal["training", "original"]


@checked(target="float (*batch, n)")
def to_training_units(model: ExactGP, target: Tensor, multitask: bool = False) -> Tensor:
    """Targets in original units, transformed as the model transformed its training targets.

    Args:
        model: A model of gpclml (``target_standardizer``), of BoTorch (``outcome_transform``)
            or one that does not transform targets.
        target: Targets in original units, ``(*batch, n)``; ``(*batch, n, t)`` if multitask.
        multitask: Whether the targets have a task dimension.

    Returns:
        The transformed targets, same shape.

    Raises:
        UnsupportedError: If the outcome transform is not affine.
    """
    standardizer = getattr(model, "target_standardizer", None)
    if standardizer is not None:
        return standardizer.transform(target)
    transform = _affine_outcome_transform(model)
    if transform is None:
        return target
    offset, scale = (_aligned(s, multitask) for s in (transform.means, transform.stdvs))
    return (target - offset) / scale


@checked
def log_target_scale(model: ExactGP, units: Units, multitask: bool = False) -> Tensor | float:
    """Logarithm of the original units in one training unit.

    A log density in original units is the one in training units less this, once for each
    target scored.

    Args:
        model: As for :func:`to_training_units`.
        units: ``"training"`` gives zero.
        multitask: Whether the targets have a task dimension.

    Returns:
        A tensor that broadcasts to the targets, or 0.0.

    Raises:
        ArgumentError: If ``units`` is neither name.
        UnsupportedError: If the outcome transform is not affine.
    """
    if units not in ("training", "original"):
        raise ArgumentError("units", repr(units), "'training' or 'original'")
    if units == "training":
        return 0.0
    standardizer = getattr(model, "target_standardizer", None)
    if standardizer is not None:
        return standardizer.scale.log()
    transform = _affine_outcome_transform(model)
    return 0.0 if transform is None else _aligned(transform.stdvs, multitask).log()


@checked
def term_offset(model: ExactGP, data: Observations, units: Units) -> Tensor:
    """What the log density of each target is too large by, in nats.

    The change of units, or the constant that a missing target enters with.

    Args:
        model: As for :func:`to_training_units`.
        data: The model's targets.
        units: Units that the density is asked in.

    Returns:
        ``(*batch, N)``.

    Raises:
        ArgumentError, UnsupportedError: As for :func:`log_target_scale`.
    """
    scale = log_target_scale(model, units, multitask=data.num_tasks > 1)
    event = (data.num_rows, data.num_tasks)[: 1 + (data.num_tasks > 1)]
    scale = torch.as_tensor(scale).to(data.residual)
    offset = data.flatten(scale.expand(*data.residual.shape[:-1], *event))
    if data.missing is None:
        return offset
    return offset.masked_fill(data.missing, MISSING_TERM)


@checked
def units_of_targets(model: ExactGP, units: Units) -> tuple[Tensor, Tensor]:
    """What takes targets in training units to these: scale times target plus shift.

    Args:
        model: As for :func:`to_training_units`, of one output and no batch.
        units: Those asked for.

    Returns:
        Scale and shift, numbers in float64 on the CPU.

    Raises:
        ArgumentError, UnsupportedError: As for :func:`log_target_scale`.
    """
    targets = model.train_targets
    assert isinstance(targets, Tensor)
    scale = torch.as_tensor(log_target_scale(model, units)).exp().to("cpu", torch.float64)
    if units == "training":
        return scale.reshape(()), torch.zeros((), dtype=torch.float64)
    zero = to_training_units(model, targets.detach().new_zeros(1)).to("cpu", torch.float64)
    return scale.reshape(()), -(zero * scale).reshape(())


def _affine_outcome_transform(model: ExactGP):
    transform = getattr(model, "outcome_transform", None)
    if transform is None or hasattr(transform, "stdvs"):
        return transform
    raise UnsupportedError(
        "model.outcome_transform",
        type(transform).__name__,
        "botorch's Standardize, or none",
        "Other transforms have a Jacobian of their own: score in training units.",
    )


def _aligned(statistic: Tensor, multitask: bool) -> Tensor:
    """A statistic ``(*batch, 1, outputs)`` as it broadcasts to targets."""
    if multitask:
        return statistic
    # Multi-output BoTorch models carry their outputs as the last batch dimension.
    return statistic.squeeze(-1) if statistic.shape[-1] == 1 else statistic.mT
