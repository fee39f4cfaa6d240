r"""Estimators of the log marginal likelihood from training speed (Lyle et al. 2020, Section 3).

A model that predicts each new point well from the points before it trains fast, and has a high
marginal likelihood: :math:`\log p(D) = \sum_i \log E[p(D_i \mid \theta)]`,
:math:`\theta \sim p(\theta \mid D_{<i})`. Under Gaussian noise the parameters enter through the
function at the next point alone, so that nothing but its mean and variance is needed.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.conditioning.orderings import as_orders
from gpclml.evidence.training_speed._checks import check_count
from gpclml.evidence.training_speed._prefixes import (
    Prefixes,
    noise_variances,
    predict_prefixes,
    single_target_data,
)
from gpclml.evidence.training_speed._terms import (
    divergences,
    expected_terms,
    marginal_terms,
    sampled_terms,
)
from gpclml.evidence.training_speed.results import Estimate, TrainingSpeed, mean_estimate
from gpclml.inference.observations import Observations
from gpclml.inference.units import Units, term_offset

__all__ = ["posterior_divergences", "training_speed"]


@torch.no_grad()
@checked(orderings="index (k, n)")
def training_speed(
    model: ExactGP,
    num_samples: int = 10,
    *,
    orderings: int | Tensor = 1,
    repeats: int = 10,
    units: Units = "training",
    seed: int = 0,
) -> TrainingSpeed:
    r"""Lower bounds and estimates of the log marginal likelihood by draws of each next point.

    With e the error of the prediction of point i from those before it, v the variance of the
    function there and s the noise,

    .. math:: \log p(D) = \sum_i \log N(e_i; 0, v_i + s_i), \qquad
        L(D) = \sum_i \Big[\log N(e_i; 0, s_i) - \frac{v_i}{2 s_i}\Big],

    and with draws :math:`f_{ij} \sim N(\mu_i, v_i)`, their mean :math:`\bar f_i` and their
    variance :math:`\hat v_i` (of divisor k - 1),

    .. math:: L_k(D) = \sum_i \log \frac1k \sum_{j \le k} N(y_i; f_{ij}, s_i), \qquad
        L_S(D) = \sum_i \log N(y_i; \bar f_i, \hat v_i + s_i)

    (Lyle et al. 2020, Section 3). In expectation :math:`L \le L_k \le \log p(D)`, and L_k grows
    with k. All but the log marginal likelihood depend on the order of the points.

    Args:
        model: An exact GP with training data, one target a row and independent noise.
        num_samples: Draws k of each function value, at least 2.
        orderings: Number of random orderings, or the orderings, ``(k, n)``.
        repeats: How often the draws are repeated in each ordering; values are means.
        units: Units of the targets; see :mod:`gpclml.evaluation`.
        seed: Seed of orderings and draws.

    Returns:
        Total nats over the observed targets.

    Raises:
        ArgumentError: A number is out of range, an ordering no permutation, or the model a
            batch of models or a multitask one.
        ShapeError: Orderings are not ``(k, n)``.
        UnsupportedError: The noise is correlated.

    Note:
        n³/3 floating-point operations for each ordering; n k ``repeats`` draws at a time.
    """
    check_count("num_samples", num_samples, 2, "A variance needs two draws.")
    check_count("repeats", repeats, 1)
    generator = torch.Generator().manual_seed(seed)
    data, prefixes = _model_prefixes(model, orderings, generator)
    offset = float(term_offset(model, data, units).double().sum())
    sums = [_draws_of_ordering(one, num_samples, repeats, generator) for one in _rows(prefixes)]
    values, variances = torch.tensor(sums, dtype=torch.float64).unbind(1)  # (orderings, 3)
    errors = (variances.sum(0) / repeats).sqrt() / len(sums)
    lower, multi_sample, gaussian = (
        Estimate(value - offset, error if repeats > 1 else math.inf)
        for value, error in zip(values.mean(0).tolist(), errors.tolist(), strict=True)
    )
    return TrainingSpeed(
        log_marginal_likelihood=float(marginal_terms(prefixes).sum(-1).mean()) - offset,
        expected=mean_estimate(expected_terms(prefixes).sum(-1) - offset),
        lower=lower,
        multi_sample=multi_sample,
        gaussian=gaussian,
        num_samples=num_samples,
    )


@torch.no_grad()
@checked(orderings="index (k, n)")
def posterior_divergences(model: ExactGP, orderings: int | Tensor = 1, *, seed: int = 0) -> Tensor:
    r"""How much each point moves the posterior, KL(p(θ | D_<i) || p(θ | D_<=i)), in nats.

    The sum of a row is what :math:`L(D)` misses of the log marginal likelihood (Lyle et al.
    2020, Proposition 3.1, Eq. 6). With the quantities of :func:`training_speed` and
    :math:`q_i = v_i / s_i`,

    .. math:: KL_i = \tfrac12 \Big[q_i - \log(1 + q_i) + \frac{e_i^2 q_i}{s_i + v_i}\Big],

    which is the divergence of parameters, as of functions: the likelihood sees θ through f_i
    alone.

    Args:
        model: As for :func:`training_speed`.
        orderings: Number of random orderings, or the orderings, ``(k, n)``.
        seed: Seed of random orderings.

    Returns:
        Term i of row j is that of point ``orderings[j, i]``, ``(k, n)``; zero where the target
        is missing.

    Raises:
        ArgumentError, ShapeError, UnsupportedError: As :func:`training_speed`.

    Note:
        n³/3 floating-point operations for each ordering.
    """
    generator = torch.Generator().manual_seed(seed)
    return divergences(_model_prefixes(model, orderings, generator)[1])


def _model_prefixes(
    model: ExactGP, orderings: int | Tensor, generator: torch.Generator
) -> tuple[Observations, Prefixes]:
    data = single_target_data(model)
    orders = as_orders(orderings, data.num_rows, generator)
    noise = noise_variances(cast(Likelihood, model.likelihood), data)
    return data, predict_prefixes(data.covariance, data.residual, noise, orders)


def _rows(prefixes: Prefixes) -> list[Prefixes]:
    parts = zip(prefixes.errors, prefixes.variances, prefixes.noise, strict=True)
    return [Prefixes(*part) for part in parts]


def _draws_of_ordering(
    prefixes: Prefixes, num_samples: int, repeats: int, generator: torch.Generator
) -> tuple[list[float], list[float]]:
    """Mean over repeats and variance of one repeat, of the three estimators.

    Draws at different points are independent, so the variance of a sum is that of its terms,
    which a few repeats tell well.
    """
    shape = (repeats, num_samples, len(prefixes.errors))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64).to(prefixes.errors)
    deviations = prefixes.errors - prefixes.variances.sqrt() * normal
    values, variances = [], []
    for terms in sampled_terms(deviations, prefixes.noise):
        values.append(float(terms.mean(0).sum()))
        variances.append(float(terms.var(0).sum()) if repeats > 1 else 0.0)
    return values, variances
