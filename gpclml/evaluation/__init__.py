"""Evaluation of models: scores, calibration, and comparisons of several models with plots."""

from gpclml.evaluation.calibration import expected_calibration_error, fit_temperature
from gpclml.evaluation.comparison import Comparison, Finding, compare, score_models
from gpclml.evaluation.decomposition import Decomposition, decompose
from gpclml.evaluation.model_scores import (
    CRITERIA,
    ModelScores,
    PairedDifference,
    paired_difference,
    stacking_weights,
)
from gpclml.evaluation.plots import plot_calibration, plot_compare, plot_fit, plot_learning_curves
from gpclml.evaluation.scores import (
    conditional_log_marginal_likelihood,
    joint_log_predictive,
    learning_curve,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
)

__all__ = [
    "CRITERIA",
    "Comparison",
    "Decomposition",
    "Finding",
    "ModelScores",
    "PairedDifference",
    "compare",
    "conditional_log_marginal_likelihood",
    "decompose",
    "expected_calibration_error",
    "fit_temperature",
    "joint_log_predictive",
    "learning_curve",
    "leave_one_out",
    "log_marginal_likelihood",
    "marginal_log_predictive",
    "paired_difference",
    "plot_calibration",
    "plot_compare",
    "plot_fit",
    "plot_learning_curves",
    "score_models",
    "stacking_weights",
]
