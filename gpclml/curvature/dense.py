"""Curvature of all parameters, of blocks of them, of each alone, and in function space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import checked
from gpclml.curvature.gradients import (
    dense_rows,
    gradient_shape,
    layer_gradients,
    layer_products,
    weighted_products,
)
from gpclml.curvature.layers import OuterProducts, sum_over_chunks
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
    layer_of,
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
        gradients = dict(layer_gradients(module, x, cotangents))
        return DenseCurvature([Block.from_gradients(gradients, self.form)])


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
        blocks: dict[str, dict[str, Tensor | OuterProducts]] = {}
        for name, rows in layer_gradients(module, x, cotangents):
            blocks.setdefault(layer_of(name) if self.by == "layer" else name, {})[name] = rows
        return DenseCurvature([Block.from_gradients(block) for block in blocks.values()])


class DenseCurvature(BlockCurvature):
    r"""Dense blocks of :math:`H = \sum_{nk} (J_n^\top v_{nk}) (J_n^\top v_{nk})^\top`."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)

    @override
    def __add__(self, other: Self) -> Self:
        pairs = zip(self.blocks, other.blocks, strict=True)
        return type(self)([mine + theirs for mine, theirs in pairs])


@dataclass(frozen=True)
class Block(Curvature):
    """A block as its rows, ``(N K, p)``, or as the product of these, ``(p, p)`` in float64."""

    shapes: Mapping[str, torch.Size]
    is_rows: bool
    matrix: Tensor

    @classmethod
    def from_gradients(
        cls, gradients: Mapping[str, Tensor | OuterProducts], form: str = "smaller"
    ) -> Block:
        """The block of parameters from their gradients by name, ``(N, K, *shape)``."""
        shapes = {name: gradient_shape(rows) for name, rows in gradients.items()}
        first, *others = gradients.values()
        sums = first.gradients if isinstance(first, OuterProducts) else first
        size = sum(shape.numel() for shape in shapes.values())
        is_rows = form == "samples" or (form == "smaller" and sums.shape[:2].numel() < size)
        if isinstance(first, OuterProducts) and not is_rows and all(b is sums for b in others):
            return cls(shapes, False, layer_products(first, bias=bool(others)))
        flat = [dense_rows(rows, slice(None)) for rows in gradients.values()]
        rows = torch.cat(flat, dim=-1).flatten(0, 1)
        return cls(shapes, is_rows, rows if is_rows else _gram(rows.mT))

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return list(self.shapes)

    def _roots(self, precisions: Precisions) -> Tensor:
        """Prior standard deviations, ``(p,)``."""
        roots = [precisions[name].rsqrt().expand(n.numel()) for name, n in self.shapes.items()]
        return torch.cat(roots)

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """From a Cholesky factor."""
        root = self._roots(precisions)
        if self.is_rows:
            inner = _gram(self.matrix * root)
        else:
            inner = self.matrix * root * root.unsqueeze(-1)
        return _log_det(inner, scale).to(root.dtype)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        root = self._roots(precisions)
        prior = draw(count, len(root))  # of standardized weights
        if self.is_rows:  # a draw from the prior, moved by what noisy rows say of it
            rows = scale**0.5 * self.matrix * root
            factor = _factor(_gram(rows)).to(rows.dtype)
            seen = prior @ rows.mT + draw(count, len(rows))
            values = prior - torch.cholesky_solve(seen.mT, factor).mT @ rows
        else:
            inner = scale * self.matrix * root * root.unsqueeze(-1)
            factor = _factor(inner).to(prior.dtype)
            values = torch.linalg.solve_triangular(factor.mT, prior.mT, upper=True).mT
        draws = (root * values).split([n.numel() for n in self.shapes.values()], dim=-1)
        pairs = zip(self.shapes.items(), draws, strict=True)
        return {name: values.reshape(count, *shape) for (name, shape), values in pairs}

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """From a Cholesky factor."""
        root = self._roots(precisions).double()
        rows = scale**0.5 * self.matrix * root
        factor = _factor(_gram(rows) if self.is_rows else scale**0.5 * root.unsqueeze(-1) * rows)

        def chunk_covariance(gradients: Mapping[str, Any], points: slice) -> Tensor:
            flat = torch.cat([dense_rows(gradients[name], points) for name in self.shapes], dim=-1)
            columns = (flat * root).flatten(0, 1).mT
            seen = rows @ columns if self.is_rows else columns
            solved = torch.linalg.solve_triangular(factor, seen, upper=False)
            known = _point_products(solved, flat.shape[:2])
            if self.is_rows:  # what rows tell is taken from the prior's covariance
                known = _point_products(columns, flat.shape[:2]) - known
            return known.to(flat)

        def covariance(gradients: Mapping[str, Any]) -> Tensor:
            first = gradients[next(iter(self.shapes))]
            count, outputs = getattr(first, "gradients", first).shape[:2]
            step = max(1, _NUMBERS // (outputs * len(root)))
            starts = range(0, count, step)
            return torch.cat([chunk_covariance(gradients, slice(a, a + step)) for a in starts])

        return covariance

    @override
    def __add__(self, other: Block) -> Block:
        if self.is_rows and other.is_rows:
            rows = torch.cat([self.matrix, other.matrix])
            few = len(rows) < rows.shape[1]
            return replace(self, is_rows=few, matrix=rows if few else _gram(rows.mT))
        mine, theirs = (b._product() for b in (self, other))
        return replace(self, is_rows=False, matrix=mine + theirs)

    def _product(self) -> Tensor:
        return _gram(self.matrix.mT) if self.is_rows else self.matrix


@dataclass(frozen=True)
class Diagonal(Structure):
    """Structure of independent parameters: the loosest bound (Immer et al. 2023, Theorem 1).

    Note:
        Costs K backward passes. So many points are in memory at a time as take about 64 MiB.
    """

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DiagonalCurvature:
        """The sum of squared gradients of each parameter; see :meth:`Structure.of`."""
        return sum_over_chunks(_diagonal, module, x, cotangents, all_columns=True)


def _diagonal(module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> DiagonalCurvature:
    return DiagonalCurvature.from_gradients(layer_gradients(module, x, cotangents))


class DiagonalCurvature(Curvature):
    r"""The diagonal of the curvature, :math:`h = \sum_{nk} (J_n^\top v_{nk})^{\circ 2}`.

    Args:
        diagonal: Diagonal of each parameter by name, in the parameter's shape.
    """

    def __init__(self, diagonal: Mapping[str, Tensor]) -> None:
        self.diagonal: dict[str, Tensor] = dict(diagonal)

    @classmethod
    def from_gradients(
        cls, gradients: Iterable[tuple[str, Tensor | OuterProducts]]
    ) -> DiagonalCurvature:
        """The diagonal from pairs of a name and gradients, ``(N, K, *shape)``, one at a time."""
        return cls({name: _sum_of_squares(rows) for name, rows in gradients})

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

        def covariance(gradients: Mapping[str, Any]) -> Tensor:
            terms = []
            for name, weight in weights.items():
                rows = gradients[name]
                if isinstance(rows, OuterProducts):
                    terms.append(weighted_products(rows, weight))
                else:
                    flat = dense_rows(rows, slice(None))
                    terms.append((flat * weight.flatten()) @ flat.mT)
            return torch.stack(terms).sum(0)

        return covariance

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
        grams: dict[str, Tensor] = {}
        last = gram = torch.zeros(())
        for name, rows in layer_gradients(module, x, cotangents):
            gradients = rows.gradients if isinstance(rows, OuterProducts) else rows
            if gradients is not last:  # a bias has the gradients of outputs that its weight has
                last, gram = gradients, _gram(dense_rows(gradients, slice(None)).flatten(0, 1))
            grams[name] = gram
            if isinstance(rows, OuterProducts):
                # Inner products of g aᵀ are products of those of g and of a.
                k = gradients.shape[1]
                inputs = _gram(rows.inputs).repeat_interleave(k, 0).repeat_interleave(k, 1)
                grams[name] = inputs * gram
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


def _sum_of_squares(rows: Tensor | OuterProducts) -> Tensor:
    """Squares of gradients, summed over points and columns, in the shape of the parameter."""
    if isinstance(rows, OuterProducts):
        return rows.gradients.square().sum(1).mT @ rows.inputs.square()
    return rows.square().sum((0, 1))


def _point_products(columns: Tensor, shape: torch.Size) -> Tensor:
    """Inner products of the C columns of each point, ``(p, N C)`` to ``(N, C, C)``."""
    rows = columns.mT.unflatten(0, shape)
    return rows @ rows.mT


def _gram(rows: Tensor) -> Tensor:
    """Inner products of rows ``(m, p)``, summed over their columns in float64."""
    if rows.dtype == torch.float64:
        return rows @ rows.mT
    chunks = map(Tensor.double, rows.split(max(1024, _DOUBLES // len(rows)), dim=-1))
    return reduce(torch.add, (chunk @ chunk.mT for chunk in chunks))
