"""Evidence by sampling: draws of weights, their predictions, and means over draws."""

from gpclml.evidence.sampling.conditional import (
    SampledConditional,
    estimate_conditional_log_density,
    joint_log_density,
    laplace_conditional_log_density,
    marginal_log_densities,
)
from gpclml.evidence.sampling.monte_carlo import (
    Estimate,
    SampledDensity,
    log_mean,
    simple_monte_carlo,
)
from gpclml.evidence.sampling.weights import (
    linearized_outputs,
    rescaled,
    sample_sgld,
    sampled_outputs,
)

__all__ = [
    "Estimate",
    "SampledConditional",
    "SampledDensity",
    "estimate_conditional_log_density",
    "joint_log_density",
    "laplace_conditional_log_density",
    "linearized_outputs",
    "log_mean",
    "marginal_log_densities",
    "rescaled",
    "sample_sgld",
    "sampled_outputs",
    "simple_monte_carlo",
]
