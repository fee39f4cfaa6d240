"""How well models explain their data: scores, calibration, and comparisons of several models."""

from gpclml import explain_moved
from gpclml.evaluation._criteria import CRITERIA
from gpclml.evaluation.calibration import (
    expected_calibration_error,
    fit_temperature,
    out_of_distribution_auroc,
)
from gpclml.evaluation.calibration_plot import plot_calibration
from gpclml.evaluation.comparison import Comparison
from gpclml.evaluation.criteria_plot import plot_compare
from gpclml.evaluation.curves_plot import plot_learning_curves
from gpclml.evaluation.differences import PairedDifference, paired_difference
from gpclml.evaluation.findings import Finding, FindingName
from gpclml.evaluation.fit_plot import plot_fit
from gpclml.evaluation.model_scores import ModelScores
from gpclml.evaluation.ranking import compare, score_models
from gpclml.evaluation.scores import (
    conditional_log_marginal_likelihood,
    joint_log_predictive,
    learning_curve,
    leave_one_out,
    log_marginal_likelihood,
    marginal_log_predictive,
)
from gpclml.evaluation.stacking import stacking_weights

__all__ = [
    "CRITERIA",
    "Comparison",
    "Finding",
    "FindingName",
    "ModelScores",
    "PairedDifference",
    "compare",
    "conditional_log_marginal_likelihood",
    "expected_calibration_error",
    "fit_temperature",
    "joint_log_predictive",
    "learning_curve",
    "leave_one_out",
    "log_marginal_likelihood",
    "marginal_log_predictive",
    "out_of_distribution_auroc",
    "paired_difference",
    "plot_calibration",
    "plot_compare",
    "plot_fit",
    "plot_learning_curves",
    "score_models",
    "stacking_weights",
]

explain_moved(__name__)
