"""Checks of training data, of points to predict at, and of stored models."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gpclml.errors import ArgumentError, DataError, NonFiniteError, ShapeError

__all__ = ["check_stored", "checked_training_data"]


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
}
_UNITS = ("target_standardizer.scale", "target_standardizer.offset")


def checked_training_data(train_x: Tensor, train_y: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs as ``(*batch, n, d)`` and targets as ``(*batch, n)``, or a typed error."""
    _check_tensor("train_x", train_x)
    _check_tensor("train_y", train_y)
    train_x = train_x.unsqueeze(-1) if train_x.ndim == 1 else train_x
    if train_x.ndim < 2 or 0 in train_x.shape:
        mend = "Give at least one point with at least one column."
        expected = "(n,) or (*batch, n, d), nothing of size zero"
        raise ShapeError("train_x", tuple(train_x.shape), expected, mend)
    if train_y.shape != train_x.shape[:-1]:
        mend = "Give one target a point; a column of targets is train_y.squeeze(-1)."
        raise ShapeError("train_y", tuple(train_y.shape), str(tuple(train_x.shape[:-1])), mend)
    _check_same("train_y", train_y, "train_x", train_x)
    _check_finite("train_x", train_x, "Drop or impute the rows with missing inputs.")
    if torch.isinf(train_y).any():
        count = int(torch.isinf(train_y).sum())
        mend = "Mark missing targets with NaN, not with infinity."
        raise NonFiniteError("train_y", f"{count} infinite values", "finite values or NaN", mend)
    if torch.isnan(train_y).all(-1).any():
        mend = "Give each batch element at least one observed target."
        raise ArgumentError("train_y", "NaN at every point", "an observed target", mend)
    return train_x, train_y


def _check_tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        mend = f"Use torch.as_tensor({argument}, dtype=torch.float64)."
        raise ArgumentError(argument, type(value).__name__, "a torch.Tensor", mend)
    if value.dtype not in (torch.float32, torch.float64):
        mend = f"Use {argument}.double(); factorizations need float32 or float64."
        raise ArgumentError(argument, f"dtype {value.dtype}", "float32 or float64", mend)


def _check_same(argument: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.dtype != other.dtype or value.device != other.device:
        got = f"{value.dtype} on {value.device}"
        expected = f"{other.dtype} on {other.device}, as {other_name}"
        raise ArgumentError(argument, got, expected, f"Use {argument}.to({other_name}).")


def _check_finite(argument: str, value: Tensor, mend: str) -> None:
    finite = torch.isfinite(value)
    if not finite.all():
        got = f"{int((~finite).sum())} non-finite values (shape {tuple(value.shape)}, "
        raise NonFiniteError(argument, got + f"dtype {value.dtype})", "finite values", mend)


def check_stored(
    path: str | os.PathLike, config: dict[str, Any], state: dict[str, Any], train_x: Tensor
) -> None:
    """Raises where a stored ``GPRegression`` is not complete, or larger than its own state.

    Args:
        path: Where it is stored, for the message.
        config: Arguments of the model.
        state: Its ``state_dict``.
        train_x: Its inputs.

    Raises:
        DataError: With what is missing, or the two sizes.
    """
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
    # Networks and mixtures are made before their state is loaded, in whatever size is asked for.
    d, widths = train_x.shape[-1], [train_x.shape[-1], *config["hidden"]]
    asked = 0
    if config["kernel"] in ("deep", "deep-bottleneck"):
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
