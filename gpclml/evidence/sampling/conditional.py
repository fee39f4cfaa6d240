"""Log densities of targets, and the CLML of a network, from draws of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.evidence.sampling.monte_carlo import SampledDensity, log_mean
from gpclml.evidence.sampling.weights import rescaled

__all__ = [
    "SCALES",
    "SampledConditional",
    "conditional_split",
    "estimate_conditional_log_density",
    "joint_log_density",
    "marginal_log_densities",
]

SCALES = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Scales of a posterior's covariance that are tried if none are given."""

OutputsOf = Callable[[Mapping[str, Tensor], Tensor], Tensor]


@checked(outputs="float (S, N, C)", target="(N,) | (N, C)")
def joint_log_density(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> SampledDensity:
    r"""The log density of all targets together, averaged over draws, in nats.

    .. math:: \log \frac1S \sum_s \prod_i p(y_i \mid w_s)

    With draws from the posterior given some points and the targets of all others this is the
    conditional log marginal likelihood of a network (Lotfi et al. 2022, Appendix B): each draw has
    to explain all targets at once, where :func:`marginal_log_densities` scores each target alone.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs: Outputs of a network at draws of its weights, ``(S, N, C)``.
        target: Targets, ``(N,)`` or ``(N, C)``.

    Returns:
        The estimate and its error.

    Raises:
        UnsupportedError: The likelihood is of another class.
        ShapeError, ArgumentError: Targets do not fit outputs or likelihood.
        NonFiniteError: As :func:`log_mean`.
    """
    return log_mean(_log_densities(likelihood, outputs, target).sum(-1))


@checked(outputs="float (S, N, C)", target="(N,) | (N, C)")
def marginal_log_densities(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> Tensor:
    r"""The log density of each target alone, :math:`\log \frac1S \sum_s p(y_i \mid w_s)`.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs: Outputs of a network at draws of its weights, ``(S, N, C)``.
        target: Targets, ``(N,)`` or ``(N, C)``.

    Returns:
        Nats, ``(N,)``.

    Raises:
        UnsupportedError: The likelihood is of another class.
        ShapeError, ArgumentError: Targets do not fit outputs or likelihood.
    """
    densities = _log_densities(likelihood, outputs, target)
    return torch.logsumexp(densities, dim=0) - math.log(len(densities))


@dataclass(frozen=True)
class SampledConditional:
    """A conditional log marginal likelihood estimated from draws.

    Attributes:
        joint: Log density of all held-out targets together, in nats.
        marginal: Mean over held-out targets of the log density of each alone, nats a point.
        scale: Factor of the posterior's covariance.
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
    r"""The CLML of a network: the log density of held-out targets under posterior draws.

    .. math:: \log p(\mathcal D_{\text{held out}} \mid \mathcal D_{\text{rest}})
        \approx \log \frac1S \sum_s p(\mathcal D_{\text{held out}} \mid w_s)

    If scaling points are given, the covariance of the draws is first multiplied by that scale
    among ``scales`` for which the marginal density of these points is largest (Lotfi et al. 2022,
    Appendix B: 80% of the points for the posterior, 5% for its scale, 15% held out). A Laplace
    posterior is too wide where the curvature at the mode differs from that around it.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs_of: Maps draws and points to outputs ``(S, N, C)``, such as
            ``functools.partial(sampled_outputs, network)``.
        weights: Draws by name, ``(S, *shape)``.
        held_out: Points and targets that neither the draws nor the scale have seen.
        scaling: Points and targets that the draws have not seen.
        center: Weights that the draws are scaled around, by name; their mean if None.
        scales: Factors of the covariance among which one is chosen.

    Returns:
        The joint and the marginal density, and the scale; 1 without scaling points.

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
    """Splits points at random: for the posterior, for its scale, and held out.

    Args:
        num_data: Number N of points.
        shares: Share of each part; the last gets what rounding leaves.
        seed: Seed of the split.

    Returns:
        Indices of each part, together 0 to N - 1.

    Raises:
        ArgumentError: The shares are not positive or do not add up to one, or one gets no point.
        UnsupportedError: The shares are a tensor.
    """
    if isinstance(shares, Tensor):
        raise UnsupportedError("shares", "Tensor", "a sequence of numbers", "Use shares.tolist().")
    if not shares or not all(share > 0 for share in shares) or not abs(sum(shares) - 1) <= 1e-9:
        raise ArgumentError("shares", list(shares), "positive numbers that add up to one")
    sizes = [round(share * num_data) for share in shares[:-1]]
    sizes.append(num_data - sum(sizes))
    if min(sizes) < 1:
        got = f"{num_data} points, {sizes} for the shares {list(shares)}"
        raise ArgumentError("num_data", got, "at least one point for each share")
    order = torch.randperm(num_data, generator=torch.Generator().manual_seed(seed))
    return list(order.split(sizes))


@torch.no_grad()
def _log_densities(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> Tensor:
    """Log densities of each target at each draw, ``(S, N)``, in float64."""
    count, n = outputs.shape[:2]
    every = target.repeat(count, *[1] * (target.ndim - 1))
    densities = output_likelihood(likelihood).log_density(outputs.flatten(0, 1), every)
    return densities.reshape(count, n).double()
