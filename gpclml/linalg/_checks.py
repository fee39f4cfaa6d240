"""Checks that the density functions share."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from gpclml.errors import ArgumentError, ShapeError, UnsupportedError

__all__ = [
    "check_gaussian",
    "check_indices",
    "check_member_indices",
    "check_residual",
    "refuse_double_backward",
]


def check_gaussian(covariance: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Both, expanded to one batch shape."""
    batch = check_residual(covariance.shape, residual)
    n = residual.shape[-1]
    if covariance.shape[:-2] == residual.shape[:-1]:
        return covariance, residual
    return covariance.expand(*batch, n, n), residual.expand(*batch, n)


def check_residual(covariance: torch.Size, residual: Tensor) -> tuple[int, ...]:
    """The batch shape of a covariance of that shape and a residual together."""
    if len(covariance) < 2 or covariance[-1] != covariance[-2] or covariance[-1] == 0:
        raise ShapeError("covariance", tuple(covariance), "(*batch, n, n) with n >= 1")
    n = covariance[-1]
    if residual.ndim < 1 or residual.shape[-1] != n:
        raise ShapeError("residual", tuple(residual.shape), f"(*batch, {n}), as the covariance")
    try:
        return numpy.broadcast_shapes(covariance[:-2], residual.shape[:-1])
    except ValueError as error:
        raise ShapeError(
            "residual",
            f"batch shape {tuple(residual.shape[:-1])}",
            f"one that broadcasts with the covariance's {tuple(covariance[:-2])}",
        ) from error


def check_indices(argument: str, indices: Tensor, n: int, count: int | None = None) -> Tensor:
    """The indices as they came: integer, one-dimensional, distinct, within 0 .. n - 1."""
    expected = f"{count or 'at least 1'} distinct integers from 0 to {n - 1}, one-dimensional"
    if indices.ndim != 1 or indices.dtype.is_floating_point or indices.dtype == torch.bool:
        raise ArgumentError(argument, f"shape {tuple(indices.shape)} of {indices.dtype}", expected)
    if indices.numel() == 0 or count not in (None, indices.numel()):
        raise ArgumentError(argument, f"{indices.numel()} indices", expected)
    values = indices.tolist()
    low, high = min(values), max(values)
    if low < 0 or high >= n:
        raise ArgumentError(argument, f"indices from {low} to {high}", expected)
    if len(set(values)) != len(values):
        raise ArgumentError(argument, "repeated indices", expected)
    return indices


def check_member_indices(argument: str, indices: Tensor, batch: torch.Size, n: int) -> Tensor:
    """The indices as they came: for each batch member as :func:`check_indices` asks."""
    if indices.shape[:-1] != batch:
        expected = f"(b,), or {tuple(batch)} and b: a row of indices for each batch member"
        raise ShapeError(argument, f"shape {tuple(indices.shape)}", expected)
    check_indices(argument, indices.flatten().unique(), n)
    ordered = indices.sort(-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ArgumentError(argument, "repeated indices", f"distinct integers from 0 to {n - 1}")
    return indices


def refuse_double_backward(name: str) -> None:
    """Raises when a gradient is asked for that could itself be differentiated."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            name,
            "backward with create_graph=True",
            "a first derivative only",
            "Its gradient is in closed form and not itself differentiable: take finite "
            "differences of the gradient for a Hessian.",
        )
