"""Kernels, means and feature maps, as GPyTorch takes them, and the networks in them."""

from gpclml.kernels.cosine_similarity import CosineSimilarityKernel
from gpclml.kernels.deep import DeepKernel
from gpclml.kernels.feature import FeatureKernel
from gpclml.kernels.fourier_features import FourierFeatures, RandomFourierFeatures
from gpclml.kernels.joint_spectral_mixture import JointSpectralMixtureKernel
from gpclml.kernels.linearized_mean import LinearizedMean
from gpclml.kernels.network_mean import NetworkMean
from gpclml.kernels.networks import MLP, StackedNetwork
from gpclml.kernels.neural_tangent import NeuralTangentKernel
from gpclml.kernels.polynomial_features import IdentityFeatures, PolynomialFeatures, PrefixFeatures
from gpclml.kernels.skip_features import SkipFeatures
from gpclml.kernels.spectral_mixture import initialize_spectral_mixture

__all__ = [
    "MLP",
    "CosineSimilarityKernel",
    "DeepKernel",
    "FeatureKernel",
    "FourierFeatures",
    "IdentityFeatures",
    "JointSpectralMixtureKernel",
    "LinearizedMean",
    "NetworkMean",
    "NeuralTangentKernel",
    "PolynomialFeatures",
    "PrefixFeatures",
    "RandomFourierFeatures",
    "SkipFeatures",
    "StackedNetwork",
    "initialize_spectral_mixture",
]
