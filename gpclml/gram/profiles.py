"""Functions of distance that kernels are made of, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["PROFILES", "Profile"]


class Profile(NamedTuple):
    """A function k of e, minus half a squared distance.

    Attributes:
        factor: Points are multiplied by it before distances are taken.
        value: ``(e, power) -> (k, *kept)``, with what the derivatives need; may overwrite e.
        slope: ``(k, *kept) -> k'``, the derivative with respect to e.
        power_slope: ``(k, *kept) -> dk / d power``, where there is a power.
    """

    factor: float
    value: Callable[[Tensor, Any], tuple[Tensor, ...]]
    slope: Callable[..., Tensor]
    power_slope: Callable[..., Tensor] | None = None


def _rbf(e: Tensor, _: Any) -> tuple[Tensor]:
    return (e.exp_(),)


def _distance(e: Tensor) -> Tensor:
    return e.mul_(-2.0).sqrt_()


def _matern_12(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    return (-r).exp_(), r


def _slope_of_matern_12(k: Tensor, r: Tensor) -> Tensor:
    # Infinite where points are equal: GPyTorch's gradient there, and ours, is zero.
    return (k / r).masked_fill_(r == 0.0, 0.0)


def _matern_32(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    decay = (-r).exp_()
    return r.add_(1.0).mul_(decay), decay


def _matern_52(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    slope = (-r).exp_()
    third = (r * r).mul_(slope).div_(3.0)
    slope.mul_(r.add_(1.0))  # (1 + r) exp(-r)
    return third.add_(slope), slope.div_(3.0)


def _rational_quadratic(e: Tensor, power: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    share = e / -power  # t = r^2 / 2 alpha, of which 1 + t would keep no digits as alpha grows
    log = share.log1p()
    return (log * -power).exp_(), share, log


_SERIES_BELOW = 0.02  # where it has more digits than the difference has


def _power_slope(k: Tensor, share: Tensor, log: Tensor) -> Tensor:
    r"""The derivative with respect to :math:`\alpha`, :math:`-k\, (\log(1 + t) - t / (1 + t))`.

    The difference is :math:`t^2 / 2` for small t and would cancel. With :math:`s = t / (2 + t)` it
    is :math:`2 s^2 / (1 + s) + (\log(1 + t) - 2 s)`, terms of one sign, and the second of them,
    :math:`2 s^3 (1/3 + s^2/5 + s^4/7 + \ldots)`, is the smaller by a factor of s.
    """
    s = share / (share + 2.0)
    square = s * s
    series = (2.0 * s * square) * (1 / 3 + square * (1 / 5 + square / 7))
    remainder = torch.where(s < _SERIES_BELOW, series, log - 2.0 * s)
    return -k * (2.0 * square / (s + 1.0) + remainder)


def _cosine(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    return r.cos(), r


PROFILES = {
    "rbf": Profile(1.0, _rbf, lambda k: k),
    "matern_12": Profile(1.0, _matern_12, _slope_of_matern_12),
    "matern_32": Profile(math.sqrt(3.0), _matern_32, lambda k, decay: decay),
    "matern_52": Profile(math.sqrt(5.0), _matern_52, lambda k, slope: slope),
    "rational_quadratic": Profile(
        1.0, _rational_quadratic, lambda k, share, _: k / (share + 1.0), _power_slope
    ),
    "cosine": Profile(math.pi, _cosine, lambda k, r: torch.sinc(r / math.pi)),
}
"""The functions of distance by name, each of unit variance at distance zero.

With r the distance of two points in units of the lengthscales:

- ``"rbf"``: :math:`\\exp(-r^2 / 2)`
- ``"matern_12"``, ``"matern_32"``, ``"matern_52"``: of smoothness 1/2, 3/2, 5/2
- ``"rational_quadratic"``: :math:`(1 + r^2 / 2\\alpha)^{-\\alpha}`
- ``"cosine"``: :math:`\\cos \\pi r`
"""
