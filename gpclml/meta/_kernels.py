"""The kernels on features that go by a name."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
)

from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.kernels import CosineSimilarityKernel, JointSpectralMixtureKernel

__all__ = ["BATCH_NORM", "KERNELS", "SUPPORT_NORM", "make_kernel"]

BATCH_NORM, SUPPORT_NORM = "batch-norm-cosine", "support-norm-cosine"
_MIXTURES = 4


# The starts have a variance and correlations of order one on q features of order one.


def _scaled(kernel: Kernel, variance: float = 1.0) -> Kernel:
    scaled = ScaleKernel(kernel)
    scaled.outputscale = variance
    return scaled


def _linear(features: int) -> Kernel:
    kernel = LinearKernel()
    kernel.raw_variance.requires_grad_(False)  # the scale around it is the same parameter
    kernel.variance = 1.0
    return _scaled(kernel, 1 / features)


def _with_lengthscale(kernel: Kernel, features: int) -> Kernel:
    kernel.initialize(lengthscale=math.sqrt(features))
    return _scaled(kernel)


_MAKERS: dict[str, Callable[[int], Kernel]] = {
    BATCH_NORM: lambda features: _scaled(CosineSimilarityKernel()),
    "cosine": lambda features: _scaled(CosineSimilarityKernel()),
    "linear": _linear,
    "matern": lambda features: _with_lengthscale(MaternKernel(2.5), features),
    "polynomial": lambda features: _scaled(PolynomialKernel(2), features**-2),
    "rbf": lambda features: _with_lengthscale(RBFKernel(), features),
    SUPPORT_NORM: lambda features: _scaled(CosineSimilarityKernel()),
    "spectral-mixture": lambda features: JointSpectralMixtureKernel(_MIXTURES, features),
}
KERNELS = tuple(sorted(_MAKERS))


def make_kernel(kernel: str | Kernel, features: int) -> Kernel:
    """The kernel of that name, or the kernel itself.

    Args:
        kernel: A name in ``KERNELS``, or a kernel on features.
        features: Number of features.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        raise ArgumentError("kernel", type(kernel).__name__, "a name or a gpytorch Kernel")
    if kernel not in _MAKERS:
        raise UnknownNameError("kernel", kernel, KERNELS)
    return _MAKERS[kernel](features)
