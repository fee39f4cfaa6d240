"""The start of the kernel ``"deep"``: as the fitted ARD GP."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor
from torch.nn import Module

from gpclml._optimize import StoppedError
from gpclml._searches import FitWarning, search
from gpclml._utils.arguments import callers_level
from gpclml.inference.observations import training_observations
from gpclml.kernels import DeepKernel
from gpclml.linalg import conditional_log_density
from gpclml.models._networks import find_networks

__all__ = ["start_as_ard_gp"]

_RETRIES = 2  # as many as fit_mll takes


def start_as_ard_gp(model: ExactGP, plain: ExactGP) -> None:
    """Fits another model by L-BFGS on the LML, and starts the ARD part of this one there.

    It is the line search of :func:`gpclml.fit.fit_mll` on the same objective, so that the ARD part
    is the GP that fits alone, bit for bit. Networks of the mean stay as they are. Missing (NaN)
    targets are left out. A search that stops early (usual in float32) keeps its best point; a
    start that cannot be evaluated is kept, with a :class:`~gpclml.fit.FitWarning`. Costs O(n^3) an
    iteration.

    Args:
        model: One whose kernel is a scaled sum of an ARD kernel and of others, in a
            :class:`~gpclml.kernels.DeepKernel`; changed in place, left in train mode.
        plain: The same with the scaled ARD kernel alone, at its start; it is fitted.
    """
    plain.train()
    assert isinstance(plain.train_targets, torch.Tensor)
    missing = bool(torch.isnan(plain.train_targets).any())
    with (
        _frozen(find_networks(plain)),
        torch.enable_grad(),
        gpytorch.settings.observation_nan_policy("mask" if missing else "ignore"),
    ):
        try:
            mll = _LogMarginalLikelihood(plain.likelihood, plain)
            search(mll, None, lambda _, result: None, _RETRIES)
        except StoppedError as error:
            warnings.warn(
                f"The warm start failed and its start is kept ({error}). Use float64, look for "
                "duplicated rows, or pass warm_start=False.",
                FitWarning,
                stacklevel=callers_level(),
            )
    whole, fitted = cast(ScaleKernel, model.covar_module), cast(ScaleKernel, plain.covar_module)
    both = cast(AdditiveKernel, cast(DeepKernel, whole.base_kernel).base_kernel)
    pairs = [
        (both.kernels[0], fitted.base_kernel),
        (model.mean_module, plain.mean_module),
        (model.likelihood, plain.likelihood),
    ]
    for part, other in cast(list[tuple[Module, Module]], pairs):
        part.load_state_dict(other.state_dict(), strict=part is not both.kernels[0])
    with torch.no_grad():
        cast(Tensor, whole.raw_outputscale).copy_(cast(Tensor, fitted.raw_outputscale))
    model.train()


class _LogMarginalLikelihood(ExactMarginalLogLikelihood):
    """The log marginal likelihood per point, exact whatever settings are in force."""

    def compute_custom_loss(self) -> Tensor:
        data = training_observations(cast(ExactGP, self.model))
        everything = torch.arange(data.residual.shape[-1])
        value = conditional_log_density(data.covariance, data.residual, everything)
        return -value / data.num_observed()


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
