"""A stored ``GPRegression``: reading its file, and checks that it is complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn import Module

from gpclml._utils.annotations import fits
from gpclml._utils.checkpoint import read_checkpoint
from gpclml.errors import ArgumentError, DataError

CHECKPOINT = "gpclml.GPRegression"
_REQUIRED = {"config": dict, "state_dict": dict, "train_x": Tensor, "train_targets": Tensor}


_CONFIG: dict[str, Any] = {
    "kernel": str | None, "mean": str | None, "likelihood": str | None, "standardize": bool,
    "ard": bool, "num_features": int, "hidden": Sequence[int], "num_mixtures": int, "seed": int,
    "warm_start": bool, "columns": Sequence[str] | None,
}  # fmt: skip
_UNITS = ("target_standardizer.scale", "target_standardizer.offset")


def _check_stored(
    path: str | os.PathLike[str], config: dict[str, Any], state: dict[str, Any], train_x: Tensor
) -> None:
    """Raises where a stored ``GPRegression`` is not complete, or larger than its own state."""
    unlike = [
        name for name, hint in _CONFIG.items() if name not in config or not fits(config[name], hint)
    ]
    unlike += [name for name in _UNITS if not isinstance(state.get(name), Tensor)]
    unlike += ["train_x"] if train_x.ndim < 2 else []
    if unlike:
        raise DataError(
            f"path: {path} lacks {', '.join(unlike)}, or has something else in their place. "
            "Restore a copy of it, or save the model again."
        )
    # Networks and mixtures are made before their state is loaded, as large as the file asks for.
    d, widths = train_x.shape[-1], [train_x.shape[-1], *config["hidden"]]
    asked = 0
    if config["kernel"] in ("deep", "deep_bottleneck"):
        asked += sum(a * b for a, b in pairwise([*widths, config["num_features"]]))
    if config["kernel"] == "spectral_mixture":
        asked += d * config["num_mixtures"]
    if config["mean"] == "mlp":
        asked += sum(a * b for a, b in pairwise([*widths, 1]))
    stored = sum(entry.numel() for entry in state.values() if isinstance(entry, Tensor))
    if asked > stored:
        raise DataError(
            f"path: {path} describes a model of at least {asked} parameters and holds {stored}. "
            "Save the model again."
        )


def load_stored(
    cls: Any, path: str | os.PathLike[str], map_location: Any, parts: dict[str, Module | None]
) -> Any:
    """The model in a file, of this class, with the parts that it was given as objects."""
    content = read_checkpoint(path, CHECKPOINT, map_location, _REQUIRED)
    config, state, train_x = content["config"], content["state_dict"], content["train_x"]
    _check_stored(path, config, state, train_x)
    columns = config.pop("columns")
    for name, value in parts.items():
        if value is None and config[name] is None:
            expected = f"the {name} object the model was made with"
            suggestion = f"Call load(path, {name}=...) with one built as when the model was made."
            raise ArgumentError(name, None, expected, suggestion)
    for name in ("kernel", "mean"):
        config[name] = parts[name] if config[name] is None else config[name]
    config["likelihood"] = parts["likelihood"]
    scale, offset = (state[name] for name in _UNITS)
    model = cls(train_x, content["train_targets"] * scale + offset, **config)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        got = str(error).splitlines()[-1].strip()
        if any(part is not None for part in parts.values()):
            name, expected = "kernel, mean or likelihood", "the saved state"
            suggestion = "Pass objects of the same classes and sizes as when the model was made."
            raise ArgumentError(name, got, expected, suggestion) from error
        raise DataError(
            f"path: {path} holds the state of another model than it describes ({got}). "
            "Restore a copy of it, or save the model again."
        ) from error
    model.set_train_data(targets=content["train_targets"], strict=False)
    model.column_names = columns
    return model
