"""Densities on a CPU, with their gradients, by NumPy and LAPACK.

A call of PyTorch takes some microseconds whatever it computes, which for a hundred points is most
of the time of a density; NumPy's calls take a fraction of that. For many points LAPACK's inverse of
a factor and products of which one half is computed save half of the operations. The formulas are
those of :mod:`gpclml.linalg.dense`, for one covariance and one residual.

A covariance that is not positive definite, or singular to rounding, is left to the other modules.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from numpy import ndarray
from scipy.linalg import blas as _blas
from scipy.linalg import lapack as _lapack
from threadpoolctl import ThreadpoolController
from torch import Tensor

from gpclml.linalg.array_kernels import ArrayKernel, panels, set_diagonal
from gpclml.linalg.matrices import DOUBLE_UP_TO, PIVOT_ROUNDINGS

__all__ = [
    "LARGEST",
    "applies",
    "kernel_density",
    "kernel_factor",
    "last_densities",
    "last_gradient",
    "least_pivot",
    "leave_one_out",
    "matrix_density_and_gradients",
    "one_thread",
]

blas: Any = _blas  # whose functions are known at run time alone
lapack: Any = _lapack

LARGEST = {torch.float32: DOUBLE_UP_TO, torch.float64: 2**15}
"""Most points by the type in which they come; all is computed in double precision. LAPACK counts
the entries of a matrix in 32 bits."""

# Points up to which PyTorch's factor takes no longer on one thread; its sums lose fewer digits. It
# reads the half that is zero in matrices that are computed by panels.
_BY_TORCH = 256
# Points up to which one thread is used. On two cores it is as fast as two up to 1,000 points; on
# more cores PyTorch's threads may gain earlier.
_ONE_THREAD_UP_TO = 512
# Points up to which blocks of several are taken; PyTorch takes about as long for those of more.
_BLOCKS_UP_TO = 128
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)

Blocks = int | Sequence[ndarray]
"""How many of the last points are held out, given the others; or indices of held-out blocks,
``(k_i, b_i)`` a size, each given all others."""


def matrix_density_and_gradients(
    covariance: Tensor, residual: Tensor, blocks: Blocks | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The log density of held-out points, and its gradients by covariance and residual.

    Args:
        covariance: ``(*batch, n, n)``.
        residual: ``(*batch, n)``.
        blocks: The held-out points; None where this module does not take them.

    Returns:
        The three; None where points are too many, on a GPU or a batch, or have no Cholesky factor.
    """
    if blocks is None or covariance.ndim > 2 or not applies(residual, blocks):
        return None
    with numpy.errstate(all="ignore"), one_thread(len(residual)):
        # A copy, by columns as LAPACK has it: the transpose of one by rows.
        matrix = covariance.detach().double().numpy().copy().T
        L = _factor(matrix, least_pivot(residual))
        if L is None:
            return None
        result = _of_factor(L, _array(residual), blocks)
    if result is None:
        return None
    value, G, of_residual = result
    G = G + G.T
    set_diagonal(G, 0.5 * G.diagonal())
    as_tensors = torch.from_numpy(G), torch.from_numpy(of_residual)
    return torch.tensor(value, dtype=residual.dtype), *as_tensors


def applies(residual: Tensor, blocks: Blocks) -> bool:
    """Whether densities of a residual of this shape, type and device are computed here."""
    if residual.ndim > 1 or residual.device.type != "cpu":
        return False
    if torch._C._are_functorch_transforms_active():  # whose tensors have no memory to read
        return False
    several = not isinstance(blocks, int) and any(group.shape[1] > 1 for group in blocks)
    n, most = residual.shape[-1], LARGEST.get(residual.dtype, 0)
    if torch.get_num_threads() > 1:
        most = min(most, _ONE_THREAD_UP_TO)
    return n <= (min(most, _BLOCKS_UP_TO) if several else most)


def one_thread(n: int = 0) -> AbstractContextManager[Any]:
    """Keeps NumPy and SciPy to one thread meanwhile, unless matrices have many rows.

    Their libraries have threads of their own beside PyTorch's, and both kinds wait busily for a
    while after they had something to do, which takes the cores away from the other kind.
    """
    return contextlib.nullcontext() if n > _ONE_THREAD_UP_TO else _ONE_THREAD


