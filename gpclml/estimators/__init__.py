"""Estimators: mixtures of models for tables, and Laplace posteriors of networks."""

from gpclml.estimators.candidates import CANDIDATES, DEFAULT_CANDIDATES, Candidate
from gpclml.estimators.components import Calibration, Component, fit_calibration
from gpclml.estimators.laplace import Laplace
from gpclml.estimators.mixture import StackedPrediction
from gpclml.estimators.regressor import Regressor
from gpclml.estimators.stacked import StackedGP

__all__ = [
    "CANDIDATES",
    "DEFAULT_CANDIDATES",
    "Calibration",
    "Candidate",
    "Component",
    "Laplace",
    "Regressor",
    "StackedGP",
    "StackedPrediction",
    "fit_calibration",
]
