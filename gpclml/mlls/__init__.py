"""Objectives ``mll(output, target)``: larger is better, nats per observed point."""

from gpclml.mlls.conditional_marginal_log_likelihood import (
    ConditionalMarginalLogLikelihood,
    ExactMarginalLogLikelihood,
    LeaveOneOutPseudoLikelihood,
)
from gpclml.mlls.laplace_marginal_log_likelihood import (
    LaplaceEvidence,
    LaplaceMarginalLogLikelihood,
)
from gpclml.mlls.linear_evidence_lower_bound import LinearEvidenceLowerBound
from gpclml.mlls.sum_marginal_log_likelihood import SumMarginalLogLikelihood

__all__ = [
    "ConditionalMarginalLogLikelihood",
    "ExactMarginalLogLikelihood",
    "LaplaceEvidence",
    "LaplaceMarginalLogLikelihood",
    "LeaveOneOutPseudoLikelihood",
    "LinearEvidenceLowerBound",
    "SumMarginalLogLikelihood",
]
