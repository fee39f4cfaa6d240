"""Evidence as a mean over draws: simple Monte Carlo and importance sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_finite, checked
from gpclml.errors import NonFiniteError, ShapeError, UnsupportedError

__all__ = [
    "Estimate",
    "LogDensity",
    "SampledDensity",
    "check_differentiable",
    "importance_sampling",
    "log_mean",
    "log_values",
    "mean_estimate",
    "simple_monte_carlo",
]

LogDensity = Callable[[Tensor], Tensor]
"""Maps draws ``(S, P)`` to the log density of each, ``(S,)``."""


@dataclass(frozen=True)
class Estimate:
    """An estimate and its standard error.

    Attributes:
        value: The estimate, in nats in all.
        standard_error: Standard error of the value; infinite for a single repetition or chain.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class SampledDensity(Estimate):
    """The log of a mean density over draws, with its Monte Carlo error.

    Its standard error, from the spread over draws (to first order), is far too small if few draws
    dominate the mean.

    Attributes:
        effective_draws: Number of draws of equal weight with the same error, from 1 to S.
    """

    effective_draws: float


@checked(log_values="float (S,)")
def log_mean(log_values: Tensor) -> SampledDensity:
    r"""The log of the mean of densities given by their logs, in nats.

    .. math:: \log \frac1S \sum_s e^{\ell_s}

    The standard error is that of the mean divided by the mean (to first order), from the spread of
    the terms. The number of effective draws is :math:`(\sum_s u_s)^2 / \sum_s u_s^2` with
    :math:`u_s = e^{\ell_s}`.

    Args:
        log_values: Logs :math:`\ell_s`, ``(S,)``; minus infinity for a term of zero.

    Returns:
        The estimate, its standard error (infinite for one draw) and the effective draws.

    Raises:
        ShapeError: There are no draws, or not one number for each draw.
        NonFiniteError: A log is NaN or plus infinity, or all are minus infinity.
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


@torch.no_grad()
@checked(prior_draws="float (S, P)")
def simple_monte_carlo(log_likelihood: LogDensity, prior_draws: Tensor) -> SampledDensity:
    r"""The log evidence as the log mean likelihood over draws of the prior, in nats.

    .. math:: \log p(\mathcal D) \approx \log \frac1S \sum_s p(\mathcal D \mid w_s),
        \qquad w_s \sim p(w)

    The mean is unbiased, its log a lower bound in expectation. It takes about
    :math:`e^{\mathrm{KL}}` draws, KL the divergence of the posterior from the prior in nats
    (Chatterjee and Diaconis 2018), so that some draws explain the data. With fewer the estimate is
    too low and its error too small, which few effective draws indicate.

    Args:
        log_likelihood: Maps parameters ``(S, P)`` to the log likelihood of all data, ``(S,)``;
            minus infinity for none.
        prior_draws: Independent draws of the prior, ``(S, P)``.

    Returns:
        The estimate, its standard error and the effective draws.

    Raises:
        ShapeError: There are no draws, or the log likelihood is not one number for each draw.
        NonFiniteError: Draws are not finite, a log likelihood is NaN or plus infinity, or it is
            minus infinity at every draw.

    Note:
        One evaluation of the log likelihood at all draws together.
    """
    check_finite("prior_draws", prior_draws)
    return log_mean(log_values("log_likelihood", log_likelihood, prior_draws))


@torch.no_grad()
@checked(draws="float (S, P)")
def importance_sampling(
    log_joint: LogDensity, draws: Tensor, log_proposal: LogDensity
) -> SampledDensity:
    r"""The log evidence from draws of a proposal, in nats.

    .. math:: \log p(\mathcal D) \approx
        \log \frac1S \sum_s \frac{p(\mathcal D, w_s)}{q(w_s)}, \qquad w_s \sim q(w)

    With the posterior as proposal every term is the evidence and one draw is enough. The proposal
    must have wider tails than the posterior; otherwise the reported error is too small, and the
    draws do not show it.

    Args:
        log_joint: Maps parameters ``(S, P)`` to :math:`\log p(\mathcal D, w)`, ``(S,)``;
            minus infinity outside the prior's support.
        draws: Independent draws of the proposal, ``(S, P)``.
        log_proposal: Maps the same to the log of its normalized density, ``(S,)``, such as
            ``MultivariateNormal(mean, covariance).log_prob``.

    Returns:
        The estimate, its standard error and the effective draws.

    Raises:
        ShapeError: There are no draws, or a log density is not one number for each draw.
        NonFiniteError: Draws or log densities of the proposal are not finite, a log joint is NaN
            or plus infinity, or it is minus infinity at every draw.

    Note:
        One evaluation of either function at all draws together.
    """
    check_finite("draws", draws)
    joint = log_values("log_joint", log_joint, draws)
    proposal = log_values("log_proposal", log_proposal, draws)
    check_finite("log_proposal", proposal)
    return log_mean(joint.double() - proposal.double())


def mean_estimate(totals: Tensor) -> Estimate:
    """The mean of independent values ``(r,)``, with its error."""
    spread = float(totals.std()) if len(totals) > 1 else math.inf
    return Estimate(float(totals.mean()), spread / math.sqrt(len(totals)))


def log_values(argument: str, log_density: LogDensity, draws: Tensor) -> Tensor:
    """Log densities of the draws, ``(S,)``, whose shape is checked."""
    values = log_density(draws)
    if values.shape != draws.shape[:1]:
        expected = f"({len(draws)},), one value for each draw"
        raise ShapeError(argument, tuple(values.shape), expected, "Sum over parameters and data.")
    return values


def check_differentiable(argument: str, log_density: LogDensity, draws: Tensor) -> None:
    """Raises an UnsupportedError where a log density has no gradient by the parameters."""
    with torch.enable_grad():
        inputs = draws.detach().requires_grad_()
        values = log_values(argument, log_density, inputs)
        gradient = None
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(values.sum(), inputs, allow_unused=True)
    if gradient is None:
        raise UnsupportedError(
            argument,
            "values without a gradient with respect to the parameters",
            "a differentiable function of them",
            "Use torch operations throughout, without detach or numpy.",
        )
