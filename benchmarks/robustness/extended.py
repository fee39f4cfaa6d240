"""Gaussian densities in extended precision, 64 bits of mantissa, as a reference.

NumPy's ``longdouble`` has no LAPACK behind it, so the factorization is written out by columns; it
takes about five seconds at n = 1500. Where ``longdouble`` is ``float64`` (Windows, some ARM) the
reference is no better than what it judges, which :func:`is_extended` says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["cholesky", "extended", "forward", "is_extended", "log_density_of_last"]

_BLOCK = 48
Array = NDArray[np.longdouble]


def is_extended() -> bool:
    """Whether ``longdouble`` has more digits than ``float64`` here."""
    return bool(np.finfo(np.longdouble).eps < np.finfo(np.float64).eps)


def extended(values: Tensor) -> Array:
    """The same numbers in extended precision.

    Args:
        values: Any shape.
    """
    return values.detach().double().cpu().numpy().astype(np.longdouble)


def cholesky(matrix: Array) -> Array | None:
    """The lower factor; None where a pivot is not positive.

    Args:
        matrix: Symmetric, ``(n, n)``; its lower triangle counts.
    """
    factor = matrix.copy()
    n = len(factor)
    for start in range(0, n, _BLOCK):
        stop = min(n, start + _BLOCK)
        for j in range(start, stop):
            if not factor[j, j] > 0:
                return None
            factor[j, j] = np.sqrt(factor[j, j])
            factor[j + 1 :, j] /= factor[j, j]
            column = factor[j + 1 : stop, j]
            factor[j + 1 :, j + 1 : stop] -= np.outer(factor[j + 1 :, j], column)
        rest = factor[stop:, start:stop]
        factor[stop:, stop:] -= rest @ rest.T
    return np.tril(factor)


def forward(factor: Array, right: Array) -> Array:
    """What the factor's inverse makes of columns.

    Args:
        factor: Lower, ``(n, n)``.
        right: ``(n, k)``.
    """
    solved = right.copy()
    for j in range(len(factor)):
        solved[j] = (solved[j] - factor[j, :j] @ solved[:j]) / factor[j, j]
    return solved


def log_density_of_last(factor: Array, residual: Array, count: int) -> float:
    """The log density of the last points given those before, in nats.

    Args:
        factor: Of the covariance, lower, ``(n, n)``.
        residual: ``(n,)``.
        count: How many points are scored; all of them for the log marginal likelihood.
    """
    z = forward(factor, residual[:, None])[-count:, 0]
    log_det = np.log(np.diag(factor)[-count:]).sum()
    half_log = np.log(2 * np.longdouble(np.pi)) / 2
    return float(-(z @ z) / 2 - log_det - count * half_log)
