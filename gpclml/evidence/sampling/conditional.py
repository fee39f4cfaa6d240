"""The conditional log marginal likelihood of a network, from draws of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError
from gpclml.evidence.sampling.densities import (
    SampledDensity,
    joint_log_density,
    marginal_log_densities,
)
from gpclml.evidence.sampling.weights import rescaled

__all__ = [
    "SCALES",
    "SampledConditional",
    "conditional_split",
    "estimate_conditional_log_density",
]

SCALES = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Scales of a posterior's covariance that are tried if none are given."""

OutputsOf = Callable[[Mapping[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class SampledConditional:
    """A conditional log marginal likelihood.

    Attributes:
        joint: Log density of all held-out targets together, in nats.
        marginal: Mean over held-out targets of the log density of each alone, nats a point.
        scale: What the covariance of the posterior was multiplied by.
        num_held_out: Number of held-out targets.
    """

    joint: SampledDensity
    marginal: float
    scale: float
    num_held_out: int


@checked
def estimate_conditional_log_density(
    likelihood: Likelihood,
    outputs_of: OutputsOf,
    weights: Mapping[str, Tensor],
    held_out: tuple[Tensor, Tensor],
    *,
    scaling: tuple[Tensor, Tensor] | None = None,
    center: Mapping[str, Tensor] | None = None,
    scales: Sequence[float] = SCALES,
) -> SampledConditional:
    r"""The log density of held-out targets under draws from a posterior given all others.

    .. math:: \log p(\mathcal D_{\text{held out}} \mid \mathcal D_{\text{rest}})
        \approx \log \frac1S \sum_s p(\mathcal D_{\text{held out}} \mid w_s)

    With scaling points the covariance of the draws is first multiplied by that one of the scales
    under which these points are likeliest, each alone (Lotfi et al. 2022, Appendix B: 80% of
    the points for the posterior, 5% for its scale, 15% held out): a Laplace posterior is too wide
    where the curvature at the mode is not that of its surroundings.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs_of: Maps draws and points to outputs ``(S, N, C)``, such as
            ``functools.partial(sampled_outputs, network)``.
        weights: Draws by name, ``(S, *shape)``.
        held_out: Points and targets that neither the draws nor the scale have seen.
        scaling: Points and targets that the draws have not seen.
        center: Weights that the draws are scaled around, by name; their mean if None.
        scales: What may multiply the covariance.

    Returns:
        Both forms of it, and the scale; 1 without scaling points.

    Raises:
        ArgumentError: No scale is given, or one is not positive.
        UnsupportedError, ShapeError: As :func:`joint_log_density`.
    """
    scale = 1.0
    if scaling is not None:
        if not scales or not all(0 < scale < math.inf for scale in scales):
            raise ArgumentError("scales", list(scales), "positive numbers")
        scores = []
        for one in scales:
            outputs = outputs_of(rescaled(weights, one, center), scaling[0])
            scores.append(float(marginal_log_densities(likelihood, outputs, scaling[1]).mean()))
        scale = scales[max(range(len(scales)), key=scores.__getitem__)]
        weights = rescaled(weights, scale, center)
    x, y = held_out
    outputs = outputs_of(weights, x)
    marginal = float(marginal_log_densities(likelihood, outputs, y).mean())
    return SampledConditional(joint_log_density(likelihood, outputs, y), marginal, scale, len(y))


@checked
def conditional_split(
    num_data: int, shares: Sequence[float] = (0.8, 0.05, 0.15), seed: int = 0
) -> list[Tensor]:
    """Random points for the posterior, for its scale, and held out.

    Args:
        num_data: Number N of points.
        shares: Their parts; the last gets what rounding leaves.
        seed: Seed of the split.

    Returns:
        Indices of each, together 0 to N - 1.

    Raises:
        ArgumentError: The shares are not positive or do not add up to one, or one gets no point.
    """
    if not shares or not all(share > 0 for share in shares) or not abs(sum(shares) - 1) <= 1e-9:
        raise ArgumentError("shares", list(shares), "positive numbers that add up to one")
    sizes = [round(share * num_data) for share in shares[:-1]]
    sizes.append(num_data - sum(sizes))
    if min(sizes) < 1:
        got = f"{num_data} points, {sizes} for the shares {list(shares)}"
        raise ArgumentError("num_data", got, "at least one point for each share")
    order = torch.randperm(num_data, generator=torch.Generator().manual_seed(seed))
    return list(order.split(sizes))
