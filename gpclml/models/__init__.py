"""Models: exact Gaussian processes, linear models and networks."""

from gpclml import explain_moved
from gpclml.models._networks import find_networks
from gpclml.models.bayesian_linear_model import BayesianLinearModel
from gpclml.models.linearized_gp import LinearizedGP
from gpclml.models.linearized_network import Linearization, LinearizedNetwork
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

explain_moved(__name__)
