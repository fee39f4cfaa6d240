"""The page of a comparison, one HTML file with its figures, and the same as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpclml.cli.options import RunOptions
from gpclml.cli.report.figures import figure_of_test_rows, figures_of_criteria
from gpclml.cli.report.predictions import Choice, ColumnEffect, PredictionScores
from gpclml.cli.report.recipes import (
    DESCRIPTIONS,
    MODELS,
    STACK,
    FittedModel,
    Recipe,
    package_versions,
    rendered,
)
from gpclml.cli.report.words import (
    CRITERIA_COLUMNS,
    TEST_COLUMNS,
    answer,
    column_rows,
    columns_in_words,
    criteria_rows,
    effect_rows,
    headline,
    noise_in_words,
    score_rows,
)
from gpclml.cli.table_data import TableData
from gpclml.cli.yardsticks import YARDSTICKS
from gpclml.evaluation import Comparison

__all__ = ["Report", "page_of", "report_text"]


@dataclass(frozen=True, eq=False)
class Report:
    """The content of a report.

    ``comparison`` is of the models on the training rows; ``predictions`` has their scores on the
    test rows, ``others`` those of what is no model of the comparison; ``effects`` are of the chosen
    model, ``noise`` is of the first-ranked one; ``notes`` say what was done with rows, columns and
    models, and why.
    """

    options: RunOptions
    data: TableData
    comparison: Comparison
    predictions: Mapping[str, PredictionScores]
    others: Mapping[str, PredictionScores]
    choice: Choice
    effects: tuple[ColumnEffect, ...]
    noise: float
    fitted: Mapping[str, FittedModel]
    notes: tuple[str, ...]
    made: str

    @property
    def first(self) -> str:
        """The model that ranks first, which ``model.py`` rebuilds."""
        return str(self.comparison.table.index[0])

    @property
    def scores(self) -> Mapping[str, PredictionScores]:
        """Scores on the test rows of all that predicted them."""
        return {**self.predictions, **self.others}

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
        return {**YARDSTICKS, **{name: DESCRIPTIONS[name] for name in self.predictions}}

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
    choice = report.choice
    fitted = choice.name if choice.name in (*MODELS, STACK) else choice.pick
    recipe = report.options.recipe
    if fitted == STACK:  # which has no other objective and no limit of steps
        recipe = Recipe(STACK, seed=recipe.seed, restarts=recipe.restarts)
    else:
        recipe = replace(recipe, model=fitted)
    return rendered(
        "page.html.jinja",
        report=report,
        target=encoding.target,
        headline=headline(choice, encoding.target),
        num_test=len(report.data.test[1]),
        descriptions=[(name, report.texts[name]) for name in scores],
        test_columns=TEST_COLUMNS,
        score_rows=score_rows(choice, scores),
        figure=figure_of_test_rows(choice.name, report.data.test[1], scores[choice.name]),
        effects=effect_rows(report.effects),
        objective=report.options.recipe.objective.upper(),
        criteria_columns=CRITERIA_COLUMNS,
        criteria_rows=criteria_rows(comparison, scores, report.fitted),
        columns=column_rows(encoding),
        fitted=fitted,
        fit_command=RunOptions(report.options.table, recipe, Path("model")).command("fit"),
        folder=os.getcwd(),
        versions=package_versions(),
        figures=figures_of_criteria(comparison, one_input=len(encoding.inputs) == 1),
    )


_OF_FITS = "fit-failed", "below-contained", "not-scored"


def report_text(report: Report) -> list[str]:
    """What the page says, in lines for a terminal."""
    import pandas

    comparison, rows = report.comparison, score_rows(report.choice, report.scores)
    table = pandas.DataFrame(
        [[f"{text} ± {error}" if error else text for text, error in cells] for _, cells in rows],
        [name for name, _ in rows], TEST_COLUMNS,
    )  # fmt: skip
    criteria = comparison.sentences[: len(comparison.sentences) - len(comparison.findings)]
    said = [
        headline(report.choice, report.data.encoding.target),
        " ".join(report.answer),
        "",
        *table.to_string().split("\n"),
        "",
        *report.columns,
        *([f"Of the single Gaussian processes: {' '.join(criteria)}"] if criteria else []),
        *(one.text for one in comparison.findings if one.name in _OF_FITS),
    ]
    return [line.replace("\N{MINUS SIGN}", "-") for line in said]  # code pages of Windows lack it
