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
under the prior P and the change of measure to Q. P and φ must not depend on those n points. Where
the points choose among k models that were fixed without them, give δ / k to the bound of each.

Risk, KL and evidence are numbers or tensors, in which a bound is differentiable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, checked
from gpclml.errors import ArgumentError

__all__ = ["RiskBound", "evidence_bound", "mcallester_bound"]


@dataclass(frozen=True, eq=False)
class RiskBound:
    """A number that the posterior's risk exceeds with probability at most δ.

    Attributes:
        value: The bound, ``(*batch,)``; it may lie above the range of the loss.
        units: Units of the value: ``"units of the loss"`` or ``"nats a point"``.
        loss_range: Least and largest loss (a, b).
        assumptions: Conditions under which the bound holds.
    """

    value: Tensor
    units: str
    loss_range: tuple[float, float]
    assumptions: str

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
) -> RiskBound:
    r"""McAllester's bound: the empirical risk plus the root of KL over n, for any posterior.

    .. math:: E_Q R \le E_Q r
       + (b - a) \sqrt{\frac{\operatorname{KL}(Q \| P) + \log(n / \delta) + 2}{2 n - 1}}

    McAllester (1999, Theorem 1); Lotfi et al. (2022, Eq. 15), there of losses in [0, 1]. It is
    slightly loose: by Hoeffding's inequality the excess d of risk over empirical risk, zero where
    it is negative, has E_D exp((2 n - 1) d²) <= 2 n, so that log 2 would do for the 2.

    Args:
        empirical_risk: Mean loss on the data of models drawn from Q, ``(*batch,)``.
        kl: KL(Q || P) in nats, ``(*batch,)``.
        num_data: Number n of points.
        delta: Probability δ that the bound fails.
        loss_range: Least and largest loss (a, b).

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
    prior = "prior chosen without the data; any posterior"
    assumptions = _assumptions(num_data, delta, loss_range, prior)
    risk, kl = _finite_tensors(empirical_risk=empirical_risk, kl=kl)
    _check_within("empirical_risk", risk, loss_range, "Give the range of this loss.")
    _check_within("kl", kl, (0.0, math.inf), "It is KL(posterior || prior).")
    cost = math.log(num_data / delta) + 2
    width = ((kl + risk.new_tensor(cost)) / (2 * num_data - 1)).sqrt()
    value = risk + (loss_range[1] - loss_range[0]) * width
    return RiskBound(value, "units of the loss", loss_range, assumptions)


@checked(log_evidence="(*batch)")
def evidence_bound(
    log_evidence: Tensor | float,
    num_data: int,
    *,
    m: int = 0,
    loss_range: tuple[float, float],
    delta: float = 0.05,
) -> RiskBound:
    r"""Bound of the posterior's negative log-likelihood on new points by the LML or the CLML.

    .. math:: E_Q R \le a + \frac{b - a}{1 - e^{a - b}}
       \left[1 - e^a (p(D_{>m} \mid D_{\le m}) \delta)^{1 / (n - m)}\right]

    Germain et al. (2016, Corollary 4); Lotfi et al. (2022, Eq. 17 for m = 0, Eq. 18). A loss l in
    [a, b] has, by convexity, :math:`E e^{a - l} \le 1 - (R - a) (1 - e^{a - b}) / (b - a)`; the
    n-th power bounds :math:`E_D e^{n (a - r)}`, minus whose logarithm is convex in R (Catoni 2007),
    and for the exact posterior n E_Q r + KL(Q || P) = -log Z. Of two models of the same data and
    range, the one of larger evidence has the smaller bound.

    With m > 0 it is the bound of the last n - m points, the prior of which is the posterior given
    the first m; Q is the posterior given all n. The KL divergence due to the first m points does
    not enter, but log(1 / δ) is divided by n - m only. As the number of points grows the bound does
    not tend to the risk: for small losses it exceeds it by the factor (b - a) / (1 - e^(a - b)).

    Args:
        log_evidence: log p(D_{>m} | D_{<=m}) in nats in all, ``(*batch,)``: the LML for m = 0. The
            mean of CLMLs over orderings drawn without the data, all of one m, serves as well and
            costs no union: exp(n φ) of each has a mean of at most one, so has their geometric mean.
        num_data: Number n of all points.
        m: Number of points conditioned on, 0 to n - 1.
        loss_range: Least and largest negative log-likelihood (a, b) of a point, in nats.
        delta: Probability δ that the bound fails.

    Returns:
        The bound, in nats a point: of the mean over draws from Q of their risk, which the risk of
        the prediction averaged over draws does not exceed.

    Raises:
        ArgumentError: If δ is not in (0, 1), a >= b, a number is below 1, m is out of range, or
            log_evidence / (n - m) is outside [-b, -a], which no loss of that range allows.
        NonFiniteError: If the evidence is not finite.

    Note:
        The evidence must be exact: an estimate that may exceed it, by Laplace's method or by Monte
        Carlo, gives no bound.
    """
    prior = "prior chosen without the data"
    if m:
        prior = f"prior chosen with {m} other points, to which those counted are added"
    assumptions = _assumptions(num_data, delta, loss_range, f"{prior}; the exact posterior")
    if not 0 <= m < num_data:
        suggestion = "m counts the points conditioned on; some must be left."
        raise ArgumentError("m", m, f"an integer from 0 to {num_data - 1}", suggestion)
    (evidence,) = _finite_tensors(log_evidence=log_evidence)
    n, (lower, upper) = num_data - m, loss_range
    suggestion = "Give that of all points counted, in nats, with losses within loss_range."
    _check_within("log_evidence", evidence, (-n * upper, -n * lower), suggestion)
    excess = (-math.log(delta) - evidence) / n - lower
    # expm1 keeps digits where the range is narrow or the excess small.
    value = lower - (upper - lower) / -math.expm1(lower - upper) * torch.expm1(-excess)
    return RiskBound(value, "nats a point", loss_range, assumptions)


def _assumptions(num_data: int, delta: float, loss_range: tuple[float, float], prior: str) -> str:
    """Checks the arguments that all bounds share, and says what the bound assumes."""
    check_counts(num_data=num_data)
    if not 0 < delta < 1:
        suggestion = "It is the probability that the bound fails, such as 0.05."
        raise ArgumentError("delta", delta, "between 0 and 1, both excluded", suggestion)
    lower, upper = loss_range
    if not -math.inf < lower < upper < math.inf:
        suggestion = "The loss must be bounded: clip it, and its evidence with it."
        raise ArgumentError("loss_range", (lower, upper), "finite (a, b) with a < b", suggestion)
    points = "independent points of one distribution"
    return f"{points}; every loss in [{lower:g}, {upper:g}]; {prior}"


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
