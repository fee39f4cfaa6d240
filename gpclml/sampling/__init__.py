"""Weights drawn from a posterior, and what they predict."""

from gpclml.sampling.densities import (
    SampledDensity,
    joint_log_density,
    marginal_log_densities,
)
from gpclml.sampling.predictions import linearized_outputs, sampled_outputs

__all__ = [
    "SampledDensity",
    "joint_log_density",
    "linearized_outputs",
    "marginal_log_densities",
    "sampled_outputs",
]
