r"""Densities on a CPU, with their gradients, by NumPy and LAPACK.

A call of PyTorch takes some microseconds whatever it computes, which for a hundred points is most
of the time of a density; NumPy's calls take a fraction of that. For many points LAPACK's inverse of
a factor and products of which one half is computed save half of the operations. The formulas are
those of :mod:`gpclml.linalg.radial` and :mod:`gpclml.linalg.closed_forms`, for one covariance and
one residual: with :math:`G = \partial L / \partial K`, :math:`H = s\, G \circ k'` and points z in
units of the lengthscales,

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
from scipy.linalg import blas as _blas
from scipy.linalg import lapack as _lapack
from scipy.spatial.distance import cdist
from torch import Tensor

from gpclml.linalg.matrices import DOUBLE_UP_TO, PIVOT_ROUNDINGS
from gpclml.linalg.profiles import Profile

__all__ = [
    "LARGEST",
    "applies",
    "density_and_gradients",
    "least_pivot",
    "matrix_density_and_gradients",
    "of_distances",
]

blas: Any = _blas  # whose functions are known at run time alone
lapack: Any = _lapack

LARGEST = {torch.float32: DOUBLE_UP_TO, torch.float64: 2**15}
"""Most points by the type in which they come; all is computed in double precision. LAPACK counts
the entries of a matrix in 32 bits."""

_BY_DIFFERENCES = 8  # dimensions up to which they are as fast as a product, and more accurate
_BY_TORCH = 256  # points up to which PyTorch's factor takes no longer, whose sums lose fewer digits
# Points up to which blocks of several are taken. Where NumPy's LAPACK has threads of its own, their
# many small matrices of more points take longer than by PyTorch.
_BLOCKS_UP_TO = 128
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_EPS = float(numpy.finfo(float).eps)

Blocks = int | Sequence[ndarray]
"""How many of the last points are held out, given the others; or indices of held-out blocks,
``(k_i, b_i)`` a size, each given all others."""


def density_and_gradients(
    arguments: Sequence[Tensor | None],
    residual: Tensor,
    profile: Profile,
    blocks: Blocks | None,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]] | None:
    """The log density of held-out points by a covariance of distance, and its gradients.

    Args:
        arguments: Points, lengthscale, scale, noise and power, as
            :func:`gpclml.linalg.radial_covariance` takes them.
        residual: ``(*batch, n)``.
        profile: The function of distance.
        blocks: The held-out points; None where this module does not take them.
        needed: Which gradients: of the five arguments and of the residual.

    Returns:
        The density, ``()``, and the gradients, None for those not needed; None in place of both
        where points are too many, on a GPU or a batch, or have no Cholesky factor.
    """
    points = cast(Tensor, arguments[0])
    if blocks is None or points.ndim > 2 or not applies(residual, blocks):
        return None
    arrays = [None if one is None else one.detach().double().numpy() for one in arguments]
    least = least_pivot(residual)
    found = of_distances(arrays, _array(residual), profile, blocks, needed, least)
    if found is None:
        return None
    value, gradients = found
    tensors = [None if one is None else torch.as_tensor(one) for one in gradients]
    return torch.tensor(value, dtype=residual.dtype), tensors


def matrix_density_and_gradients(
    covariance: Tensor, residual: Tensor, blocks: Blocks | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The log density of held-out points, and its gradients by covariance and residual.

    Args:
        covariance: ``(*batch, n, n)``.
        residual: ``(*batch, n)``.
        blocks: The held-out points; None where this module does not take them.

    Returns:
        The three, or None as :func:`density_and_gradients` does.
    """
    if blocks is None or covariance.ndim > 2 or not applies(residual, blocks):
        return None
    with numpy.errstate(all="ignore"):
        # A copy, by columns as LAPACK has it: the transpose of one by rows.
        matrix = covariance.detach().double().numpy().copy().T
        found = _of_matrix(matrix, _array(residual), blocks, least_pivot(residual))
    if found is None:
        return None
    value, G, of_residual = found
    G = G + G.T
    _set_diagonal(G, 0.5 * G.diagonal())
    as_tensors = torch.from_numpy(G), torch.from_numpy(of_residual)
    return torch.tensor(value, dtype=residual.dtype), *as_tensors


def applies(residual: Tensor, blocks: Blocks) -> bool:
    """Whether densities of a residual of this shape, type and device are computed here."""
    if residual.ndim > 1 or residual.device.type != "cpu":
        return False
    several = not isinstance(blocks, int) and any(group.shape[1] > 1 for group in blocks)
    n, most = residual.shape[-1], LARGEST.get(residual.dtype, 0)
    return n <= (min(most, _BLOCKS_UP_TO) if several else most)


