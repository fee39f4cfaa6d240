"""Units of the targets: those a model is trained in and the original ones."""

from __future__ import annotations

from typing import Literal, cast

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import UnsupportedError
from gpclml.inference.observations import MISSING_TERM, Observations

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
    units = _offset_and_scale(model, multitask)
    return target if units is None else (target - units[0]) / units[1]


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
    if units == "training":
        return 0.0
    original = _offset_and_scale(model, multitask)
    return 0.0 if original is None else original[1].log()


@checked
def term_offset(model: ExactGP, data: Observations, units: Units) -> Tensor:
    """The amount by which the log density of each target is too large, in nats.

    It is the change of units, or for a missing target its constant.

    Args:
        model: As for :func:`to_training_units`.
        data: The model's targets.
        units: Units of the density.

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
    """Scale and shift that take targets in training units to the given units.

    Args:
        model: As for :func:`to_training_units`, of one output.
        units: The given units.

    Returns:
        Scale and shift in float64, on the device of the targets; they broadcast to targets
        ``(*batch, n)``.

    Raises:
        ArgumentError, UnsupportedError: As for :func:`log_target_scale`.
    """
    original = None if units == "training" else _offset_and_scale(model, multitask=False)
    if original is None:
        zero = cast(Tensor, model.train_targets).new_zeros((), dtype=torch.float64)
        return zero + 1, zero
    offset, scale = original
    return scale.double(), offset.double()


def _offset_and_scale(model: ExactGP, multitask: bool) -> tuple[Tensor, Tensor] | None:
    """Offset and scale of the targets' transformation in the type of the model; None without."""
    standardizer = getattr(model, "target_standardizer", None)
    if standardizer is not None:
        return standardizer.offset, standardizer.scale
    transform = getattr(model, "outcome_transform", None)
    if transform is None:
        return None
    if not hasattr(transform, "stdvs"):
        raise UnsupportedError(
            "model.outcome_transform",
            type(transform).__name__,
            "botorch's Standardize, or none",
            "Other transforms have a Jacobian of their own: score with units='training'.",
        )
    return _aligned(transform.means, multitask), _aligned(transform.stdvs, multitask)


def _aligned(statistic: Tensor, multitask: bool) -> Tensor:
    """A statistic ``(*batch, 1, outputs)`` as it broadcasts to targets."""
    if multitask:
        return statistic
    # Multi-output BoTorch models carry their outputs as the last batch dimension.
    return statistic.squeeze(-1) if statistic.shape[-1] == 1 else statistic.mT
