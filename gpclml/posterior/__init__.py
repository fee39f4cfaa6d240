"""Posteriors of exact GPs given the targets that are there, dense or by conjugate gradients."""

from gpclml.posterior.dense import evaluating, exact_posterior
from gpclml.posterior.iterative import IterativePosterior
from gpclml.posterior.normal import PosteriorNormal
from gpclml.posterior.reports import IterativePrediction, SolveReport

__all__ = [
    "IterativePosterior",
    "IterativePrediction",
    "PosteriorNormal",
    "SolveReport",
    "evaluating",
    "exact_posterior",
]
