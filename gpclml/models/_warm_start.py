"""A short fit of everything but the networks, residual features held at zero."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import gpytorch
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NotPSDError

from gpclml.kernels import DeepKernel
from gpclml.models._networks import networks_of

__all__ = ["fit_with_networks_frozen"]


def fit_with_networks_frozen(model: ExactGP, max_iterations: int = 200) -> None:
    """Fits lengthscales, scales, noise and mean by L-BFGS on the LML, networks left alone.

    The features of residual deep kernels count as zero meanwhile, so that the fit is the base
    kernel's on the inputs and no lengthscale adapts to an untrained network. Missing (NaN)
    targets are masked. A line search that stops early (usual in float32) keeps its best
    point; one that meets a covariance that is not positive definite keeps the start, with a
    ``RuntimeWarning``. Costs O(n^3) an iteration.

    Args:
        model: Changed in place; left in train mode.
        max_iterations: Most steps of the optimizer.
    """
    from botorch.exceptions.warnings import OptimizationWarning
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    model.train()
    assert isinstance(model.train_targets, torch.Tensor)
    missing = bool(torch.isnan(model.train_targets).any())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    # Exact whatever settings are in force around it, and whether or not they were changed.
    with (
        _frozen(networks_of(model)),
        _silenced([kernel for kernel in model.modules() if isinstance(kernel, DeepKernel)]),
        torch.enable_grad(),
        gpytorch.settings.max_cholesky_size(2**31),
        gpytorch.settings.fast_computations(log_prob=False),
        gpytorch.settings.observation_nan_policy("mask" if missing else "ignore"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", OptimizationWarning)
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        try:
            fit_gpytorch_mll_scipy(mll, options={"maxiter": max_iterations})
            failure = None
        except NotPSDError as error:
            failure = error
    model.zero_grad(set_to_none=True)
    if failure is not None or not all(p.isfinite().all() for p in model.parameters()):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        warnings.warn(
            f"The warm start failed and its start is kept ({failure or 'not finite'}). Use "
            "float64, look for duplicated rows, or pass warm_start=False.",
            RuntimeWarning,
            stacklevel=3,
        )


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
