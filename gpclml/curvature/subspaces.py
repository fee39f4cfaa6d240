"""Structures of some of a network's weights, and of few directions among all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from gpclml._utils.arguments import check_counts, checked
from gpclml.curvature.blocks import Block, DiagonalCurvature
from gpclml.curvature.gradients import layer_gradients
from gpclml.curvature.layers import OuterProducts, sum_over_chunks
from gpclml.curvature.structure import (
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

_NUMBERS = 2**24  # of gradients of the chosen weights in memory at a time
_ROWS = 512  # beside those kept, whose largest directions are found at a time


@checked
@dataclass(frozen=True)
class Subnetwork(Structure):
    """Structure of some weights, all others being constants (Daxberger et al. 2021).

    Args:
        indices: Numbers of the weights in their flattened parameter, by its name. Other parameters
            must not require a gradient.
        structure: ``"full"`` for a matrix of all of these weights, ``"diag"`` for independent ones.

    Note:
        Costs as :class:`Full` or :class:`Diagonal` of so many weights. Of layers that are not
        linear the gradients of all weights are formed, of so many points as take about 64 MiB.
    """

    indices: Mapping[str, Tensor]
    structure: Literal["full", "diag"] = "full"

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> SubnetworkCurvature:
        """The curvature of these weights; see :meth:`Structure.of`."""
        return sum_over_chunks(self._of, module, x, cotangents, all_columns=True)

    def _of(
        self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents
    ) -> SubnetworkCurvature:
        rows: dict[str, Tensor | OuterProducts] = {}
        shapes: dict[str, torch.Size] = {}
        for name, gradients in layer_gradients(module, x, cotangents):
            rows[name] = _chosen_columns(gradients, self.indices[name])
            shapes[name] = gradients.shape[2:]
        full = self.structure == "full"
        inner = (
            Block.from_gradients(rows) if full else DiagonalCurvature.from_gradients(rows.items())
        )
        return SubnetworkCurvature(inner, dict(self.indices), shapes)


def _chosen_columns(rows: Tensor | OuterProducts, index: Tensor) -> Tensor:
    """Gradients ``(N, K, *shape)`` with respect to some entries of a parameter, ``(N, K, p)``."""
    if isinstance(rows, Tensor):
        return rows.flatten(2)[..., index.to(rows.device)]
    inputs, index = rows.inputs.flatten(1), index.to(rows.inputs.device)
    width = inputs.shape[1]
    return rows.gradients[..., index // width] * inputs[:, index % width].unsqueeze(1)


@dataclass(frozen=True)
class SubnetworkCurvature(Curvature):
    """The curvature of some weights.

    Attributes:
        inner: That of the chosen weights of each parameter as one vector.
        indices: Their numbers in the flattened parameter, by its name.
        shapes: Shapes of the parameters.
    """

    inner: Any
    indices: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]

    @property
    def names(self) -> list[str]:
        """Names of the parameters that have chosen weights."""
        return list(self.shapes)

    def _chosen_precisions(self, precisions: Precisions) -> dict[str, Tensor]:
        values = {name: precisions[name] for name in self.names}
        return {
            name: value.flatten()[self.indices[name].to(value.device)] if value.ndim else value
            for name, value in values.items()
        }

    @override
    def log_det_ratio(self, precisions: Precisions, scale: Scale = 1.0) -> Tensor:
        """That of the chosen weights."""
        return self.inner.log_det_ratio(self._chosen_precisions(precisions), scale)

    @override
    def _draws(self, precisions: Precisions, scale: float, count: int, draw: Draw) -> Draws:
        chosen = self.inner._draws(self._chosen_precisions(precisions), scale, count, draw)
        draws = {}
        for name, values in chosen.items():
            whole = values.new_zeros(count, self.shapes[name].numel())
            whole[:, self.indices[name].to(values.device)] = values
            draws[name] = whole.reshape(count, *self.shapes[name])
        return draws

    @override
    def output_covariance(self, precisions: Precisions, scale: Scale = 1.0) -> OutputCovariance:
        """That of the chosen weights."""
        inner = self.inner.output_covariance(self._chosen_precisions(precisions), scale)

        def covariance(gradients: Mapping[str, Any], together: int = 1) -> Tensor:
            count, outputs = gradients[self.names[0]].shape[:2]
            size = outputs * sum(map(len, self.indices.values()))
            step = together * max(1, _NUMBERS // (together * size))
            chunks = []
            for first in range(0, count, step):
                rows = {k: gradients[k][first : first + step] for k in self.names}
                rows = {k: _chosen_columns(g, self.indices[k]) for k, g in rows.items()}
                chunks.append(inner(rows, together))
            return torch.cat(chunks)

        return covariance

    @override
    def __add__(self, other: Self) -> Self:
        return replace(self, inner=self.inner + other.inner)


@checked
@dataclass(frozen=True)
class LowRank(Structure):
    r"""Structure of the directions with the largest curvature among all weights.

    .. math:: H \approx \sum_{r \le R} \lambda_r u_r u_r^\top

    with the largest eigenvalues of H and their vectors; of more than 512 gradients, of the sum of
    what was kept of those before and the next ones. In all other directions the posterior is the
    prior: variances are no smaller than those of :class:`Full`, and the evidence is larger, by much
    where the rank is small. It pays where points unlike the data are to be told from others.

    Args:
        rank: Number R of directions. From N K on, the number of gradients, nothing is left out.

    Note:
        R P numbers in memory, where :class:`Full` takes the smaller of P² and N K P, and as many of
        gradients as take about 64 MiB. Costs N K (R + 512) P.
    """

    rank: int = 100

    def __post_init__(self) -> None:
        check_counts(rank=self.rank)

    @override
    def of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> LowRankCurvature:
        """The largest directions; see :meth:`Structure.of`."""
        return sum_over_chunks(self._of, module, x, cotangents, all_columns=True, dense=True)

    def _of(self, module: torch.nn.Module, x: Tensor, cotangents: Cotangents) -> LowRankCurvature:
        block = Block.from_gradients(dict(layer_gradients(module, x, cotangents)), "samples")
        rows = _principal_rows(block.matrix, self.rank)
        return LowRankCurvature(block.shapes, True, rows, self.rank)


def _principal_rows(rows: Tensor, rank: int) -> Tensor:
    """Rows ``(rank, p)`` whose products are the largest part of those of rows ``(m, p)``."""
    kept = rows[:0].double()
    for block in rows.split(max(rank, _ROWS)):  # the cube of all rows would cost more
        kept = torch.cat([kept, block.double()])
        if len(kept) > rank:
            _, vectors = torch.linalg.eigh(kept @ kept.mT)
            kept = vectors[:, -rank:].mT @ kept
    return kept.to(rows)


@dataclass(frozen=True)
class LowRankCurvature(Block):
    """A curvature as few rows, ``(R, P)``.

    Attributes:
        rank: The most rows that are kept.
    """

    rank: int

    @override
    def __add__(self, other: Any) -> Any:
        if not isinstance(other, LowRankCurvature):
            got = f"{type(other).__name__} beside a curvature of low rank"
            raise UnsupportedError("curvature", got, "one of low rank", "Use Full for a sum.")
        rows = torch.cat([self.matrix, other.matrix])
        return replace(self, matrix=_principal_rows(rows, self.rank))
