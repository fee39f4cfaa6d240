"""Which of several models to trust on their data, and whether the criteria agree."""

from gpclml.compare._criteria import CRITERIA
from gpclml.compare.calibration_plot import plot_calibration
from gpclml.compare.comparison import Comparison
from gpclml.compare.criteria_plot import plot_compare
from gpclml.compare.curves_plot import plot_learning_curves
from gpclml.compare.differences import PairedDifference, paired_difference
from gpclml.compare.findings import ComparisonWarning, WarningName
from gpclml.compare.fit_plot import plot_fit
from gpclml.compare.model_scores import ModelScores
from gpclml.compare.ranking import compare, score_models
from gpclml.compare.stacking import stacking_weights

__all__ = [
    "CRITERIA",
    "Comparison",
    "ComparisonWarning",
    "ModelScores",
    "PairedDifference",
    "WarningName",
    "compare",
    "paired_difference",
    "plot_calibration",
    "plot_compare",
    "plot_fit",
    "plot_learning_curves",
    "score_models",
    "stacking_weights",
]
