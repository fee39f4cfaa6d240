"""Missing targets: which they are, and what remains of a Gaussian without them."""

from __future__ import annotations

import math

import torch
from gpytorch import settings
from torch import Tensor

from gpclml._finite import all_finite
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.linalg import LowRankPlusDiagonal

__all__ = ["MISSING_TERM", "missing_targets", "without_missing"]

MISSING_TERM = -0.5 * math.log(2 * math.pi)
"""What a missing target adds to a log density: it enters as a standard normal at its mean."""


def missing_targets(target: Tensor) -> Tensor | None:
    """Which targets are missing under GPyTorch's policy, same shape; None where none is.

    Args:
        target: Any shape; NaN is missing under ``observation_nan_policy("mask")``.

    Raises:
        UnsupportedError: Under the "fill" policy.
        NonFiniteError: If a target is not finite, outside the mask policy.
    """
    policy = settings.observation_nan_policy.value()
    if policy == "fill":
        raise UnsupportedError(
            "observation_nan_policy", "'fill'", "'ignore' or 'mask'", "Use 'mask'."
        )
    if all_finite(target):
        return None
    finite = torch.isfinite(target)
    missing = torch.isnan(target)
    if policy == "mask" and bool((finite | missing).all()):
        return missing
    raise NonFiniteError(
        "target",
        f"{int((~finite).sum())} non-finite of {target.numel()} values "
        f"(shape {tuple(target.shape)})",
        "finite targets",
        "Mark missing targets as NaN under "
        "gpytorch.settings.observation_nan_policy('mask'), or remove those rows.",
    )


def without_missing(
    covariance: Tensor | LowRankPlusDiagonal, residual: Tensor, missing: Tensor
) -> tuple[Tensor | LowRankPlusDiagonal, Tensor]:
    """Both with missing targets as independent standard normals at their means.

    Args:
        covariance: ``(*batch, n, n)``.
        residual: ``(*batch, n)``.
        missing: Of the residual's shape.
    """
    if isinstance(covariance, LowRankPlusDiagonal):
        return covariance.masked(missing), residual.masked_fill(missing, 0.0)
    gone = missing.unsqueeze(-1) | missing.unsqueeze(-2)
    covariance = covariance.masked_fill(gone, 0.0) + torch.diag_embed(missing.to(covariance))
    return covariance, residual.masked_fill(missing, 0.0)
