r"""Densities of few points on a CPU, with their gradients, by NumPy and LAPACK.

A call of PyTorch takes some microseconds whatever it computes, which for a hundred points is most
of the time of a density. NumPy's calls take a fraction of that. The formulas are those of
:mod:`gpclml.linalg.radial` and :mod:`gpclml.linalg.dense`, for one covariance and one residual:
with :math:`G = \partial L / \partial K`, :math:`H = s\, G \circ k'` and points z in units of the
lengthscales,

.. math:: \frac{\partial L}{\partial z} = 2 (H z - \operatorname{diag}(H 1)\, z), \qquad
    \frac{\partial L}{\partial \ell_d}
    = -\frac{1}{\ell_d} \sum_i z_{id} \frac{\partial L}{\partial z_{id}}.

A covariance that is not positive definite, or singular to rounding, is left to the other modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy
import torch
from numpy import ndarray
from scipy.linalg import lapack as _lapack
from torch import Tensor

from gpclml.linalg.matrices import PIVOT_ROUNDINGS
from gpclml.linalg.profiles import Profile

__all__ = ["SMALL", "density_and_gradients", "density_of_few"]

lapack: Any = _lapack  # whose functions are known at run time alone

SMALL = 128
"""Largest number of points for which it is used."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_EPS = float(numpy.finfo(float).eps)

Gradients = list[ndarray | float | None]


def density_of_few(
    arguments: Sequence[Tensor | None],
    residual: Tensor,
    profile: Profile,
    blocks: int | Sequence[ndarray] | None,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]] | None:
    """The log density of held-out points and its gradients, where it is one for this module.

    Args:
        arguments: Points, lengthscale, scale, noise and power, as
            :func:`gpclml.linalg.radial_covariance` takes them.
        residual: ``(*batch, n)``.
        profile: The function of distance.
        blocks: See :func:`density_and_gradients`; None for what it cannot compute.
        needed: Which gradients: of the five arguments and of the residual.

    Returns:
        The density, ``()``, and gradients in the shapes that NumPy gave them; None where points
        are many, on a GPU or a batch, or where the covariance has no Cholesky factor.
    """
    if (
        blocks is None
        or residual.shape[-1] > SMALL
        or residual.ndim > 1
        or residual.device.type != "cpu"
    ):
        return None
    arrays = [
        None if one is None else one.detach().double().numpy() for one in (*arguments, residual)
    ]
    points = arrays[0]
    if points is None or points.ndim > 2:
        return None
    least = PIVOT_ROUNDINGS * torch.finfo(residual.dtype).eps
    found = density_and_gradients(
        arrays[:5], cast(ndarray, arrays[5]), profile, blocks, needed, least
    )
    if found is None:
        return None
    value, gradients = found
    tensors = [None if one is None else torch.as_tensor(one) for one in gradients]
    return torch.tensor(value, dtype=residual.dtype), tensors


def density_and_gradients(
    arguments: Sequence[ndarray | None],
    residual: ndarray,
    profile: Profile,
    blocks: int | Sequence[ndarray],
    needed: Sequence[bool],
    least: float,
) -> tuple[float, Gradients] | None:
    """The log density of held-out points by a covariance of distance, and its gradients.

    Args:
        arguments: Points ``(n, d)``, lengthscale ``(1, d)`` or ``(1, 1)``, scale ``()``, noise
            ``(n,)`` or ``(1,)``, power ``()``, as :func:`gpclml.linalg.radial_covariance` takes
            them; None where it does.
        residual: ``(n,)``.
        profile: The function of distance, one of ``gpclml.linalg.PROFILES``.
        blocks: How many of the last points are held out; or indices of held-out blocks,
            ``(k_i, b_i)`` a size, each given all others.
        needed: Which gradients: of the five arguments and of the residual.
        least: Smallest squared pivot, as a share of its variance.

    Returns:
        The density and its gradients, None for those not needed; None in place of both where the
        covariance has no Cholesky factor with such pivots.
    """
    with numpy.errstate(all="ignore"):  # what is not finite has no factor
        return _density_and_gradients(arguments, residual, profile, blocks, needed, least)


