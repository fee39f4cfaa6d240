"""What layers saw and what came back: gradients of their parameters, and products of these."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call

from gpclml.linalg import symmetric_product

__all__ = ["CONVOLUTIONS", "NORMS", "LayerRecord", "LinearRecord", "NormRecord", "Products"]

CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_OF_CHANNELS = (
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.GroupNorm,
)  # fmt: skip
NORMS = (*_OF_CHANNELS, torch.nn.LayerNorm, torch.nn.RMSNorm)
_CHUNK = 2**20  # numbers of the gradients, or of the inputs of places, of a chunk of points


@dataclass(frozen=True)
class LayerRecord:
    """Inputs and output gradients of a layer that is linear in its weight and bias.

    It is applied at T places of each point, one in a plain layer. Versions of a point that a
    network averages over count as places. Rows are those of the points, one after the other.

    Attributes:
        layer: The layer.
        weight: Name of its weight in the network; None if it is not trained.
        bias: Name of its bias; None if it is not trained, or there is none.
        num_points: Number of points N.
        raw_inputs: Inputs of the layer, in its own layout.
        raw_gradients: Gradients of its outputs, one for each column of output curvature.
    """

    layer: torch.nn.Module
    weight: str | None
    bias: str | None
    num_points: int
    raw_inputs: Tensor
    raw_gradients: Sequence[Tensor]

    def gradients(self) -> dict[str, Tensor]:
        """Gradients at each point by the parameter's name, ``(N, K, *shape)``."""
        raise NotImplementedError

    def diagonal(self) -> dict[str, Tensor]:
        """Sums over points and columns of squared gradients, in the shapes of the parameters."""
        return {name: rows.square().sum((0, 1)) for name, rows in self.gradients().items()}

    def _of_points(self, rows: Tensor) -> Tensor:
        """Rows summed over versions of a point."""
        return rows.unflatten(0, (self.num_points, -1)).sum(1)


class NormRecord(LayerRecord):
    """A normalization: its scale and shift."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients at each point by the parameter's name, ``(N, K, *shape)``."""
        plain = {
            kind: torch.full_like(p, float(kind == "weight"))
            for kind, p in self.layer.named_parameters()
        }
        normalized = functional_call(self.layer, plain, (self.raw_inputs,))
        found = {}
        if self.weight is not None:
            rows = [self._summed(g * normalized) for g in self.raw_gradients]
            found[self.weight] = torch.stack(rows, dim=1)
        if self.bias is not None:
            found[self.bias] = torch.stack([self._summed(g) for g in self.raw_gradients], dim=1)
        return found

    def _summed(self, values: Tensor) -> Tensor:
        """Sums over places, ``(N, *shape)``."""
        if isinstance(self.layer, _OF_CHANNELS):
            return self._of_points(values.flatten(2).sum(2) if values.ndim > 2 else values)
        shape = next(p.shape for p in self.layer.parameters())
        return values.reshape(self.num_points, -1, *shape).sum(1)


