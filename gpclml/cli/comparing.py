"""The command ``compare``: fit, compare, report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import typer

from gpclml.cli.chosen_by_size import check_size, default_models
from gpclml.cli.errors import INTERRUPTED, FitError, error_text
from gpclml.cli.fit_recipe import fit_recipe, made_from
from gpclml.cli.folders import WorkFolder, open_work_folder
from gpclml.cli.options import CompareOptions, check_encodable
from gpclml.cli.progress import shows_progress
from gpclml.cli.records import REPORT
from gpclml.cli.report import Recipe, Report, report_text
from gpclml.cli.report_folder import REPORT_FILES, add_report, make_report
from gpclml.cli.saved_models import (
    SavedModel,
    add_named_model,
    load_model_made_from,
    names_of_model,
)
from gpclml.cli.table_data import TableData, read_table_data
from gpclml.cli.terminal import give, tell
from gpclml.cli.threads import threads_for

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
    check_encodable("data", str(options.table.data.absolute()))  # the page and the Python file say
    check_encodable("--out", str(options.out))  # where the table is, and what was typed where
    check_encodable("the current folder", os.getcwd())
    data = read_table_data(options.table, tests=True)
    recipes, notes = _recipes(options, data)
    for note in () if quiet else (*data.notes, *notes):
        tell(note)
    names = [*REPORT_FILES, *(file for name in recipes for file in names_of_model(name))]
    with open_work_folder(options.out, REPORT, names) as work:
        try:
            with threads_for(len(data.train[1])):
                saved, failures = _fit_all(recipes, data, work, quiet)
                said = (*notes, *failures)
                report = make_report(options, data, saved, said, shows_progress(quiet))
            work.publish(add_report(work, report, options))
        except BaseException as error:
            kept = _kept(recipes, work)
            if not kept:
                work.discard()
            elif isinstance(error, KeyboardInterrupt):
                _tell_what_is_kept(work.path, kept)
                raise typer.Exit(INTERRUPTED) from None
            raise
    give(*report_text(report).split("\n"), "", f"Report: {options.out / 'index.html'}")
    return report


def _recipes(options: CompareOptions, data: TableData) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    num_train, num_inputs = data.train[0].shape
    names, notes = default_models(num_train, num_inputs)
    if options.models is not None:
        names, notes = options.models, ()
        check_size(names, num_train, num_inputs)
    return {name: replace(options.recipe, model=name) for name in names}, notes


def _fit_all(
    recipes: Mapping[str, Recipe], data: TableData, work: WorkFolder, quiet: bool
) -> tuple[dict[str, SavedModel], list[str]]:
    """Models that could be fitted, and sentences on those that could not."""
    before = _kept_from_before(recipes, data, work)
    saved: dict[str, SavedModel] = {}
    failures: list[str] = []
    for number, (name, recipe) in enumerate(recipes.items(), start=1):
        known = before.get(name)
        if not quiet:
            doing = "kept from before" if known else "fitting"
            tell(f"{name} ({number} of {len(recipes)}): {doing}")
        try:
            saved[name] = known or fit_recipe(recipe, data, shows_progress(quiet))
        except FitError as error:
            failures.append(error_text(error))
            tell(failures[-1])
            continue
        if known is None:
            add_named_model(work, name, saved[name])
    if not saved:
        raise FitError("no model could be fitted. Look for columns of extreme values.")
    return saved, failures


def _kept_from_before(
    recipes: Mapping[str, Recipe], data: TableData, work: WorkFolder
) -> dict[str, SavedModel]:
    """Models that these recipes would make of this data; all else that was written is removed."""
    found = {
        name: load_model_made_from(work.path / "models" / name, made_from(recipe, data))
        for name, recipe in recipes.items()
        if set(names_of_model(name)) <= work.files.keys()
    }
    known = {name: saved for name, saved in found.items() if saved is not None}
    kept = {file for name in known for file in names_of_model(name)}
    work.remove(work.files.keys() - kept)
    return known


def _kept(recipes: Mapping[str, Recipe], work: WorkFolder) -> list[str]:
    """Names of the models in a work folder."""
    return sorted(name for name in recipes if set(names_of_model(name)) <= work.files.keys())


def _tell_what_is_kept(part: Path, kept: list[str]) -> None:
    tell(
        "",
        f"Interrupted. Fitted models are kept in {part}: {', '.join(kept)}. The same command "
        f"goes on from there; with --models {','.join(kept)} it compares these alone.",
    )
