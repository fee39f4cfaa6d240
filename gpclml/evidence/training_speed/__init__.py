"""Training speed as evidence (Lyle et al. 2020)."""

from gpclml.evidence.sampling.monte_carlo import Estimate
from gpclml.evidence.training_speed.combination import (
    Combination,
    ModelPredictions,
    Scheme,
    expected_combination,
    model_predictions,
    model_weights,
    optimal_combination,
    sampled_combination,
)
from gpclml.evidence.training_speed.descent import (
    DescentDraws,
    sample_then_optimize,
    training_speed_by_descent,
)
from gpclml.evidence.training_speed.estimators import (
    TrainingSpeed,
    posterior_divergences,
    training_speed,
)
from gpclml.evidence.training_speed.losses import SumOfTrainingLosses

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
