"""What a comparison of models of a table leaves behind: a page, and a file that rebuilds one."""

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
