"""The command ``compare``: fits models of a table, compares them and writes a report."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import typer

from gpclml.errors import UnknownNameError
from gpclml.evaluation import score_models
from gpclml.evaluation.comparison import failed_fits
from gpclml.models import GPRegression
from gpclml.tables.comparing_classes import TargetReport, compare_only
from gpclml.tables.data import TableData, read_table_data
from gpclml.tables.fitting import (
    MODEL_FILE,
    RunOptions,
    SavedModel,
    check_size,
    default_models,
    fit_recipe,
    limit_threads,
    load_model_made_from,
    made_from,
    package_versions,
    save_model,
)
from gpclml.tables.folders import open_work_folder, work_folder_of, write_record
from gpclml.tables.missing import filled
from gpclml.tables.page import Report, page_of, report_text
from gpclml.tables.predictions import (
    PredictionScores,
    Predictor,
    choose,
    column_effects,
    prediction_scores,
    yardsticks,
)
from gpclml.tables.recipes import AVERAGES, MODELS, Recipe
from gpclml.tables.terminal import (
    INTERRUPTED,
    FitError,
    error_text,
    give,
    shows_progress,
    tell,
    warned,
)

PAGE = "index.html"
"""The page of a report."""


def compare_table(options: RunOptions, quiet: bool = False) -> Report | TargetReport:
    """Fits models of a table, compares them and writes the report, which it returns.

    Each model is saved in the work folder as soon as it is fitted. If the run is interrupted, the
    next run takes the models from there that it would fit in the same way from the same data.
    """
    data = read_table_data(options.table, tests=True)
    if data.task != "regression":
        return compare_only(options, data, quiet)
    models, notes = default_models(*data.train[0].shape)
    if options.models is not None:
        models, notes = options.models, ()
        if unknown := [name for name in models if name not in MODELS]:
            raise UnknownNameError("models", unknown[0], MODELS)
        check_size(models, *data.train[0].shape)
    recipes = {name: replace(options.recipe, model=name) for name in models}
    for note in () if quiet else (*data.notes, *notes):
        tell(note)
    try:
        with open_work_folder(options.out, "report") as folder:
            limit_threads(len(data.train[1]))
            saved, failures = _fit_all(recipes, data, folder, quiet)
            others, missing = yardsticks(data.train, options.table.seed, data.encoding.categories)
            tell(*missing)
            said = (*notes, *failures, *missing)
            report = make_report(options, data, saved, said, shows_progress(quiet), others)
            tell(*(note for note in report.notes if note not in (*data.notes, *said)))
            write_report(folder, report, saved)
    except KeyboardInterrupt:
        folder = work_folder_of(options.out)
        kept = sorted(name for name in models if (folder / "models" / name / "model.json").exists())
        if not kept:
            raise
        tell(
            "",
            f"Interrupted. Fitted models are kept in {folder}: {', '.join(kept)}. The same command "
            f"continues from there; with --models {','.join(kept)} it compares only these.",
        )
        raise typer.Exit(INTERRUPTED) from None
    give(*report_text(report), "", f"Report: {options.out / PAGE}")
    return report


def _fit_all(
    recipes: Mapping[str, Recipe], data: TableData, folder: Path, quiet: bool
) -> tuple[dict[str, SavedModel], list[str]]:
    """The fitted models, and a sentence for each model that could not be fitted.

    Models of an interrupted run that these recipes would make of this data are taken as they are,
    and others removed.
    """
    kept = {
        name: load_model_made_from(folder / "models" / name, made_from(recipe, data))
        for name, recipe in recipes.items()
    }
    # Models of other recipes or data would be taken for those of this report.
    for name in (*MODELS, *AVERAGES):
        if kept.get(name) is None:
            shutil.rmtree(folder / "models" / name, ignore_errors=True)
    saved: dict[str, SavedModel] = {}
    failures: list[str] = []
    for number, (name, recipe) in enumerate(recipes.items(), start=1):
        model = kept[name]
        if not quiet:
            doing = "kept from before" if model else "fitting"
            tell(f"{name} ({number} of {len(recipes)}): {doing}")
        if model is None:
            try:
                model = fit_recipe(recipe, data, shows_progress(quiet))
            except FitError as error:
                failures.append(error_text(error))
                tell(failures[-1])
                continue
            save_model(folder / "models" / name, model)
        saved[name] = model
    if not saved:
        raise FitError("no model could be fitted. Look for columns with extreme values.")
    return saved, failures


def make_report(
    options: RunOptions,
    data: TableData,
    saved: Mapping[str, SavedModel],
    notes: tuple[str, ...],
    progress: bool,
    others: Mapping[str, Predictor],
) -> Report:
    """Scores fitted models on the training rows and on the test rows, and chooses one."""
    seed, (test_x, test_y) = options.table.seed, data.test
    with warned() as said:
        # None of them is a stack.
        models = {name: cast(GPRegression, model.model) for name, model in saved.items()}
        problems = {name: model.problem for name, model in saved.items()}
        comparison = score_models(models, seed=seed, problems=problems, progress=progress)
        predictors: dict[str, Predictor] = {
            name: partial(saved[name].predict, progress=progress) for name in comparison.models
        }
        predictors.update(others)
        scores, failures = {}, []
        for name, predict in predictors.items():
            try:
                scores[name] = prediction_scores(test_y, predict(test_x))
            except Exception as error:
                scores[name] = PredictionScores.missing(len(test_y))
                failures.append(f"{name} could not predict the test rows: {error_text(error)}")
        if all(scores[name].is_missing for name in models):
            raise FitError(" ".join(failures))
        # The choice is before the test, but for what the test rows show clearly.
        choice = choose(comparison.models, scores, failed_fits(comparison.findings))
        whole = filled(test_x, data.encoding.categories, seed, data.train[0])
        effects = column_effects(predictors[choice.name], data.encoding, (whole, test_y), seed)
    fitted = {name: saved[name] for name in comparison.models}
    notes = (*data.notes, *notes, *failures, *said)
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return Report(options, data, comparison, scores, choice, effects, fitted, notes, made)


def write_report(folder: Path, report: Report, saved: Mapping[str, SavedModel]) -> None:
    """Writes the page, and last the record, beside the saved models."""
    # Names of files may have bytes that are no UTF-8.
    (folder / PAGE).write_bytes(page_of(report).encode("utf-8", "backslashreplace"))
    files = [f"models/{name}/{file}" for name in saved for file in (MODEL_FILE, "model.json")]
    models = {
        str(name): _without_nan(line) | _test_scores(report.scores[str(name)])
        for name, line in report.comparison.table.to_dict("index").items()
    }
    content = {
        "command": report.options.command("compare"),
        "data": str(report.options.table.data),
        "sha256": report.data.sha256,
        "chosen": next(iter(models)),
        "recommended": report.choice.name,
        "models": models,
        "others": {
            name: _test_scores(scores)
            for name, scores in report.scores.items()
            if name not in models
        },
        "columns": [effect._asdict() for effect in report.effects],
        "fitted": {name: model.record for name, model in report.fitted.items()},
        "sentences": list(report.comparison.sentences),
        "notes": list(report.notes),
        "packages": package_versions(),
        "made": report.made,
    }
    write_record(folder, "report", content, [PAGE, *files])


def _test_scores(scores: PredictionScores) -> dict[str, Any]:
    names = "rmse", "rmse_se", "nll", "nll_se", "coverage", "coverage_se", "width"
    return _without_nan({f"test_{name}": getattr(scores, name) for name in names})


def _without_nan(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Values by name, with null for NaN, which JSON does not have."""
    return {str(name): None if value != value else value for name, value in values.items()}
