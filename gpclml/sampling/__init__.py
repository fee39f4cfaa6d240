"""Weights drawn from a posterior, and what they predict."""

from gpclml.sampling.conditional import (
    SampledConditional,
    conditional_log_density,
    conditional_split,
)
from gpclml.sampling.densities import (
    SampledDensity,
    joint_log_density,
    marginal_log_densities,
)
from gpclml.sampling.predictions import linearized_outputs, sampled_outputs
from gpclml.sampling.sgld import sample_sgld
from gpclml.sampling.weights import rescaled, stacked_weights

__all__ = [
    "SampledConditional",
    "SampledDensity",
    "conditional_log_density",
    "conditional_split",
    "joint_log_density",
    "linearized_outputs",
    "marginal_log_densities",
    "rescaled",
    "sample_sgld",
    "sampled_outputs",
    "stacked_weights",
]
