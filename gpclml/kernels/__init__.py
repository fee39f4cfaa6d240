"""Kernels, means and feature maps, as GPyTorch takes them, and the networks in them."""

from gpclml.kernels.deep import (
    CosineSimilarityKernel,
    DeepKernel,
    LinearizedMean,
    NetworkMean,
    NeuralTangentKernel,
    SkipFeatures,
)
from gpclml.kernels.features import (
    FeatureKernel,
    FourierFeatures,
    PolynomialFeatures,
    RandomFourierFeatures,
)
from gpclml.kernels.networks import MLP, StackedNetwork
from gpclml.kernels.spectral_mixture import JointSpectralMixtureKernel, initialize_spectral_mixture

__all__ = [
    "MLP",
    "CosineSimilarityKernel",
    "DeepKernel",
    "FeatureKernel",
    "FourierFeatures",
    "JointSpectralMixtureKernel",
    "LinearizedMean",
    "NetworkMean",
    "NeuralTangentKernel",
    "PolynomialFeatures",
    "RandomFourierFeatures",
    "SkipFeatures",
    "StackedNetwork",
    "initialize_spectral_mixture",
]
