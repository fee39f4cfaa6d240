"""Scaled cosines of linear maps, kept in one array forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml.linalg import refuse_double_backward

__all__ = ["scaled_cosines"]

_COLUMNS_AT_ONCE = 4096


def scaled_cosines(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    r"""The features :math:`s \cos(W x + b)`, ``(*batch, n, d)`` to ``(*batch, n, R)``.

    The angles are computed again for the gradient, which costs less than a second array of their
    size: with d columns 2 n R d operations.

    Args:
        x: ``(*batch, n, d)``.
        weight: W, ``(R, d)``; without a gradient.
        bias: b, ``(R,)``; without a gradient.
        scale: s, a number.
    """
    features = _ScaledCosines.apply(x, weight, bias, scale)
    assert isinstance(features, Tensor)
    return features


class _ScaledCosines(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale):
        ctx.save_for_backward(x, weight, bias, scale)
        return torch.nn.functional.linear(x, weight, bias).cos_().mul_(scale)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("scaled_cosines")
        x, weight, bias, scale = ctx.saved_tensors
        of_x, of_scale = torch.zeros_like(x), torch.zeros_like(scale)
        for grad, W, b in zip(
            grads[0].split(_COLUMNS_AT_ONCE, -1), weight.split(_COLUMNS_AT_ONCE),
            bias.split(_COLUMNS_AT_ONCE), strict=True,
        ):  # fmt: skip
            angles = torch.nn.functional.linear(x, W, b)
            of_scale += (grad * angles.cos()).sum()
            of_x -= (angles.sin_().mul_(grad) @ W) * scale
        return of_x, None, None, of_scale
