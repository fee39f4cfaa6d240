"""Covariance functions, as GPyTorch kernels."""

from gpclml.kernels.cosine_similarity import CosineSimilarityKernel
from gpclml.kernels.deep import DeepKernel
from gpclml.kernels.feature import FeatureKernel
from gpclml.kernels.joint_spectral_mixture import JointSpectralMixtureKernel
from gpclml.kernels.neural_tangent import NeuralTangentKernel
from gpclml.kernels.skip_features import SkipFeatures
from gpclml.kernels.spectral_mixture import initialize_spectral_mixture

__all__ = [
    "CosineSimilarityKernel",
    "DeepKernel",
    "FeatureKernel",
    "JointSpectralMixtureKernel",
    "NeuralTangentKernel",
    "SkipFeatures",
    "initialize_spectral_mixture",
]
