"""Objectives ``mll(output, target)``: larger is better, nats per observed point."""

from typing import TYPE_CHECKING

from gpclml._utils.lazy import lazy_names

if TYPE_CHECKING:
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

# The Laplace evidence brings the curvature of networks along, which most programs do without.
__getattr__ = lazy_names(
    __name__,
    __all__,
    [
        "conditional_marginal_log_likelihood", "sum_marginal_log_likelihood",
        "linear_evidence_lower_bound", "laplace_marginal_log_likelihood",
    ],
)  # fmt: skip
