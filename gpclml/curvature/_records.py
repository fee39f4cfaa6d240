"""A linear layer's inputs and gradients, and the products that curvature is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.linalg import symmetric_product

__all__ = ["LayerRecord"]


@dataclass(frozen=True)
class LayerRecord:
    """A linear map that is applied at T places of each point (T = 1 in a plain layer).

    Versions of a point that a network averages over are places of it. Tensors are kept as the
    layer has them, channels first in a convolution, and never transposed as a whole.

    Attributes:
        layer: Linear or Conv2d.
        weight: Name of its weight in the network; None if it is not trained.
        bias: Name of its bias; None if it is not trained, or there is none.
        num_points: Number of points N.
        raw_inputs: What the layer was given.
        raw_gradients: Of its outputs, one for each column of output curvature.
    """

    layer: torch.nn.Module
    weight: str | None
    bias: str | None
    num_points: int
    raw_inputs: Tensor
    raw_gradients: Sequence[Tensor]

    @property
    def is_plain(self) -> bool:
        """Whether the map is applied at one place of each point."""
        rows, _, places = next(self._gradients()).shape
        return rows * places == self.num_points

    def mean_inputs(self) -> Tensor:
        """What the map is applied to, the mean over places, ``(N, in)``."""
        return self._inputs().mean(2).unflatten(0, (self.num_points, -1)).mean(1)

    def summed_gradients(self) -> Tensor:
        """Of its outputs, the sum over places, ``(N, K, out)``: those of the bias."""
        sums = [g.sum(2).unflatten(0, (self.num_points, -1)).sum(1) for g in self._gradients()]
        return torch.stack(sums, dim=1)

    def weight_gradients(self) -> Tensor:
        """Of the weight at each point, ``(N, K, out in)``."""
        inputs = self._inputs().mT
        columns = [
            torch.bmm(g, inputs).unflatten(0, (self.num_points, -1)).sum(1).flatten(1)
            for g in self._gradients()
        ]
        return torch.stack(columns, dim=1)

    def input_product(self, reduce: bool) -> tuple[Tensor, int]:
        r"""The sum of :math:`a a^\top`, float64, and the number of its terms.

        Args:
            reduce: Whether a is the mean over places; else each place is a term.
        """
        # In float64, so that rounding does not fill the null space of many inputs.
        if reduce:
            a = self.mean_inputs().double()
            return symmetric_product(a.mT, a.mT), len(a)
        a = self._inputs().double()
        return _outer_products(a), a.shape[0] * a.shape[2]

    def gradient_product(self, reduce: bool) -> Tensor:
        r"""The sum of :math:`g g^\top` over points and columns, float64.

        Args:
            reduce: Whether g is the sum over places; else each place is a term.
        """
        if not reduce:
            return torch.stack([_outer_products(g) for g in self._gradients()]).sum(0)
        rows = self.summed_gradients().flatten(0, 1)
        return symmetric_product(rows.mT, rows.mT).double()

    def _inputs(self) -> Tensor:
        """``(R, in, T)``, R points or versions of them."""
        if isinstance(self.layer, torch.nn.Conv2d):
            return _patches(self.layer, self.raw_inputs)
        return _channels_first(self.raw_inputs)

    def _gradients(self) -> Iterator[Tensor]:
        """``(R, out, T)`` for each column."""
        for gradient in self.raw_gradients:
            if isinstance(self.layer, torch.nn.Conv2d):
                yield gradient.flatten(2)
            else:
                yield _channels_first(gradient)


def _channels_first(values: Tensor) -> Tensor:
    """``(R, T, channels)`` of any number of places as ``(R, channels, T)``."""
    return values.reshape(len(values), -1, values.shape[-1]).mT


def _outer_products(values: Tensor) -> Tensor:
    """The sum over R and T of products of ``(R, channels, T)`` with itself, float64.

    Point by point, without a transposed copy, where that takes no more memory than the values.
    """
    _, channels, places = values.shape
    if places > 1 and channels <= places:
        return torch.bmm(values, values.mT).sum(0, dtype=torch.float64)
    rows = values.mT.flatten(0, 1)
    return symmetric_product(rows.mT, rows.mT).double()


def _patches(layer: torch.nn.Conv2d, inputs: Tensor) -> Tensor:
    """What each place of a convolution's output is made of, ``(R, in, T)``."""
    padded = torch.nn.functional.pad(inputs, _padding(layer))
    if layer.dilation != (1, 1):
        return torch.nn.functional.unfold(
            padded, layer.kernel_size, layer.dilation, stride=layer.stride
        )
    # One copy of views: several times faster on a CPU than torch's unfold.
    (height, width), (down, right) = layer.kernel_size, layer.stride
    views = padded.unfold(2, height, down).unfold(3, width, right)
    return views.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)


def _padding(layer: torch.nn.Conv2d) -> tuple[int, int, int, int]:
    """Left, right, above, below."""
    if layer.padding == "same":
        reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        (above, below), (left, right) = ((one // 2, one - one // 2) for one in reach)
        return left, right, above, below
    if isinstance(layer.padding, str):  # "valid"
        return 0, 0, 0, 0
    above, left = layer.padding
    return left, left, above, above
