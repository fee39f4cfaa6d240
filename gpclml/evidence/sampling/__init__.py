"""Evidence by sampling: draws of weights, their predictions, annealing, simple Monte Carlo."""

from gpclml.evidence.sampling.annealing import (
    AnnealedEvidence,
    BidirectionalEvidence,
    annealed_importance_sampling,
    bidirectional_evidence,
    power_schedule,
    reverse_annealed_importance_sampling,
)
from gpclml.evidence.sampling.conditional import (
    SampledConditional,
    conditional_split,
    estimate_conditional_log_density,
    joint_log_density,
    laplace_conditional_log_density,
    marginal_log_densities,
)
from gpclml.evidence.sampling.monte_carlo import (
    Estimate,
    SampledDensity,
    importance_sampling,
    log_mean,
    simple_monte_carlo,
)
from gpclml.evidence.sampling.weights import (
    linearized_outputs,
    rescaled,
    sample_sgld,
    sampled_outputs,
    stacked_weights,
)

__all__ = [
    "AnnealedEvidence",
    "BidirectionalEvidence",
    "Estimate",
    "SampledConditional",
    "SampledDensity",
    "annealed_importance_sampling",
    "bidirectional_evidence",
    "conditional_split",
    "estimate_conditional_log_density",
    "importance_sampling",
    "joint_log_density",
    "laplace_conditional_log_density",
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
