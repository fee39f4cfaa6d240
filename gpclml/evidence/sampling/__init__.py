"""Draws of weights, what they predict, and evidences estimated from draws."""

from gpclml import explain_moved
from gpclml.evidence.sampling.annealed import (
    AnnealedEvidence,
    EvidenceBound,
    annealed_importance_sampling,
    reverse_annealed_importance_sampling,
)
from gpclml.evidence.sampling.bidirectional import BidirectionalEvidence, bidirectional_evidence
from gpclml.evidence.sampling.conditional import (
    SampledConditional,
    conditional_split,
    estimate_conditional_log_density,
)
from gpclml.evidence.sampling.densities import (
    SampledDensity,
    joint_log_density,
    log_mean,
    marginal_log_densities,
)
from gpclml.evidence.sampling.predictions import linearized_outputs, sampled_outputs
from gpclml.evidence.sampling.sgld import sample_sgld
from gpclml.evidence.sampling.simple_monte_carlo import importance_sampling, simple_monte_carlo
from gpclml.evidence.sampling.temperatures import power_schedule
from gpclml.evidence.sampling.weights import rescaled, stacked_weights

__all__ = [
    "AnnealedEvidence",
    "BidirectionalEvidence",
    "EvidenceBound",
    "SampledConditional",
    "SampledDensity",
    "annealed_importance_sampling",
    "bidirectional_evidence",
    "conditional_split",
    "estimate_conditional_log_density",
    "importance_sampling",
    "joint_log_density",
    "linearized_outputs",
    "log_mean",
    "marginal_log_densities",
    "power_schedule",
    "rescaled",
    "reverse_annealed_importance_sampling",
    "sample_sgld",
    "sampled_outputs",
    "simple_monte_carlo",
    "stacked_weights",
]

explain_moved(__name__)
