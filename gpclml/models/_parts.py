"""The kernels and means that go by a name, and the networks inside a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

from gpclml._utils.arguments import checked
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
KERNELS = ("deep", "deep_bottleneck", "matern", "rbf", "rq", "spectral_mixture")
MEANS = ("constant", "mlp", "zero")


@dataclass(frozen=True)
class PartOptions:
    """What named kernels and means are made with; the fields are GPRegression's arguments."""

    standardize: bool
    ard: bool
    hidden: Sequence[int]
    num_features: int
    num_mixtures: int


def make_kernel(
    kernel: str | Kernel, x: Tensor, y: Tensor, options: PartOptions, generator: torch.Generator
) -> Kernel:
    """The kernel of that name for standardized data, or the kernel itself, as ``x`` is placed."""
    if isinstance(kernel, Kernel):
        return kernel.to(x)
    batch_shape, d, q = x.shape[:-2], x.shape[-1], options.num_features

    def scaled(base: Kernel) -> Kernel:
        return ScaleKernel(base, batch_shape=batch_shape).to(x)

    def of_inputs(cls: type[Kernel], active_dims: tuple[int, ...] | None = None) -> Kernel:
        """Distances grow with the root of the number of columns, and so do lengthscales."""
        made = cls(
            ard_num_dims=d if options.ard else None,
            batch_shape=batch_shape,
            active_dims=active_dims,
            # Of one class in both cases, so that one's parameters can be loaded into the other.
            lengthscale_constraint=GreaterThan(_LEAST_LENGTHSCALE if options.standardize else 0.0),
        )
        if options.standardize:
            made.initialize(lengthscale=math.sqrt(d))
            if isinstance(made, RQKernel):
                made.initialize(alpha=_SHAPE_START)
        return made

    if kernel in _STATIONARY:
        return scaled(of_inputs(_STATIONARY[kernel]))
    if kernel == "deep":
        features = SkipFeatures([d, *options.hidden, q], _FEATURE_START, generator=generator)
        inputs, outputs = range(d), range(d, 2 * d + q)  # of what the sum sees
        base = of_inputs(RBFKernel, tuple(inputs))
        rational = RQKernel(batch_shape=batch_shape, active_dims=tuple(outputs))
        residual = ScaleKernel(rational, batch_shape=batch_shape)
        residual.outputscale = _RESIDUAL_START
        return scaled(DeepKernel(features, base + residual, residual=True))
    if kernel == "deep_bottleneck":
        network = MLP([d, *options.hidden, q], generator=generator)
        base = RBFKernel(ard_num_dims=q if options.ard else None, batch_shape=batch_shape)
        return scaled(DeepKernel(network, base, residual=False))
    if kernel == "spectral_mixture":
        mixture = SpectralMixtureKernel(
            options.num_mixtures, ard_num_dims=d, batch_shape=batch_shape
        ).to(x)
        # Its weights are the scale: no ScaleKernel around it.
        spacing = "smallest" if d == 1 else "grid"
        return initialize_spectral_mixture(mixture, x, y, generator, spacing)
    raise UnknownNameError("kernel", kernel, KERNELS)


def make_mean(
    mean: str | Mean, x: Tensor, options: PartOptions, generator: torch.Generator
) -> Mean:
    """The mean of that name for standardized data, or the mean itself, as ``x`` is placed."""
    if isinstance(mean, Mean):
        return mean.to(x)
    if mean == "constant":
        return ConstantMean(batch_shape=x.shape[:-2]).to(x)
    if mean == "zero":
        return ZeroMean(batch_shape=x.shape[:-2])
    if mean == "mlp":
        return NetworkMean(MLP([x.shape[-1], *options.hidden, 1], generator=generator)).to(x)
    raise UnknownNameError("mean", mean, MEANS)


@checked
def find_networks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The networks of a model's deep kernels and network means, each once.

    ``gpclml.kernels.networks.reset_network`` draws one anew, e.g. for a restart.

    Args:
        model: Any module, e.g. an ``ExactGP``.

    Returns:
        The networks, in the order of ``model.modules()``.
    """
    networks: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        if isinstance(module, DeepKernel):
            networks.setdefault(id(module.feature_extractor), module.feature_extractor)
        elif isinstance(module, NetworkMean):
            networks.setdefault(id(module.network), module.network)
    return list(networks.values())
