"""Values that come with their vector-Jacobian products, and the one autograd node for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from gpclml.errors import UnsupportedError

__all__ = ["Evaluated", "Gradients", "as_matrix", "fitted", "precomputed", "refuse_double_backward"]

Gradients = list[tuple[Tensor, Tensor]]
"""Tensors and gradients with respect to them, each of the shape and type of its tensor. A tensor
may be there several times: its gradient is the sum."""


class VectorJacobianProduct(Protocol):
    """The vector-Jacobian product of a value: gradients of a loss through it."""

    def __call__(self, grad: Tensor, weight: Tensor | None = None, /) -> Gradients:
        """Gradients with respect to the tensors that the value depends on.

        Args:
            grad: Gradient with respect to the value; symmetric, where the value is a matrix of one
                set of points with itself.
            weight: Multiplies all gradients, ``()`` or one a batch member; one if None.
        """
        ...


class Evaluated(NamedTuple):
    """A value and its vector-Jacobian product.

    Attributes:
        value: Without a gradient.
        tensors: Those that it depends on and that require a gradient.
        vjp: Gradients with respect to them, from that with respect to the value.
        is_free: Whether the memory of the value may be used for something else.
    """

    value: Tensor
    tensors: list[Tensor]
    vjp: VectorJacobianProduct
    is_free: bool = False


def fitted(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient in the shape and type of its tensor, which may have been broadcast."""
    if gradient.shape != like.shape:
        gradient = gradient.sum_to_size(like.shape)
    return gradient.to(like.dtype)


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
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    return cast(Tensor, _Precomputed.apply(value, vjp, evaluated.value.dtype, *distinct))


def as_matrix(evaluated: Evaluated, dtype: torch.dtype) -> Tensor:
    """The matrix of one set of points as a node of autograd, with whatever is computed of it.

    Args:
        evaluated: The matrix, ``(*batch, n, n)``.
        dtype: Type of the result.
    """
    value, tensors, vjp, _ = evaluated
    return precomputed(
        Evaluated(value, tensors, lambda grad, *_: vjp(0.5 * (grad + grad.mT))), dtype
    )


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, vjp, dtype, *tensors):
        ctx.vjp, ctx.tensors, ctx.dtype = vjp, tensors, dtype
        ctx.save_for_backward(*tensors)  # so that autograd refuses those that were changed in place
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("log densities and covariances in closed form")
        _ = ctx.saved_tensors
        return None, None, None, *summed(ctx.vjp(grads[0].to(ctx.dtype)), ctx.tensors)


def summed(gradients: Gradients, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient with respect to each of these tensors; None where there is none."""
    totals: dict[int, Tensor] = {}
    for tensor, gradient in gradients:
        key = id(tensor)
        totals[key] = totals[key] + gradient if key in totals else gradient
    return [totals.get(id(tensor)) for tensor in tensors]


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
