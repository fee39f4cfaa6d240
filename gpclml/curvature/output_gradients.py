"""Gradients of a network's outputs at single points, of plain layers as products of two vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.curvature._layers import LinearRecord
from gpclml.curvature._recording import record_layers
from gpclml.curvature.structure import sample_gradients

__all__ = ["OuterProducts", "dense_rows", "output_gradients", "weighted_products"]


@dataclass(frozen=True)
class OuterProducts:
    r"""Gradients :math:`g a^\top` of the weight of a layer that is applied once to each point.

    Attributes:
        gradients: g of each output, ``(N, C, out)``.
        inputs: a, ``(N, in)``.
    """

    gradients: Tensor
    inputs: Tensor


@checked(passes_on="x", x="(N, *event)")
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

    Raises:
        ArgumentError, ModelModeError, ShapeError, UnsupportedError: The network cannot be used.

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


def weighted_products(gradients: OuterProducts, weights: Tensor) -> Tensor:
    """Inner products of gradients with weights of their entries, ``(out, in)``; ``(N, C, C)``."""
    of_inputs = gradients.inputs.square() @ weights.mT
    return (gradients.gradients * of_inputs.unsqueeze(1)) @ gradients.gradients.mT
