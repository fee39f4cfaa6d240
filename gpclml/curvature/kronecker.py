"""Kronecker factors of the curvature, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import checked
from gpclml.curvature._layers import record_layers
from gpclml.curvature.dense import DenseCurvature, DiagonalCurvature
from gpclml.curvature.structure import (
    Cotangents,
    Curvature,
    Draw,
    Structure,
    sample_gradients,
)
from gpclml.errors import UnsupportedError

__all__ = ["Factors", "Kronecker", "KroneckerCurvature"]


@checked
@dataclass(frozen=True)
class Kronecker(Structure):
    r"""Structure of Kronecker factors for each layer: :math:`H \approx B \otimes A`.

    :math:`A` is the mean over points of :math:`a a^\top`, :math:`B` the sum over points and
    columns of :math:`g g^\top` (Martens and Grosse 2015; with weights shared by places of a
    point, Eschenhagen et al. 2023). It is exact for one point with one place and for
    a linear network's last layer. It gives no bound of the evidence: with a = g = (0, 2) on two
    points its log-determinant is smaller than the exact one.

    Args:
        sharing: ``"expand"`` treats places as points; with ``"reduce"`` a is their mean and g
            their sum, as averaged augmentations need.
        others: Treatment of the parameters of modules other than Linear and Conv2d, and of layers
            whose inputs and outputs do not determine the gradient: subclasses (LoRA), layers that
            are pruned, parametrized (weight and spectral norm) or have hooks, and weights that are
            tied, used by a function too, or applied twice. ``"refuse"`` raises an error that names
            them; ``"diagonal"`` and ``"full"`` give them an exact block of their own.

    Note:
        Costs K backward passes and, for each layer, the eigenvalues of an in x in and an out x out
        matrix.
    """

    sharing: Literal["expand", "reduce"] = "expand"
    others: Literal["refuse", "diagonal", "full"] = "refuse"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> KroneckerCurvature:
        reduce = self.sharing == "reduce"
        factors = []
        records, names = record_layers(module, x, cotangents, only=self.others == "refuse")
        for record in records:
            inputs, count = (None, 0) if record.weight is None else record.input_product(reduce)
            shape = cast(Tensor, record.layer.weight).shape
            gradients = record.gradient_product(reduce)
            factors.append(Factors(record.weight, record.bias, gradients, inputs, count, shape))
        if not names:
            return KroneckerCurvature(factors)
        gradients = sample_gradients(module, x, cotangents, names)
        if self.others == "diagonal":
            return KroneckerCurvature(factors, DiagonalCurvature.of_gradients(gradients))
        others = DenseCurvature.of_gradients(gradients, [names], "parameters")
        return KroneckerCurvature(factors, others)


class KroneckerCurvature(Curvature):
    r"""Blocks :math:`B \otimes A` of weights and B of biases.

    Args:
        factors: Factors of each layer.
        others: Curvature of the parameters without factors.
    """

    @checked(late=True)
    def __init__(
        self,
        factors: Sequence[Factors],
        others: DiagonalCurvature | DenseCurvature | None = None,
    ) -> None:
        self.factors = tuple(factors)
        self.others = others

    @cached_property
    def _eigenvalues(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one in self.factors:
            found |= one.eigenvalues()
        return found

    @override
    def log_det_ratio(
        self, precisions: Mapping[str, Tensor], scale: Tensor | float = 1.0
    ) -> Tensor:
        terms = [
            (scale * values / precisions[name]).log1p().sum()
            for name, values in self._eigenvalues.items()
        ]
        if self.others is not None:
            terms.append(self.others.log_det_ratio(precisions, scale).double())
        return torch.stack(terms).sum().to(next(iter(precisions.values())).dtype)

    @override
    def _draws(
        self, precisions: Mapping[str, Tensor], scale: float, count: int, draw: Draw
    ) -> dict[str, Tensor]:
        draws: dict[str, Tensor] = {}
        for one in self.factors:
            draws |= one.sample(precisions, scale, count, draw)
        if self.others is not None:
            draws |= self.others._draws(precisions, scale, count, draw)
        return draws

    @override
    def __add__(self, other: Self) -> Self:
        mine, theirs = ([(one.weight, one.bias) for one in part.factors] for part in (self, other))
        if mine != theirs:
            got = f"Kronecker factors of {theirs}"
            raise UnsupportedError("curvature", got, f"factors of {mine}", "Use Full for a sum.")
        factors = [one + two for one, two in zip(self.factors, other.factors, strict=True)]
        if self.others is None:
            return type(self)(factors)
        both: Any = (self.others, other.others)
        return type(self)(factors, both[0] + both[1])


@dataclass(frozen=True)
class Factors:
    r"""Kronecker factors of a layer: :math:`B \otimes A` of its weight, B of its bias.

    Attributes:
        weight: Name of its weight; None if it is not trained.
        bias: Name of its bias; None if that is not trained, or there is none.
        gradients: B, the sum of g gᵀ, ``(out, out)``.
        inputs: A times the number of its terms, the sum of a aᵀ, ``(in, in)``; None without a
            weight.
        count: Number of terms of that sum.
        shape: Shape of the weight.
    """

    weight: str | None
    bias: str | None
    gradients: Tensor
    inputs: Tensor | None
    count: int
    shape: torch.Size

    def eigenvalues(self) -> dict[str, Tensor]:
        """Eigenvalues by the parameter's name, ``(out, in)`` and ``(out,)``, float64."""
        of_gradients = _eigenvalues(self.gradients)
        found = {} if self.bias is None else {self.bias: of_gradients}
        if self.weight is not None and self.inputs is not None:
            of_inputs = _eigenvalues(self.inputs) / self.count
            found[self.weight] = of_gradients.unsqueeze(-1) * of_inputs
        return found

    def sample(
        self, precisions: Mapping[str, Tensor], scale: float, count: int, draw: Draw
    ) -> dict[str, Tensor]:
        """Draws of weights with covariance (s B ⊗ A + δ I)⁻¹ of each block, by eigenvectors."""
        like = next(iter(precisions.values()))
        values, vectors = (part.to(like) for part in torch.linalg.eigh(self.gradients.double()))
        values = values.clamp_min(0.0)
        draws = {}
        if self.weight is not None and self.inputs is not None:
            of_inputs, directions = torch.linalg.eigh(self.inputs.double() / self.count)
            products = values.unsqueeze(-1) * of_inputs.to(like).clamp_min(0.0)
            deviation = (scale * products + precisions[self.weight]).rsqrt()
            scaled = draw(count, *deviation.shape) * deviation
            made = vectors @ scaled @ directions.mT.to(like)
            draws[self.weight] = made.reshape(count, *self.shape)
        if self.bias is not None:
            deviation = (scale * values + precisions[self.bias]).rsqrt()
            draws[self.bias] = draw(count, len(values)) * deviation @ vectors.mT
        return draws

    def __add__(self, other: Factors) -> Factors:
        inputs = None
        if self.inputs is not None and other.inputs is not None:
            inputs = self.inputs + other.inputs
        gradients, count = self.gradients + other.gradients, self.count + other.count
        return replace(self, gradients=gradients, inputs=inputs, count=count)


def _eigenvalues(factor: Tensor) -> Tensor:
    """Eigenvalues in float64; those below zero, which are rounding, are set to zero."""
    return torch.linalg.eigvalsh(factor.double()).clamp_min(0.0)
