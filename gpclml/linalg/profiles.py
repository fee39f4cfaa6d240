"""Functions of distance and their derivatives, of tensors and of NumPy's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from numpy import ndarray
from scipy.spatial.distance import cdist
from torch import Tensor

__all__ = ["PROFILES", "Profile", "half_squared_distances"]

_BY_DIFFERENCES = 8  # dimensions up to which they are as fast as a product, and more accurate
_EPS = float(numpy.finfo(float).eps)


class Profile(NamedTuple):
    """A function k of e, minus half a squared distance; of tensors, and of NumPy's arrays.

    Attributes:
        factor: Points are multiplied by it before distances are taken.
        value: ``(e, power) -> (k, *kept)``, with what the derivatives need; may overwrite e.
        slope: ``(k, *kept) -> k'``, the derivative by e.
        power_slope: ``(k, *kept) -> dk / d power``, where there is a power.
    """

    factor: float
    value: Callable[..., tuple[Any, ...]]
    slope: Callable[..., Any]
    power_slope: Callable[..., Any] | None = None


def half_squared_distances(left: ndarray, right: ndarray, work: ndarray) -> ndarray:
    """Minus half the squared distances of points; those of equal points are zero.

    Args:
        left: ``(p, d)``, the first of the following.
        right: ``(m, d)``.
        work: At least ``p m`` numbers, in whose memory the result ``(p, m)`` is.
    """
    e = work[: len(left) * len(right)].reshape(len(left), len(right))
    if left.shape[1] <= _BY_DIFFERENCES:
        cdist(left, right, "sqeuclidean", out=e)
        e *= -0.5
        return e
    half = numpy.add.reduce(right * right, 1)
    half *= -0.5
    own = half[: len(left), None]
    numpy.matmul(left, right.T, out=e)
    e += half
    e += own
    # Equal points have one norm, of which a few roundings are left as their distance.
    numpy.copyto(e, 0.0, where=e > 4.0 * _EPS * own)
    numpy.fill_diagonal(e, 0.0)
    return e


def _library(array: Any) -> Any:
    """PyTorch or NumPy, whose functions of one array have the same names and ``out``."""
    return torch if isinstance(array, Tensor) else numpy


def _exp_(array: Any) -> Any:
    """In place; PyTorch's is the faster, in NumPy's memory too."""
    torch.exp_(array if isinstance(array, Tensor) else torch.from_numpy(array))
    return array


def _rbf(e: Any, *_: Any) -> tuple[Any]:
    return (_exp_(e),)


def _distance(e: Any) -> Any:
    e *= -2.0
    return _library(e).sqrt(e, out=e)


def _decay(t: Any) -> Any:
    return _exp_(-t)


def _matern_12(e: Any, *_: Any) -> tuple[Any, Any]:
    t = _distance(e)
    return _decay(t), t


def _slope_of_matern_12(k: Any, t: Any) -> Any:
    equal = t == 0.0
    slope = k / (t + equal)
    slope[equal] = 0.0
    return slope


def _matern_32(e: Any, *_: Any) -> tuple[Any, Any]:
    t = _distance(e)
    decay = _decay(t)
    t += 1.0
    t *= decay
    return t, decay


def _matern_52(e: Any, *_: Any) -> tuple[Any, Any]:
    t = _distance(e)
    slope = _decay(t)
    third = t * t
    third *= slope
    third /= 3.0
    t += 1.0
    slope *= t
    third += slope
    slope /= 3.0
    return third, slope


def _rational_quadratic(e: Any, power: Any) -> tuple[Any, Any, Any]:
    share = e / -power  # t = r^2 / 2 alpha, of which 1 + t would keep no digits as alpha grows
    log = _log1p(share)
    return _exp_(-power * log), share, log


def _log1p(array: Any) -> Any:
    """PyTorch's, which is the faster, of NumPy's memory too."""
    return array.log1p() if isinstance(array, Tensor) else torch.from_numpy(array).log1p().numpy()


_SERIES_BELOW = 0.02  # where it has more digits than the difference has


def _power_slope(k: Any, share: Any, log: Any) -> Any:
    r"""The derivative by :math:`\alpha`, :math:`-k\, (\log(1 + t) - t / (1 + t))`.

    The difference is :math:`t^2 / 2` for small t and would cancel. With :math:`s = t / (2 + t)` it
    is :math:`2 s^2 / (1 + s) + (\log(1 + t) - 2 s)`, terms of one sign, and the second of them,
    :math:`2 s^3 (1/3 + s^2/5 + s^4/7 + \ldots)`, is the smaller by a factor of s.
    """
    s = share / (share + 2.0)
    square = s * s
    series = (2.0 * s * square) * (1 / 3 + square * (1 / 5 + square / 7))
    remainder = _library(s).where(s < _SERIES_BELOW, series, log - 2.0 * s)
    return -k * (2.0 * square / (s + 1.0) + remainder)


def _cosine(e: Any, *_: Any) -> tuple[Any, Any]:
    t = _distance(e)
    return _library(t).cos(t), t


PROFILES = {
    "rbf": Profile(1.0, _rbf, lambda k: k),
    "matern_12": Profile(1.0, _matern_12, _slope_of_matern_12),
    "matern_32": Profile(math.sqrt(3.0), _matern_32, lambda k, decay: decay),
    "matern_52": Profile(math.sqrt(5.0), _matern_52, lambda k, slope: slope),
    "rational_quadratic": Profile(
        1.0, _rational_quadratic, lambda k, share, _: k / (share + 1.0), _power_slope
    ),
    "cosine": Profile(math.pi, _cosine, lambda k, t: _library(t).sinc(t / math.pi)),
}
"""The functions of distance by name, each of unit variance at distance zero."""
