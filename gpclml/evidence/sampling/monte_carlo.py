"""Evidence as a mean over draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_finite, checked
from gpclml.errors import NonFiniteError, ShapeError

__all__ = [
    "Estimate",
    "LogDensity",
    "SampledDensity",
    "log_mean",
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
    values = log_likelihood(prior_draws)
    if values.shape != prior_draws.shape[:1]:
        expected = f"({len(prior_draws)},), one value for each draw"
        suggestion = "Sum over parameters and data."
        raise ShapeError("log_likelihood", tuple(values.shape), expected, suggestion)
    return log_mean(values)


def mean_estimate(totals: Tensor) -> Estimate:
    """The mean of independent values ``(r,)``, with its error."""
    spread = float(totals.std()) if len(totals) > 1 else math.inf
    return Estimate(float(totals.mean()), spread / math.sqrt(len(totals)))
