"""The page of a comparison, one HTML file with its figures, and the same as text."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
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
from gpclml.tables.predictions import YARDSTICKS, Choice, ColumnEffect, PredictionScores
from gpclml.tables.recipes import (
    DESCRIPTIONS,
    MODELS,
    STACK,
    FittedModel,
    Recipe,
    RunOptions,
    package_versions,
)
from gpclml.tables.words import (
    answer,
    columns_in_words,
    criteria_table,
    effect_table,
    headline,
    input_table,
    marks,
    noise_in_words,
    score_table,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = [
    "Report",
    "figure_of_test_rows",
    "figures_of_criteria",
    "page_of",
    "report_text",
]


@dataclass(frozen=True, eq=False)
class Report:
    """The content of a report.

    ``comparison`` is of the models on the training rows; ``scores`` are those on the test rows, of
    the models and of others; ``effects`` are of the chosen model, ``noise`` is of the first-ranked
    one; ``notes`` say what was done with rows, columns and models, and why.
    """

    options: RunOptions
    data: TableData
    comparison: Comparison
    scores: Mapping[str, PredictionScores]
    choice: Choice
    effects: tuple[ColumnEffect, ...]
    noise: float
    fitted: Mapping[str, FittedModel]
    notes: tuple[str, ...]
    made: str

    @property
    def first(self) -> str:
        """The model that ranks first."""
        return str(self.comparison.table.index[0])

    @property
    def answer(self) -> list[str]:
        """Sentences on the chosen model."""
        count, column = len(self.data.test[1]), self.options.table.time_column
        which = f"{count} test rows, which no fit has seen,"
        if column is not None:
            which = f"latest {count} rows by {column}, which no fit has seen,"
        return answer(self.choice, self.texts[self.choice.name], self.scores, f"the {which}")

    @property
    def texts(self) -> Mapping[str, str]:
        """What each model is."""
        return {**YARDSTICKS, **{name: DESCRIPTIONS[name] for name in self.fitted}}

    @property
    def columns(self) -> list[str]:
        """Sentences on the columns that matter, and on the noise."""
        said = [columns_in_words(self.effects)]
        if self.noise == self.noise:  # else the model has none that can be told
            said.append(noise_in_words(self.noise, self.choice, self.scores, self.first))
        return said


def page_of(report: Report) -> str:
    """The page as HTML, with style and figures in it, so that it needs no other file."""
    comparison, encoding, scores = report.comparison, report.data.encoding, report.scores
    choice, recipe = report.choice, report.options.recipe
    fitted = choice.name if choice.name in (*MODELS, STACK) else choice.pick
    if fitted == STACK:  # which has no other objective and no limit of steps
        recipe = Recipe(STACK, seed=recipe.seed, restarts=recipe.restarts)
    else:
        recipe = replace(recipe, model=fitted)
    # Names of columns, levels and files are escaped.
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return templates.get_template("page.html.jinja").render(
        report=report,
        target=report.options.table.target,
        headline=headline(choice, report.options.table.target),
        num_test=len(report.data.test[1]),
        descriptions=[(name, report.texts[name]) for name in scores],
        score_table=score_table(choice, scores, marks(comparison, report.fitted)),
        table=_table,
        figure=figure_of_test_rows(report.data.test[1], scores[choice.name]),
        is_drawn_in_part=len(report.data.test[1]) > _MOST_DRAWN,
        effect_table=effect_table(report.effects),
        objective=report.options.recipe.objective.upper(),
        criteria_table=criteria_table(comparison, scores, report.fitted),
        input_table=input_table(encoding),
        fitted=fitted,
        fit_command=RunOptions(report.options.table, recipe, Path("model")).command("fit"),
        versions=package_versions(),
        figures=figures_of_criteria(comparison, one_input=len(encoding.names) == 1),
        models=joined(list(comparison.models)),
    )


def _table(frame: pandas.DataFrame, classes: str) -> str:
    """A table of texts as HTML; what has a meaning there is escaped."""
    import pandas

    with pandas.option_context("display.max_colwidth", None):
        return Markup(frame.to_html(border=0, classes=classes, escape=True))


_ON_FITS = "fit-failed", "below-contained", "not-scored"


def report_text(report: Report) -> list[str]:
    """What the page says, in lines for a terminal."""
    comparison, fitted = report.comparison, report.fitted
    table = score_table(report.choice, report.scores, marks(comparison, fitted))
    criteria = comparison.sentences[: len(comparison.sentences) - len(comparison.findings)]
    said = [
        headline(report.choice, report.options.table.target),
        " ".join(report.answer),
        "",
        *table.to_string().split("\n"),
        "",
        *report.columns,
        *([f"Of the single Gaussian processes: {' '.join(criteria)}"] if criteria else []),
        *(finding.text for finding in comparison.findings if finding.name in _ON_FITS),
        *(f"{name}: {fit.note}" for name, fit in fitted.items() if fit.note and not fit.problem),
    ]
    return [line.replace("\N{MINUS SIGN}", "-") for line in said]  # code pages of Windows lack it


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
        axes.legend(loc="upper left", frameon=False, fontsize="small")

    return _drawn(draw, 1, 4.2)


def figures_of_criteria(comparison: Comparison, one_input: bool) -> dict[str, str]:
    """What the criteria say of the GPs on the training rows: addresses of figures by name."""
    count = len(comparison.models)

    def criteria(axes: NDArray[np.object_]) -> None:
        for criterion, panel in zip(CRITERIA, axes, strict=True):
            plot_compare(comparison, criterion, ax=panel)

    figures = {
        "criteria": _drawn(criteria, 3, 1.2 + 3 * (0.55 + 0.35 * count)),
        "curves": _drawn(lambda axes: plot_learning_curves(comparison, ax=axes), 2, 5.6),
        "calibration": _drawn(lambda axes: plot_calibration(comparison, ax=axes), 2, 5.6),
    }
    if one_input:
        height = 0.6 + 1.9 * count
        figures["fits"] = _drawn(lambda axes: plot_fit(comparison, ax=axes), count, height)
    return figures


def _drawn(draw: Callable[[NDArray[np.object_]], object], panels: int, height: float) -> str:
    """Draws a figure, with no regard to the user's own style; an address that holds it."""
    with style.context("default"):
        figure = Figure(figsize=(_INCHES, height), layout="constrained")
        draw(figure.subplots(panels, 1, squeeze=False).ravel())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
