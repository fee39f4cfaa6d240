"""Cholesky factors of covariances: precision policy, jitter, and errors that say why."""

from __future__ import annotations

import warnings

import torch
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpclml._utils.arguments import callers_level, checked
from gpclml.errors import ArgumentError, NonFiniteError

__all__ = ["DOUBLE_UP_TO", "factorization_dtype", "safe_cholesky"]

DOUBLE_UP_TO = 512
"""Largest n at which a float32 covariance is factored in float64 without being asked."""

_ROUNDINGS = 2  # epsilons of a variance that a squared pivot has to be above


@checked(late=True, covariance="float (*batch, n, n)")
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


@checked(late=True, covariance="float (*batch, n, n)")
def safe_cholesky(
    covariance: Tensor,  # shape: (*batch, n, n)
    factor_dtype: torch.dtype | None = None,
    *,
    checked: bool = True,
) -> Tensor:
    r"""The lower Cholesky factor :math:`L`, :math:`K = L L^\top`, jittered only if needed.

    The first attempt takes the matrix as it is. It fails where the matrix is not positive definite
    or singular to the rounding of the type in which it came: where a squared pivot, the variance of
    a point given those before it, is below two epsilons of that type times its variance. If it
    fails, float32 is repeated in float64, which cannot restore what the entries have lost, and then
    each failing batch member gets jitter of :math:`10^{-8}, 10^{-7}, \ldots, 10^{-3}` times its
    mean diagonal, from :math:`10^{-6}` on where it came in float32, with a ``NumericalWarning``: a
    jittered density is that of a slightly noisier model.

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
    least = _ROUNDINGS * torch.finfo(covariance.dtype).eps
    factor, left = _factor(matrix)
    if not checked:
        factor.diagonal(dim1=-2, dim2=-1).masked_fill_(~(left > least).unsqueeze(-1), torch.nan)
        return factor
    if left.amin().item() > least:
        return factor
    _check_finite(covariance)
    if matrix.dtype == torch.float32:
        matrix = matrix.double()
        factor, left = _factor(matrix)
    # Each member on its own, with jitter to its own scale.
    members = zip(_members(factor), left.flatten().tolist(), _members(matrix), strict=True)
    factors = [one if share > least else _jittered(member, least) for one, share, member in members]
    return torch.stack(factors).reshape(matrix.shape)


def _members(matrices: Tensor) -> Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])


def _factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The factor, and its least squared pivot as a share of its variance, ``(*batch,)``.

    Roundings of the entries that a pivot is the difference of are of the order of the epsilon of
    the type in which they came times the variance. Where a factorization failed the share is
    negative, or NaN where it did so on a GPU without an error code.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
    return factor, (pivots / matrix.detach().diagonal(dim1=-2, dim2=-1)).amin(-1) - info


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


def _jittered(matrix: Tensor, least: float) -> Tensor:
    """The factor with the first jitter that lifts all pivots above rounding."""
    scale = float(matrix.detach().diagonal().mean().abs()) or 1.0
    share = 1e-8 if least < 1e-8 else 1e-6
    while share < 2e-3:
        jitter = torch.full_like(matrix[..., 0].detach(), share * scale)
        factor, left = _factor(matrix + torch.diag(jitter))
        if left.item() > least:
            warnings.warn(
                f"A covariance of shape {tuple(matrix.shape)} is singular to rounding: jitter of "
                f"{share * scale:.1e} was added to its diagonal, of mean {scale:.3g}.",
                NumericalWarning,
                stacklevel=callers_level(),
            )
            return factor
        share *= 10
    raise NotPSDError(
        f"covariance of shape {tuple(matrix.shape)}, factored in {matrix.dtype}, with mean "
        f"diagonal {scale:.3g}: not positive definite even with jitter of 1e-3 of that. Raise the "
        "noise floor of the likelihood, or look for hyperparameters that degenerated."
    )