class LinearRecord(LayerRecord):
    """A linear map of G groups of inputs, applied at T places: ``Linear`` or a convolution."""

    @property
    def is_plain(self) -> bool:
        """Whether the map has one group and is applied at one place of each point."""
        rows, groups, _, places = next(self._gradients()).shape
        return groups == 1 and rows * places == self.num_points

    def mean_inputs(self) -> Tensor:
        """Inputs of the map, their mean over places, ``(N, G, in)``."""
        inputs = self._inputs_of(self.raw_inputs).mean(3)
        return inputs.unflatten(0, (self.num_points, -1)).mean(1)

    def summed_gradients(self) -> Tensor:
        """Gradients of its outputs, summed over places, ``(N, K, out)``: those of the bias."""
        return torch.stack([self._of_bias(g) for g in self._gradients()], 1)

    def _of_bias(self, gradient: Tensor) -> Tensor:
        return self._of_points(gradient.sum(3)).flatten(1)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients at each point by the parameter's name, ``(N, K, *shape)``."""
        found = {}
        if self.weight is not None:
            rows = torch.cat([torch.stack(columns, 1) for columns in self._of_weight()])
            found[self.weight] = rows.flatten(2).unflatten(2, self.shape)
        if self.bias is not None:
            found[self.bias] = self.summed_gradients()
        return found

    def diagonal(self) -> dict[str, Tensor]:
        """Sums over points and columns of squared gradients, in the shapes of the parameters."""
        squares = torch.zeros((), dtype=self.raw_inputs.dtype, device=self.raw_inputs.device)
        for g in self._gradients():  # one column after the other takes less memory than all
            squares = squares + self._of_bias(g).square()
        found = {} if self.bias is None else {self.bias: squares.sum(0)}
        if self.weight is not None and self.is_plain:
            found[self.weight] = squares.mT @ self.mean_inputs()[:, 0].square()
        elif self.weight is not None:
            squares = (column.square().sum(0) for some in self._of_weight() for column in some)
            found[self.weight] = functools.reduce(operator.add, squares).reshape(self.shape)
        return found

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return cast(Tensor, self.layer.weight).shape

    def _of_weight(self) -> Iterator[list[Tensor]]:
        """Gradients of the weight at some points, ``(n, G, out, in)``, for each column."""
        # Patches and gradients of few points stay in the caches.
        columns, versions = list(self._gradients()), len(self.raw_inputs) // self.num_points
        of_inputs = math.prod(self.shape[1:]) * self._groups * columns[0].shape[-1]
        step = versions * max(1, _CHUNK // (versions * max(math.prod(self.shape), of_inputs)))
        for start in range(0, len(self.raw_inputs), step):
            some = slice(start, start + step)
            inputs = self._inputs_of(self.raw_inputs[some]).mT
            yield [(g[some] @ inputs).unflatten(0, (-1, versions)).sum(1) for g in columns]

    def input_products(self, reduce: bool) -> tuple[Products, int]:
        r"""The sum of :math:`a a^\top`, float64, for each of several groups; number of its terms.

        With ``reduce`` a is the mean over places, else each place is a term.
        """
        # In float64, so that rounding does not fill the null space of many inputs; some rows at a
        # time, since patches of images take many times the memory of images.
        places = next(self._gradients()).shape[-1]
        if reduce:
            products = Products.of(self.mean_inputs().double().unsqueeze(-1))
            return products, self.num_points
        channels, count = math.prod(self.shape[1:]), len(self.raw_inputs) * places
        shifts = self._moves_by_lines and count >= channels
        numbers = channels * self._groups * places // (self.shape[2] if shifts else 1)
        parts = (
            _products_of_shifts(self.layer, some.double())
            if shifts else Products.of(self._inputs_of(some.double()))
            for some in self.raw_inputs.split(max(1, _CHUNK // numbers))
        )  # fmt: skip
        return functools.reduce(operator.add, parts), count

    @property
    def _moves_by_lines(self) -> bool:
        """Whether it is a convolution for which :func:`_products_of_shifts` is of use."""
        if not isinstance(self.layer, CONVOLUTIONS) or self.layer.stride[0] > 1:
            return False
        size, gap = self.layer.kernel_size[0], self.layer.dilation[0]
        return size > 1 and self.raw_gradients[0].shape[2] > gap * (size - 1)

    def gradient_products(self, reduce: bool) -> Products:
        r"""The sum of :math:`g g^\top` over points and columns, float64, for each group.

        With ``reduce`` g is the sum over places, else each place is a term.
        """
        if not reduce:
            return functools.reduce(operator.add, map(Products.of, self._gradients()))
        rows = self.summed_gradients().flatten(0, 1)
        return Products.of(rows.unflatten(1, (self._groups, -1)).unsqueeze(-1))

    @property
    def _groups(self) -> int:
        return getattr(self.layer, "groups", 1)

    def _inputs_of(self, rows: Tensor) -> Tensor:
        """Inputs, ``(R, G, in, T)``, of R points or versions of them."""
        if isinstance(self.layer, CONVOLUTIONS):
            return _patches(self.layer, rows).unflatten(1, (self._groups, -1))
        return _channels_first(rows)

    def _gradients(self) -> Iterator[Tensor]:
        """Gradients of the outputs, ``(R, G, out, T)``, for each column."""
        for gradient in self.raw_gradients:
            if isinstance(self.layer, CONVOLUTIONS):
                yield gradient.flatten(2).unflatten(1, (self._groups, -1))
            else:
                yield _channels_first(gradient)


def _channels_first(values: Tensor) -> Tensor:
    """``(R, T, channels)`` of any number of places as ``(R, 1, channels, T)``."""
    return values.reshape(len(values), -1, values.shape[-1]).mT.unsqueeze(1)


@dataclass(frozen=True)
class Products:
    r"""The sum of :math:`v v^\top` over vectors, or one sum for each of G groups.

    Attributes:
        values: The sum, ``(p, p)`` or ``(G, p, p)``, float64; of fewer than p vectors these as
            rows, ``(n, p)``, whose inner products have the same eigenvalues other than zero.
        by_rows: Whether they are rows.
    """

    values: Tensor
    by_rows: bool = False

    @classmethod
    def of(cls, values: Tensor) -> Products:
        """Of the vectors ``(R, G, p, T)`` of R points and T places."""
        count, groups, channels, places = values.shape
        if groups > 1:
            rows = values.permute(1, 2, 0, 3).flatten(2)
            return cls(torch.bmm(rows, rows.mT).double())
        values = values[:, 0]
        if places > 1 and channels <= places:  # point by point, without a transposed copy
            return cls(torch.bmm(values, values.mT).sum(0, dtype=torch.float64))
        rows = values.mT.flatten(0, 1)
        if count * places < channels:
            return cls(rows, by_rows=True)
        return cls(symmetric_product(rows.mT, rows.mT).double())

    def matrix(self) -> Tensor:
        """The sum, ``(p, p)`` or ``(G, p, p)``, float64."""
        rows = self.values.mT
        return symmetric_product(rows, rows).double() if self.by_rows else self.values

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the sum, without some that are zero; those below zero are set to zero."""
        values = self.values.double()
        matrix = values @ values.mT if self.by_rows else values
        return torch.linalg.eigvalsh(matrix).clamp_min(0.0)

    def __add__(self, other: Products) -> Products:
        rows, channels = len(self.values) + len(other.values), self.values.shape[-1]
        if self.by_rows and other.by_rows and rows < channels:
            return Products(torch.cat([self.values, other.values]), by_rows=True)
        return Products(self.matrix() + other.matrix())


def _patches(layer: torch.nn.Module, inputs: Tensor) -> Tensor:
    """Inputs of each place of a convolution's output, ``(R, in, T)``."""
    views = _windows(layer, inputs, first=0)
    count = (views.ndim - 2) // 2
    order = 0, 1, *range(2 + count, 2 + 2 * count), *range(2, 2 + count)
    return views.permute(order).flatten(1, 1 + count).flatten(2)


def _windows(layer: torch.nn.Module, inputs: Tensor, first: int) -> Tensor:
    """Views of padded inputs, ``(R, channels, *places, *kernel)``, windows from a dimension on."""
    assert isinstance(layer, CONVOLUTIONS)
    padding = layer._reversed_padding_repeated_twice  # before and after, the last dimension first
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    # Copied once, from views: several times faster on a CPU than torch's unfold.
    views = torch.nn.functional.pad(inputs, padding, mode) if any(padding) else inputs
    steps = list(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True))
    for place, (size, stride, gap) in enumerate(steps[first:], start=2 + first):
        views = views.unfold(place, gap * (size - 1) + 1, stride)[..., ::gap]
    return views


def _products_of_shifts(layer: torch.nn.Module, inputs: Tensor) -> Products:
    r"""Products of the patches of a convolution that moves by one line at a time.

    Two patches' lines i and i' of all outputs are lines of the inputs with the distance i' - i, but
    for some at both ends. Their products are therefore computed for each distance, rather than for
    each pair: a third of the operations and of the copies if the kernel has three lines.
    """
    assert isinstance(layer, CONVOLUTIONS)
    size, gap, groups = layer.kernel_size[0], layer.dilation[0], layer.groups
    views = _windows(layer, inputs, first=1)
    count = (views.ndim - 3) // 2
    order = 1, *range(3 + count, 3 + 2 * count), 2, 0, *range(3, 3 + count)
    lines = views.permute(order).flatten(0, count).flatten(2).unflatten(0, (groups, -1))
    height = lines.shape[2] - gap * (size - 1)

    def product(start: int, stop: int, distance: int) -> Tensor:
        left, right = (lines[:, :, start + by : stop + by].flatten(2) for by in (0, distance))
        return left @ right.mT

    blocks = {}
    for step in range(size):
        last, distance = size - 1 - step, gap * step
        before = [product(gap * i, gap * (i + 1), distance) for i in range(last)]
        after = [product(height + gap * i, height + gap * (i + 1), distance) for i in range(last)]
        common = product(gap * last, height, distance)
        for i in range(last + 1):  # of lines that follow line i of the kernel
            block = sum([*before[i:], *after[:i]], common)
            blocks[i, i + step], blocks[i + step, i] = block, block.mT
    parts = inputs.shape[1] // groups, -1  # channels, and places of the kernel within a line
    pairs = torch.stack([blocks[i, j] for i in range(size) for j in range(size)])
    pairs = pairs.unflatten(3, parts).unflatten(2, parts).unflatten(0, (size, size))
    whole = pairs.permute(2, 3, 0, 4, 5, 1, 6).flatten(4).flatten(1, 3)
    return Products(whole if groups > 1 else whole[0])
