"""The command ``compare``: fit, compare, report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import typer

from gpclml.command_line.chosen_by_size import check_size, default_models
from gpclml.command_line.errors import INTERRUPTED, FitError, error_text
from gpclml.command_line.fit_recipe import fit_recipe, made_from
from gpclml.command_line.folders import discard, open_work_folder, publish
from gpclml.command_line.options import CompareOptions
from gpclml.command_line.progress import shows_progress
from gpclml.command_line.report_folder import REPORT_RECORD, make_report, write_report
from gpclml.command_line.saved_models import (
    MODEL_RECORD,
    SavedModel,
    load_model_made_from,
    save_model,
)
from gpclml.command_line.table_data import TableData, read_table_data
from gpclml.command_line.threads import threads_for
from gpclml.report import Recipe, Report, report_text

__all__ = ["compare_table"]


def compare_table(options: CompareOptions, quiet: bool = False) -> Report:
    """Fits models of a table, compares them and writes the report.

    Each model is kept in the work folder as soon as it is fitted, and taken from there by a run
    that would fit it from the same data alike.

    Args:
        options: What to compare, and how.
        quiet: Whether nothing is told but the result.

    Returns:
        The report, as it was written.

    Raises:
        ArgumentError, DataError: Something is given wrong; nothing has been written.
        FitError: No model could be fitted.
        typer.Exit: On Ctrl-C, with code 130, where fitted models are kept.
    """
    data = read_table_data(options.table, tests=True)
    recipes, notes = _recipes(options, data)
    for note in () if quiet else (*data.notes, *notes):
        typer.echo(note, err=True)
    part = open_work_folder(options.out, REPORT_RECORD)
    try:
        with threads_for(len(data.train[1])):
            saved, failures = _fit_all(recipes, data, part / "models", quiet)
            report = make_report(options, data, saved, (*notes, *failures), shows_progress(quiet))
        write_report(part, report, options)
    except BaseException as error:
        kept = _kept(part)
        if not kept:
            discard(part)
        elif isinstance(error, KeyboardInterrupt):
            _tell_what_is_kept(part, kept)
            raise typer.Exit(INTERRUPTED) from None
        raise
    publish(part, options.out)
    typer.echo(report_text(report))
    typer.echo(f"\nReport: {options.out / 'index.html'}")
    return report


def _recipes(options: CompareOptions, data: TableData) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    num_train, num_inputs = data.train[0].shape
    names, notes = default_models(num_train, num_inputs)
    if options.models is not None:
        names, notes = options.models, ()
        check_size(names, num_train, num_inputs)
    return {name: replace(options.recipe, model=name) for name in names}, notes


def _fit_all(
    recipes: Mapping[str, Recipe], data: TableData, folder: Path, quiet: bool
) -> tuple[dict[str, SavedModel], list[str]]:
    """Models that could be fitted, and sentences on those that could not."""
    folder.mkdir(exist_ok=True)
    before = _kept_from_before(recipes, data, folder)
    saved: dict[str, SavedModel] = {}
    failures: list[str] = []
    for number, (name, recipe) in enumerate(recipes.items(), start=1):
        known = before.get(name)
        if not quiet:
            doing = "kept from before" if known else "fitting"
            typer.echo(f"{name} ({number} of {len(recipes)}): {doing}", err=True)
        try:
            saved[name] = known or fit_recipe(recipe, data, shows_progress(quiet))
        except FitError as error:
            failures.append(error_text(error))
            typer.echo(failures[-1], err=True)
            continue
        if known is None:
            save_model(folder / name, saved[name])
    if not saved:
        raise FitError("no model could be fitted. Look for columns of extreme values.")
    return saved, failures


def _kept_from_before(
    recipes: Mapping[str, Recipe], data: TableData, folder: Path
) -> dict[str, SavedModel]:
    """Models that these recipes would make of this data; all else in the folder is removed."""
    found: dict[str, SavedModel] = {}
    for other in folder.iterdir():
        recipe = recipes.get(other.name)
        known = recipe and load_model_made_from(other, made_from(recipe, data))
        if known:
            found[other.name] = known
        else:
            discard(other)
    return found


def _kept(part: Path) -> list[str]:
    """Names of the models in a work folder."""
    folders = (record.parent for record in part.glob(f"models/*/{MODEL_RECORD}"))
    return sorted(folder.name for folder in folders if folder.suffix != ".part")


def _tell_what_is_kept(part: Path, kept: list[str]) -> None:
    typer.echo(
        f"\nInterrupted. Fitted models are kept in {part}: {', '.join(kept)}. The same command "
        f"goes on from there; with --models {','.join(kept)} it compares these alone.",
        err=True,
    )
