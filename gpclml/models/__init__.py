"""Models: exact Gaussian processes, linear models and networks."""

from typing import TYPE_CHECKING

from gpclml._utils.lazy import lazy_names

if TYPE_CHECKING:
    from gpclml.models.base import find_networks
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
    "GPRegression",
    "Linearization",
    "LinearizedGP",
    "LinearizedNetwork",
    "Standardizer",
    "find_networks",
]

__getattr__ = lazy_names(__name__, __all__, ["standardize", "base", "regression", "linear"])
