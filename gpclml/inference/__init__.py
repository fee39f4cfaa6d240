"""From a GPyTorch model to a covariance and a residual, and back to a posterior.

:mod:`~gpclml.inference.observations` reads the Gaussian of the training targets off a model,
:mod:`~gpclml.inference.covariances` says in which form a solver takes their covariance, and the
posterior is exact, by a Cholesky factor, or by conjugate gradients with bounded errors
(:class:`IterativePosterior`).
"""

from gpclml.inference.covariances import Road, Solver, SolverWarning
from gpclml.inference.iterative_posterior import (
    IterativePosterior,
    IterativePrediction,
    SolveReport,
)
from gpclml.inference.observations import Observations, likelihood_parameters, training_observations
from gpclml.inference.posterior import (
    evaluating,
    exact_posterior,
    marginal_predictive,
    predictive_observations,
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
    "marginal_predictive",
    "predictive_observations",
    "training_observations",
]
