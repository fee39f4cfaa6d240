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
from gpclml.curvature.dense import Block, DenseCurvature, DiagonalCurvature
from gpclml.curvature.gradients import sample_gradients, weighted_products
from gpclml.curvature.layers import (
    LinearRecord,
    OuterProducts,
    Products,
    record_columns,
    sum_over_chunks,
)
from gpclml.curvature.structure import (
    BlockCurvature,
    Cotangents,
    Curvature,
    Draw,
    Draws,
    OutputCovariance,
    Precisions,
    Scale,
    Structure,
)
from gpclml.errors import UnsupportedError

__all__ = ["Factors", "Kronecker", "KroneckerCurvature"]


@checked
@dataclass(frozen=True)
class Kronecker(Structure):
    r"""Structure of Kronecker factors for each layer: :math:`H \approx B \otimes A`.

    :math:`A` is the mean over points of :math:`a a^\top`, :math:`B` the sum over points and columns
    of :math:`g g^\top` (Martens and Grosse 2015; with weights shared by positions of a point,
    Eschenhagen et al. 2023). It is exact for one point with one position and for a linear network's
    last layer. It gives no bound of the evidence: with a = g = (0, 2) on two points its
    log-determinant is smaller than the exact one.

    Linear layers and convolutions, with groups too, have factors. Scale and shift of a batch
    (in eval mode), layer, group or RMS normalization have one exact block a layer.

    Args:
        sharing: Treatment of the positions of a convolution: ``"expand"`` treats them as points;
            with ``"reduce"`` a is their mean and g their sum, as averaged augmentations need.
        others: Treatment of all other parameters. These are the parameters of other modules
            (embeddings, attention, recurrent layers, transposed convolutions) and of layers whose
            inputs and outputs do not determine the gradient: subclasses (LoRA); pruned or
            parametrized layers (weight and spectral norm); layers with hooks, or whose first
            dimension is not that of points; and weights that are tied, used by a function, or
            applied twice. ``"refuse"`` raises an error that names them; ``"diagonal"`` and
            ``"full"`` give them an exact block of their own.

    Note:
        Costs K backward passes and, for each layer, the eigenvalues of an in x in and an out x out
        matrix, or of smaller ones if points are fewer. So many points are in memory at a time as
        take about 64 MiB.
    """

    sharing: Literal["expand", "reduce"] = "expand"
    others: Literal["refuse", "diagonal", "full"] = "refuse"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> KroneckerCurvature:
        """Two factors for each layer; see :meth:`Structure.of`."""
        return sum_over_chunks(self._of, module, x, cotangents)

    def _of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> KroneckerCurvature:
        reduce = self.sharing == "reduce"
        blocks: dict[int, Factors | Block] = {}
        columns, names = record_columns(module, x, cotangents, only=self.others == "refuse")
        for records in columns:  # one after the other takes less memory than all
            for layer, record in enumerate(records):
                before = blocks.get(layer)
                if not isinstance(record, LinearRecord):
                    block = Block.from_gradients(record.gradients())
                    blocks[layer] = before + block if isinstance(before, Block) else block
                    continue
                gradients = record.gradient_products(reduce)
                if isinstance(before, Factors):
                    blocks[layer] = replace(before, gradients=before.gradients + gradients)
                    continue
                inputs, count = (
                    (None, 0) if record.weight is None else record.input_products(reduce)
                )
                blocks[layer] = Factors(
                    record.weight, record.bias, gradients, inputs, count, record.shape
                )
        factors = [block for block in blocks.values() if isinstance(block, Factors)]
        others: list[DiagonalCurvature | DenseCurvature] = [
            DenseCurvature([block]) for block in blocks.values() if isinstance(block, Block)
        ]
        if names:
            rows = sample_gradients(module, x, cotangents, names)
            if self.others == "diagonal":
                others.append(DiagonalCurvature.from_gradients(rows.items()))
            else:
                others.append(DenseCurvature([Block.from_gradients(rows, "parameters")]))
        return KroneckerCurvature(factors, others)


class KroneckerCurvature(BlockCurvature):
    r"""Blocks :math:`B \otimes A` of weights and B of biases.

    Args:
        factors: Factors of each layer.
        others: Curvatures of the parameters without factors, independent of each other.
    """

    def __init__(
        self,
        factors: Sequence[Factors],
        others: Sequence[DiagonalCurvature | DenseCurvature] = (),
    ) -> None:
        self.factors: tuple[Factors, ...] = tuple(factors)
        self.others: tuple[DiagonalCurvature | DenseCurvature, ...] = tuple(others)
        self.blocks = (*self.factors, *self.others)

    @override
    def __add__(self, other: Self) -> Self:
        mine, theirs = ([block.names for block in c.blocks] for c in (self, other))
        if mine != theirs:
            got = f"Kronecker factors of {theirs}"
            raise UnsupportedError("curvature", got, f"factors of {mine}", "Use Full for a sum.")
        sums = [one + two for one, two in zip(self.blocks, other.blocks, strict=True)]
        count = len(self.factors)
        return type(self)(cast(Any, sums[:count]), cast(Any, sums[count:]))


