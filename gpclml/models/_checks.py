"""Checks of training data and of points to predict at."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError

__all__ = ["checked_points", "checked_training_data"]


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


def checked_points(x: Tensor, train_x: Tensor) -> Tensor:
    """Points as ``(*batch, m, d)`` that fit the training inputs, or a typed error."""
    _check_tensor("x", x)
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    if x.ndim < 2 or x.shape[-1] != train_x.shape[-1] or 0 in x.shape:
        expected = f"(*batch, m, {train_x.shape[-1]}), m at least 1"
        mend = "Give one row a point with the columns of the training inputs."
        raise ShapeError("x", tuple(x.shape), expected, mend)
    try:
        torch.broadcast_shapes(x.shape[:-2], train_x.shape[:-2])
    except RuntimeError:
        expected = f"a batch that broadcasts with {tuple(train_x.shape[:-2])}"
        mend = "Give one set of points, or one for each batch element."
        raise ShapeError("x", tuple(x.shape), expected, mend) from None
    _check_same("x", x, "the training inputs", train_x)
    _check_finite("x", x, "Drop or impute the rows with missing inputs.")
    return x


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
