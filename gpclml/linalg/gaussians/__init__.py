"""Gaussian distributions of the weights of a linear model, by the form of their covariance.

Every form answers the same questions at a cost linear in the number of weights, but for the full
one: which variance the features of points have, which variances the weights have, the
log-determinant, draws, and products with the inverse.
"""

from gpclml.linalg.gaussians.diagonal import DiagonalGaussian
from gpclml.linalg.gaussians.distribution import WeightDistribution
from gpclml.linalg.gaussians.divergence import gaussian_kl
from gpclml.linalg.gaussians.dual import DualGaussian
from gpclml.linalg.gaussians.expected_square import expected_square
from gpclml.linalg.gaussians.families import (
    DiagonalFamily,
    FullFamily,
    GaussianFamily,
    LowRankFamily,
)
from gpclml.linalg.gaussians.full import FullGaussian
from gpclml.linalg.gaussians.low_rank import LowRankGaussian
from gpclml.linalg.gaussians.posterior import linear_posterior
from gpclml.linalg.gaussians.trainable import TrainableGaussian

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
