"""Tangent kernels of infinitely wide ReLU networks, fully connected and convolutional, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

__all__ = ["KERNELS", "tangent_kernel"]

_HIDDEN, _CONVOLUTIONS = 2, 3
_PAIRS = 2**21  # entries of one chunk of covariances of positions


def tangent_kernel(name: str, x: Tensor) -> Tensor:
    """The tangent kernel of images, scaled to mean variance one.

    Weights have variance 2 over the number of inputs, so that ReLUs keep variances; there are no
    biases. ``"fully connected"`` has two hidden layers; the others have three convolutions of 3 x 3
    with zeros around the image, and a dense layer on all positions or, ``"pooled"``, on their mean
    (Jacot et al. 2018; Arora et al. 2019, Section 4).

    Args:
        name: One of :data:`KERNELS`.
        x: ``(n, channels, size, size)``.

    Returns:
        ``(n, n)``.
    """
    kernel = KERNELS[name](x)
    return kernel / kernel.diagonal().mean()


def _relu(covariance: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Covariances behind ReLUs of twice the variance, and of their derivatives.

    Args:
        covariance: Of two Gaussians before.
        first: Variance of the first.
        second: Variance of the second.
    """
    scale = (first * second).sqrt()
    cosine = (covariance / scale.clamp_min(1e-30)).clamp(-1.0, 1.0)
    angle = torch.acos(cosine)
    behind = scale / math.pi * ((1 - cosine.square()).sqrt() + (math.pi - angle) * cosine)
    return behind, (math.pi - angle) / math.pi


def _fully_connected(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    covariance = flat @ flat.mT / flat.shape[-1]
    variance = covariance.diagonal()
    tangent = covariance
    for _ in range(_HIDDEN):
        covariance, slope = _relu(covariance, variance.unsqueeze(-1), variance)
        tangent = tangent * slope + covariance
    return tangent


def _averaged(values: Tensor) -> Tensor:
    """Means over 3 x 3 places, with zeros around, of ``(..., size, size)``."""
    return avg_pool2d(values.flatten(0, -4), 3, stride=1, padding=1).reshape(values.shape)


def _variances(x: Tensor) -> list[Tensor]:
    """Of each place before each layer of ReLUs, ``(n, 1, size, size)``; ReLUs keep them."""
    variances = [_averaged(x.square().mean(1, keepdim=True))]
    for _ in range(_CONVOLUTIONS - 1):
        variances.append(_averaged(variances[-1]))
    return variances


def _convolutional(x: Tensor) -> Tensor:
    """Places of one image meet the same places of the other: only they matter to a dense layer."""
    variances = _variances(x)
    rows = []
    for i in range(len(x)):
        covariance = _averaged((x[i : i + 1] * x).mean(1, keepdim=True))
        tangent = covariance
        for layer, variance in enumerate(variances):
            covariance, slope = _relu(covariance, variance[i : i + 1], variance)
            tangent = tangent * slope
            if layer < _CONVOLUTIONS - 1:
                covariance, tangent = _averaged(covariance), _averaged(tangent)
                tangent = tangent + covariance
        rows.append((tangent + covariance).mean((1, 2, 3)))
    return torch.stack(rows)


def _pooled(x: Tensor) -> Tensor:
    """All pairs of places matter to a mean over them; in float32, for their number."""
    x, dtype = x.float(), x.dtype
    n, size = len(x), x.shape[-1]
    places = size * size
    flat = [variance.reshape(n, places) for variance in _variances(x)]
    kernel = x.new_zeros(n, n)
    pairs = torch.tril_indices(n, n)
    for chunk in pairs.split(max(1, _PAIRS // places**2), dim=1):
        first, second = chunk
        left, right = (x[rows].flatten(2) for rows in (first, second))
        covariance = _averaged_pairs(torch.einsum("bcp,bcq->bpq", left, right) / x.shape[1], size)
        tangent = covariance
        for layer, variance in enumerate(flat):
            covariance, slope = _relu(
                covariance, variance[first].unsqueeze(-1), variance[second].unsqueeze(-2)
            )
            tangent = tangent * slope
            if layer < _CONVOLUTIONS - 1:
                covariance = _averaged_pairs(covariance, size)
                tangent = _averaged_pairs(tangent, size) + covariance
        values = (tangent + covariance).mean((1, 2))
        kernel[first, second] = values
        kernel[second, first] = values
    return kernel.to(dtype)


def _averaged_pairs(values: Tensor, size: int) -> Tensor:
    """Means over the nine shifts of both places alike, of ``(b, places, places)``."""
    shape = values.shape
    grid = pad(values.reshape(-1, size, size, size, size), (1, 1) * 4)
    total = torch.zeros_like(values.reshape(-1, size, size, size, size))
    for i in range(3):
        for j in range(3):
            rows, columns = slice(i, i + size), slice(j, j + size)
            total += grid[:, rows, columns, rows, columns]
    return (total / 9).reshape(shape)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolutional": _convolutional, "convolutional, pooled": _pooled,
    "fully connected": _fully_connected,
}  # fmt: skip
"""Name of a network to its kernel."""
