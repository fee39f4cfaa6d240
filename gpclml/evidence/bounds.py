r"""PAC-Bayes bounds: upper bounds of the risk on new points that hold with probability 1 - δ.

They bound the risk :math:`E_Q R` of models drawn from the posterior Q, where R(h) is the mean
loss of h on new points, and hold with probability at least 1 - δ over data of n independent
points. Every bound here assumes a *bounded* loss: in [a, b] for every h and every possible
point. A negative log-likelihood is bounded if the probabilities are, as those of a classifier
clipped to [p, 1 - p] (a = -log(1 - p), b = -log p); that of a Gaussian is not. Where the loss is
clipped, the evidence has to be of the clipped loss, log E_P exp(-n r) with r its mean
on the data, and Q the Gibbs posterior, in proportion to P exp(-n r).

All rest on one inequality. If E_D exp(n φ(r(h), R(h))) <= c for every h, then with probability
at least 1 - δ, for all Q at once, E_Q φ <= (KL(Q || P) + log(c / δ)) / n, by Markov's inequality
under the prior P and the change of measure to Q. P and φ must not depend on those n points.

Risk, KL and evidence are numbers or tensors, in which a bound is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, check_positive, checked
from gpclml.errors import ArgumentError

__all__ = [
    "RiskBound",
    "catoni_bound",
    "conditional_evidence_bound",
    "evidence_bound",
    "mcallester_bound",
]

_ANY_POSTERIOR = "prior chosen without the data; any posterior"


@dataclass(frozen=True, eq=False)
class RiskBound:
    """A number that the posterior's risk exceeds with probability at most δ.

    Attributes:
        value: The bound, ``(*batch,)``; it may lie above the range of the loss.
        units: Units of the value: ``"units of the loss"`` or ``"nats a point"``.
        delta: Probability δ over data that the bound fails, for all models compared together.
        num_data: Number of points that the bound counts.
        num_models: Number k of models among which the data may have chosen.
        loss_range: Least and largest loss (a, b).
        assumptions: Conditions under which the bound holds.
        terms: The terms of the bound: ``"empirical_risk"`` in the units of the value; ``"kl"``,
            ``"log_evidence"`` and ``"confidence"`` (what δ, k and the bound's constants cost) in
            nats in all.
    """

    value: Tensor
    units: str
    delta: float
    num_data: int
    num_models: int
    loss_range: tuple[float, float]
    assumptions: str
    terms: Mapping[str, Tensor]

    @property
    def vacuous(self) -> Tensor:
        """Whether the bound is no smaller than the largest loss b, ``(*batch,)``."""
        return self.value >= self.loss_range[1]


@checked(empirical_risk="(*batch)", kl="(*batch)")
def mcallester_bound(
    empirical_risk: Tensor | float,
    kl: Tensor | float,
    num_data: int,
    *,
    delta: float = 0.05,
    loss_range: tuple[float, float] = (0.0, 1.0),
    num_models: int = 1,
) -> RiskBound:
    r"""McAllester's bound: the empirical risk plus the root of KL over n, for any posterior.

    .. math:: E_Q R \le E_Q r
       + (b - a) \sqrt{\frac{\operatorname{KL}(Q \| P) + \log(k n / \delta) + 2}{2 n - 1}}

    McAllester (1999, Theorem 1); Lotfi et al. (2022, Eq. 15), there of losses in [0, 1] and k = 1.
    It is slightly loose: by Hoeffding's inequality the excess d of risk over empirical risk, zero
    where it is negative, has E_D exp((2 n - 1) d²) <= 2 n, so that log 2 would do for the 2.

    Args:
        empirical_risk: Mean loss on the data of models drawn from Q, ``(*batch,)``.
        kl: KL(Q || P) in nats, ``(*batch,)``.
        num_data: Number n of points.
        delta: Probability δ that the bound fails.
        loss_range: Least and largest loss (a, b).
        num_models: Number k of models, fixed without the data, among which the data choose; each
            has δ / k.

    Returns:
        The bound, in units of the loss.

    Raises:
        ArgumentError: If δ is not in (0, 1), a >= b, a number is below 1, the KL is negative
            or the empirical risk outside [a, b].
        NonFiniteError: If empirical risk or KL is not finite.
        ShapeError: If their shapes do not fit.

    Note:
        Risk and KL of Q must be exact: a mean over draws from Q has an error of its own. A mean
        loss within the range does not prove that every loss is.
    """
    setting = _Setting(num_data, delta, loss_range, num_models)
    risk, kl = _risk_and_kl(empirical_risk, kl, loss_range)
    confidence = risk.new_tensor(math.log(num_models * num_data / delta) + 2)
    width = ((kl + confidence) / (2 * num_data - 1)).sqrt()
    value = risk + (loss_range[1] - loss_range[0]) * width
    terms = {"empirical_risk": risk, "kl": kl, "confidence": confidence}
    return setting.bound(value, "units of the loss", terms, _ANY_POSTERIOR)


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
    r"""Catoni's bound, for any posterior; the exact posterior makes it smallest.

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
        ArgumentError, NonFiniteError, ShapeError: As :func:`mcallester_bound`, or if β is not
            positive.

    Note:
        KL + n E_Q r is the negative ELBO of a variational posterior, at β = 1: of posteriors at
        hand, the one of the largest ELBO has the smallest bound. Risk and KL must be exact.
    """
    setting = _Setting(num_data, delta, loss_range, num_models)
    beta = inverse_temperature
    check_positive(inverse_temperature=beta)
    risk, kl = _risk_and_kl(empirical_risk, kl, loss_range)
    confidence = risk.new_tensor(math.log(num_models / delta))
    excess = beta * (risk - loss_range[0]) + (kl + confidence) / num_data
    value = _value(excess, loss_range, beta)
    terms = {"empirical_risk": risk, "kl": kl, "confidence": confidence}
    return setting.bound(value, "units of the loss", terms, _ANY_POSTERIOR)


@checked(log_evidence="(*batch)")
def evidence_bound(
    log_evidence: Tensor | float,
    num_data: int,
    *,
    loss_range: tuple[float, float],
    delta: float = 0.05,
    num_models: int = 1,
) -> RiskBound:
    r"""Bound of the posterior's negative log-likelihood on new points by the evidence Z.

    .. math:: E_Q R \le a + \frac{b - a}{1 - e^{a - b}}
       \left[1 - e^a (Z \delta / k)^{1 / n}\right]

    Germain et al. (2016, Corollary 4); Lotfi et al. (2022, Eq. 17), there for k = 1. It is
    :func:`catoni_bound` of the posterior, for which n E_Q r + KL(Q || P) = -log Z. Of two models
    of the same data and range, the one of larger evidence has the smaller bound. As n grows it
    does not tend to the risk; see :func:`catoni_bound`.

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
        Carlo, gives no bound.
    """
    setting = _Setting(num_data, delta, loss_range, num_models)
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
    r"""Bound of the posterior's negative log-likelihood on new points by the CLML.

    .. math:: E_Q R \le a + \frac{b - a}{1 - e^{a - b}}
       \left[1 - e^a (p(D_{>m} \mid D_{\le m}) \delta / k)^{1 / (n - m)}\right]

    Lotfi et al. (2022, Eq. 18), there for k = 1: :func:`evidence_bound` of the last n - m points,
    the prior of which is the posterior given the first m. Q is the posterior given all n. The KL
    divergence due to the first m points does not enter, but log(k / δ) is divided by n - m only.
    With m = 0 it is :func:`evidence_bound`.

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
    _Setting(num_data, delta, loss_range, num_models)
    if not 0 <= m < num_data:
        suggestion = "m counts the points conditioned on; some must be left."
        raise ArgumentError("m", m, f"an integer from 0 to {num_data - 1}", suggestion)
    setting = _Setting(num_data - m, delta, loss_range, num_models)
    prior = f"prior chosen with {m} other points, to which those counted are added"
    return _by_evidence("conditional_log_evidence", conditional_log_evidence, setting, prior)


def _by_evidence(
    name: str, log_evidence: Tensor | float, setting: _Setting, prior: str
) -> RiskBound:
    (evidence,) = _finite_tensors(**{name: log_evidence})
    n, (lower, upper) = setting.num_data, setting.loss_range
    suggestion = "Give that of all points counted, in nats, with losses within loss_range."
    _check_within(name, evidence, (-n * upper, -n * lower), suggestion)
    confidence = evidence.new_tensor(math.log(setting.num_models / setting.delta))
    value = _value((confidence - evidence) / n - lower, setting.loss_range, 1.0)
    terms = {"log_evidence": evidence, "confidence": confidence}
    return setting.bound(value, "nats a point", terms, f"{prior}; the exact posterior")


def _value(excess: Tensor, loss_range: tuple[float, float], beta: float) -> Tensor:
    """The risk at which Catoni's φ, in nats a point, equals the excess over a."""
    lower, upper = loss_range
    scale = (upper - lower) / -math.expm1(-beta * (upper - lower))
    return lower - scale * torch.expm1(-excess)


@dataclass(frozen=True)
class _Setting:
    """The arguments that all bounds share; checked when it is made."""

    num_data: int
    delta: float
    loss_range: tuple[float, float]
    num_models: int

    def __post_init__(self) -> None:
        check_counts(num_data=self.num_data, num_models=self.num_models)
        if not 0 < self.delta < 1:
            suggestion = "It is the probability that the bound fails, such as 0.05."
            raise ArgumentError("delta", self.delta, "between 0 and 1, both excluded", suggestion)
        lower, upper = self.loss_range
        if not -math.inf < lower < upper < math.inf:
            suggestion = "The loss must be bounded: clip it, and its evidence with it."
            raise ArgumentError(
                "loss_range", (lower, upper), "finite (a, b) with a < b", suggestion
            )

    def bound(
        self, value: Tensor, units: str, terms: Mapping[str, Tensor], posterior: str
    ) -> RiskBound:
        """The bound with its assumptions; ``posterior`` describes prior and posterior."""
        lower, upper = self.loss_range
        points = f"independent points of one distribution; every loss in [{lower:g}, {upper:g}]"
        models = f"; one of {self.num_models} models fixed as early as their priors"
        return RiskBound(
            value=value,
            units=units,
            delta=self.delta,
            num_data=self.num_data,
            num_models=self.num_models,
            loss_range=self.loss_range,
            assumptions=f"{points}; {posterior}{models if self.num_models > 1 else ''}",
            terms=terms,
        )


def _risk_and_kl(
    empirical_risk: Tensor | float, kl: Tensor | float, loss_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Risk and KL as tensors of one shape, checked to be within their ranges."""
    risk, kl = _finite_tensors(empirical_risk=empirical_risk, kl=kl)
    _check_within("empirical_risk", risk, loss_range, "Give the range of this loss.")
    _check_within("kl", kl, (0.0, math.inf), "It is KL(posterior || prior).")
    return risk, kl


def _finite_tensors(**values: Tensor | float) -> list[Tensor]:
    """The values as finite tensors of one shape; numbers take dtype and device of the tensors."""
    real = [v for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()]
    like = real[0] if real else torch.zeros((), dtype=torch.float64)
    tensors = []
    for name, value in values.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        check_finite(name, value)
        tensors.append(value)
    return list(torch.broadcast_tensors(*tensors))


def _check_within(name: str, values: Tensor, limits: tuple[float, float], suggestion: str) -> None:
    """Raises an ArgumentError unless all values are within limits, up to rounding."""
    lower, upper = limits
    # Rounding of a sum over data: some hundreds of units in the last place of the larger limit.
    size = 1 + max(abs(limit) for limit in limits if math.isfinite(limit))
    slack = size * torch.finfo(values.dtype).eps ** 0.75
    outside = (values < lower - slack) | (values > upper + slack)
    if outside.any():
        first = float(values[outside].flatten()[0])
        raise ArgumentError(name, f"{first:g}", f"within [{lower:g}, {upper:g}]", suggestion)