class _OneThread:
    """Gives the libraries their threads back after the last of those who asked for one."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._several: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                counts = [(one, one.get_num_threads()) for one in _libraries()]
                self._several = [(one, count) for one, count in counts if count != 1]
                for one, _ in self._several:
                    one.set_num_threads(1)
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                for one, count in self._several:
                    one.set_num_threads(count)


_ONE_THREAD = _OneThread()


@functools.cache
def _libraries() -> list[Any]:
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _array(values: Tensor) -> ndarray:
    return values.detach().double().numpy()


def least_pivot(like: Tensor) -> float:
    """Smallest squared pivot as a share of its variance."""
    return PIVOT_ROUNDINGS * torch.finfo(like.dtype).eps


def kernel_density(
    kernel: ArrayKernel,
    noise: ndarray | None,
    residual: ndarray,
    blocks: Blocks,
    least: float,
    work: ndarray | None = None,
) -> tuple[float, ndarray, ndarray] | None:
    """The density by a kernel and noise, and its gradients by their sum and by the residual.

    Args:
        kernel: Of ``n`` points.
        noise: Variances, ``(n,)`` or ``(1,)``; none if None. The gradient by them is the diagonal
            of that by the covariance.
        residual: ``(n,)``.
        blocks: The held-out points, for which :func:`applies` is true.
        least: Smallest squared pivot of the factor, as a share of its variance.
        work: An array ``(n, n)`` to compute in; a new one if None.

    Returns:
        The density; the gradient by the covariance, as
        :meth:`~gpclml.linalg.array_kernels.ArrayKernel.add_gradient` takes it; that by the
        residual. None where there is no Cholesky factor.
    """
    L = kernel_factor(kernel, noise, len(residual), least, work)
    if L is None:
        return None
    with numpy.errstate(all="ignore"):
        return _of_factor(L, residual, blocks)


def kernel_factor(
    kernel: ArrayKernel, noise: ndarray | None, n: int, least: float, work: ndarray | None = None
) -> ndarray | None:
    """The Cholesky factor of the covariance of ``n`` points, whose upper half is zero.

    Args:
        kernel: As for :func:`kernel_density`, and so are the others.
        noise: Variances.
        n: Number of points.
        least: Smallest squared pivot.
        work: An array to compute in.
    """
    with numpy.errstate(all="ignore"):  # what is not finite has no factor
        covariance = numpy.zeros((n, n)) if work is None else work
        k, scale = kernel.value()
        k = k if k.shape == covariance.shape else numpy.broadcast_to(k, covariance.shape)
        for panel in panels(n):
            numpy.multiply(k[panel], scale, out=covariance[panel])
        if noise is not None:
            covariance.ravel()[:: n + 1] += noise  # a view of rows
        # LAPACK has matrices by columns: to it the transpose, which is equal, is one in place.
        return _factor(covariance.T, least)


def _factor(covariance: ndarray, least: float) -> ndarray | None:
    """The factor of a matrix by columns, which may be computed in its memory."""
    variances = covariance.diagonal().copy()
    if len(covariance) <= _BY_TORCH and torch.get_num_threads() == 1:
        factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(covariance.T))
        L, info = factor.numpy(), failed.item()
    else:
        L, info = lapack.dpotrf(covariance, lower=1, overwrite_a=1)
    pivots = L.diagonal()
    return None if info or not (pivots * pivots / variances).min() > least else L


def _of_factor(
    L: ndarray, residual: ndarray, blocks: Blocks
) -> tuple[float, ndarray, ndarray] | None:
    """The density, the lower half of its gradient by the covariance, and that by the residual.

    None where the covariance of a block given the others has no Cholesky factor by its rounding.
    """
    if not isinstance(blocks, int):
        try:
            return _of_blocks(L, residual, blocks)
        except numpy.linalg.LinAlgError:
            return None
    values, z = last_densities(L, residual[:, None], blocks)
    G, of_residual = last_gradient(L, z, blocks, _ONE, overwrite=True)
    return float(values[0]), G, of_residual[:, 0]


def leave_one_out(
    kernel: ArrayKernel, noise: ndarray | None, residual: ndarray, least: float
) -> ndarray | None:
    """Mean and variance of each residual given all others, ``(2, n)``; None without a factor.

    Args:
        kernel: As for :func:`kernel_density`, and so are the others.
        noise: Variances.
        residual: ``(n,)``.
        least: Smallest squared pivot.
    """
    with one_thread(len(residual)):
        L = kernel_factor(kernel, noise, len(residual), least)
        if L is None:
            return None
        inverse = lapack.dtrtri(L, lower=1, overwrite_c=1)[0]
        variance = 1.0 / numpy.einsum("ij,ij->j", inverse, inverse)
        alpha = inverse.T @ (inverse @ residual)
    return numpy.stack([residual - alpha * variance, variance])


_ONE = numpy.ones(1)


def last_densities(L: ndarray, residuals: ndarray, b: int) -> tuple[ndarray, ndarray]:
    """Log densities of the last b of n points given the others: see ``ConditionalLogDensity``.

    Args:
        L: Factor of the covariance.
        residuals: Those of k densities that share it, ``(n, k)``.
        b: Number of points.

    Returns:
        The densities, ``(k,)``, and what :func:`last_gradient` needs.
    """
    z = lapack.dtrtrs(L, residuals, lower=1)[0]
    # Terms of a point are added before those of other points, which keeps partial sums small.
    terms = z[-b:] * z[-b:]
    terms *= 0.5
    terms += numpy.log(L.diagonal()[-b:, None])
    terms += _HALF_LOG_2PI
    return -terms.sum(0), z


def last_gradient(
    L: ndarray, z: ndarray, b: int, weights: ndarray, *, overwrite: bool = False
) -> tuple[ndarray, ndarray]:
    """Gradients of the weighted sum of :func:`last_densities` by covariance and residuals.

    Args:
        L: Factor of the covariance.
        z: As :func:`last_densities` gives it.
        b: Number of points.
        weights: Of the densities, ``(k,)``.
        overwrite: Whether the memory of the factor may be used.

    Returns:
        The lower half of the gradient by the covariance, whose upper half is zero, and
        ``(n, k)``.
    """
    (n, k), total = z.shape, weights.sum()
    if b == n:
        u = alpha = lapack.dtrtrs(L, z, lower=1, trans=1)[0]
        G = lapack.dpotri(L, lower=1, overwrite_c=overwrite)[0]
        G *= -0.5 * total
    else:
        right = numpy.zeros((n, b + 2 * k), order="F")
        right[range(n - b, n), range(b)] = 1.0
        right[n - b :, b : b + k] = z[n - b :]
        right[:, b + k :] = z
        solved = lapack.dtrtrs(L, right, lower=1, trans=1, overwrite_b=1)[0]
        W, u, alpha = solved[:, :b], solved[:, b : b + k], solved[:, b + k :]
        G = blas.dsyrk(-0.5 * total, W, c=L, lower=1, overwrite_c=overwrite)
    weighted = u * weights
    G = blas.dsyr2k(0.5, weighted, alpha - 0.5 * u, beta=1.0, c=G, lower=1, overwrite_c=1)
    return G, -weighted


def _of_blocks(
    L: ndarray, residual: ndarray, blocks: Sequence[ndarray]
) -> tuple[float, ndarray, ndarray]:
    """Of each block given all others: see ``BlockLogDensities``."""
    Q = lapack.dpotri(L, lower=1)[0]  # the other half of a factor is zero
    Q = Q + Q.T
    Q.ravel(order="K")[:: len(Q) + 1] *= 0.5
    alpha = lapack.dpotrs(L, residual, lower=1)[0]
    value, roots = 0.0, []
    source, weight = numpy.zeros_like(alpha), numpy.zeros_like(alpha)
    for group in blocks:
        alpha_B = alpha[group]
        if group.shape[1] == 1:
            rows = group[:, 0]
            Q_BB = Q[rows, rows]
            s = alpha_B[:, 0] / Q_BB
            value += 0.5 * float(numpy.log(Q_BB).sum() - alpha_B[:, 0] @ s)
            numpy.add.at(weight, rows, s * s + 1.0 / Q_BB)
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
    single = numpy.flatnonzero(weight)
    if len(single) == len(Q):  # which is no longer needed
        roots.append(numpy.multiply(Q.T, numpy.sqrt(weight), out=Q.T))
    elif len(single):
        roots.append(Q[:, single] * numpy.sqrt(weight[single]))
    root = roots[0] if len(roots) == 1 else numpy.concatenate(roots, 1)
    G = blas.dsyrk(-0.5, root, lower=1)
    return value, blas.dsyr2(0.5, u, alpha, a=G, lower=1, overwrite_a=1), -u
