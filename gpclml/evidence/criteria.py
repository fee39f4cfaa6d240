"""Information criteria: estimates from the training data of how well new data are predicted.

WAIC and PSIS-LOO estimate the log density of n new points, each given all the data. They are sums
over the n points in nats, larger better; the deviance of the papers is -2 times that.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import all_finite, check_finite, checked
from gpclml.errors import ShapeError, UnsupportedError

_LARGEST_VARIANCE = 0.4
_FEWEST_PSIS_DRAWS = 25


@dataclass(frozen=True, eq=False)
class PredictiveCriterion:
    """An estimate of the log density of new points, from draws of the posterior.

    Attributes:
        value: Sum over points, scalar.
        standard_error: Standard error of the value, from the spread over points; NaN for one point.
            It does not include the Monte Carlo error of the draws.
        effective_parameters: Log density of the training data less the value, in nats, scalar.
        pointwise: Terms of the value, ``(N,)``.
        diagnostic: Reliability of each term, ``(N,)``: for WAIC the variance over draws of the
            log-likelihood, for PSIS-LOO the Pareto shape k of the weights.
        unreliable: Whether the diagnostic is too large, ``(N,)``.
    """

    value: Tensor
    standard_error: Tensor
    effective_parameters: Tensor
    pointwise: Tensor
    diagnostic: Tensor
    unreliable: Tensor


@checked(log_likelihoods="float (S, N)")
def waic(log_likelihoods: Tensor) -> PredictiveCriterion:
    r"""The widely applicable information criterion: the fit less the log-likelihoods' variance.

    .. math:: \sum_i \log \frac1S \sum_s p(y_i \mid w_s)
       - \sum_i \operatorname{Var}_s \log p(y_i \mid w_s)

    Watanabe (2010); Gelman, Hwang and Vehtari (2014), with their second effective number of
    parameters. A variance above .4 makes a term unreliable (Vehtari, Gelman and Gabry 2017).

    Args:
        log_likelihoods: log p(y_i | w_s) at S draws from the posterior given all points,
            ``(S, N)``; S at least 2.

    Returns:
        The estimate, differentiable, with a standard error and its terms.

    Raises:
        ShapeError: If the shape is not ``(S, N)``, or S is too small.
        NonFiniteError: If a log-likelihood is not finite.

    Note:
        S N operations.

    Examples:
        >>> import torch
        >>> from gpclml import waic
        >>> draws = torch.randn(200, 1, dtype=torch.float64) / 20**0.5  # of the mean of y
        >>> y = torch.linspace(-1, 1, 20, dtype=torch.float64)
        >>> result = waic(torch.distributions.Normal(draws, 1.0).log_prob(y))
    """
    _check_draws(log_likelihoods, 2)
    fit = torch.logsumexp(log_likelihoods, dim=0) - math.log(len(log_likelihoods))
    variance = log_likelihoods.var(dim=0)
    return _criterion(fit, fit - variance, variance, variance > _LARGEST_VARIANCE)


@torch.no_grad()
@checked(log_likelihoods="float (S, N)")
def psis_loo(log_likelihoods: Tensor) -> PredictiveCriterion:
    r"""PSIS-LOO: the log density of each point given all others, by smoothed importance weights.

    Draws from the posterior given all points get weights 1 / p(y_i | w_s), the largest of which
    are replaced by quantiles of a Pareto distribution (Vehtari, Gelman and Gabry 2017). A shape
    k above min(1 - 1 / log10 S, .7) makes a term unreliable (Vehtari et al. 2024).

    Args:
        log_likelihoods: log p(y_i | w_s) at S draws from the posterior given all points,
            ``(S, N)``; S at least 25, taken as independent.

    Returns:
        The estimate with a standard error and its terms. Weights that no Pareto distribution fits
        are not smoothed and have k infinite; equal weights are exact and have k minus infinity.

    Raises:
        UnsupportedError: If the package arviz-stats is not installed.
        ShapeError: If the shape is not ``(S, N)``, or S is too small.
        NonFiniteError: If a log-likelihood is not finite.

    Note:
        S log S operations a point, in float64 on the CPU; without a gradient.

    Examples:
        >>> import torch
        >>> from gpclml import psis_loo
        >>> draws = torch.randn(200, 1, dtype=torch.float64) / 20**0.5  # of the mean of y
        >>> y = torch.linspace(-1, 1, 20, dtype=torch.float64)
        >>> result = psis_loo(torch.distributions.Normal(draws, 1.0).log_prob(y))
    """
    _check_draws(log_likelihoods, _FEWEST_PSIS_DRAWS)
    draws = log_likelihoods.detach().to("cpu", torch.float64)
    pairs = [_smoothed_log_weights(log_likelihood) for log_likelihood in draws.T]
    log_weights = torch.stack([weights for weights, _ in pairs], dim=1)
    shape = torch.tensor([shape for _, shape in pairs], dtype=torch.float64)
    fit = torch.logsumexp(draws, dim=0) - math.log(len(draws))
    left_out = torch.logsumexp(draws + log_weights, dim=0)
    largest = min(1 - 1 / math.log10(len(draws)), 0.7)
    fit, left_out, shape = (t.to(log_likelihoods) for t in (fit, left_out, shape))
    return _criterion(fit, left_out, shape, ~(shape <= largest))


def _smoothed_log_weights(log_likelihood: Tensor) -> tuple[Tensor, float]:
    """Logarithms of the weights of all draws for one point, sum one, and their Pareto shape."""
    try:
        from arviz_stats.base.array import array_stats
    except ImportError as error:
        suggestion = f"Install it: pip install 'gpclml[criteria]'. {error}"
        expected = "the package beside gpclml"
        raise UnsupportedError("psis_loo", "no arviz-stats", expected, suggestion) from None
    raw = torch.log_softmax(-log_likelihood, dim=0)
    if bool((log_likelihood == log_likelihood[0]).all()):
        return raw, -math.inf
    try:
        with warnings.catch_warnings():
            # Weights beyond the range of numbers; seen below.
            warnings.simplefilter("ignore", RuntimeWarning)
            smoothed, shape = array_stats.psislw(log_likelihood.numpy())
    except ValueError:  # the largest weights are all equal
        return raw, math.inf
    smoothed = torch.as_tensor(smoothed)
    if not (math.isfinite(shape) and all_finite(smoothed)):
        return raw, math.inf
    return smoothed, float(shape)


def _criterion(
    fit: Tensor, pointwise: Tensor, diagnostic: Tensor, unreliable: Tensor
) -> PredictiveCriterion:
    """The criterion made of its terms and those of the fit, ``(N,)``, in nats."""
    count = len(pointwise)
    # The variance of one term is NaN, said with a warning.
    spread = pointwise.std() if count > 1 else pointwise.new_tensor(math.nan)
    return PredictiveCriterion(
        value=pointwise.sum(),
        standard_error=math.sqrt(count) * spread,
        effective_parameters=(fit - pointwise).sum(),
        pointwise=pointwise,
        diagnostic=diagnostic,
        unreliable=unreliable,
    )


def _check_draws(log_likelihoods: Tensor, fewest: int) -> None:
    """Refuses too few draws, and values that are not finite."""
    got = tuple(log_likelihoods.shape)
    if got[0] < fewest:
        raise ShapeError("log_likelihoods", got, f"(S, N), S at least {fewest}", "Draw more.")
    check_finite("log_likelihoods", log_likelihoods)
