"""Catoni's bound, for any posterior and, by the evidence, for the exact one."""

from __future__ import annotations

import math
from numbers import Integral

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError
from gpclml.evidence.bounds._risk_bound import (
    ANY_POSTERIOR,
    RiskBound,
    Setting,
    check_within,
    finite_tensors,
    risk_and_kl,
)

__all__ = ["catoni_bound", "conditional_evidence_bound", "evidence_bound"]


@checked(empirical_risk="(*batch)", kl="(*batch)")
def catoni_bound(
    empirical_risk: Tensor | float,
    kl: Tensor | float,
    num_data: int,
    *,
    loss_range: tuple[float, float],
    delta: float = 0.05,
    inverse_temperature: float = 1.0,
    num_models: int = 1,
) -> RiskBound:
    r"""The bound of the risk that the exact posterior makes smallest, for any posterior.

    .. math:: E_Q R \le a + \frac{b - a}{1 - e^{-\beta (b - a)}} \left[1 - \exp\left(
       -\beta (E_Q r - a) - \frac{\operatorname{KL}(Q \| P) + \log(k / \delta)}{n}\right)\right]

    Catoni (2007); Germain et al. (2016), there for β = 1 and k = 1. A loss l in [a, b] has, by
    convexity, :math:`E e^{-\beta (l - a)} \le 1 - (R - a) (1 - e^{-\beta (b - a)}) / (b - a)`;
    the n-th power bounds :math:`E_D e^{-\beta n (r - a)}`, and minus its logarithm is convex in R.
    The bound is smallest at the Gibbs posterior, in proportion to P exp(-β n r), and there, for
    β = 1, is :func:`evidence_bound`. As n grows it does not tend to the risk, unless β falls: for
    small losses it exceeds the risk by the factor β (b - a) / (1 - e^(-β (b - a))).

    Args:
        empirical_risk: Mean loss on the data of models drawn from Q, ``(*batch,)``.
        kl: KL(Q || P) in nats, ``(*batch,)``.
        num_data: Number n of points.
        loss_range: Least and largest loss (a, b).
        delta: Probability δ that the bound fails.
        inverse_temperature: β, fixed without the data, in nats per unit of the loss; 1 suits a
            negative log-likelihood.
        num_models: Number k of models, or values of β, fixed without the data, among which the
            data choose; each has δ / k.

    Returns:
        The bound, in units of the loss: nats a point for a negative log-likelihood.

    Raises:
        ArgumentError: If δ is not in (0, 1), a >= b, a number is below 1, β is not positive,
            the KL is negative or the empirical risk outside [a, b].
        NonFiniteError: If empirical risk or KL is not finite.
        ShapeError: If their shapes do not fit.

    Note:
        KL + n E_Q r is the negative ELBO of a variational posterior, at β = 1: of posteriors at
        hand, the one of the largest ELBO has the smallest bound. Risk and KL must be exact.
    """
    setting = Setting(num_data, delta, loss_range, num_models)
    beta = inverse_temperature
    if not 0 < beta < math.inf:
        raise ArgumentError("inverse_temperature", beta, "positive and finite")
    risk, kl = risk_and_kl(empirical_risk, kl, loss_range)
    confidence = risk.new_tensor(math.log(num_models / delta))
    excess = beta * (risk - loss_range[0]) + (kl + confidence) / num_data
    value = _value(excess, loss_range, beta)
    terms = {"empirical_risk": risk, "kl": kl, "confidence": confidence}
    return setting.bound(value, "units of the loss", terms, ANY_POSTERIOR)


