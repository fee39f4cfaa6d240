"""Log densities of one point under a Gaussian prediction of the function, exact and by draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpclml.evidence.training_speed._prefixes import Prefixes

__all__ = ["divergences", "expected_terms", "log_density", "marginal_terms", "sampled_terms"]


def log_density(errors: Tensor, variances: Tensor) -> Tensor:
    """Log density N(error; 0, variance), in nats."""
    return -0.5 * ((2 * math.pi * variances).log() + errors.square() / variances)


def marginal_terms(prefixes: Prefixes) -> Tensor:
    """Log densities log p(y_i | y_<i), ``(k, n)``; the log evidence is the sum of a row."""
    return log_density(prefixes.errors, prefixes.variances + prefixes.noise)


def expected_terms(prefixes: Prefixes) -> Tensor:
    """Expected log densities E[log p(y_i | f_i)], f_i as predicted from y_<i, ``(k, n)``."""
    return log_density(prefixes.errors, prefixes.noise) - 0.5 * prefixes.variances / prefixes.noise


def divergences(prefixes: Prefixes) -> Tensor:
    """The marginal less the expected terms without their cancellation, ``(k, n)``.

    With s the noise, v the latent variance and q = v / s it is
    (q - log(1 + q) + e² q / (s + v)) / 2, a sum of two numbers that are not negative.
    """
    ratio = prefixes.variances / prefixes.noise
    shift = prefixes.errors.square() * ratio / (prefixes.noise + prefixes.variances)
    return 0.5 * (ratio - ratio.log1p() + shift)


def sampled_terms(deviations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Terms of the three estimators from draws of the function.

    Args:
        deviations: Targets less draws of the function, ``(*batch, S, n)``.
        noise: Noise variances, ``(n,)``.

    Returns:
        Mean log density, log mean density, and log density of the Gaussian with the draws'
        mean and variance, ``(*batch, n)`` each.
    """
    densities = log_density(deviations, noise)
    of_mixture = densities.logsumexp(-2) - math.log(deviations.shape[-2])
    variance, mean = torch.var_mean(deviations, dim=-2)
    return densities.mean(-2), of_mixture, log_density(mean, variance + noise)
