"""Kernels and means by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import (
    Kernel,
    MaternKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.means import ConstantMean, Mean, ZeroMean
from torch import Tensor

from gpclml.errors import UnknownNameError
from gpclml.kernels import DeepKernel, NetworkMean, SkipFeatures, initialize_spectral_mixture
from gpclml.kernels.networks import MLP

_STATIONARY: dict[str, type[Kernel]] = {"matern": MaternKernel, "rbf": RBFKernel, "rq": RQKernel}
# Near zero, so that the deep kernel starts as its base kernel; at zero it has no gradient.
_FEATURE_START = 1e-3
# Below it, in deviations of a column, squared distances are rounding; values of a column that it
# tells apart are uncorrelated already.
_LEAST_LENGTHSCALE = 1e-3
_SHAPE_START = 3.0  # of the rational quadratic: near the RBF, which it becomes as its shape grows
_RESIDUAL_START = 1e-4  # of the residual's variance to that of the ARD part
_JOINT_START = 0.1  # of the features beside the inputs: small, and large enough to learn from
KERNELS = ("deep", "deep_bottleneck", "deep_joint", "matern", "rbf", "rq", "spectral_mixture")
MEANS = ("constant", "mlp", "zero")


def make_kernel(
    kernel: str | Kernel,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    hidden: Sequence[int],
    num_features: int,
    num_mixtures: int = 1,
    standardize: bool = False,
    ard: bool = True,
) -> Kernel:
    """The kernel of that name for standardized data, or the kernel itself, as ``x`` is placed."""
    if isinstance(kernel, Kernel):
        return kernel.to(x)
    kernel = kernel.replace("-", "_")
    batch_shape, d, q = x.shape[:-2], x.shape[-1], num_features

    def scaled(base: Kernel) -> Kernel:
        return ScaleKernel(base, batch_shape=batch_shape).to(x)

    def input_kernel(
        cls: type[Kernel], active_dims: tuple[int, ...] | None = None, features: int = 0
    ) -> Kernel:
        """Distances grow with the root of the number of columns, and so do lengthscales."""
        kernel = cls(
            ard_num_dims=d + features if ard else None,
            batch_shape=batch_shape,
            active_dims=active_dims,
            # Of one class in both cases, so that one's parameters can be loaded into the other.
            lengthscale_constraint=GreaterThan(_LEAST_LENGTHSCALE if standardize else 0.0),
        )
        if standardize:
            kernel.initialize(lengthscale=math.sqrt(d))
            if isinstance(kernel, RQKernel):
                kernel.initialize(alpha=_SHAPE_START)
        if features and ard:
            start = kernel.lengthscale.detach().clone()
            start[..., d:] = 1.0
            kernel.lengthscale = start
        return kernel

    if kernel in _STATIONARY:
        return scaled(input_kernel(_STATIONARY[kernel]))
    if kernel == "deep":
        # The sum sees the columns, and behind them what the skip connection and the network give.
        features = SkipFeatures([d, *hidden, q], _FEATURE_START, generator=generator)
        base = input_kernel(RBFKernel, tuple(range(d)))
        rational = RQKernel(batch_shape=batch_shape, active_dims=tuple(range(d, 2 * d + q)))
        residual = ScaleKernel(rational, batch_shape=batch_shape)
        residual.outputscale = _RESIDUAL_START
        return scaled(DeepKernel(features, base + residual, residual=True))
    if kernel == "deep_bottleneck":
        network = MLP([d, *hidden, q], generator=generator)
        base = RBFKernel(ard_num_dims=q if ard else None, batch_shape=batch_shape)
        return scaled(DeepKernel(network, base, residual=False))
    if kernel == "deep_joint":
        network = MLP([d, *hidden, q], torch.nn.SiLU, _JOINT_START, generator=generator)
        base = input_kernel(MaternKernel, features=q)
        return scaled(DeepKernel(network, base, residual=True))
    if kernel == "spectral_mixture":
        mixture = SpectralMixtureKernel(num_mixtures, ard_num_dims=d, batch_shape=batch_shape).to(x)
        # Its weights are the scale: no ScaleKernel around it.
        spacing = "smallest" if d == 1 else "grid"
        return initialize_spectral_mixture(mixture, x, y, generator, spacing)
    raise UnknownNameError("kernel", kernel, KERNELS)


def make_mean(
    mean: str | Mean, x: Tensor, generator: torch.Generator, hidden: Sequence[int]
) -> Mean:
    """The mean of that name for standardized data, or the mean itself, as ``x`` is placed."""
    if isinstance(mean, Mean):
        return mean.to(x)
    if mean == "constant":
        return ConstantMean(batch_shape=x.shape[:-2]).to(x)
    if mean == "zero":
        return ZeroMean(batch_shape=x.shape[:-2])
    if mean == "mlp":
        return NetworkMean(MLP([x.shape[-1], *hidden, 1], generator=generator)).to(x)
    raise UnknownNameError("mean", mean, MEANS)
