"""Evidence by other roads: sampling, training speed, PAC-Bayes bounds and information criteria.

:mod:`~gpclml.evidence.sampling` has draws of weights and annealed importance sampling,
:mod:`~gpclml.evidence.training_speed` the estimators of Lyle et al. (2020),
:mod:`~gpclml.evidence.bounds` PAC-Bayes bounds.
"""

from gpclml.evidence.criteria import PredictiveCriterion, Scale, aic, bic, psis_loo, waic

__all__ = [
    "PredictiveCriterion",
    "Scale",
    "aic",
    "bic",
    "psis_loo",
    "waic",
]