@dataclass(frozen=True)
class Factors(Curvature):
    r"""Kronecker factors of a layer: :math:`B \otimes A` of its weight, B of its bias.

    Attributes:
        weight: Name of its weight; None if it is not trained.
        bias: Name of its bias; None if that is not trained, or there is none.
        gradients: B, the sum of g gᵀ; with several groups one for each.
        inputs: A times the number of its terms, the sum of a aᵀ; None without a weight.
        count: Number of terms of that sum.
        shape: Shape of the weight.
    """

    weight: str | None
    bias: str | None
    gradients: Products
    inputs: Products | None
    count: int
    shape: torch.Size

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [name for name in (self.weight, self.bias) if name is not None]

    @cached_property
    def eigenvalues(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Eigenvalues of B and A by the parameter's name, ``(*G, b)`` and ``(*G, a)``; float64.

        Some that are zero are left out. For a bias the latter is one.
        """
        b, values = self.gradients.eigenvalues(), {}
        if self.bias is not None:
            values[self.bias] = b, torch.ones_like(b[..., :1])
        if self.weight is not None and self.inputs is not None:
            values[self.weight] = b, self.inputs.eigenvalues() / self.count
        return values

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """From the eigenvalues of both factors, in float64."""
        terms = [
            ((scale / precisions[name]).double() * b.unsqueeze(-1) * a.unsqueeze(-2)).log1p().sum()
            for name, (b, a) in self.eigenvalues.items()
        ]
        return torch.stack(terms).sum()

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        """Draws of weights with covariance (s B ⊗ A + δ I)⁻¹ of each block, by eigenvectors."""
        draws = {}
        for name, (left, right, deviation) in self._spectra(precisions, scale).items():
            normal = draw(count, *deviation.shape)
            values = (left @ (normal.double() * deviation) @ right.mT).to(normal)
            draws[name] = values.reshape(count, *(self.shape if name == self.weight else (-1,)))
        return draws

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """From the eigenvectors of both factors."""
        spectra = self._spectra(precisions, float(scale))

        # In float64: where a prior is vague, the deviation of what the data do not determine is so
        # large that the rounding of a turned gradient would be seen.
        def covariance(gradients: Mapping[str, Any]) -> Tensor:
            terms = []
            for name, (left, right, deviation) in spectra.items():
                rows = gradients[name]
                if isinstance(rows, OuterProducts):
                    g, a = rows.gradients.double() @ left, rows.inputs.double() @ right
                    products = weighted_products(OuterProducts(g, a), deviation.square())
                    terms.append(products.to(rows.gradients))
                    continue
                blocks = rows.reshape(*rows.shape[:2], *deviation.shape).double()
                turned = (left.mT @ blocks @ right * deviation).flatten(2)
                terms.append((turned @ turned.mT).to(rows))
            return torch.stack(terms).sum(0)

        return covariance

    def _spectra(
        self, precisions: Precisions, scale: float
    ) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Eigenvectors of B and A by name, and deviations in their directions; float64."""
        dtype = next(iter(precisions.values())).dtype
        b, left = torch.linalg.eigh(self.gradients.matrix())
        b = _above_rounding(b, dtype).unsqueeze(-1)
        spectra = {}
        if self.weight is not None and self.inputs is not None:
            a, right = torch.linalg.eigh(self.inputs.matrix() / self.count)
            products = b * _above_rounding(a, dtype).unsqueeze(-2)
            deviation = (scale * products + precisions[self.weight]).rsqrt()
            spectra[self.weight] = left, right, deviation
        if self.bias is not None:
            deviation = (scale * b + precisions[self.bias]).rsqrt()
            spectra[self.bias] = left, torch.ones_like(b[..., :1, :]), deviation
        return spectra

    @override
    def __add__(self, other: Factors) -> Factors:
        inputs = None
        if self.inputs is not None and other.inputs is not None:
            inputs = self.inputs + other.inputs
        gradients, count = self.gradients + other.gradients, self.count + other.count
        return replace(self, gradients=gradients, inputs=inputs, count=count)


def _above_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Eigenvalues, ``(*G, p)``, at least as large as their rounding, of vectors of this type.

    Directions in which vague priors would else have all the variance are known to this accuracy.
    """
    eps = max(torch.finfo(dtype).eps ** 2, torch.finfo(values.dtype).eps)
    return values.clamp_min(values.shape[-1] * eps * values.amax(-1, keepdim=True).clamp_min(0.0))
