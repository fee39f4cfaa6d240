"""The report of a comparison: scores, the page, and the Python file that rebuilds a model."""

from gpclml.cli.report.page import Report, page_of, report_text
from gpclml.cli.report.predictions import (
    ChosenModel,
    PredictionScores,
    best_on_test,
    chosen_models,
    predicted,
    prediction_scores,
)
from gpclml.cli.report.recipes import (
    MODELS,
    OBJECTIVES,
    FittedModel,
    Recipe,
    package_versions,
    script_of,
)
from gpclml.cli.report.words import answer, headline

__all__ = [
    "MODELS",
    "OBJECTIVES",
    "ChosenModel",
    "FittedModel",
    "PredictionScores",
    "Recipe",
    "Report",
    "answer",
    "best_on_test",
    "chosen_models",
    "headline",
    "package_versions",
    "page_of",
    "predicted",
    "prediction_scores",
    "report_text",
    "script_of",
]