def _array(values: Tensor) -> ndarray:
    return values.detach().double().numpy()


def least_pivot(like: Tensor) -> float:
    """Smallest squared pivot as a share of its variance."""
    return PIVOT_ROUNDINGS * torch.finfo(like.dtype).eps


def of_distances(
    arrays: Sequence[ndarray | None],
    residual: ndarray,
    profile: Profile,
    blocks: Blocks,
    needed: Sequence[bool],
    least: float,
    work: tuple[ndarray, ndarray] | None = None,
) -> tuple[float, list[ndarray | float | None]] | None:
    """The density and its gradients of arrays, as :func:`density_and_gradients` gives them.

    Args:
        arrays: Points ``(n, d)``, lengthscale ``(1, d)`` or ``(1, 1)``, scale ``()``, noise
            ``(n,)`` or ``(1,)`` and power ``()``; None where there is none.
        residual: ``(n,)``.
        profile: The function of distance.
        blocks: The held-out points, for which :func:`applies` is true.
        needed: Which gradients: of the five arrays and of the residual.
        least: Smallest squared pivot of the factor, as a share of its variance.
        work: Two arrays ``(n, n)`` to compute in. Memory of this size that is asked for anew at
            each step has to be cleared by the system first.

    Returns:
        The density and the gradients: that by the lengthscale ``(1, d)``, that by the noise
        ``(n,)``; None where there is no Cholesky factor.
    """
    with numpy.errstate(all="ignore"):  # what is not finite has no factor
        return _of_distances(arrays, residual, profile, blocks, needed, least, work)


def _of_distances(
    arrays: Sequence[ndarray | None],
    residual: ndarray,
    profile: Profile,
    blocks: Blocks,
    needed: Sequence[bool],
    least: float,
    work: tuple[ndarray, ndarray] | None,
) -> tuple[float, list[ndarray | float | None]] | None:
    points, lengthscale, scale, noise, power = cast(list[Any], arrays)
    n = len(residual)
    z = points if lengthscale is None else points / lengthscale
    z = z - numpy.add.reduce(z, 0) / n
    if profile.factor != 1.0:
        z *= profile.factor
    distances, covariance = work or (numpy.empty((n, n)), numpy.empty((n, n)))
    k, *kept = profile.value(_half_squared_distances(z, distances), power)
    if scale is None:
        numpy.copyto(covariance, k)
    else:
        numpy.multiply(k, scale, out=covariance)
    if noise is not None:
        covariance.ravel()[:: n + 1] += noise  # a view of rows
    # LAPACK has matrices by columns: to it the transpose, which is equal, is one in place.
    found = _of_matrix(covariance.T, residual, blocks, least)
    if found is None:
        return None
    value, G, of_residual = found  # of G, which is symmetric, the lower half, by columns
    gradients: list[ndarray | float | None] = [None] * 6
    if needed[5]:
        gradients[5] = of_residual
    of_points, of_lengthscale, of_scale, of_noise, of_power = needed[:5]
    diagonal = G.diagonal().copy()
    if of_noise:
        gradients[3] = diagonal
    if of_scale:
        gradients[2] = 2.0 * (G * k.T).sum() - (diagonal * k.diagonal()).sum()
    if of_power:
        assert profile.power_slope is not None
        slope = profile.power_slope(k, *kept).T
        by_power = 2.0 * (G * slope).sum() - (diagonal * slope.diagonal()).sum()
        gradients[4] = by_power if scale is None else by_power * scale
    if of_points or of_lengthscale:
        G *= profile.slope(k, *kept).T
        _set_diagonal(G, 0.0)
        if z.shape[1] == 1:  # without a difference of two sums, which cancels
            G += G.T
            gradient = numpy.add.reduce(G * (z.T - z), 1)[:, None]
        else:
            products = blas.dsymm(1.0, G, numpy.concatenate([z, numpy.ones((n, 1))], 1), lower=1)
            gradient = products[:, :-1] - products[:, -1:] * z
        gradient *= 2.0 if scale is None else 2.0 * scale
        if of_lengthscale:
            gradients[1] = -numpy.add.reduce(gradient * z, 0)[None] / lengthscale
        if of_points:
            gradient *= profile.factor if lengthscale is None else profile.factor / lengthscale
            gradients[0] = gradient
    return value, gradients


def _half_squared_distances(z: ndarray, e: ndarray) -> ndarray:
    """Minus half the squared distances of points, in ``e``; those of equal points are zero."""
    if z.shape[1] <= _BY_DIFFERENCES:
        cdist(z, z, "sqeuclidean", out=e)
        e *= -0.5
        return e
    half = numpy.add.reduce(z * z, 1)
    half *= -0.5
    numpy.matmul(z, z.T, out=e)
    e += half
    e += half[:, None]
    # Equal points have one norm, of which a few roundings are left as their distance.
    numpy.copyto(e, 0.0, where=e > 4.0 * _EPS * half[:, None])
    _set_diagonal(e, 0.0)
    return e


