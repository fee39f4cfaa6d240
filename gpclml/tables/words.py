"""The results of a comparison in words and tables, for a page and for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpclml.evaluation import Comparison
from gpclml.evaluation.comparison import joined
from gpclml.tables.encoding import CategoryColumn, InputEncoding, NumberColumn
from gpclml.tables.predictions import PREDICTED_SHARE, Choice, ColumnEffect, PredictionScores
from gpclml.tables.recipes import FittedModel

if TYPE_CHECKING:
    import pandas

__all__ = [
    "TEST_COLUMNS",
    "answer",
    "columns_in_words",
    "criteria_table",
    "effect_table",
    "figure",
    "headline",
    "input_table",
    "marks",
    "noise_in_words",
    "percent",
    "score_table",
]

Scores = Mapping[str, PredictionScores]

_COMPARED = {"mean": "the mean has", "linear": "a linear model", "trees": "trees"}
_MOST_SHOWN = 6  # levels of a category
_MOST_NAMED = 4  # columns
_MOST_EFFECTS = 12


def headline(choice: Choice, target: str) -> str:
    """Which model to use."""
    if not choice.explains:
        return f"Nothing here predicts {target} clearly better than its mean."
    return f"To predict {target}, use {choice.name}."


def answer(choice: Choice, what: str, scores: Scores, rows: str) -> list[str]:
    """Sentences on how the chosen model predicts the test rows, and how others do.

    ``what`` says what the model is, ``rows`` what the test rows are, such as "the 88 test rows".
    """
    name, score = choice.name, scores[choice.name]
    others = [
        f"{words} {figure(scores[other].rmse)}"
        for other, words in _COMPARED.items()
        if other != name and other in scores and not scores[other].is_missing
    ]
    said = [f"{name} is {what}."] if what else []
    where = f", where {joined(others)}" if others else ""
    said.append(f"On {rows} its typical error is {figure(score.rmse)}{where}.")
    said.append(f"Half of its predictions are off by less than {figure(score.median_error)}.")
    if score.has_intervals:
        off = score.coverage - PREDICTED_SHARE
        limit = 2 * math.sqrt(PREDICTED_SHARE * (1 - PREDICTED_SHARE) / len(score.means))
        verdict = ""
        if abs(off) > limit:
            verdict = ", so they are too narrow" if off < 0 else ", so they are wider than needed"
        said.append(
            f"Its {percent(PREDICTED_SHARE)} intervals are about {figure(score.width)} wide and "
            f"hold {percent(score.coverage)} of the true values{verdict}."
        )
    else:
        said.append(f"It gives no intervals; if you need them, use {choice.pick}.")
    if choice.name != choice.pick:
        how = "" if score.rmse < scores[choice.pick].rmse else ", by the density of the true values"
        said.append(
            f"Before the test the choice was {choice.pick}; on the test rows {name} is clearly "
            f"better{how}."
        )
    same = [
        other for other in scores
        if other not in (name, choice.pick, *choice.beaten) and not scores[other].is_missing
    ]  # fmt: skip
    if choice.beaten:
        said.append(f"Its errors are clearly smaller than those of {_listed(choice.beaten)}.")
    if same:
        said.append(f"Between {_listed([name, *same])} the differences may be chance.")
    return said


def _listed(names: Sequence[str]) -> str:
    return joined(["the mean" if name == "mean" else name for name in names])


def columns_in_words(effects: Sequence[ColumnEffect]) -> str:
    """A sentence on the columns that clearly matter."""
    clear = [effect for effect in effects if effect.is_clear]
    if not clear:
        return "No single column clearly matters to the predictions."
    first, *others = clear
    named = [effect.column for effect in clear[:_MOST_NAMED]]
    if more := len(clear) - len(named):
        named.append(f"{more} other{'s' if more > 1 else ''}")
    what = "columns that clearly matter are" if others else "one column that clearly matters is"
    return (
        f"The {what} {joined(named)}: if the values of {first.column} are shuffled among the test "
        f"rows, the typical error rises by {figure(first.rise, 2)}."
    )


def noise_in_words(noise: float, choice: Choice, scores: Scores, model: str) -> str:
    """A sentence on how much of the error is scatter that the columns do not explain."""
    share = noise / scores[choice.name].rmse
    said = (
        f"According to {model}, rows with the same inputs scatter by {figure(noise)} (standard "
        "deviation). "
    )
    if share > 1 and model in choice.beaten:
        return (
            f"{said}{choice.name} is more exact: it finds a pattern that {model} takes for noise."
        )
    if share > 0.8:
        return f"{said}That is most of the error: further columns may help more than further rows."
    if share < 0.5:
        return f"{said}That is far less than the error: further rows may help."
    return f"{said}The rest of the error may shrink with further rows."


TEST_COLUMNS = "typical error", "explained", "interval width", "rows inside"
"""Names of the columns of the table of test scores."""


def score_table(
    choice: Choice, scores: Scores, marked: Mapping[str, str] | None = None
) -> pandas.DataFrame:
    """Test scores as texts: the chosen model, then the others from the smallest error on.

    ``marked`` has for models whose fit is in doubt what is shown after the name.
    """
    mean = scores["mean"].rmse if "mean" in scores else math.nan

    def rank(name: str) -> tuple[bool, bool, float]:
        return scores[name].is_missing, name != choice.name, scores[name].rmse

    rows: dict[str, list[str]] = {}
    for name in sorted(scores, key=rank):
        score = scores[name]
        rows[name + (marked or {}).get(name, "")] = [
            _with_error(score.rmse, score.rmse_se),
            percent(1 - (score.rmse / mean) ** 2 if mean > 0 else math.nan),
            figure(score.width),
            percent(score.coverage) if score.has_intervals else "",
        ]
    return _frame(rows, TEST_COLUMNS)


def criteria_table(
    comparison: Comparison, scores: Scores, fitted: Mapping[str, FittedModel]
) -> pandas.DataFrame:
    """The criteria as texts: a row for each GP, and test scores of the stack."""
    rows: dict[str, list[str]] = {}
    marked = marks(comparison, fitted)
    for name, line in comparison.table.to_dict("index").items():
        name = str(name)
        rows[name + marked[name]] = [
            _text(line["lml"]),
            _text(line["clml"], line["clml_se"]),
            _text(line["loo"], line["loo_se"]),
            "" if line["rank"] == 0 else _text(line["difference"], line["difference_se"]),
            _text(line["weight"], digits=2),
            *_density_cells(scores[name]),
            f"{fitted[name].seconds:.1f}",
        ]
    if "stack" in scores:
        rows["stack"] = [""] * 5 + [*_density_cells(scores["stack"]), ""]
    columns = "LML", "CLML", "LOO", "LOO less first", "weight", "test NLL", "rows inside", "seconds"
    return _frame(rows, columns)


def _density_cells(scores: PredictionScores) -> list[str]:
    if not scores.has_intervals:
        return ["", ""]
    inside = f"{percent(scores.coverage)} ± {percent(scores.coverage_se)}"
    return [_with_error(scores.nll, scores.nll_se), inside]


def effect_table(effects: Sequence[ColumnEffect]) -> pandas.DataFrame:
    """How much the typical error rises by each column that matters, as texts."""
    rows = {each.column: [_with_error(each.rise, each.error)] for each in effects[:_MOST_EFFECTS]}
    return _frame(rows, ["typical error rises by"])


def input_table(encoding: InputEncoding) -> pandas.DataFrame:
    """How many inputs each column becomes, and how."""
    rows = {column.name: [str(len(column.inputs)), _how(column)] for column in encoding.columns}
    rows |= {name: ["0", f"left out: {reason}"] for name, reason in encoding.left_out.items()}
    return _frame(rows, ["inputs", "as"])


def _how(column: NumberColumn | CategoryColumn) -> str:
    if isinstance(column, CategoryColumn):
        shown = ", ".join(column.levels[:_MOST_SHOWN])
        more = ", ..." if len(column.levels) > _MOST_SHOWN else ""
        missing = "; missing is a level of its own" if column.has_missing else ""
        return f"an input for each of {len(column.levels)} levels: {shown}{more}{missing}"
    what = {"number": "number", "boolean": "0 and 1", "date": "days since 1970"}[column.kind]
    return f"{what}, and an input that says where it is missing" if column.has_missing else what


def _frame(rows: dict[str, list[str]], columns: Sequence[str]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame.from_dict(rows, orient="index", columns=list(columns))


_MARKS = {
    "fit-failed": "fit failed",
    "below-contained": "fit failed",
    "predicts-mean": "predicts the mean",
}
_NOISE_AT_BOUND = "The noise ended at its lower bound"


def marks(comparison: Comparison, fitted: Mapping[str, FittedModel]) -> dict[str, str]:
    """What is shown after the name of each model whose fit failed or is in doubt; else nothing."""
    marked = {}
    for name, findings in comparison.table["findings"].items():
        said = dict.fromkeys(_MARKS[finding] for finding in findings if finding in _MARKS)
        if not said and fitted[str(name)].note.startswith(_NOISE_AT_BOUND):
            said = ["noise at its bound"]
        marked[str(name)] = f" ({', '.join(said)})" if said else ""
    return marked


def figure(value: float, digits: int = 3) -> str:
    """A number rounded to so many digits, written out where that is short; empty for NaN."""
    if math.isnan(value) or value == 0:
        return "" if math.isnan(value) else "0"
    if not 1e-4 <= abs(value) < 1e7:
        return _minus(f"{value:.{digits}g}")
    return _rounded(value, digits - 1 - math.floor(math.log10(abs(value))))


def percent(share: float) -> str:
    """A share in percent, rounded to a whole number, with a non-breaking space; empty for NaN."""
    return "" if math.isnan(share) else _minus(f"{round(100 * share)}\N{NO-BREAK SPACE}%")


def _text(value: float, error: float = math.nan, digits: int = 1) -> str:
    """A number and its error, if it has one, as text; empty for NaN."""
    text = "" if math.isnan(value) else _minus(f"{value:.{digits}f}")
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def _with_error(value: float, error: float) -> str:
    """A value and its error, rounded to two digits of the error."""
    if not error > 0:
        return figure(value)
    if not 1e-4 <= abs(value) < 1e7:
        return f"{figure(value)} ± {figure(error, 2)}"
    decimals = 1 - math.floor(math.log10(error))
    return f"{_rounded(value, decimals)} ± {_rounded(error, decimals)}"


def _rounded(value: float, decimals: int) -> str:
    return _minus(f"{round(value, decimals):.{max(decimals, 0)}f}")


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")
