"""The page of a comparison, one HTML file with its figures, and the same as text."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpclml._utils.files import printable
from gpclml.cli.options import RunOptions
from gpclml.cli.report.predictions import PredictionScores
from gpclml.cli.report.recipes import DESCRIPTIONS, FittedModel, package_versions, rendered
from gpclml.cli.report.words import (
    MODEL_COLUMNS,
    answer,
    choice_rows,
    column_rows,
    headline,
    model_rows,
)
from gpclml.cli.table_data import TableData
from gpclml.cli.yardsticks import YARDSTICKS
from gpclml.evaluation import (
    CRITERIA,
    Comparison,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
)
from gpclml.evaluation.findings import joined

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Report", "page_of", "report_text"]


@dataclass(frozen=True, eq=False)
class Report:
    """The content of a report.

    Attributes:
        options: The options of the command.
        data: The table.
        comparison: Comparison of the models on the training rows.
        predictions: Scores on the test rows, by model.
        fitted: How each model was fitted.
        notes: Sentences on rows, columns and models: what was done, and why.
        made: Date and time of the report.
        others: Scores on the test rows of what is no model of the comparison.
    """

    options: RunOptions
    data: TableData
    comparison: Comparison
    predictions: Mapping[str, PredictionScores]
    fitted: Mapping[str, FittedModel]
    notes: tuple[str, ...]
    made: str
    others: Mapping[str, PredictionScores] = field(default_factory=dict)

    @property
    def chosen(self) -> str:
        """The model that ranks first."""
        return str(self.comparison.table.index[0])


def page_of(report: Report) -> str:
    """The page as HTML, with style and figures in it, so that it needs no other file."""
    comparison, predictions, encoding = report.comparison, report.predictions, report.data.encoding
    chosen = replace(report.options.recipe, model=report.chosen)
    return rendered(
        "page.html.jinja",
        report=report,
        target=encoding.target,
        headline=headline(comparison, encoding.target),
        answer=answer(comparison, predictions),
        objective=report.options.recipe.objective.upper(),
        num_test=len(report.data.test[1]),
        descriptions=[
            (name, text)
            for known, there in ((DESCRIPTIONS, predictions), (YARDSTICKS, report.others))
            for name, text in known.items()
            if name in there
        ],
        model_columns=MODEL_COLUMNS,
        models=model_rows(comparison, predictions, report.fitted, report.others),
        choices=choice_rows(comparison, predictions),
        columns=column_rows(encoding),
        fit_command=RunOptions(report.options.table, chosen, Path("model")).command("fit"),
        folder=os.getcwd(),
        versions=package_versions(),
        figures=_figures(comparison, one_input=len(encoding.inputs) == 1),
    )


class PageFigure(NamedTuple):
    """A figure of a page: what it shows, how to read it, and it for light and dark pages."""

    title: str
    reading: str
    light: str
    dark: str


def _figures(comparison: Comparison, one_input: bool) -> list[PageFigure]:
    count, names = len(comparison.models), list(comparison.models)

    def criteria(axes: NDArray[np.object_]) -> None:
        for criterion, one in zip(CRITERIA, axes, strict=True):
            plot_compare(comparison, criterion, ax=one)

    figures = [
        _drawn(
            "What the criteria say",
            "Each panel is a criterion. A dot is the score of a model, less that of the "
            "first-ranked one, with its standard error; a triangle is the same difference with "
            "the standard error of paired differences. This criterion prefers a model to the "
            "first-ranked one if its triangle is clearly to the right of the line.",
            criteria, 3, 1.2 + 3 * (0.55 + 0.35 * count),
        ),
        _drawn(
            "How the models learn",
            "Above: how well the next row is predicted from the rows before it (higher is better). "
            "Below: what a model gains on the first-ranked one in all rows so far. The last value "
            "is the difference in LML; the rows before the dotted line do not count for the CLML.",
            lambda axes: plot_learning_curves(comparison, ax=axes), 2, 5.6,
        ),
        _drawn(
            "Whether their intervals hold",
            "Lines should stay in the grey band. A model whose line is below the band in the lower "
            "panel, or high at both ends in the upper one, is too sure of its predictions.",
            lambda axes: plot_calibration(comparison, ax=axes), 2, 5.6,
        ),
    ]  # fmt: skip
    if one_input:
        figures.append(
            _drawn(
                "How they fit the training rows",
                "Mean and two standard deviations of new observations along the input, a panel for "
                f"each of {joined(names)}. Dots are rows.",
                lambda axes: plot_fit(comparison, ax=axes), count, 0.6 + 1.9 * count,
            )
        )  # fmt: skip
    return figures


# Letters of 10 points in 5.6 inches are legible on a page 390 pixels wide, and not large on a wide
# one; 1120 dots are sharp on both.
_INCHES, _DOTS_PER_INCH = 5.6, 200


def _drawn(
    title: str,
    reading: str,
    draw: Callable[[NDArray[np.object_]], object],
    panels: int,
    height: float,
) -> PageFigure:
    """Draws a figure for light and for dark pages, with no regard to the user's own style."""
    from matplotlib import rcParamsDefault, style
    from matplotlib.figure import Figure

    addresses = []
    for theme in ("default", "dark_background"):
        with style.context([theme, {"axes.prop_cycle": rcParamsDefault["axes.prop_cycle"]}]):
            figure = Figure(figsize=(_INCHES, height), layout="constrained")
            draw(figure.subplots(panels, 1, squeeze=False).ravel())
            buffer = io.BytesIO()
            figure.savefig(
                buffer, format="png", dpi=_DOTS_PER_INCH, transparent=True,
                metadata={"Software": None},
            )  # fmt: skip
        addresses.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return PageFigure(title, reading, *addresses)


def report_text(report: Report) -> str:
    """The table of models and the sentences on it, for a terminal."""
    import pandas

    rows = model_rows(report.comparison, report.predictions, report.fitted, report.others)
    table = pandas.DataFrame(
        [[f"{text} ± {error}" if error else text for text, error in cells] for _, cells in rows],
        [name for name, _ in rows], MODEL_COLUMNS,
    )  # fmt: skip
    said = headline(report.comparison, printable(report.data.encoding.target))
    told = answer(report.comparison, report.predictions)
    shown = table.rename_axis(columns="model").to_string()
    text = "\n".join([shown, "", said, told, *report.comparison.sentences])
    return text.replace("\N{MINUS SIGN}", "-")  # code pages of Windows lack it
