"""The report of a comparison: sentences, tables and figures, as one HTML file and as text."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import style
from matplotlib.figure import Figure
from torch import Tensor

from gpclml.evaluation import (
    CRITERIA,
    Comparison,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
)
from gpclml.evaluation.comparison import joined
from gpclml.evaluation.plots import GUIDE, style_of
from gpclml.tables.data import TableData
from gpclml.tables.fitting import RunOptions, SavedModel, package_versions
from gpclml.tables.predictions import (
    PREDICTED_SHARE,
    YARDSTICKS,
    Choice,
    ColumnEffect,
    PredictionScores,
)
from gpclml.tables.recipes import DESCRIPTIONS, MODELS, STACK

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray


Scores = Mapping[str, PredictionScores]

_COMPARED = {"mean": "the mean has", "linear": "a linear model", "trees": "trees"}
_MOST_NAMED = 4  # columns


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
        said.append(
            f"Before the test the choice was {choice.pick}; on the test rows {name} is clearly "
            "better."
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
    named = [effect.column for effect in clear[:_MOST_NAMED]]
    if more := len(clear) - len(named):
        named.append(f"{more} other{'s' if more > 1 else ''}")
    what = "columns that clearly matter are"
    if len(clear) == 1:
        what = "one column that clearly matters is"
    return (
        f"The {what} {joined(named)}: if the values of {named[0]} are shuffled among the test "
        f"rows, the typical error rises by {figure(clear[0].rise, 2)}."
    )


def score_table(
    choice: Choice, scores: Scores, marked: Mapping[str, str] | None = None
) -> pandas.DataFrame:
    """Test scores as texts: the chosen model, then the others from the smallest error on.

    ``marked`` has for models whose fit is in doubt what is shown after the name.
    """
    mean = scores["mean"].rmse if "mean" in scores else math.nan
    order = sorted(
        scores, key=lambda name: (scores[name].is_missing, name != choice.name, scores[name].rmse)
    )
    rows = {
        name + (marked or {}).get(name, ""): {
            "typical error": value_and_error(scores[name].rmse, scores[name].rmse_se),
            "explained": percent(1 - (scores[name].rmse / mean) ** 2 if mean > 0 else math.nan),
            "interval width": figure(scores[name].width),
            "rows inside": percent(scores[name].coverage),
        }
        for name in order
    }
    return pandas.DataFrame.from_dict(rows, orient="index")


_MARKS = {
    "fit-failed": "fit failed",
    "predicts-mean": "predicts the mean",
}
_NOISE_AT_BOUND = "The noise ended at its lower bound"


def marks(comparison: Comparison, fitted: Mapping[str, SavedModel]) -> dict[str, str]:
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
    if _is_long(value):
        return f"{value:.{digits}g}"
    return f"{Decimal(f'{value:#.{digits}g}'):f}"


def percent(share: float) -> str:
    """A share in percent, rounded to a whole number, with a non-breaking space; empty for NaN."""
    return "" if math.isnan(share) else f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


def criterion_text(value: float, error: float = math.nan, digits: int = 1) -> str:
    """A number and its error, if it has one, as text; empty for NaN."""
    text = "" if math.isnan(value) else f"{value:.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def value_and_error(value: float, error: float) -> str:
    """A value and its error, rounded to two digits of the error."""
    if not error > 0:
        return figure(value)
    if _is_long(value):
        return f"{figure(value)} ± {figure(error, 2)}"
    digits = Decimal(f"{error:.1e}")
    return f"{Decimal(value).quantize(digits):f} ± {digits:f}"


def _is_long(value: float) -> bool:
    return not 1e-4 <= abs(value) < 1e7


@dataclass(frozen=True, eq=False)
class Report:
    """The content of a report.

    ``comparison`` is of the models on the training rows; ``scores`` are those on the test rows, of
    the models and of others; ``effects`` are of the chosen model; ``notes`` say what was done with
    rows, columns and models, and why.
    """

    options: RunOptions
    data: TableData
    comparison: Comparison
    scores: Mapping[str, PredictionScores]
    choice: Choice
    effects: tuple[ColumnEffect, ...]
    fitted: Mapping[str, SavedModel]
    notes: tuple[str, ...]
    made: str

    @property
    def texts(self) -> Mapping[str, str]:
        """What each model is."""
        return {**YARDSTICKS, **{name: DESCRIPTIONS[name] for name in self.fitted}}

    @property
    def words(self) -> dict[str, Any]:
        """What page and terminal both say: headline, answer, table of scores, and columns."""
        count, column = len(self.data.test[1]), self.options.table.time_column
        rows = f"{count} test rows" if column is None else f"latest {count} rows by {column}"
        rows = f"the {rows}, which no fit has seen,"
        description = self.texts[self.choice.name]
        marked = marks(self.comparison, self.fitted)
        return {
            "headline": headline(self.choice, self.options.table.target),
            "answer": " ".join(answer(self.choice, description, self.scores, rows)),
            "score_table": score_table(self.choice, self.scores, marked),
            "columns": columns_in_words(self.effects),
            "marks": marked,
        }


def page_of(report: Report) -> str:
    """The page as HTML, with style and figures in it, so that it needs no other file."""
    comparison, choice, recipe = report.comparison, report.choice, report.options.recipe
    fitted = choice.name if choice.name in (*MODELS, STACK) else choice.pick
    if fitted == STACK:  # which has no other objective and no limit of steps
        recipe = replace(recipe, objective="lml", steps=None)
    command = RunOptions(report.options.table, replace(recipe, model=fitted), Path("model"))
    targets = report.data.test[1]
    return rendered(
        "page.html.jinja",
        report=report,
        **report.words,
        fitted=fitted,
        fit_command=command.command("fit"),
        versions=package_versions(),
        num_test=len(targets),
        most_drawn=_MOST_DRAWN,
        figure=figure_of_test_rows(targets, report.scores[choice.name]),
        figures=figures_of_criteria(comparison, one_input=len(report.data.encoding.names) == 1),
        models=joined(list(comparison.models)),
    )


def rendered(template: str, **values: Any) -> str:
    """A template of this folder with these values."""
    # Names of columns, levels and files are escaped.
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.globals.update(
        percent=percent, value_and_error=value_and_error, criterion_text=criterion_text
    )
    return templates.get_template(template).render(**values)


_ON_FITS = "fit-failed", "not-scored"


def report_text(report: Report) -> list[str]:
    """What the page says, in lines for a terminal."""
    comparison, fitted, words = report.comparison, report.fitted, report.words
    # Sentences end with the findings, of which a terminal shows those on fits alone.
    criteria = comparison.sentences[: len(comparison.sentences) - len(comparison.findings)]
    return [
        words["headline"],
        words["answer"],
        "",
        *words["score_table"].to_string().split("\n"),
        "",
        words["columns"],
        *([f"Of the single Gaussian processes: {' '.join(criteria)}"] if criteria else []),
        *(finding.text for finding in comparison.findings if finding.name in _ON_FITS),
        *(f"{name}: {fit.note}" for name, fit in fitted.items() if fit.note and not fit.problem),
    ]


# Letters of 10 points in 5.6 inches are legible on a page 390 pixels wide, and not large on a wide
# one; 1120 dots are sharp on both.
_INCHES, _DOTS_PER_INCH = 5.6, 200
_MOST_DRAWN = 150  # test rows


def figure_of_test_rows(targets: Tensor, scores: PredictionScores) -> str:
    """The test rows: true values against predictions, with 90 % intervals if there are any."""
    rows = torch.linspace(0, len(targets) - 1, min(len(targets), _MOST_DRAWN)).round().long()
    true, mean, lower, upper = (
        values[rows].numpy() for values in (targets, scores.means, scores.lower, scores.upper)
    )
    outside = (true < lower) | (true > upper)

    def draw(panels: NDArray[np.object_]) -> None:
        axes: Axes = panels[0]
        ends = [min(true.min(), mean.min()), max(true.max(), mean.max())]
        axes.plot(ends, ends, **GUIDE)
        if scores.has_intervals:
            axes.vlines(mean, lower, upper, color="gray", alpha=0.35, linewidth=1.5)
        for shown, style_number, mark, size, where in (
            (~outside, 0, "o", 18, "inside"),
            (outside, 5, "X", 36, "outside"),
        ):
            if shown.any():
                label = f"{where} its 90 % interval" if scores.has_intervals else "test row"
                axes.scatter(
                    mean[shown], true[shown], s=size, marker=mark,
                    color=style_of(style_number)["color"],
                    label=label, zorder=3,
                )  # fmt: skip
        axes.set(xlabel="prediction", ylabel="true value")
        axes.legend(loc="upper left", frameon=False, fontsize=9)

    return drawn(draw, 1, 4.2)


def figures_of_criteria(comparison: Comparison, one_input: bool) -> dict[str, str]:
    """What the criteria say of the GPs on the training rows: addresses of figures by name."""
    count = len(comparison.models)

    def criteria(axes: NDArray[np.object_]) -> None:
        for criterion, panel in zip(CRITERIA, axes, strict=True):
            plot_compare(comparison, criterion, ax=panel)

    figures = {
        "criteria": drawn(criteria, 3, 1.2 + 3 * (0.55 + 0.35 * count)),
        "curves": drawn(lambda axes: plot_learning_curves(comparison, ax=axes), 2, 5.6),
        "calibration": drawn(lambda axes: plot_calibration(comparison, ax=axes), 2, 5.6),
    }
    if one_input:
        height = 0.6 + 1.9 * count
        figures["fits"] = drawn(lambda axes: plot_fit(comparison, ax=axes), count, height)
    return figures


def drawn(draw: Callable[[NDArray[np.object_]], object], panels: int, height: float) -> str:
    """Draws a figure, with no regard to the user's own style; an address that holds it."""
    with style.context("default"):
        figure = Figure(figsize=(_INCHES, height), layout="constrained")
        draw(figure.subplots(panels, 1, squeeze=False).ravel())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
