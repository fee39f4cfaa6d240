"""Fitting models: one, many at once, or networks as far as held-out data support."""

from gpclml.fit.batch import batch_size, fit_batch
from gpclml.fit.mll import FitResult, fit_mll
from gpclml.fit.networks import StoppingResult, fit_networks

__all__ = [
    "FitResult",
    "StoppingResult",
    "batch_size",
    "fit_batch",
    "fit_mll",
    "fit_networks",
]
