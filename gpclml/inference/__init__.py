"""From a GPyTorch model to a covariance and a residual, and back to a posterior.

:mod:`~gpclml.inference.observations` reads the Gaussian of the training targets off a model and
says in which form a solver takes their covariance. The posterior is exact, by a Cholesky factor, or
by conjugate gradients with bounded errors (:class:`IterativePosterior`).
"""

from gpclml.inference.observations import (
    Observations,
    Road,
    Solver,
    SolverWarning,
    likelihood_parameters,
    training_observations,
)
from gpclml.inference.posterior import (
    IterativePosterior,
    IterativePrediction,
    SolveReport,
    evaluating,
    exact_posterior,
)
from gpclml.inference.units import PosteriorNormal, Units

__all__ = [
    "IterativePosterior",
    "IterativePrediction",
    "Observations",
    "PosteriorNormal",
    "Road",
    "SolveReport",
    "Solver",
    "SolverWarning",
    "Units",
    "evaluating",
    "exact_posterior",
    "likelihood_parameters",
    "training_observations",
]
