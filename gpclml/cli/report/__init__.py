"""How models of a table are fitted and scored on test rows, for the page and ``model.py``."""

from gpclml.cli.report.predictions import PredictionScores, predicted, prediction_scores
from gpclml.cli.report.recipes import MODELS, OBJECTIVES, Recipe

__all__ = [
    "MODELS",
    "OBJECTIVES",
    "PredictionScores",
    "Recipe",
    "predicted",
    "prediction_scores",
]
