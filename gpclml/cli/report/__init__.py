"""What a comparison of models of a table leaves behind: a page, and a file that rebuilds one."""

from gpclml.cli.report.chosen_models import ChosenModel, best_on_test, chosen_models
from gpclml.cli.report.fitted_model import FittedModel
from gpclml.cli.report.headline import answer, headline
from gpclml.cli.report.page import Report, page_of
from gpclml.cli.report.predictions import PredictionScores, predicted, prediction_scores
from gpclml.cli.report.recipes import MODELS, OBJECTIVES, Recipe
from gpclml.cli.report.script import script_of
from gpclml.cli.report.text import report_text
from gpclml.cli.report.versions import package_versions

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
