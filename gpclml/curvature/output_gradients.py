"""Gradients of a network's outputs at single points, of plain layers as products of two vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.curvature._layers import LinearRecord
from gpclml.curvature._recording import record_layers
from gpclml.curvature.structure import sample_gradients

__all__ = ["OuterProducts", "dense_rows", "layer_products", "output_gradients", "weighted_products"]

_NUMBERS = 2**24  # of products of single points in memory at a time


@dataclass(frozen=True)
class OuterProducts:
    r"""Gradients :math:`g a^\top` of the weight of a layer that is applied once to each point.

    Attributes:
        gradients: g of each output, ``(N, C, out)``.
        inputs: a, ``(N, in)``.
    """

    gradients: Tensor
    inputs: Tensor


def output_gradients(
    module: torch.nn.Module, x: Tensor, outputs: int
) -> dict[str, Tensor | OuterProducts]:
    """Gradients of all outputs at points, by the names of trained parameters.

    Args:
        module: Maps ``(N, *event)`` to ``(N, C)``, each point independently.
        x: Points, ``(N, *event)``.
        outputs: Number C of outputs.

    Returns:
        Gradients, ``(N, C, *shape)``, or :class:`OuterProducts`.

    Note:
        C backward passes, and N C P numbers for layers without outer products.
    """

    def columns(values: Tensor) -> Tensor:
        eye = torch.eye(outputs, dtype=values.dtype, device=values.device)
        return eye.expand(len(values), outputs, outputs)

    found: dict[str, Tensor | OuterProducts] = {}
    records, others = record_layers(module, x, columns)
    for record in records:
        if isinstance(record, LinearRecord) and record.is_plain:
            gradients = record.summed_gradients()
            if record.weight is not None:
                inputs = record.mean_inputs()[:, 0]
                found[record.weight] = OuterProducts(gradients, inputs)
            if record.bias is not None:
                found[record.bias] = gradients
        else:
            found |= record.gradients()
    return found | (sample_gradients(module, x, columns, others) if others else {})


def dense_rows(gradients: Tensor | OuterProducts, points: slice) -> Tensor:
    """Gradients of some points, flat, ``(N, C, p)``."""
    if isinstance(gradients, OuterProducts):
        inputs = gradients.inputs[points, None, None]
        return (gradients.gradients[points].unsqueeze(-1) * inputs).flatten(2)
    some = gradients[points]
    return some.reshape(*some.shape[:2], -1)


def layer_products(record: LinearRecord) -> Tensor:
    """The sum of products of a layer's gradients over points and columns, ``(p, p)``, float64.

    Weights come first, then biases. The layer is applied once to each point; from products of
    inputs and of gradients N points take N (in out)² operations, K times fewer than from rows.
    """
    gradients, inputs = record.summed_gradients(), record.mean_inputs()[:, 0]
    out = gradients.shape[-1]
    if record.bias is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=-1)
    width = inputs.shape[-1]
    step = max(1, _NUMBERS // (out**2 + width**2))
    total = torch.zeros(out**2, width**2, dtype=torch.float64, device=inputs.device)
    for some, values in zip(gradients.split(step), inputs.split(step), strict=True):
        g, a = some.double(), values.double()
        products = (a.unsqueeze(-1) * a.unsqueeze(-2)).flatten(1)
        total = total + (g.mT @ g).flatten(1).mT @ products
    blocks = total.unflatten(0, (out, out)).unflatten(2, (width, width))
    matrix = blocks.permute(0, 2, 1, 3).reshape(out * width, out * width)
    if record.bias is None:
        return matrix
    places = torch.arange(out * width, device=matrix.device).reshape(out, width)
    order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
    return matrix[order][:, order]


def point_products(columns: Tensor, shape: torch.Size) -> Tensor:
    """Inner products of the C columns of each point, ``(p, N C)`` to ``(N, C, C)``."""
    rows = columns.mT.unflatten(0, shape)
    return rows @ rows.mT


def weighted_products(gradients: OuterProducts, weights: Tensor) -> Tensor:
    """Inner products of gradients with weights of their entries, ``(out, in)``; ``(N, C, C)``."""
    of_inputs = gradients.inputs.square() @ weights.mT
    return (gradients.gradients * of_inputs.unsqueeze(1)) @ gradients.gradients.mT
