r"""PAC-Bayes bounds: what the risk on new points does not exceed, with probability 1 - δ.

They are of the risk :math:`E_Q R` of models drawn from the posterior Q, where R(h) is the mean
loss of h on new points, and hold with probability at least 1 - δ over data of n independent
points. Every bound here assumes a *bounded* loss: in [a, b] for every h and every possible
point. A negative log-likelihood is so where probabilities are kept within limits, as those of a
classifier clipped to [p, 1 - p] (a = -log(1 - p), b = -log p); that of a Gaussian is not. Where
the loss is clipped, the evidence has to be of the clipped loss, log E_P exp(-n r) with r its mean
on the data, and Q the Gibbs posterior, in proportion to P exp(-n r).

All rest on one inequality. If E_D exp(n φ(r(h), R(h))) <= c for every h, then with probability
at least 1 - δ, for all Q at once, E_Q φ <= (KL(Q || P) + log(c / δ)) / n, by Markov's inequality
under the prior P and the change of measure to Q. P and φ must not depend on those n points.

Numbers and tensors are taken alike, and a bound is differentiable in risk, KL and evidence.
"""

from __future__ import annotations

from gpclml.evidence.bounds._risk_bound import RiskBound
from gpclml.evidence.bounds.catoni import catoni_bound, conditional_evidence_bound, evidence_bound
from gpclml.evidence.bounds.mcallester import mcallester_bound

__all__ = [
    "RiskBound",
    "catoni_bound",
    "conditional_evidence_bound",
    "evidence_bound",
    "mcallester_bound",
]
