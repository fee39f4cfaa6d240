"""Fitting models: one, many at once, or networks as far as held-out data support."""

from gpclml.fit.batch import fit_batch, suggest_batch_size
from gpclml.fit.botorch import fit_gpytorch_mll_fused
from gpclml.fit.deep_kernel import warm_start
from gpclml.fit.laplace import OnlineFitResult, fit_hyperparameters, fit_map, fit_online
from gpclml.fit.mll import fit_mll
from gpclml.fit.networks import NetworksFitResult, fit_networks
from gpclml.fit.result import FitResult, FitWarning, MLLFitResult

__all__ = [
    "FitResult",
    "FitWarning",
    "MLLFitResult",
    "NetworksFitResult",
    "OnlineFitResult",
    "fit_batch",
    "fit_gpytorch_mll_fused",
    "fit_hyperparameters",
    "fit_map",
    "fit_mll",
    "fit_networks",
    "fit_online",
    "suggest_batch_size",
    "warm_start",
]
