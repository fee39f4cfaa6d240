"""A stored stack: its training data, and the state of each component."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import Tensor

from gpclml.errors import DataError
from gpclml.estimators.calibration import LEAST_DEGREES, Calibration
from gpclml.estimators.candidates import CANDIDATES, make_candidate
from gpclml.estimators.components import Component
from gpclml.estimators.warps import Warp

__all__ = ["KIND", "REQUIRED", "StoredStack", "content_of_stack", "stored_stack"]

KIND = "gpclml.StackedGP"
REQUIRED = {
    "config": dict, "x": Tensor, "y": Tensor, "columns": (list, type(None)), "categories": list,
    "components": list, "failures": dict,
}  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, float) and not math.isnan(value)


def _is_warp(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(map(_is_number, value)):
        return False
    return value[1] > 0 and 0 <= value[2] <= 2


def _is_calibration(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 5 or not all(map(_is_number, value)):
        return False
    return value[0] > 0 and value[1] >= LEAST_DEGREES and value[4] > 0


_CONFIG: dict[str, Callable[[Any], bool]] = {
    "candidates": lambda value: isinstance(value, list) and set(value) <= set(CANDIDATES),
    "pseudo_counts": _is_number,
    "calibrate": lambda value: isinstance(value, bool),
    "fit_rows": lambda value: isinstance(value, int),
    "restarts": lambda value: isinstance(value, int),
    "extrapolation": _is_number,
    "seed": lambda value: isinstance(value, int),
}
_COMPONENT: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: value in CANDIDATES,
    "state": lambda value: isinstance(value, dict),
    "weight": lambda value: _is_number(value) and value >= 0,
    "calibration": _is_calibration,
    "loo": _is_number,
    "loo_uncalibrated": _is_number,
    "note": lambda value: isinstance(value, str),
    "seconds": _is_number,
    "warp": lambda value: value is None or _is_warp(value),
}


@dataclass(frozen=True)
class StoredStack:
    """What a file holds.

    Attributes:
        config: Arguments of the stack.
        x: Training inputs.
        y: Training targets.
        columns: Names of the inputs' columns, if they are known.
        categories: For each category the columns that are its levels.
        components: The components.
        failures: By name, why a candidate is not among them.
    """

    config: dict[str, Any]
    x: Tensor
    y: Tensor
    columns: list[str] | None
    categories: tuple[tuple[int, ...], ...]
    components: tuple[Component, ...]
    failures: Mapping[str, str]


def content_of_stack(
    config: Mapping[str, Any],
    x: Tensor,
    y: Tensor,
    columns: list[str] | None,
    categories: Sequence[Sequence[int]],
    components: Sequence[Component],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    """Tensors and primitives that :func:`stored_stack` makes a stack of; the data once."""
    stored = [
        {
            "name": one.name, "state": dict(one.model.state_dict()), "weight": one.weight,
            "calibration": list(astuple(one.calibration)), "loo": one.loo,
            "loo_uncalibrated": one.loo_uncalibrated, "note": one.note, "seconds": one.seconds,
            "warp": None if one.warp is None else list(astuple(one.warp)),
        }
        for one in components
    ]  # fmt: skip
    return {
        "config": dict(config), "x": x, "y": y, "columns": columns,
        "categories": [list(group) for group in categories], "components": stored,
        "failures": dict(failures),
    }  # fmt: skip


def stored_stack(path: str | os.PathLike[str], content: Mapping[str, Any]) -> StoredStack:
    """Checks a content and makes the models in it.

    Args:
        path: Where it is from, for messages.
        content: Of the keys and types of :data:`REQUIRED`.

    Raises:
        DataError: It is not complete, or parts do not fit each other.
    """
    _check(path, content["config"], _CONFIG)
    x, y = content["x"], content["y"]
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise _damaged(path, f"inputs {tuple(x.shape)} and targets {tuple(y.shape)}")
    categories = tuple(map(tuple, content["categories"]))
    columns = [column for group in categories for column in group]
    if not all(isinstance(column, int) and 0 <= column < x.shape[1] for column in columns):
        raise _damaged(path, "categories of other columns")
    components = []
    for one in content["components"]:
        _check(path, one, _COMPONENT)
        warp = None if one["warp"] is None else Warp(*one["warp"])
        warped = y if warp is None else warp.forward(y)
        model = make_candidate(one["name"], x, warped, content["config"]["seed"], categories)
        try:
            model.load_state_dict(one["state"])
        except RuntimeError as error:
            raise _damaged(path, f"the state of {one['name']} does not fit") from error
        targets = model.target_standardizer.transform(warped)
        model.set_train_data(targets=targets, strict=False)
        calibration = Calibration(*one["calibration"])
        scores = one["loo"], one["loo_uncalibrated"]
        said = one["note"], one["seconds"], warp
        components.append(
            Component(one["name"], model.eval(), one["weight"], calibration, *scores, *said)
        )
    if not components:
        raise _damaged(path, "no component")
    return StoredStack(
        content["config"],
        x,
        y,
        content["columns"],
        categories,
        tuple(components),
        content["failures"],
    )


def _check(path: object, values: object, fits: Mapping[str, Callable[[Any], bool]]) -> None:
    if not isinstance(values, dict):
        raise _damaged(path, f"a {type(values).__name__} in place of a mapping")
    unlike = [name for name, fit in fits.items() if name not in values or not fit(values[name])]
    if unlike or set(values) != set(fits):
        raise _damaged(path, f"no {', '.join(unlike)}, or something else in their place")


def _damaged(path: object, got: str) -> DataError:
    return DataError(f"path: {path} holds {got}. Restore a copy of it, or save the stack again.")
