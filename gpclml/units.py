"""Units of the targets: those a model is trained in and the original ones."""

from __future__ import annotations

from typing import Literal

from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.errors import ArgumentError, UnsupportedError

__all__ = ["Units", "log_target_scale", "to_training_units"]

Units = Literal["training", "original"]


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
