"""The kernels of the models of classes and counts that are averaged, with their priors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.models.latent import add_latent_priors

_LEAST_LENGTHSCALE = 1e-3  # in deviations of a column, as named kernels have it
# Lengthscales of columns differ by a factor of about 1.6 from their common one.
_SPREAD = 0.5
# Of the additive kernel each lengthscale is that of one column: around 4 deviations.
_LOG_COLUMN_LENGTHSCALE, _COLUMN_SPREAD = math.sqrt(2), 1.0

assert issubclass(Kernel, torch.nn.Module)


class AdditiveMatern(Kernel):
    """A mean of Matern kernels of 3/2, one for each column, with a lengthscale for each.

    Its functions are sums of functions of single columns (Duvenaud et al. 2011). A matrix takes
    memory for two of its size, whatever the number of columns.

    Args:
        ard_num_dims: Number of columns.
        **options: As of ``gpytorch.kernels.Kernel``.
    """

    has_lengthscale = True

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """The covariances of rows ``(*batch, n, d)`` and ``(*batch, m, d)``, or a diagonal."""
        scale = math.sqrt(3) / cast(Tensor, self.lengthscale)
        x1, x2 = x1 * scale, x2 * scale
        if diag:
            return _matern32(x1, x2).mean(-1)
        total: Any = 0.0
        for first, second in zip(x1.unbind(-1), x2.unbind(-1), strict=True):
            pair = first.unsqueeze(-1), second.unsqueeze(-2)
            # Computed again in the gradient: the matrices of all columns would fill the memory.
            total = total + checkpoint(_matern32, *pair, use_reentrant=False)
        return total / x1.shape[-1]


def _matern32(x1: Tensor, x2: Tensor) -> Tensor:
    distance = (x1 - x2).abs()
    return (1 + distance) * (-distance).exp()


_STATIONARY: Mapping[str, Callable[..., Kernel]] = {
    "additive": AdditiveMatern,
    "matern12": partial(MaternKernel, 0.5),
    "matern32": partial(MaternKernel, 1.5),
    "matern52": partial(MaternKernel, 2.5),
    "rbf": RBFKernel,
}
KERNELS = ("linear", *_STATIONARY)
"""Kernels of the models of classes or counts that may be averaged, by name."""

AVERAGED = ("linear", "additive", "matern12")
"""Those that it averages if none are named."""


def class_kernel(name: str, x: Tensor, scale: float = 4.0) -> Kernel:
    """A kernel of standardized inputs with weak priors of its scale and lengthscales.

    Lengthscales of the stationary kernels are shrunk towards a common one, which is free: each has
    a log-normal prior around that, with the deviation .5 of the logarithm.

    Args:
        name: One of :data:`KERNELS`.
        x: The inputs, ``(n, d)``.
        scale: Of latent values, around which its prior is.
    """
    d = x.shape[-1]
    if name == "linear":
        linear = LinearKernel()
        linear.variance = 1 / d  # so that the scale is that of latent values, and has its prior
        linear.raw_variance.requires_grad_(False)
        kernel = ScaleKernel(linear).to(x)
        add_latent_priors(kernel, x, scale)
        return kernel
    bound = GreaterThan(_LEAST_LENGTHSCALE)
    base = _STATIONARY[name](ard_num_dims=d, lengthscale_constraint=bound)
    is_additive = name == "additive"
    base.initialize(lengthscale=2.0 if is_additive else math.sqrt(d))
    kernel = ScaleKernel(base).to(x)
    add_latent_priors(kernel, x, scale, _SPREAD)
    if is_additive:
        prior = LogNormalPrior(_LOG_COLUMN_LENGTHSCALE, _COLUMN_SPREAD).to(x)
        base.register_prior("lengthscale_prior", prior, "lengthscale")
    return kernel


def checked_kernels(argument: str, names: Sequence[str] | None) -> list[str]:
    """Names of kernels, each once, in the order in which all are listed; some if none are given."""
    if names is None:
        return list(AVERAGED)
    for name in (names,) if isinstance(names, str) else names:
        if name not in KERNELS:
            raise UnknownNameError(argument, name, KERNELS)
    if isinstance(names, str):
        raise ArgumentError(argument, repr(names), f"names in a list: [{names!r}]")
    if len(names) == 0:
        raise ArgumentError(argument, "none", "at least one name")
    return [name for name in KERNELS if name in names]
