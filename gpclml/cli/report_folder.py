"""The folder of a report: page, figures of all kinds as data, models, and the Python file."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.cli.errors import FitError, error_text
from gpclml.cli.folders import WorkFolder
from gpclml.cli.options import CompareOptions, FitOptions
from gpclml.cli.report import (
    PredictionScores,
    Report,
    package_versions,
    page_of,
    predicted,
    prediction_scores,
    script_of,
)
from gpclml.cli.saved_models import SavedModel
from gpclml.cli.table_data import TableData
from gpclml.cli.threads import one_thread_serves
from gpclml.cli.warned import warned
from gpclml.evaluation import score_models
from gpclml.models import GPRegression

__all__ = ["REPORT_FILES", "add_report", "make_report"]

REPORT_FILES = ("index.html", "model.py", "table.json")
"""The files of a report, beside its record and its models."""


def make_report(
    options: CompareOptions,
    data: TableData,
    saved: Mapping[str, SavedModel],
    notes: tuple[str, ...],
    progress: bool,
) -> Report:
    """Scores fitted models on the training rows and on the test rows.

    Args:
        options: What was compared, and how.
        data: The table.
        saved: The models.
        notes: Sentences on them, beside those on the table.
        progress: Whether to show progress bars on standard error.

    Raises:
        NonFiniteError, NotPSDError: No model can be scored.
        FitError: No model can predict the test rows.
    """
    models = {name: one.model for name, one in saved.items()}
    x, y = data.test
    with warned() as said:
        problems = {name: one.fitted.problem for name, one in saved.items()}
        comparison = score_models(
            models, seed=options.table.seed, problems=problems, progress=progress
        )
        predictions, failures = _predictions(comparison.models, x, y, progress)
    chosen = replace(options.recipe, model=next(iter(comparison.models)))
    return Report(
        data=options.table.data,
        sha256=data.sha256,
        comparison=comparison,
        predictions=predictions,
        fitted={name: saved[name].fitted for name in comparison.models},
        encoding=data.encoding,
        notes=(*data.notes, *notes, *failures, *said),
        command=options.command,
        fit_command=FitOptions(options.table, chosen, Path("model")).command,
        folder=os.getcwd(),
        versions=package_versions(),
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _predictions(
    models: Mapping[str, ExactGP], x: Tensor, y: Tensor, progress: bool
) -> tuple[dict[str, PredictionScores], list[str]]:
    """Scores on the test rows, and sentences on the models that could not predict them."""
    found: dict[str, PredictionScores] = {}
    failures = []
    for name, model in models.items():
        try:
            assert isinstance(model, GPRegression)
            found[name] = prediction_scores(y, *predicted(model, x, progress))
        except Exception as error:
            found[name] = PredictionScores.missing(len(y))
            failures.append(f"{name} could not predict the test rows: {error_text(error)}")
    if len(failures) == len(models):
        raise FitError(" ".join(failures))
    return found, failures


def add_report(work: WorkFolder, report: Report, options: CompareOptions) -> dict[str, Any]:
    """Writes the page, the encoding, and the Python file.

    Args:
        work: Where to; its models are there.
        report: What to write.
        options: What was compared, and how.

    Returns:
        What the page says as data: what the record of the folder is to say.
    """
    recipe = report.fitted[report.chosen].recipe
    script = script_of(
        recipe, report.data.absolute(), options.table.rows, options.table.seed,
        report.versions["gpclml"], one_thread_serves(len(report.comparison.targets)),
    )  # fmt: skip
    work.add_text("index.html", page_of(report))
    work.add_text("model.py", script)
    work.add({"table.json": report.encoding.save})
    return _record(report)


def _record(report: Report) -> dict[str, Any]:
    table = report.comparison.table
    return {
        "command": report.command,
        "data": str(report.data),
        "sha256": report.sha256,
        "chosen": report.chosen,
        "models": {
            str(name): {**_numbers(line.to_dict()), **_test_scores(report.predictions[str(name)])}
            for name, line in table.iterrows()
        },
        "fitted": {name: asdict(one) for name, one in report.fitted.items()},
        "sentences": list(report.comparison.sentences),
        "notes": list(report.notes),
        "packages": dict(report.versions),
        "made": report.made,
    }


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name; NaN, which JSON has not, as null."""
    return {
        str(key): list(value) if isinstance(value, tuple) else None if value != value else value
        for key, value in line.items()
    }


def _test_scores(scores: PredictionScores) -> dict[str, Any]:
    names = "rmse", "rmse_se", "nll", "nll_se", "coverage", "coverage_se"
    return _numbers({f"test_{name}": getattr(scores, name) for name in names})
