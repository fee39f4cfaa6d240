"""Estimates of evidence: sampling, training speed, PAC-Bayes bounds, information criteria.

:mod:`~gpclml.evidence.sampling` draws weights and estimates evidence from draws,
:mod:`~gpclml.evidence.training_speed` has the estimators of Lyle et al. (2020), and
:mod:`~gpclml.evidence.bounds` bounds the risk by PAC-Bayes theorems.
"""

from gpclml.evidence.criteria import PredictiveCriterion, psis_loo, waic

__all__ = ["PredictiveCriterion", "psis_loo", "waic"]
