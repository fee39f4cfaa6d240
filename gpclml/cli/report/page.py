"""The page of a comparison, one HTML file with its figures, and the same as text."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpclml._utils.files import printable
from gpclml.cli.report.predictions import PredictionScores
from gpclml.cli.report.recipes import DESCRIPTIONS, FittedModel
from gpclml.cli.report.words import (
    MODEL_COLUMNS,
    answer,
    choice_rows,
    column_rows,
    headline,
    left_out_rows,
    model_rows,
)
from gpclml.cli.tables import TableEncoding
from gpclml.evaluation import (
    Comparison,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PageFigure", "Report", "page_figures", "page_of", "report_text"]


@dataclass(frozen=True, eq=False)
class Report:
    """The content of a report.

    Attributes:
        data: Path of the table.
        sha256: SHA-256 of the table.
        comparison: Comparison of the models on the training rows.
        predictions: Scores on the test rows, by model.
        fitted: How each model was fitted.
        encoding: How columns became inputs.
        notes: Sentences on rows, columns and models: what was done, and why.
        command: The command that made the report.
        fit_command: The command that fits the chosen model on all rows.
        folder: The current folder of the command.
        versions: Versions of packages, by name.
        made: Date and time of the report.
    """

    data: Path
    sha256: str
    comparison: Comparison
    predictions: Mapping[str, PredictionScores]
    fitted: Mapping[str, FittedModel]
    encoding: TableEncoding
    notes: tuple[str, ...]
    command: str
    fit_command: str
    folder: str
    versions: Mapping[str, str]
    made: str

    @property
    def chosen(self) -> str:
        """The model that ranks first."""
        return str(self.comparison.table.index[0])


def page_of(report: Report) -> str:
    """The page as HTML, with style and figures in it, so that it needs no other file.

    Args:
        report: The content of the page.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Names of columns, levels and files may be any text: everything that is inserted is escaped.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(_values(report))


def _values(report: Report) -> dict[str, Any]:
    comparison, predictions = report.comparison, report.predictions
    first = next(iter(predictions.values()))
    return {
        "report": report,
        "target": report.encoding.target,
        "headline": headline(comparison, report.encoding.target),
        "answer": answer(comparison, predictions),
        "objective": next(iter(report.fitted.values())).recipe.objective.upper(),
        "num_train": len(comparison.targets),
        "num_test": len(first.log_densities),
        "num_given": comparison.m,
        "descriptions": [
            (name, DESCRIPTIONS[name]) for name in DESCRIPTIONS if name in predictions
        ],
        "num_orderings": len(comparison.orders),
        "model_columns": MODEL_COLUMNS,
        "models": model_rows(report.comparison, predictions, report.fitted),
        "fit_notes": [(name, one.note) for name, one in report.fitted.items() if one.note],
        "choices": choice_rows(comparison, predictions),
        "columns": column_rows(report.encoding),
        "left_out": left_out_rows(report.encoding),
        "figures": page_figures(comparison, one_input=len(report.encoding.inputs) == 1),
    }


_DOTS_PER_INCH = 200  # 1120 pixels wide: sharp on a phone and on a wide screen


@dataclass(frozen=True)
class PageFigure:
    """A figure of a page.

    Attributes:
        title: What the figure shows.
        reading: How to read it.
        address: The image as a data URI.
    """

    title: str
    reading: str
    address: str


def page_figures(comparison: Comparison, one_input: bool) -> tuple[PageFigure, ...]:
    """Figures of the criteria, of learning curves, of calibration, and of the fits.

    Args:
        comparison: Comparison of the models.
        one_input: Whether the models have a single input.
    """
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
    return tuple(PageFigure(title, reading, _address(figure)) for title, reading, figure in drawn)


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def report_text(report: Report) -> str:
    """The table of models and the sentences on it, for a terminal.

    Args:
        report: The content.
    """
    lines = [["model", *MODEL_COLUMNS]]
    for name, cells in model_rows(report.comparison, report.predictions, report.fitted):
        lines.append([name, *(f"{text} ± {error}" if error else text for text, error in cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    said = headline(report.comparison, printable(report.encoding.target))
    told = answer(report.comparison, report.predictions)
    text = "\n".join([*table, "", said, told, *report.comparison.sentences])
    return text.replace("\N{MINUS SIGN}", "-")  # code pages of Windows lack it