def _density_and_gradients(arguments, residual, profile, blocks, needed, least):
    points, lengthscale, scale, noise, power = arguments
    n = len(residual)
    z = points if lengthscale is None else points / lengthscale
    z = z - numpy.add.reduce(z, 0) / n
    if profile.factor != 1.0:
        z *= profile.factor
    half = numpy.add.reduce(z * z, 1)
    half *= -0.5
    e = z @ z.T
    e += half
    e += half[:, None]
    half *= 4.0 * _EPS  # equal points are at distance zero exactly, as each is to itself
    numpy.copyto(e, 0.0, where=e > half[:, None])
    e.ravel()[:: n + 1] = 0.0
    k, *kept = profile.value(e, power)
    covariance = k.copy() if scale is None else k * scale
    if noise is not None:
        covariance.ravel()[:: n + 1] += noise
    variances = covariance.diagonal()
    # LAPACK has matrices by columns: to it the transpose, which is equal, is one in place.
    L, info = lapack.dpotrf(covariance.T, lower=1)
    pivots = L.diagonal()
    if info or not (pivots * pivots / variances).min() > least:
        return None
    if isinstance(blocks, int):
        value, G, of_residual = _of_last(L, pivots, residual, blocks)
    else:
        value, G, of_residual = _of_blocks(L, residual, blocks)
    gradients: Gradients = [None, None, None, None, None, of_residual if needed[5] else None]
    of_points, of_lengthscale, of_scale, of_noise, of_power = needed[:5]
    if of_noise:
        gradients[3] = G.diagonal().copy()
    if of_scale:
        gradients[2] = (G * k).sum()
    if of_power:
        by_power = (G * profile.power_slope(k, *kept)).sum()
        gradients[4] = by_power if scale is None else by_power * scale
    if of_points or of_lengthscale:
        G *= profile.slope(k, *kept)
        G.ravel()[:: n + 1] = 0.0
        if z.shape[1] == 1:  # without a difference of two sums, which cancels
            gradient = numpy.add.reduce(G * (z.T - z), 1)[:, None]
        else:
            gradient = G @ z
            gradient -= numpy.add.reduce(G, 1)[:, None] * z
        gradient *= 2.0 if scale is None else 2.0 * scale
        if of_lengthscale:
            gradients[1] = -numpy.add.reduce(gradient * z, 0)[None] / lengthscale
        if of_points:
            gradient *= profile.factor if lengthscale is None else profile.factor / lengthscale
            gradients[0] = gradient
    return value, gradients


def _inverse(L: ndarray) -> ndarray:
    """Of the matrix with this factor, both halves."""
    Q = lapack.dpotri(L, lower=1)[0]
    Q = Q + Q.T  # the other half of a factor is zero
    Q.ravel()[:: len(Q) + 1] *= 0.5
    return Q


def _of_last(
    L: ndarray, pivots: ndarray, residual: ndarray, b: int
) -> tuple[float, ndarray, ndarray]:
    """Of the last b points given the others: see ``ConditionalLogDensity``."""
    n = len(residual)
    z = lapack.dtrtrs(L, residual, lower=1)[0]
    tail = z[n - b :]
    value = -0.5 * float(tail @ tail) - float(numpy.log(pivots[n - b :]).sum()) - b * _HALF_LOG_2PI
    if b == n:
        alpha = lapack.dtrtrs(L, z, lower=1, trans=1)[0]
        G = numpy.multiply.outer(alpha, alpha)
        G -= _inverse(L)
        G *= 0.5
        return value, G, -alpha
    right = numpy.zeros((n, b + 2), order="F")
    right[range(n - b, n), range(b)] = 1.0
    right[n - b :, b] = tail
    right[:, b + 1] = z
    solved = lapack.dtrtrs(L, right, lower=1, trans=1)[0]
    W, u, alpha = solved[:, :b], solved[:, b], solved[:, b + 1]
    G = numpy.multiply.outer(u, alpha - 0.5 * u)
    G = G + G.T
    G -= W @ W.T
    G *= 0.5
    return value, G, -u


def _of_blocks(
    L: ndarray, residual: ndarray, blocks: Sequence[ndarray]
) -> tuple[float, ndarray, ndarray]:
    """Of each block given all others: see ``BlockLogDensities``."""
    Q = _inverse(L)
    alpha = lapack.dpotrs(L, residual, lower=1)[0]
    value, source, G = 0.0, numpy.zeros_like(alpha), numpy.zeros_like(Q)
    for group in blocks:
        alpha_B = alpha[group]
        if group.shape[1] == 1:
            rows = group[:, 0]
            Q_BB = Q[rows, rows]
            s = alpha_B[:, 0] / Q_BB
            value += 0.5 * float(numpy.log(Q_BB).sum() - alpha_B[:, 0] @ s)
            columns = Q[:, rows]
            G -= (columns * (s * s + 1.0 / Q_BB)) @ columns.T
            numpy.add.at(source, rows, s)
        else:
            Q_BB = Q[group[:, :, None], group[:, None, :]]
            s = numpy.linalg.solve(Q_BB, alpha_B[:, :, None])
            value += 0.5 * float(numpy.linalg.slogdet(Q_BB)[1].sum())
            value -= 0.5 * float((alpha_B * s[:, :, 0]).sum())
            columns = Q[group]  # (k, b, n)
            middle = s * s.mT + numpy.linalg.inv(Q_BB)
            G -= columns.reshape(-1, len(Q)).T @ (middle @ columns).reshape(-1, len(Q))
            numpy.add.at(source, group, s[:, :, 0])
        value -= group.size * _HALF_LOG_2PI
    u = Q @ source
    G += numpy.multiply.outer(u, alpha)
    G += numpy.multiply.outer(alpha, u)
    G *= 0.5
    return value, G, -u
