"""Missing targets: which they are, and what each adds to a log density."""

from __future__ import annotations

import math

import torch
from gpytorch import settings
from torch import Tensor

from gpclml._utils.arguments import all_finite, checked
from gpclml.errors import NonFiniteError, UnsupportedError

__all__ = ["MISSING_TERM", "missing_targets"]

MISSING_TERM = -0.5 * math.log(2 * math.pi)
"""What a missing target adds to a log density: it enters as a standard normal at its mean."""


@checked(late=True, target="(*batch)")
def missing_targets(target: Tensor, checked: bool = True) -> Tensor | None:
    """Which targets are missing under GPyTorch's policy, same shape; None where none is.

    Args:
        target: Any shape; NaN is missing under ``observation_nan_policy("mask")``.
        checked: Look at the targets under the "ignore" policy too, which on a GPU waits for all
            that is queued.

    Raises:
        UnsupportedError: Under the "fill" policy.
        NonFiniteError: If a target is not finite, outside the mask policy.
    """
    policy = settings.observation_nan_policy.value()
    if policy == "fill":
        raise UnsupportedError(
            "observation_nan_policy", "'fill'", "'ignore' or 'mask'", "Use 'mask'."
        )
    if (policy == "ignore" and not checked) or all_finite(target):
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
