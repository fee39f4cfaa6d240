"""What the training-speed estimators give back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Estimate", "TrainingSpeed", "mean_estimate"]


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error.

    Attributes:
        value: The estimate, in total nats.
        standard_error: Of that; infinite where it cannot be told from a single repetition.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class TrainingSpeed:
    r"""The log marginal likelihood and what training speed says of it, in total nats.

    Each sum runs over the points in their order; means are over orderings.

    Attributes:
        log_marginal_likelihood: :math:`\log p(D)`, exact and the same in every order.
        expected: :math:`L(D) = \sum_i E[\log p(D_i \mid \theta)]`,
            :math:`\theta \sim p(\theta \mid D_{<i})`, in closed form: a lower bound (Lyle et al.
            2020, Eq. 4). Its error is over orderings.
        lower: The same by draws.
        multi_sample: :math:`L_k(D)`, the log of the mean density over k draws: a lower bound
            in expectation, tighter than :math:`L(D)`.
        gaussian: :math:`L_S(D)`, the density under the Gaussian with mean and variance of k
            draws: no bound and biased, the less the more draws.
        num_samples: Number k of draws.
        gradient_norm: The largest norm of a gradient that descent left, a bound on how far its
            draws are from exact ones, in prior standard deviations; zero where draws are exact.

    The errors of the last three are of the draws alone, given the orderings.
    """

    log_marginal_likelihood: float
    expected: Estimate
    lower: Estimate
    multi_sample: Estimate
    gaussian: Estimate
    num_samples: int
    gradient_norm: float = 0.0

    @property
    def gap(self) -> float:
        r"""How far L(D) is below the log marginal likelihood, in nats.

        It is :math:`\sum_i KL(p(\theta \mid D_{<i}) \,\|\, p(\theta \mid D_{\le i}))` (Lyle et
        al. 2020, Proposition 3.1, Eq. 6); :func:`posterior_divergences` has its terms.
        """
        return self.log_marginal_likelihood - self.expected.value


def mean_estimate(totals: Tensor) -> Estimate:
    """The mean of independent values ``(r,)``, with its error."""
    spread = float(totals.std()) if len(totals) > 1 else math.inf
    return Estimate(float(totals.mean()), spread / math.sqrt(len(totals)))
