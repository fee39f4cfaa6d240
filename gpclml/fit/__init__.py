"""Fitting models: one, many at once, or networks as far as held-out data support."""

from gpclml import explain_moved
from gpclml.fit.batch import fit_batch, suggest_batch_size
from gpclml.fit.hyperparameters import fit_hyperparameters
from gpclml.fit.linear_bound import LinearBoundFit, fit_linear_bound
from gpclml.fit.map import fit_map
from gpclml.fit.mll import FitResult, FitWarning, fit_mll
from gpclml.fit.networks import StoppingResult, fit_networks
from gpclml.fit.online import OnlineFit, fit_online

__all__ = [
    "FitResult",
    "FitWarning",
    "LinearBoundFit",
    "OnlineFit",
    "StoppingResult",
    "fit_batch",
    "fit_hyperparameters",
    "fit_linear_bound",
    "fit_map",
    "fit_mll",
    "fit_networks",
    "fit_online",
    "suggest_batch_size",
]

explain_moved(__name__)
