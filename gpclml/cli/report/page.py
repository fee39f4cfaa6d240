"""The page of a comparison: one file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpclml.cli.report._page_tables import (
    MODEL_COLUMNS,
    choice_rows,
    column_rows,
    left_out_rows,
    model_rows,
)
from gpclml.cli.report.figures import page_figures
from gpclml.cli.report.fitted_model import FittedModel
from gpclml.cli.report.headline import answer, headline
from gpclml.cli.report.predictions import PredictionScores
from gpclml.cli.report.recipes import DESCRIPTIONS
from gpclml.cli.tables import TableEncoding
from gpclml.evaluation import Comparison

__all__ = ["Report", "page_of"]


@dataclass(frozen=True, eq=False)
class Report:
    """All that a page is made of.

    Attributes:
        data: Path of the table.
        sha256: Of its bytes.
        comparison: Of the models, on the training rows.
        predictions: Scores on the test part, by model.
        fitted: How each model was fitted.
        encoding: How columns became inputs.
        notes: Sentences on rows, columns and models: what was done, and why.
        command: What made the report.
        fit_command: What fits the chosen model on all rows.
        folder: Where that was typed.
        versions: Of packages, by name.
        made: Date and time.
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
    """The page as HTML: one text with its style and figures, that asks for no other file.

    Args:
        report: What it is made of.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Names of columns, levels and files are anyone's text: all that is inserted is escaped.
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
