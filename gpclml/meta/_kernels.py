"""The kernels on features that go by a name."""

from __future__ import annotations

from collections.abc import Callable

from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.kernels import CosineSimilarityKernel

__all__ = ["BATCH_NORM", "KERNELS", "make_kernel"]

BATCH_NORM = "batch-norm-cosine"
_MIXTURES = 4


def _linear(features: int) -> Kernel:
    kernel = LinearKernel()
    kernel.raw_variance.requires_grad_(False)  # the scale around it is the same parameter
    kernel.variance = 1.0
    return ScaleKernel(kernel)


_MAKERS: dict[str, Callable[[int], Kernel]] = {
    BATCH_NORM: lambda features: ScaleKernel(CosineSimilarityKernel()),
    "cosine": lambda features: ScaleKernel(CosineSimilarityKernel()),
    "linear": _linear,
    "matern": lambda features: ScaleKernel(MaternKernel(2.5)),
    "polynomial": lambda features: ScaleKernel(PolynomialKernel(2)),
    "rbf": lambda features: ScaleKernel(RBFKernel()),
    "spectral-mixture": lambda features: SpectralMixtureKernel(_MIXTURES, ard_num_dims=features),
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