@checked(log_evidence="(*batch)")
def evidence_bound(
    log_evidence: Tensor | float,
    num_data: int,
    *,
    loss_range: tuple[float, float],
    delta: float = 0.05,
    num_models: int = 1,
) -> RiskBound:
    r"""The bound of the posterior's negative log-likelihood on new points, by the evidence Z.

    .. math:: E_Q R \le a + \frac{b - a}{1 - e^{a - b}}
       \left[1 - e^a (Z \delta / k)^{1 / n}\right]

    Germain et al. (2016, Corollary 4); Lotfi et al. (2022, Eq. 17), there for k = 1. It is
    :func:`catoni_bound` of the posterior, for which n E_Q r + KL(Q || P) = -log Z. Of two models
    of the same data and range, the one of larger evidence has the smaller bound. It does not tend
    to the risk as n grows; see there.

    Args:
        log_evidence: log Z of all n points, in nats, ``(*batch,)``.
        num_data: Number n of points.
        loss_range: Least and largest negative log-likelihood (a, b) of a point, in nats.
        delta: Probability δ that the bound fails.
        num_models: As for :func:`catoni_bound`.

    Returns:
        The bound, in nats a point: of the mean over draws from Q of their risk, which the risk of
        the prediction averaged over draws does not exceed.

    Raises:
        ArgumentError: If δ is not in (0, 1), a >= b, a number is below 1, or log Z / n is
            outside [-b, -a], which no loss of that range allows.
        NonFiniteError: If the evidence is not finite.

    Note:
        The evidence must be exact: an estimate that may exceed it, by Laplace's method or by Monte
        Carlo, proves nothing.
    """
    setting = Setting(num_data, delta, loss_range, num_models)
    return _by_evidence("log_evidence", log_evidence, setting, "prior chosen without the data")


@checked(conditional_log_evidence="(*batch)")
def conditional_evidence_bound(
    conditional_log_evidence: Tensor | float,
    num_data: int,
    m: int,
    *,
    loss_range: tuple[float, float],
    delta: float = 0.05,
    num_models: int = 1,
) -> RiskBound:
    r"""The bound of the posterior's negative log-likelihood on new points, by the CLML.

    .. math:: E_Q R \le a + \frac{b - a}{1 - e^{a - b}}
       \left[1 - e^a (p(D_{>m} \mid D_{\le m}) \delta / k)^{1 / (n - m)}\right]

    Lotfi et al. (2022, Eq. 18), there for k = 1: :func:`evidence_bound` of the last n - m points,
    the prior of which is the posterior given the first m. Q is the posterior given all n. What
    m points teach is not paid for, but n - m points bear log(k / δ). With m = 0 the two are one.

    Args:
        conditional_log_evidence: log p(D_{>m} | D_{<=m}) in nats in all, ``(*batch,)``. Its mean
            over orderings drawn without the data, all of one m, serves as well and costs no union:
            exp(n φ) of each has a mean of at most one, so has their geometric mean.
        num_data: Number n of all points.
        m: Number of points conditioned on, 0 to n - 1.
        loss_range: Least and largest negative log-likelihood (a, b) of a point, in nats.
        delta: Probability δ that the bound fails.
        num_models: As for :func:`catoni_bound`; with one ordering, the first m points may have
            taken part in fixing the models.

    Returns:
        The bound, in nats a point, as of :func:`evidence_bound`; its ``num_data`` is n - m.

    Raises:
        ArgumentError: As from :func:`evidence_bound`, or if m is out of range.
        NonFiniteError: If the conditional evidence is not finite.

    Note:
        The conditional evidence must be exact.
    """
    Setting(num_data, delta, loss_range, num_models)
    if not isinstance(m, Integral) or not 0 <= m < num_data:
        mend = "m counts the points conditioned on; some must be left."
        raise ArgumentError("m", m, f"a whole number from 0 to {num_data - 1}", mend)
    setting = Setting(num_data - m, delta, loss_range, num_models)
    prior = f"prior chosen with {m} other points, to which those counted are added"
    return _by_evidence("conditional_log_evidence", conditional_log_evidence, setting, prior)


def _by_evidence(
    name: str, log_evidence: Tensor | float, setting: Setting, prior: str
) -> RiskBound:
    (evidence,) = finite_tensors(**{name: log_evidence})
    n, (lower, upper) = setting.num_data, setting.loss_range
    mend = "It is of all points counted, in nats, of a likelihood within the range."
    check_within(name, evidence, (-n * upper, -n * lower), mend)
    confidence = evidence.new_tensor(math.log(setting.num_models / setting.delta))
    value = _value((confidence - evidence) / n - lower, setting.loss_range, 1.0)
    terms = {"log_evidence": evidence, "confidence": confidence}
    return setting.bound(value, "nats a point", terms, f"{prior}; the exact posterior")


def _value(excess: Tensor, loss_range: tuple[float, float], beta: float) -> Tensor:
    """The largest risk whose excess over a, in the exponential sense, is this; nats a point."""
    lower, upper = loss_range
    scale = (upper - lower) / -math.expm1(-beta * (upper - lower))
    return lower - scale * torch.expm1(-excess)
