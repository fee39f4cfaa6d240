"""Training speed as evidence (Lyle et al. 2020)."""

from gpclml.evidence.training_speed.combination import (
    Combination,
    expected_combination,
    optimal_combination,
    sampled_combination,
)
from gpclml.evidence.training_speed.descent import training_speed_by_descent
from gpclml.evidence.training_speed.estimators import posterior_divergences, training_speed
from gpclml.evidence.training_speed.losses import SumOfTrainingLosses
from gpclml.evidence.training_speed.model_weights import model_weights
from gpclml.evidence.training_speed.predictions import ModelPredictions, Scheme, model_predictions
from gpclml.evidence.training_speed.results import Estimate, TrainingSpeed
from gpclml.evidence.training_speed.sample_then_optimize import DescentDraws, sample_then_optimize

__all__ = [
    "Combination",
    "DescentDraws",
    "Estimate",
    "ModelPredictions",
    "Scheme",
    "SumOfTrainingLosses",
    "TrainingSpeed",
    "expected_combination",
    "model_predictions",
    "model_weights",
    "optimal_combination",
    "posterior_divergences",
    "sample_then_optimize",
    "sampled_combination",
    "training_speed",
    "training_speed_by_descent",
]
