"""Curvature of all parameters, of blocks of them, of each alone, and in function space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import checked
from gpclml.curvature._layers import LinearRecord
from gpclml.curvature._recording import record_layers, sum_over_chunks
from gpclml.curvature.output_gradients import (
    OuterProducts,
    dense_rows,
    layer_products,
    point_products,
    weighted_products,
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
    fresh_parameters,
    layer_of,
    sample_gradients,
)
from gpclml.errors import UnsupportedError
from gpclml.linalg import safe_cholesky

__all__ = [
    "Block",
    "BlockDiagonal",
    "DenseCurvature",
    "Diagonal",
    "DiagonalCurvature",
    "Full",
    "FunctionSpace",
    "FunctionSpaceCurvature",
]

_NUMBERS = 2**24  # of gradients of outputs in memory at a time
_DOUBLES = 2**20  # converted to float64 at a time, where rows are few


@checked
@dataclass(frozen=True)
class Full(Structure):
    """Structure of the full curvature, of all parameters together.

    Args:
        form: ``"parameters"`` for a P x P matrix, ``"samples"`` for N K x N K, ``"smaller"`` for
            the smaller of both.

    Note:
        Costs the cube of the smaller of P and N K, and N K P numbers in memory. Products of
        gradients are summed in float64: where noise is small, single precision loses what weakly
        determined weights have.
    """

    form: Literal["smaller", "parameters", "samples"] = "smaller"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DenseCurvature:
        """The dense matrix of all parameters together; see :meth:`Structure.of`."""
        layers = set(map(layer_of, fresh_parameters(module)))
        if len(layers) == 1 and type(module.get_submodule(*layers)) is torch.nn.Linear:
            records, others = record_layers(module, x, cotangents)
            if records and not others:
                return self._of_layer(cast(LinearRecord, records[0]))
        gradients = sample_gradients(module, x, cotangents)
        return DenseCurvature.of_gradients(gradients, [gradients], self.form)

    def _of_layer(self, record: LinearRecord) -> DenseCurvature:
        kinds = {record.weight: record.shape, record.bias: record.shape[:1]}
        shapes = {name: shape for name, shape in kinds.items() if name is not None}
        size = sum(shape.numel() for shape in shapes.values())
        fewer = record.num_points * len(record.raw_gradients) < size
        by_samples = self.form == "samples" or (self.form == "smaller" and fewer)
        if by_samples or record.weight is None or not record.is_plain:
            gradients = record.gradients()
            return DenseCurvature.of_gradients(gradients, [gradients], self.form)
        return DenseCurvature([Block(shapes, False, layer_products(record))])


@checked
@dataclass(frozen=True)
class BlockDiagonal(Structure):
    """Structure of independent blocks, one for each layer or each parameter tensor.

    The log-determinant is at least that of the full curvature (Fischer's inequality; Immer et
    al. 2023, Theorem 1), so that the evidence is a lower bound.

    Args:
        by: ``"layer"`` for a module with its weight and bias, or ``"parameter"``.
    """

    by: Literal["layer", "parameter"] = "layer"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DenseCurvature:
        """A dense matrix for each block; see :meth:`Structure.of`."""
        gradients = sample_gradients(module, x, cotangents)
        blocks: dict[str, list[str]] = {}
        for name in gradients:
            blocks.setdefault(layer_of(name) if self.by == "layer" else name, []).append(name)
        return DenseCurvature.of_gradients(gradients, blocks.values())


class DenseCurvature(BlockCurvature):
    r"""Dense blocks of :math:`H = \sum_{nk} (J_n^\top v_{nk}) (J_n^\top v_{nk})^\top`."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)

    @classmethod
    def of_gradients(
        cls,
        gradients: Mapping[str, Tensor],
        blocks: Iterable[Iterable[str]],
        form: str = "smaller",
    ) -> DenseCurvature:
        """The curvature of blocks of parameters, from rows of these by name, ``(N, K, *shape)``."""
        made = []
        flat = {name: rows.reshape(*rows.shape[:2], -1) for name, rows in gradients.items()}
        for names in map(tuple, blocks):
            rows = torch.cat([flat[name] for name in names], dim=-1).flatten(0, 1)
            shapes = {name: gradients[name].shape[2:] for name in names}
            by_samples = form == "samples" or (form == "smaller" and len(rows) < rows.shape[1])
            made.append(Block(shapes, by_samples, rows if by_samples else _gram(rows.mT)))
        return cls(made)

    @override
    def __add__(self, other: Self) -> Self:
        pairs = zip(self.blocks, other.blocks, strict=True)
        return type(self)([mine + theirs for mine, theirs in pairs])


