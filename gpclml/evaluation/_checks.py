"""Whether models are of the same data, and what that data is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.inference.units import Units, units_of_targets

__all__ = ["checked_models", "common_targets"]

_SAME_SHARE = 1e-6  # of the spread of the targets
_ROUNDINGS = 64  # of the largest target


def checked_models(models: object) -> dict[str, ExactGP]:
    """The models, each an exact GP of one output with training data."""
    if not isinstance(models, Mapping):
        expected, mend = "a mapping of names to models", "Write {'name': model, ...}."
        raise UnsupportedError("models", type(models).__name__, expected, mend)
    if not models:
        raise ArgumentError("models", "none", "at least one model")
    for name, model in models.items():
        argument = f"models[{name!r}]"
        if not isinstance(name, str):
            raise ArgumentError(argument, f"a name of type {type(name).__name__}", "a string")
        if not isinstance(model, ExactGP):
            raise UnsupportedError(argument, type(model).__name__, "an exact GP")
        if model.train_inputs is None or model.train_targets is None:
            raise ArgumentError(argument, "no training data", "a model with training data")
        targets = _targets(model)
        if targets.ndim != 1:
            got, expected = f"targets of shape {tuple(targets.shape)}", "(n,), one output, no batch"
            mend = "Compare outputs, or members of a batch, as models of their own."
            raise ShapeError(argument, got, expected, mend)
    return dict(models)


def common_targets(models: Mapping[str, ExactGP], units: Units) -> Tensor:
    """The targets of all models in these units, NaN where missing, ``(n,)`` in float64."""
    first, targets, rounding = "", torch.empty(0), 0.0
    for name, model in models.items():
        values = _targets_in(name, model, units)
        own_rounding = torch.finfo(_targets(model).dtype).eps
        if not first:
            first, targets, rounding = name, values, own_rounding
        _check_same(name, values, first, targets, max(rounding, own_rounding), units)
    return targets


def _targets(model: ExactGP) -> Tensor:
    targets = model.train_targets
    assert isinstance(targets, Tensor)
    return targets.detach()


def _targets_in(name: str, model: ExactGP, units: Units) -> Tensor:
    try:
        scale, shift = units_of_targets(model, units)
    except UnsupportedError as error:
        mend = "Compare in units='training' if all models transform targets alike."
        expected = "a standardization of the targets, or none"
        got = f"an outcome transform {type(getattr(model, 'outcome_transform', None)).__name__}"
        raise UnsupportedError(f"models[{name!r}]", got, expected, mend) from error
    return scale.cpu() * _targets(model).to("cpu", torch.float64) + shift.cpu()


def _check_same(
    name: str, values: Tensor, first: str, targets: Tensor, rounding: float, units: Units
) -> None:
    argument = f"models[{name!r}]"
    if values.shape != targets.shape:
        expected = f"the {len(targets)} of {first!r}"
        mend = "Train all models on the same rows."
        raise ShapeError(argument, f"{len(values)} training points", expected, mend)
    missing = targets.isnan()
    if not torch.equal(missing, values.isnan()):
        row = int((missing != values.isnan()).nonzero()[0])
        mend = "Train all models on the same targets."
        raise ArgumentError(argument, f"row {row} missing in one of the two", f"as {first!r}", mend)
    observed = targets[~missing]
    if len(observed) == 0:
        raise ArgumentError(argument, "no observed target", "at least one")
    apart = (values[~missing] - observed).abs()
    allowed = _SAME_SHARE * observed.std(correction=0)
    allowed = allowed + _ROUNDINGS * rounding * observed.abs().max()
    if bool((apart > allowed).any()):
        row = int((~missing).nonzero()[apart.argmax()])
        got = f"target {float(values[row]):.6g} in row {row}, in {units} units"
        mend = "Train all models on the same rows in the same order."
        if units == "training":
            mend += " Models that standardize differently compare in units='original'."
        raise ArgumentError(argument, got, f"{float(targets[row]):.6g}, as {first!r}", mend)