def _set_diagonal(matrix: ndarray, values: ndarray | float) -> None:
    matrix.flat[:: len(matrix) + 1] = values


def _of_matrix(
    covariance: ndarray, residual: ndarray, blocks: Blocks, least: float
) -> tuple[float, ndarray, ndarray] | None:
    """The density, the lower half of its gradient by the covariance, and that by the residual.

    Args:
        covariance: By columns, in the memory of which the factor is computed.
        residual: ``(n,)``.
        blocks: The held-out points.
        least: Smallest squared pivot, as a share of its variance.
    """
    variances = covariance.diagonal().copy()
    if len(covariance) <= _BY_TORCH:
        factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(covariance.T))
        L, info = factor.numpy(), failed.item()
    else:
        L, info = lapack.dpotrf(covariance, lower=1, overwrite_a=1)
    pivots = L.diagonal()
    if info or not (pivots * pivots / variances).min() > least:
        return None
    if isinstance(blocks, int):
        return _of_last(L, pivots, residual, blocks)
    return _of_blocks(L, residual, blocks)


def _of_last(
    L: ndarray, pivots: ndarray, residual: ndarray, b: int
) -> tuple[float, ndarray, ndarray]:
    """Of the last b points given the others: see ``ConditionalLogDensity``."""
    n = len(residual)
    z = lapack.dtrtrs(L, residual, lower=1)[0]
    tail = z[n - b :]
    # Terms of a point are added before those of other points, which keeps partial sums small.
    terms = 0.5 * tail * tail
    terms += numpy.log(pivots[n - b :])
    terms += _HALF_LOG_2PI
    value = -float(terms.sum())
    if b == n:
        alpha = lapack.dtrtrs(L, z, lower=1, trans=1)[0]
        G = lapack.dpotri(L, lower=1, overwrite_c=1)[0]
        G *= -0.5
        return value, blas.dsyr(0.5, alpha, a=G, lower=1, overwrite_a=1), -alpha
    right = numpy.zeros((n, b + 2), order="F")
    right[range(n - b, n), range(b)] = 1.0
    right[n - b :, b] = tail
    right[:, b + 1] = z
    solved = lapack.dtrtrs(L, right, lower=1, trans=1, overwrite_b=1)[0]
    W, u, alpha = solved[:, :b], solved[:, b], solved[:, b + 1]
    G = blas.dsyrk(-0.5, W, c=L, lower=1, overwrite_c=1)
    return value, blas.dsyr2(0.5, u, alpha - 0.5 * u, a=G, lower=1, overwrite_a=1), -u


def _of_blocks(
    L: ndarray, residual: ndarray, blocks: Sequence[ndarray]
) -> tuple[float, ndarray, ndarray]:
    """Of each block given all others: see ``BlockLogDensities``."""
    Q = lapack.dpotri(L, lower=1)[0]  # the other half of a factor is zero
    Q = Q + Q.T
    Q.ravel(order="K")[:: len(Q) + 1] *= 0.5
    alpha = lapack.dpotrs(L, residual, lower=1)[0]
    value, source, roots = 0.0, numpy.zeros_like(alpha), []
    for group in blocks:
        alpha_B = alpha[group]
        if group.shape[1] == 1:
            rows = group[:, 0]
            Q_BB = Q[rows, rows]
            s = alpha_B[:, 0] / Q_BB
            value += 0.5 * float(numpy.log(Q_BB).sum() - alpha_B[:, 0] @ s)
            roots.append(Q[:, rows] * numpy.sqrt(s * s + 1.0 / Q_BB))
            numpy.add.at(source, rows, s)
        else:
            Q_BB = Q[group[:, :, None], group[:, None, :]]
            s = numpy.linalg.solve(Q_BB, alpha_B[:, :, None])
            value += 0.5 * float(numpy.linalg.slogdet(Q_BB)[1].sum())
            value -= 0.5 * float((alpha_B * s[:, :, 0]).sum())
            root = numpy.linalg.cholesky(s * s.mT + numpy.linalg.inv(Q_BB))
            roots.append((root.mT @ Q[group]).reshape(-1, len(Q)).T)
            numpy.add.at(source, group, s[:, :, 0])
        value -= group.size * _HALF_LOG_2PI
    u = Q @ source
    root = roots[0] if len(roots) == 1 else numpy.concatenate(roots, 1)
    G = blas.dsyrk(-0.5, root, lower=1)
    return value, blas.dsyr2(0.5, u, alpha, a=G, lower=1, overwrite_a=1), -u