@dataclass(frozen=True)
class Block(Curvature):
    """A block as its rows, ``(N K, p)``, or as the product of these, ``(p, p)`` in float64."""

    shapes: Mapping[str, torch.Size]
    by_samples: bool
    matrix: Tensor

    def _roots(self, precisions: Precisions) -> Tensor:
        """Prior standard deviations, ``(p,)``."""
        parts = [precisions[name].rsqrt().expand(n.numel()) for name, n in self.shapes.items()]
        return torch.cat(parts)

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return list(self.shapes)

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """From a Cholesky factor."""
        root = self._roots(precisions)
        if self.by_samples:
            inner = _gram(self.matrix * root)
        else:
            inner = self.matrix * root * root.unsqueeze(-1)
        return _log_det(inner, scale).to(root.dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        root = self._roots(precisions)
        prior = draw(count, len(root))  # of standardized weights
        if self.by_samples:  # a draw from the prior, moved by what noisy rows say of it
            rows = scale**0.5 * self.matrix * root
            factor = _factor(_gram(rows)).to(rows.dtype)
            seen = prior @ rows.mT + draw(count, len(rows))
            values = prior - torch.cholesky_solve(seen.mT, factor).mT @ rows
        else:
            inner = scale * self.matrix * root * root.unsqueeze(-1)
            factor = _factor(inner).to(prior.dtype)
            values = torch.linalg.solve_triangular(factor.mT, prior.mT, upper=True).mT
        parts = (root * values).split([n.numel() for n in self.shapes.values()], dim=-1)
        return {
            name: part.reshape(count, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """From a Cholesky factor."""
        root = self._roots(precisions).double()
        rows = scale**0.5 * self.matrix * root
        factor = _factor(_gram(rows) if self.by_samples else scale**0.5 * root.unsqueeze(-1) * rows)

        def of_some(gradients: Mapping[str, Any], points: slice) -> Tensor:
            flat = torch.cat([dense_rows(gradients[name], points) for name in self.shapes], dim=-1)
            columns = (flat * root).flatten(0, 1).mT
            seen = rows @ columns if self.by_samples else columns
            solved = torch.linalg.solve_triangular(factor, seen, upper=False)
            prior, known = (point_products(one, flat.shape[:2]) for one in (columns, solved))
            return (prior - known if self.by_samples else known).to(flat)

        def of(gradients: Mapping[str, Any]) -> Tensor:
            first = gradients[next(iter(self.shapes))]
            count, outputs = getattr(first, "gradients", first).shape[:2]
            step = max(1, _NUMBERS // (outputs * len(root)))
            starts = range(0, count, step)
            return torch.cat([of_some(gradients, slice(a, a + step)) for a in starts])

        return of

    @override
    def __add__(self, other: Block) -> Block:
        if self.by_samples and other.by_samples:
            rows = torch.cat([self.matrix, other.matrix])
            few = len(rows) < rows.shape[1]
            return replace(self, by_samples=few, matrix=rows if few else _gram(rows.mT))
        mine, theirs = (
            _gram(block.matrix.mT) if block.by_samples else block.matrix for block in (self, other)
        )
        return replace(self, by_samples=False, matrix=mine + theirs)


@dataclass(frozen=True)
class Diagonal(Structure):
    """Structure of independent parameters: the loosest bound (Immer et al. 2023, Theorem 1).

    Note:
        Costs K backward passes. So many points are in memory at a time as take about 64 MiB.
    """

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DiagonalCurvature:
        """The sum of squared gradients of each parameter; see :meth:`Structure.of`."""
        return sum_over_chunks(self._of, module, x, cotangents, all_columns=True)

    def _of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DiagonalCurvature:
        records, others = record_layers(module, x, cotangents)
        found = {name: h for record in records for name, h in record.diagonal().items()}
        if others:
            rest = DiagonalCurvature.of_gradients(sample_gradients(module, x, cotangents, others))
            found |= rest.diagonal
        return DiagonalCurvature(found)


class DiagonalCurvature(Curvature):
    r"""The diagonal of the curvature, :math:`h = \sum_{nk} (J_n^\top v_{nk})^{\circ 2}`.

    Args:
        diagonal: Diagonal of each parameter by name, in the parameter's shape.
    """

    def __init__(self, diagonal: Mapping[str, Tensor]) -> None:
        self.diagonal: dict[str, Tensor] = dict(diagonal)

    @classmethod
    def of_gradients(cls, gradients: Mapping[str, Tensor]) -> DiagonalCurvature:
        """The diagonal from the rows of each parameter by name, ``(N, K, *shape)``."""
        return cls({name: rows.square().sum((0, 1)) for name, rows in gradients.items()})

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return list(self.diagonal)

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """The sum over single parameters."""
        terms = [(scale * h / precisions[name]).log1p().sum() for name, h in self.diagonal.items()]
        return torch.stack(terms).sum()

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        return {
            name: draw(count, *h.shape) * (scale * h + precisions[name]).rsqrt()
            for name, h in self.diagonal.items()
        }

    @override
    @torch.no_grad()
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """The sum over single parameters."""
        weights = {name: 1 / (scale * h + precisions[name]) for name, h in self.diagonal.items()}

        def of(gradients: Mapping[str, Any]) -> Tensor:
            total = []
            for name, weight in weights.items():
                rows = gradients[name]
                if isinstance(rows, OuterProducts):
                    total.append(weighted_products(rows, weight))
                else:
                    flat = dense_rows(rows, slice(None))
                    total.append((flat * weight.flatten()) @ flat.mT)
            return torch.stack(total).sum(0)

        return of

    @override
    def __add__(self, other: Self) -> Self:
        return type(self)({k: h + other.diagonal[k] for k, h in self.diagonal.items()})


@dataclass(frozen=True)
class FunctionSpace(Structure):
    """Structure of the full curvature in function space, by inner products of layers.

    It serves stochastic estimates of a large network's evidence from few points and outputs (Immer
    et al. 2023, Section 4), and is exact for every network.

    Note:
        Costs K backward passes and (N K)² (in + out) operations for each linear layer.
        Convolutions, parameters of other modules, and layers that :class:`Kronecker` refuses, such
        as tied ones, need gradients at single points, N K times the size of their parameters.
    """

    @override
    def of(
        self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents
    ) -> FunctionSpaceCurvature:
        """A matrix of the size of the points for each parameter; see :meth:`Structure.of`."""
        grams = {}
        records, others = record_layers(module, x, cotangents)
        for record in records:
            if isinstance(record, LinearRecord) and record.is_plain:
                grams |= _plain_grams(record)
            else:
                grams |= {name: _gram_of(rows) for name, rows in record.gradients().items()}
        if others:
            gradients = sample_gradients(module, x, cotangents, others)
            grams |= {name: _gram_of(rows) for name, rows in gradients.items()}
        return FunctionSpaceCurvature(grams)


class FunctionSpaceCurvature(Curvature):
    r"""Inner products :math:`v_{nk}^\top J_n J_m^\top v_{ml}`, a matrix for each parameter.

    Its log-determinant, :math:`\log |I + s V^\top J P_0^{-1} J^\top V|`, is that of the full
    curvature. It supports neither draws nor sums.

    Args:
        grams: Inner products by the parameter's name, ``(N K, N K)``, in float64.
    """

    def __init__(self, grams: Mapping[str, Tensor]) -> None:
        self.grams: dict[str, Tensor] = dict(grams)

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return list(self.grams)

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """The same number as that of the full curvature, from a matrix of N K columns."""
        kernel = torch.stack([gram / precisions[name] for name, gram in self.grams.items()]).sum(0)
        return _log_det(kernel, scale).to(next(iter(precisions.values())).dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        raise UnsupportedError("curvature", "a FunctionSpace", "one with draws", "Use Full.")

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """Raises an :class:`UnsupportedError`: the curvature keeps no gradients."""
        raise UnsupportedError("curvature", "a FunctionSpace", "one with a posterior", "Use Full.")

    @override
    def __add__(self, other: Self) -> Self:
        raise UnsupportedError(
            "curvature", "a FunctionSpace over several batches", "one batch", "Use Full for a sum."
        )


def _factor(matrix: Tensor, scale: Scale = 1.0) -> Tensor:
    """Cholesky factor of I + s M, with the diagonal of M raised by its rounding.

    Under a vague prior, s M far above I, a jitter of the mean diagonal would hide small curvature.
    """
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    rounding = 1 + len(matrix) * torch.finfo(matrix.dtype).eps * eye
    return safe_cholesky(torch.addcmul(eye, matrix * rounding, torch.as_tensor(scale).to(matrix)))


def _log_det(matrix: Tensor, scale: Tensor | float) -> Tensor:
    return 2 * _factor(matrix, scale).diagonal().log().sum()


def _plain_grams(record: LinearRecord) -> dict[str, Tensor]:
    gradients, inputs = record.summed_gradients(), record.mean_inputs()[:, 0]
    gram, k = _gram_of(gradients), gradients.shape[1]
    found = {} if record.bias is None else {record.bias: gram}
    if record.weight is not None:
        of_inputs = _gram(inputs).repeat_interleave(k, 0).repeat_interleave(k, 1)
        found[record.weight] = of_inputs * gram
    return found


def _gram_of(rows: Tensor) -> Tensor:
    """Inner products of rows ``(N, K, *shape)``."""
    return _gram(rows.flatten(0, 1).flatten(1) if rows.ndim > 2 else rows.reshape(-1, 1))


def _gram(rows: Tensor) -> Tensor:
    """Inner products of rows ``(m, p)``, summed over their columns in float64."""
    if rows.dtype == torch.float64:
        return rows @ rows.mT
    some = map(Tensor.double, rows.split(max(1024, _DOUBLES // len(rows)), dim=-1))
    return reduce(torch.add, (part @ part.mT for part in some))
