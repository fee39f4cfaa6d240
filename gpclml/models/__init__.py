"""Models: exact Gaussian processes, linear models and networks."""

from gpclml.models._parts import find_networks
from gpclml.models.linear import BayesianLinearModel, Linearization, LinearizedGP, LinearizedNetwork
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
