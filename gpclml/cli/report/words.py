"""The results of a comparison in words and tables, for a page and for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from gpclml.cli.report.predictions import (
    PREDICTED_SHARE,
    PredictionScores,
    best_on_test,
    lead_of_best,
)
from gpclml.cli.report.recipes import FittedModel
from gpclml.cli.tables import CategoryColumn, NumberColumn, TableEncoding
from gpclml.evaluation import CRITERIA, Comparison, PairedDifference
from gpclml.evaluation.findings import joined, plus_minus

__all__ = [
    "MODEL_COLUMNS",
    "answer",
    "choice_rows",
    "column_rows",
    "headline",
    "model_rows",
    "percent",
]


def headline(comparison: Comparison, target: str) -> str:
    """A sentence on which model ranks first, and whether LML, CLML and LOO agree."""
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
    """Sentences on how the first model predicts the test rows, and which model they prefer."""
    first = str(comparison.table.index[0])
    scores = predictions[first]
    if scores.is_missing:
        return f"{first} could not predict the test rows; they prefer {best_on_test(predictions)}."
    said = (
        f"On {len(scores.log_densities)} test rows, which no choice used, {first} is off by "
        f"{scores.rmse:.4g} (root mean square), and {percent(scores.coverage)} of them are in its "
        f"{percent(PREDICTED_SHARE)} intervals."
    )
    if sum(not one.is_missing for one in predictions.values()) == 1:
        return said
    best = best_on_test(predictions)
    if best == first:
        return f"{said} They prefer {first} too."
    return f"{said} They prefer {best}, by {_clear(lead_of_best(predictions, first))}."


def _clear(lead: PairedDifference) -> str:
    """A lead, and whether it is more than two standard errors."""
    clearly = "clearly" if lead.value > 2 * lead.standard_error else "not clearly"
    return f"{plus_minus(lead)}, {clearly}"


def percent(share: float) -> str:
    """A share in percent, rounded to a whole number, with a non-breaking space."""
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


Row = list[tuple[str, str]]
"""Values as texts, each with its standard error; an empty error is not shown."""

MODEL_COLUMNS = (
    "LML", "CLML", "LOO", "LOO less first", "weight", "test RMSE", "R²", "test NLL",
    f"in {percent(PREDICTED_SHARE)}", "seconds",
)  # fmt: skip
"""Names of the columns of the table of models."""

_MOST_SHOWN = 6  # levels of a category


def model_rows(
    comparison: Comparison,
    predictions: Mapping[str, PredictionScores],
    fitted: Mapping[str, FittedModel],
    others: Mapping[str, PredictionScores],
) -> list[tuple[str, Row]]:
    """The table of models: a row for each model with its criteria, test scores and seconds.

    A model whose fit failed is marked after its name. Rows of others, which have test scores only,
    follow; of the mean of the training rows, ``"mean"``, R² is zero.
    """
    mean = others["mean"].rmse if "mean" in others else math.nan
    rows = []
    for name, line in comparison.table.to_dict("index").items():
        name, scores = str(name), predictions[str(name)]
        rows.append(
            (
                _marked(name, line["findings"]),
                [
                    (_nats(line["lml"]), ""),
                    (_nats(line["clml"]), _nats(line["clml_se"])),
                    (_nats(line["loo"]), _nats(line["loo_se"])),
                    ("", "")
                    if line["rank"] == 0
                    else (_nats(line["difference"]), _nats(line["difference_se"])),
                    (_text(line["weight"], ".2f"), ""),
                    *_test_cells(scores, mean),
                    (f"{fitted[name].seconds:.1f}", ""),
                ],
            )
        )
    empty = [("", "")]
    return rows + [
        (name, [*empty * 5, *_test_cells(scores, mean), *empty]) for name, scores in others.items()
    ]


def _test_cells(scores: PredictionScores, mean: float) -> Row:
    explained = 1 - (scores.rmse / mean) ** 2 if mean > 0 else math.nan
    return [
        _with_error(scores.rmse, scores.rmse_se),
        (_text(explained, ".3f"), ""),
        _with_error(scores.nll, scores.nll_se),
        ("", "") if scores.is_missing else (percent(scores.coverage), percent(scores.coverage_se)),
    ]


def choice_rows(
    comparison: Comparison, predictions: Mapping[str, PredictionScores]
) -> list[tuple[str, Row]]:
    """The table of criteria: which model each one chooses, and how far it is from the best one."""
    rows = []
    for criterion, model in comparison.favourites.items():
        scores, lead = predictions[model], lead_of_best(predictions, model)
        best = best_on_test(predictions)
        if scores.is_missing:
            told = f"{best}; this one could not predict them"
        elif model == best:
            told = "the same"
        else:
            told = f"{best}, by {_clear(lead)}"
        shown = model, _text(scores.rmse, ".4g"), _text(scores.nll, ".3f"), told
        rows.append((criterion.upper(), [(text, "") for text in shown]))
    return rows


def column_rows(encoding: TableEncoding) -> list[tuple[str, str, int]]:
    """The columns that become inputs: name, how, and how many inputs."""
    return [(one.name, _how(one), len(one.inputs)) for one in encoding.columns]


def _how(column: NumberColumn | CategoryColumn) -> str:
    if isinstance(column, CategoryColumn):
        shown = ", ".join(column.levels[:_MOST_SHOWN])
        more = ", ..." if len(column.levels) > _MOST_SHOWN else ""
        missing = "; missing is a level of its own" if column.has_missing else ""
        return f"an input for each of {len(column.levels)} levels: {shown}{more}{missing}"
    what = {"number": "number", "boolean": "0 and 1", "date": "days since 1970"}[column.kind]
    if column.fill is None:
        return what
    return f"{what}, {column.fill:.6g} where missing, and an input that says where"


_MARKS = {
    "fit-failed": "fit failed",
    "below-contained": "fit failed",
    "predicts-mean": "predicts the mean",
}


def _marked(name: str, warnings: Iterable[str]) -> str:
    marks = dict.fromkeys(_MARKS[warning] for warning in warnings if warning in _MARKS)
    return f"{name} ({', '.join(marks)})" if marks else name


def _nats(value: float) -> str:
    return _text(value, ".1f")


def _text(value: float, form: str) -> str:
    """A number as text; empty for NaN."""
    return "" if math.isnan(value) else _minus(f"{value:{form}}")


def _with_error(value: float, error: float) -> tuple[str, str]:
    """A value and its error, rounded to two digits of the error."""
    if not error > 0:
        return _text(value, ".4g"), ""
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return _minus(f"{value:.{decimals}f}"), f"{error:.{decimals}f}"


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")
