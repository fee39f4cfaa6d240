"""Densities of targets under a posterior that is known by draws of outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.errors import NonFiniteError

__all__ = ["SampledDensity", "joint_log_density", "log_mean", "marginal_log_densities"]


@dataclass(frozen=True)
class SampledDensity:
    """An estimate of a log density from draws.

    Attributes:
        value: Log of the mean over draws of the density, in nats.
        standard_error: Of that, from the spread over draws (to first order); far too small
            where few draws carry the mean.
        effective_draws: How many draws of equal weight would do as well, 1 to their number.
    """

    value: float
    standard_error: float
    effective_draws: float


@checked(log_values="float (S,)")
def log_mean(log_values: Tensor) -> SampledDensity:
    r"""The log of a mean over draws of what is given by its logs, in nats.

    .. math:: \log \frac1S \sum_s e^{\ell_s}

    Its error is that of the mean over the mean, from the spread of the terms; S effective draws
    are :math:`(\sum_s u_s)^2 / \sum_s u_s^2` with :math:`u_s = e^{\ell_s}`.

    Args:
        log_values: Logs :math:`\ell_s`, ``(S,)``; minus infinity for a term of zero.

    Returns:
        The estimate, its standard error (infinite for one draw) and the effective draws.

    Raises:
        ShapeError: They are none, or not one number a draw.
        NonFiniteError: One is NaN or plus infinity, or all are minus infinity.
    """
    log_values = log_values.double()
    count = len(log_values)
    value = float(torch.logsumexp(log_values, dim=0)) - math.log(count)
    if not math.isfinite(value):
        expected = "no NaN, none plus infinity, not all minus infinity"
        raise NonFiniteError("log_values", f"a log mean of {value}", expected)
    weights = torch.softmax(log_values, dim=0)
    effective = 1 / float(weights.square().sum())
    spread = float((count * weights).std()) if count > 1 else math.inf
    return SampledDensity(value, spread / math.sqrt(count), effective)


@checked(outputs="float (S, N, C)", target="(N,) | (N, C)")
def joint_log_density(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> SampledDensity:
    r"""The log density of all targets together.

    .. math:: \log \frac1S \sum_s \prod_i p(y_i \mid w_s)

    With draws from the posterior given some points and the targets of all others this is the
    conditional log marginal likelihood of a network (Lotfi et al. 2022, Appendix B): it asks of
    every draw to explain all targets at once, where the marginal form scores each alone.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs: Of a network at draws of its weights, ``(S, N, C)``.
        target: Targets, ``(N,)`` or ``(N, C)``.

    Returns:
        The estimate and its error.

    Raises:
        UnsupportedError: The likelihood is another one.
        ShapeError, ArgumentError: Targets do not fit outputs or likelihood.
        NonFiniteError: As :func:`log_mean`.
    """
    return log_mean(_log_densities(likelihood, outputs, target).sum(-1))


@checked(outputs="float (S, N, C)", target="(N,) | (N, C)")
def marginal_log_densities(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> Tensor:
    r"""The log density of each target alone, :math:`\log \frac1S \sum_s p(y_i \mid w_s)`.

    Args:
        likelihood: As :class:`gpclml.mlls.LaplaceMarginalLogLikelihood` takes them.
        outputs: Of a network at draws of its weights, ``(S, N, C)``.
        target: Targets, ``(N,)`` or ``(N, C)``.

    Returns:
        Nats, ``(N,)``.

    Raises:
        UnsupportedError: The likelihood is another one.
        ShapeError, ArgumentError: Targets do not fit outputs or likelihood.
    """
    densities = _log_densities(likelihood, outputs, target)
    return torch.logsumexp(densities, dim=0) - math.log(len(densities))


@torch.no_grad()
def _log_densities(likelihood: Likelihood, outputs: Tensor, target: Tensor) -> Tensor:
    """Of each draw and target, ``(S, N)``, in float64."""
    count, n = outputs.shape[:2]
    every = target.repeat(count, *[1] * (target.ndim - 1))
    densities = output_likelihood(likelihood).log_density(outputs.flatten(0, 1), every)
    return densities.reshape(count, n).double()
