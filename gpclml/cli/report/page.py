"""The page of a comparison, one HTML file with its figures, and the same as text."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    Comparison,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


_DOTS_PER_INCH = 200  # 1120 pixels wide: sharp on a phone and on a wide screen


def _figures(comparison: Comparison, one_input: bool) -> list[tuple[str, str, str]]:
    """What each figure shows, how to read it, and the image as a data URI."""
    drawn = (
        (
            "What the criteria say",
            "Each panel is a criterion and each dot a model, placed by its difference to the "
            "first-ranked model: a dot clearly to the right of the line is a model that this "
            "criterion prefers to that one.",
            plot_compare(comparison),
        ),
        (
            "How the models learn",
            "Above: how well the next row is predicted from the rows before it (higher is better). "
            "Below: what a model gains on the first-ranked one in all rows so far. The last value "
            "is the difference in LML; the rows before the dotted line do not count for the CLML.",
            plot_learning_curves(comparison),
        ),
        (
            "Whether their intervals hold",
            "Lines should stay in the grey band. A model whose line is below the band in the lower "
            "panel, or high at both ends in the upper one, is too sure of its predictions.",
            plot_calibration(comparison),
        ),
        (
            "How they fit the training rows",
            "Mean and two standard deviations of new observations along the input. Dots are rows."
            if one_input
            else "The target of each row against its prediction from all other rows, with two "
            "standard deviations: dots should lie along the line.",
            plot_fit(comparison),
        ),
    )
    return [(title, reading, _address(figure)) for title, reading, figure in drawn]


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


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
