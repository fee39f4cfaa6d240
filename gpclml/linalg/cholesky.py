"""Cholesky factors of covariances: precision policy, jitter, and errors that say why."""

from __future__ import annotations

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from gpclml._finite import all_finite
from gpclml.errors import ArgumentError, NonFiniteError

__all__ = ["DOUBLE_UP_TO", "factorization_dtype", "safe_cholesky"]

DOUBLE_UP_TO = 512
"""Largest n at which a float32 covariance is factored in float64 without being asked."""

_FIRST_JITTER = 1e-8  # of the mean diagonal, in float64
_JITTER_TRIES = 6


def factorization_dtype(
    covariance: Tensor,  # shape: (*batch, n, n)
    factor_dtype: torch.dtype | None = None,
) -> torch.dtype:
    """The floating-point type in which a covariance is factored.

    The policy, when ``factor_dtype`` is not given: float64 stays float64; float32 is
    factored in float64 up to ``n = DOUBLE_UP_TO``, where the factorization costs less
    than the kernel around it, and in float32 above. Whatever is chosen, a float32
    factorization that fails is repeated in float64 before any jitter is added.

    Args:
        covariance: Covariance matrices, ``(*batch, n, n)``.
        factor_dtype: ``torch.float32`` or ``torch.float64`` to override the policy.

    Returns:
        The type to factor in.

    Raises:
        ArgumentError: If ``factor_dtype`` is another type.
    """
    if factor_dtype not in (None, torch.float32, torch.float64):
        raise ArgumentError(
            "factor_dtype",
            factor_dtype,
            "torch.float32, torch.float64 or None",
            "Leave it out for the default policy.",
        )
    if factor_dtype is not None:
        return factor_dtype
    small = covariance.shape[-1] <= DOUBLE_UP_TO
    return torch.float64 if small or covariance.dtype == torch.float64 else torch.float32


def safe_cholesky(
    covariance: Tensor,  # shape: (*batch, n, n)
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> Tensor:
    r"""The lower Cholesky factor :math:`L`, :math:`K = L L^\top`, jittered only if needed.

    The first attempt takes the matrix as it is. If it fails, float32 is repeated in
    float64, and then ``linear_operator``'s ``psd_safe_cholesky`` adds jitter of
    :math:`10^{-8}, 10^{-7}, \ldots, 10^{-3}` times its mean diagonal to each failing batch
    member, with a ``NumericalWarning`` each time: a jittered density is that of a
    slightly noisier model.

    Args:
        covariance: Symmetric matrices, ``(*batch, n, n)``; only the lower triangle counts.
        factor_dtype: See :func:`factorization_dtype`.
        checked: Look at once whether the first attempt succeeded, which on a GPU waits for all
            that is queued. If not, one that failed has NaN on its diagonal and is not repeated.

    Returns:
        Lower-triangular factors, ``(*batch, n, n)``, in the type they were computed in.

    Raises:
        NonFiniteError: If the covariance holds NaN or infinite entries.
        NotPSDError: If it is not positive definite even with jitter; BoTorch's
            ``fit_gpytorch_mll`` retries on this error.
    """
    matrix = covariance.to(factorization_dtype(covariance, factor_dtype))
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not checked:
        failed = (info != 0).unsqueeze(-1)
        factor.diagonal(dim1=-2, dim2=-1).masked_fill_(failed, torch.nan)
        return factor
    # A NaN can pass a factorization on a GPU without an error code; the diagonal shows it.
    if not bool(info.any()) and all_finite(factor.diagonal(dim1=-2, dim2=-1)):
        return factor
    _check_finite(covariance)
    if matrix.dtype == torch.float32:
        return safe_cholesky(covariance, torch.float64)
    return _jittered_cholesky(matrix)


def _check_finite(covariance: Tensor) -> None:
    bad = int((~torch.isfinite(covariance)).sum())
    if bad:
        raise NonFiniteError(
            "covariance",
            f"{bad} non-finite of {covariance.numel()} entries "
            f"(shape {tuple(covariance.shape)}, {covariance.dtype})",
            "finite entries",
            "Check the inputs for NaN, and lower the learning rate if hyperparameters diverged.",
        )


def _jittered_cholesky(matrix: Tensor) -> Tensor:
    if matrix.ndim > 2:  # each member on its own, with jitter to its own scale
        members = [safe_cholesky(member, matrix.dtype) for member in matrix.flatten(0, -3)]
        return torch.stack(members).reshape(matrix.shape)
    scale = float(matrix.detach().diagonal(dim1=-2, dim2=-1).mean(-1).abs())
    try:
        return psd_safe_cholesky(
            matrix, jitter=_FIRST_JITTER * (scale or 1.0), max_tries=_JITTER_TRIES
        )
    except NotPSDError as error:
        raise NotPSDError(
            f"covariance of shape {tuple(matrix.shape)}, factored in {matrix.dtype}, with mean "
            f"diagonal {scale:.3g}: {error} Raise the noise floor of the likelihood, or look for "
            "hyperparameters that degenerated."
        ) from error
