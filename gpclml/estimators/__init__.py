"""Estimators for tables: mixtures of models that predict with honest intervals."""

from gpclml.estimators.calibration import Calibration, fit_calibration
from gpclml.estimators.candidates import CANDIDATES, DEFAULT_CANDIDATES, Candidate
from gpclml.estimators.components import Component
from gpclml.estimators.mixture import StackedPrediction
from gpclml.estimators.regressor import Regressor
from gpclml.estimators.stacked import StackedGP

__all__ = [
    "CANDIDATES",
    "DEFAULT_CANDIDATES",
    "Calibration",
    "Candidate",
    "Component",
    "Regressor",
    "StackedGP",
    "StackedPrediction",
    "fit_calibration",
]
