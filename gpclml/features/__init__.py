"""Feature maps: what a linear model is linear in."""

from gpclml.features.fourier import FourierFeatures, RandomFourierFeatures
from gpclml.features.polynomial import IdentityFeatures, PolynomialFeatures, PrefixFeatures

__all__ = [
    "FourierFeatures",
    "IdentityFeatures",
    "PolynomialFeatures",
    "PrefixFeatures",
    "RandomFourierFeatures",
]
