"""Values that come with their vector-Jacobian products, and the one autograd node for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gpclml.errors import UnsupportedError

Gradients = list[tuple[Tensor, Tensor]]
"""Tensors and gradients with respect to them, each of the shape and type of its tensor. A tensor
may be there several times: its gradient is the sum."""


class Evaluated(NamedTuple):
    """A value and its vector-Jacobian product.

    Attributes:
        value: Without a gradient.
        tensors: Those that it depends on and that require a gradient.
        vjp: Gradients of a loss with respect to them, from that with respect to the value, which is
            symmetric where the value is a matrix of one set of points with itself.
        is_free: Whether the memory of the value may be used for something else.
    """

    value: Tensor
    tensors: list[Tensor]
    vjp: Callable[[Tensor], Gradients]
    is_free: bool = False


def fitted(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient in the shape and type of its tensor, which may have been broadcast."""
    return gradient.sum_to_size(like.shape).to(like.dtype)


def precomputed(evaluated: Evaluated, dtype: torch.dtype | None = None) -> Tensor:
    """The value as a node of autograd, whose backward pass is the vector-Jacobian product.

    Args:
        evaluated: The value; tensors that it depends on may be given several times.
        dtype: Type of the result; that of the value if None.

    Raises:
        UnsupportedError: In the backward pass, if it is to be differentiated itself.
    """
    value, tensors, vjp, _ = evaluated
    value = value if dtype is None else value.to(dtype)
    if not tensors or not torch.is_grad_enabled():
        return value
    # Autograd takes each tensor once, whatever the number of terms that it is in.
    distinct = dict(zip(map(id, tensors), tensors, strict=True)).values()
    return cast(Tensor, _Precomputed.apply(value, vjp, evaluated.value.dtype, *distinct))


def matrix_node(evaluated: Evaluated, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix of one set of points as a node of autograd, with whatever is computed of it.

    Args:
        evaluated: The matrix, ``(*batch, n, n)``.
        dtype: Type of the result; that of the matrix if None.
    """
    value, tensors, vjp, _ = evaluated
    return precomputed(Evaluated(value, tensors, lambda grad: vjp(0.5 * (grad + grad.mT))), dtype)


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, vjp, dtype, *tensors):
        ctx.vjp, ctx.tensors, ctx.dtype = vjp, tensors, dtype
        ctx.save_for_backward(*tensors)  # so that autograd refuses those that were changed in place
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "log densities and covariances in closed form",
                "backward with create_graph=True",
                "a first derivative only",
                "Its gradient is in closed form and not itself differentiable: take finite "
                "differences of the gradient for a Hessian.",
            )
        _ = ctx.saved_tensors
        totals: dict[int, Tensor] = {}
        for tensor, gradient in ctx.vjp(grads[0].to(ctx.dtype)):
            key = id(tensor)
            totals[key] = totals[key] + gradient if key in totals else gradient
        return None, None, None, *map(totals.get, map(id, ctx.tensors))
