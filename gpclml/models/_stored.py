"""A stored ``GPRegression``: reading its file, and checks that it is complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gpclml._utils.checkpoint import read_checkpoint
from gpclml.errors import ArgumentError, DataError

__all__ = ["CHECKPOINT", "StoredModel", "read_stored"]

CHECKPOINT = "gpclml.GPRegression"
_REQUIRED = {"config": dict, "state_dict": dict, "train_x": Tensor, "train_targets": Tensor}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _is_name(value: object) -> bool:
    return value is None or isinstance(value, str)


_CONFIG: dict[str, Callable[[Any], bool]] = {
    "kernel": _is_name,
    "mean": _is_name,
    "likelihood": _is_name,
    "standardize": lambda value: isinstance(value, bool),
    "ard": lambda value: isinstance(value, bool),
    "num_features": _is_size,
    "hidden": lambda value: isinstance(value, list) and all(map(_is_size, value)),
    "num_mixtures": _is_size,
    "seed": lambda value: isinstance(value, int),
    "warm_start": lambda value: isinstance(value, bool),
    "columns": lambda value: (
        value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    ),
}
_UNITS = ("target_standardizer.scale", "target_standardizer.offset")


def _check_stored(
    path: str | os.PathLike[str], config: dict[str, Any], state: dict[str, Any], train_x: Tensor
) -> None:
    """Raises where a stored ``GPRegression`` is not complete, or larger than its own state."""
    unlike = [
        name for name, fits in _CONFIG.items() if name not in config or not fits(config[name])
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


@dataclass(frozen=True)
class StoredModel:
    """What a file holds; ``config`` has the arguments of the model, with parts that were given."""

    path: str | os.PathLike
    config: dict[str, Any]
    state: dict[str, Any]
    train_x: Tensor
    targets: Tensor
    columns: list[str] | None
    has_given_parts: bool

    @property
    def original_targets(self) -> Tensor:
        """The targets in original units."""
        scaled = self.targets * self.state["target_standardizer.scale"]
        return scaled + self.state["target_standardizer.offset"]

    def load_into(self, model: torch.nn.Module) -> None:
        """Gives a model the state."""
        try:
            model.load_state_dict(self.state)
        except RuntimeError as error:
            got = str(error).splitlines()[-1].strip()
            if self.has_given_parts:
                name, expected = "kernel, mean or likelihood", "the saved state"
                suggestion = (
                    "Pass objects of the same classes and sizes as when the model was made."
                )
                raise ArgumentError(name, got, expected, suggestion) from error
            raise DataError(
                f"path: {self.path} holds the state of another model than it describes ({got}). "
                "Restore a copy of it, or save the model again."
            ) from error


def read_stored(
    path: str | os.PathLike[str], map_location: Any, parts: dict[str, torch.nn.Module | None]
) -> StoredModel:
    """Reads and checks a file."""
    content = read_checkpoint(path, CHECKPOINT, map_location, _REQUIRED)
    config, state = content["config"], content["state_dict"]
    _check_stored(path, config, state, content["train_x"])
    columns = config.pop("columns")
    for name, value in parts.items():
        if value is None and config[name] is None:
            suggestion = f"Call load(path, {name}=...) with one built as when the model was made."
            raise ArgumentError(
                name, None, f"the {name} object the model was made with", suggestion
            )
    for name in ("kernel", "mean"):
        config[name] = parts[name] if config[name] is None else config[name]
    config["likelihood"] = parts["likelihood"]
    return StoredModel(
        path, config, state, content["train_x"], content["train_targets"], columns,
        any(part is not None for part in parts.values()),
    )  # fmt: skip
