"""Kronecker factors of the curvature, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpclml.curvature._layers import LayerRecord, record_layers
from gpclml.curvature._sample_gradients import Cotangents
from gpclml.errors import UnknownNameError

__all__ = ["Kronecker", "KroneckerCurvature"]

Factors = tuple[Tensor, ...]


class KroneckerCurvature:
    r"""Blocks :math:`B \otimes A` of weights and B of biases.

    Args:
        factors: Of each parameter by name: B and A of a weight, B of a bias.
    """

    def __init__(self, factors: Mapping[str, Factors]) -> None:
        self.factors = dict(factors)
        self._eigenvalues = {
            name: [_eigenvalues(factor) for factor in parts] for name, parts in factors.items()
        }

    def log_det_ratio(
        self, precisions: Mapping[str, Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        r""":math:`\sum \log(1 + s \beta_i \alpha_j / \delta)` over eigenvalues, in nats.

        Args:
            precisions: Prior precision of each parameter, by name.
            scale: What the curvature is multiplied by.

        Returns:
            A number; differentiable in the precisions, the scale and the points.
        """
        terms = []
        for name, (first, *others) in self._eigenvalues.items():
            values = first.unsqueeze(-1) * others[0] if others else first
            terms.append((scale * values / precisions[name]).log1p().sum())
        dtype = next(iter(self.factors.values()))[0].dtype
        return torch.stack(terms).sum().to(dtype)


@dataclass(frozen=True)
class Kronecker:
    r"""Independent inputs and gradients of a layer: :math:`H \approx B \otimes A`.

    :math:`A` is the mean over points of :math:`a a^\top`, :math:`B` the sum over points and
    columns of :math:`g g^\top` (Martens and Grosse 2015; with weights shared by places of a
    point, Eschenhagen et al. 2023). Exact for one point with one place and for a linear
    network's last layer; not a bound of the evidence (with a = g = (0, 2) on two points its
    log-determinant is below that of the exact one).

    Args:
        sharing: ``"expand"``: places are as points; ``"reduce"``: a is their mean and g their
            sum, which fits augmentations that are averaged.
    """

    sharing: Literal["expand", "reduce"] = "expand"

    def __post_init__(self) -> None:
        if self.sharing not in ("expand", "reduce"):
            raise UnknownNameError("sharing", self.sharing, ("expand", "reduce"))

    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> KroneckerCurvature:
        """The curvature at points.

        Args:
            module: Maps ``(N, *event)`` to ``(N, C)``; trained parameters are of Linear or
                Conv2d.
            x: Points, ``(N, *event)``.
            cotangents: Maps outputs to columns of their curvature, ``(N, K, C)``.

        Raises:
            UnsupportedError: Another module has trained parameters; named.
            ArgumentError, ModelModeError, ShapeError, NonFiniteError: Something of these cannot
                be used.

        Note:
            K passes back and, a layer, the eigenvalues of an in x in and an out x out matrix.
        """
        factors: dict[str, Factors] = {}
        for record in record_layers(module, x, cotangents):
            inputs, gradients = _rows(record, self.sharing)
            of_gradients = gradients.mT @ gradients
            for kind in record.trained:
                of_inputs = (inputs.mT @ inputs / len(inputs),) if kind == "weight" else ()
                factors[record.parameter(kind)] = (of_gradients, *of_inputs)
        return KroneckerCurvature(factors)


def _rows(record: LayerRecord, sharing: str) -> tuple[Tensor, Tensor]:
    """Inputs, a row each, and gradients."""
    inputs, gradients = record.inputs, record.gradients
    if sharing == "reduce":
        return inputs.mean(1), gradients.sum(2).flatten(0, 1)
    return inputs.flatten(0, 1), gradients.flatten(0, 2)


def _eigenvalues(factor: Tensor) -> Tensor:
    """In float64, where rounding below zero is small enough to be cut."""
    return torch.linalg.eigvalsh(factor.double()).clamp_min(0.0)
