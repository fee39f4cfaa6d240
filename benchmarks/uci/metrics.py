"""How well normal predictions agree with test targets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["prediction_metrics", "rmse"]

_STANDARD_NORMAL_975 = 1.959963984540054  # 95% lie between plus and minus this


def rmse(mean: Tensor, target: Tensor, unit: float) -> float:
    """Root mean squared error, in the given unit of the targets.

    Args:
        mean: Predicted means, ``(num_test,)``.
        target: Test targets, ``(num_test,)``.
        unit: The unit.
    """
    return float((target - mean).square().mean().sqrt() / unit)


def prediction_metrics(
    mean: Tensor, variance: Tensor, target: Tensor, unit: float
) -> dict[str, float]:
    r"""Root mean squared error, negative log density, CRPS and coverage of normal predictions.

    The CRPS of a normal is :math:`\sigma (z (2 \Phi(z) - 1) + 2 \phi(z) - \pi^{-1/2})`, z the
    error over its standard deviation (Gneiting and Raftery 2007, Eq. 21).

    Args:
        mean: Predicted means, ``(num_test,)``.
        variance: Variances of the predicted observations, ``(num_test,)``.
        target: Test targets, ``(num_test,)``.
        unit: The unit of the targets in which errors and densities are given.

    Returns:
        - ``rmse``: root mean squared error of the means;
        - ``nll``: mean negative log density of one target, nats;
        - ``crps``: mean continuous ranked probability score;
        - ``coverage_95``: share of targets within their central 95% interval.
    """
    error = (target - mean) / unit
    sd = variance.sqrt() / unit
    z = error / sd
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    nll = 0.5 * z.square() + sd.log() + 0.5 * math.log(2 * math.pi)
    crps = sd * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))
    inside = error.abs() <= _STANDARD_NORMAL_975 * sd
    return {
        "rmse": rmse(mean, target, unit),
        "nll": float(nll.mean()),
        "crps": float(crps.mean()),
        "coverage_95": float(inside.to(nll).mean()),
    }
