"""McAllester's bound: the empirical risk and the root of KL over n."""

from __future__ import annotations

import math

from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.evidence.bounds._risk_bound import ANY_POSTERIOR, RiskBound, Setting, risk_and_kl

__all__ = ["mcallester_bound"]


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
    r"""The bound of the risk by the empirical risk and the root of KL over n, for any posterior.

    .. math:: E_Q R \le E_Q r
       + (b - a) \sqrt{\frac{\operatorname{KL}(Q \| P) + \log(k n / \delta) + 2}{2 n - 1}}

    McAllester (1999, Theorem 1); Lotfi et al. (2022, Eq. 15), there of losses in [0, 1] and k = 1.
    A little loose: by Hoeffding's inequality the excess d of risk over empirical risk, zero where
    there is none, has E_D exp((2 n - 1) d²) <= 2 n, so that log 2 would do for the 2.

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
        Risk and KL of Q must be exact: a mean over draws from Q has an error of its own. That the
        mean loss is within the range does not show that every loss is.
    """
    setting = Setting(num_data, delta, loss_range, num_models)
    risk, kl = risk_and_kl(empirical_risk, kl, loss_range)
    confidence = risk.new_tensor(math.log(num_models * num_data / delta) + 2)
    width = ((kl + confidence) / (2 * num_data - 1)).sqrt()
    value = risk + (loss_range[1] - loss_range[0]) * width
    terms = {"empirical_risk": risk, "kl": kl, "confidence": confidence}
    return setting.bound(value, "units of the loss", terms, ANY_POSTERIOR)
