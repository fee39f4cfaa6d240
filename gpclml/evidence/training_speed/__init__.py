"""Training speed as evidence (Lyle et al. 2020)."""

from gpclml.evidence.sampling.monte_carlo import Estimate
from gpclml.evidence.training_speed.estimators import (
    TrainingSpeed,
    posterior_divergences,
    training_speed,
)
from gpclml.evidence.training_speed.losses import SumOfTrainingLosses

__all__ = [
    "Estimate",
    "SumOfTrainingLosses",
    "TrainingSpeed",
    "posterior_divergences",
    "training_speed",
]
