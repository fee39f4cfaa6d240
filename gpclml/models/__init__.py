"""Models: Gaussian processes of numbers, classes and counts, linear models and networks."""

from typing import TYPE_CHECKING

from gpclml._utils.lazy import lazy_names

if TYPE_CHECKING:
    from gpclml.models.base import find_networks
    from gpclml.models.latent import GPClassification, GPCounts, LatentGP
    from gpclml.models.linear import (
        BayesianLinearModel,
        Linearization,
        LinearizedGP,
        LinearizedNetwork,
    )  # fmt: skip
    from gpclml.models.regression import GPRegression
    from gpclml.models.standardize import Standardizer

__all__ = [
    "BayesianLinearModel",
    "GPClassification",
    "GPCounts",
    "GPRegression",
    "LatentGP",
    "Linearization",
    "LinearizedGP",
    "LinearizedNetwork",
    "Standardizer",
    "find_networks",
]

__getattr__ = lazy_names(
    __name__, __all__, ["standardize", "base", "regression", "linear", "latent"]
)
