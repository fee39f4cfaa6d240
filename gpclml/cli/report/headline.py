"""The answer in a sentence or two: which model, and do the criteria agree?"""

from __future__ import annotations

from collections.abc import Mapping

from gpclml.cli.report.chosen_models import best_on_test, is_clear, lead_of_best
from gpclml.cli.report.predictions import PREDICTED_SHARE, PredictionScores
from gpclml.evaluation import CRITERIA, Comparison
from gpclml.evaluation.words import joined, plus_minus

__all__ = ["answer", "headline", "percent"]


def headline(comparison: Comparison, target: str) -> str:
    """One sentence: the model that ranks first, and whether LML, CLML and LOO agree.

    Args:
        comparison: Of the models.
        target: Name of what is predicted.
    """
    first = str(comparison.table.index[0])
    if len(comparison.table) == 1:
        return f"{first} is the only model of {target} here: there is nothing to compare."
    if len(comparison.table[comparison.rank_by].dropna()) == 1:
        return f"{first} is the only model of {target} here that could be scored."
    choices = comparison.favourites
    warned = {finding.name: finding for finding in comparison.findings}
    if len(set(choices.values())) == 1:
        close = warned["small-difference"].models if "small-difference" in warned else ()
        also = ""
        if close:
            also = f"; {joined(close)} predict{'s' if len(close) == 1 else ''} about as well"
        agree = "all three criteria agree"
        if len(choices) < len(CRITERIA):
            agree = f"so say {joined([criterion.upper() for criterion in choices])}"
        return f"{first} ranks first for {target}, and {agree}{also}."
    others = [
        f"{criterion.upper()} prefers {model}"
        for criterion, model in choices.items()
        if model != first
    ]
    if "criteria-disagree" in warned:
        return f"The criteria disagree: {first} ranks first for {target}, but {joined(others)}."
    return f"{first} ranks first for {target}; {joined(others)}, but not clearly."


def answer(comparison: Comparison, predictions: Mapping[str, PredictionScores]) -> str:
    """What the test part, which chose nothing, says of that.

    Args:
        comparison: Of the models.
        predictions: Scores on the test part, by model.
    """
    first = str(comparison.table.index[0])
    scores = predictions[first]
    if scores.is_missing:
        return f"{first} could not predict the test rows; they prefer {best_on_test(predictions)}."
    said = (
        f"On {len(scores.log_densities)} test rows, which chose nothing, {first} is off by "
        f"{scores.rmse:.4g} (root mean square), and {percent(scores.coverage)} of them are in its "
        f"{percent(PREDICTED_SHARE)} intervals."
    )
    if sum(not one.is_missing for one in predictions.values()) == 1:
        return said
    best = best_on_test(predictions)
    if best == first:
        return f"{said} They prefer {first} too."
    lead = lead_of_best(predictions, first)
    clearly = "clearly" if is_clear(lead) else "not clearly"
    return f"{said} They prefer {best}, by {plus_minus(lead)}, {clearly}."


def percent(share: float) -> str:
    """A share as a whole number of hundredths, with a space that does not break."""
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"
