"""Gaussian distributions of the weights of a linear model, by the form of their covariance.

Every form has the same methods: variances of the weights and at points, the log-determinant, draws,
and products with the inverse. Their cost is linear in the number of weights, except for the full
form.
"""

from gpclml.linalg.gaussians.distributions import (
    DiagonalGaussian,
    DualGaussian,
    FullGaussian,
    LowRankGaussian,
    WeightDistribution,
)
from gpclml.linalg.gaussians.families import (
    DiagonalFamily,
    FullFamily,
    GaussianFamily,
    LowRankFamily,
    TrainableGaussian,
    expected_square,
    gaussian_kl,
    linear_posterior,
)

__all__ = [
    "DiagonalFamily",
    "DiagonalGaussian",
    "DualGaussian",
    "FullFamily",
    "FullGaussian",
    "GaussianFamily",
    "LowRankFamily",
    "LowRankGaussian",
    "TrainableGaussian",
    "WeightDistribution",
    "expected_square",
    "gaussian_kl",
    "linear_posterior",
]
