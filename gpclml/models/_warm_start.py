"""A short fit of everything but the networks, residual features held at zero."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._optimize import StoppedError, line_search
from gpclml.kernels import DeepKernel
from gpclml.linalg import conditional_log_density
from gpclml.models._networks import networks_of
from gpclml.observations import training_observations

__all__ = ["fit_with_networks_frozen"]


def fit_with_networks_frozen(model: ExactGP) -> None:
    """Fits lengthscales, scales, noise and mean by L-BFGS on the LML, networks left alone.

    The features of residual deep kernels count as zero meanwhile, so that the fit is the base
    kernel's on the inputs and no lengthscale adapts to an untrained network. Missing (NaN)
    targets are left out. A line search that stops early (usual in float32) keeps its best
    point; a start that cannot be evaluated is kept, with a ``RuntimeWarning``. Costs O(n^3) an
    iteration.

    Args:
        model: Changed in place; left in train mode.
    """
    model.train()
    assert isinstance(model.train_targets, torch.Tensor)
    missing = bool(torch.isnan(model.train_targets).any())
    failure = ""
    deep = [kernel for kernel in model.modules() if isinstance(kernel, DeepKernel)]
    with (
        _frozen(networks_of(model)),
        _silenced(deep),
        _without_parts_on_features(deep),
        torch.enable_grad(),
        gpytorch.settings.observation_nan_policy("mask" if missing else "ignore"),
    ):
        try:
            line_search(
                _LogMarginalLikelihood(model.likelihood, model), None, lambda _, result: None
            )
        except StoppedError as error:
            failure = str(error)
    model.zero_grad(set_to_none=True)
    if failure:
        warnings.warn(
            f"The warm start failed and its start is kept ({failure}). Use float64, look for "
            "duplicated rows, or pass warm_start=False.",
            RuntimeWarning,
            stacklevel=3,
        )


class _LogMarginalLikelihood(ExactMarginalLogLikelihood):
    """The log marginal likelihood per point, exact whatever settings are in force."""

    def compute_custom_loss(self) -> Tensor:
        data = training_observations(cast(ExactGP, self.model))
        everything = torch.arange(data.residual.shape[-1])
        value = conditional_log_density(data.covariance, data.residual, everything)
        return -value / data.num_observed()


@contextmanager
def _without_parts_on_features(kernels: list[DeepKernel]) -> Iterator[None]:
    """Within the block a sum inside a residual deep kernel is its first kernel alone."""
    sums = [
        kernel.base_kernel
        for kernel in kernels
        if kernel.residual and isinstance(kernel.base_kernel, AdditiveKernel)
    ]
    parts = [kernel.kernels for kernel in sums]
    try:
        for kernel in sums:
            kernel.kernels = kernel.kernels[:1]
        yield
    finally:
        for kernel, all_parts in zip(sums, parts, strict=True):
            kernel.kernels = all_parts


@contextmanager
def _frozen(networks: list[torch.nn.Module]) -> Iterator[None]:
    """Within the block the parameters of the networks are not trained."""
    parameters = [parameter for network in networks for parameter in network.parameters()]
    trained = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in zip(parameters, trained, strict=True):
            parameter.requires_grad_(flag)


@contextmanager
def _silenced(kernels: list[DeepKernel]) -> Iterator[None]:
    """Within the block the features of residual deep kernels are zero."""
    hooks = [
        kernel.feature_extractor.register_forward_hook(_zeros)
        for kernel in kernels
        if kernel.residual
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(network: torch.nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(output)
