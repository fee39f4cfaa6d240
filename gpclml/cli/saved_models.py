"""Saves fitted models with the encoding of their table in a folder, and loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpclml.cli.folders import WorkFolder
from gpclml.cli.records import MODEL, files_of, read_record, record_text, sha256_of
from gpclml.cli.report import Recipe
from gpclml.cli.report.recipes import STACK, FittedModel, kernel_object, package_versions
from gpclml.cli.tables import TableEncoding
from gpclml.errors import ArgumentError, DataError
from gpclml.estimators import StackedGP
from gpclml.models import GPRegression

__all__ = [
    "MODEL_FILES",
    "SavedModel",
    "add_model",
    "add_named_model",
    "load_model",
    "load_model_made_from",
    "names_of_model",
    "record_of",
]

MODEL_FILES = ("model.pt", "table.json")
"""The files of a model beside its record."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A fitted model of a table.

    Attributes:
        model: The fitted model.
        encoding: How a table becomes its inputs.
        fitted: How it was fitted.
        made_from: What decides the model: data, rows, recipe and versions of packages.
    """

    model: GPRegression | StackedGP
    encoding: TableEncoding
    fitted: FittedModel
    made_from: Mapping[str, Any]


def add_model(work: WorkFolder, saved: SavedModel) -> None:
    """Writes a model to a work folder: ``model.pt`` and ``table.json``."""
    work.add({"model.pt": saved.model.save, "table.json": saved.encoding.save})


def add_named_model(work: WorkFolder, name: str, saved: SavedModel) -> None:
    """Writes a model to a folder of its own in a work folder, and last its record."""
    path, table, record = names_of_model(name)
    work.add({path: saved.model.save, table: saved.encoding.save})
    files = {"model.pt": work.files[path], "table.json": work.files[table]}
    work.add_text(record, record_text(MODEL, record_of(saved), files))


def names_of_model(name: str) -> tuple[str, str, str]:
    """Paths of the files of a model in the folder of a report; its record is the last."""
    path, table, record = (f"models/{name}/{file}" for file in (*MODEL_FILES, MODEL.record))
    return path, table, record


def record_of(saved: SavedModel) -> dict[str, Any]:
    """The content of the record of a model."""
    return {
        "recipe": asdict(saved.fitted.recipe),
        "seconds": saved.fitted.seconds,
        "note": saved.fitted.note,
        "problem": saved.fitted.problem,
        "made_from": dict(saved.made_from),
        "packages": package_versions(),
    }


def load_model(folder: Path) -> SavedModel:
    """Reads the model in a folder, without running any code from there.

    Damaged and changed models are refused, and files of two models.
    """
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}. Give one that 'gpclml fit' wrote.")
    path = folder / MODEL.record
    record = read_record(path)
    if record is None or not MODEL.is_record(record):
        suggestion = "Give one that 'gpclml fit' wrote."
        if (folder / "models").is_dir():
            names = sorted(entry.name for entry in (folder / "models").iterdir())
            suggestion = (
                f"It is a report: give one of its models, {folder}/models/{{{','.join(names)}}}."
            )
        raise DataError(f"{folder} holds no model. {suggestion}")
    if not MODEL.is_known_version(record):
        raise DataError(f"{folder} was written by another release. Fit the model again.")
    try:
        recipe = Recipe(**record["recipe"])
        fitted = FittedModel(recipe, record["seconds"], record["note"], record["problem"])
        made_from = record["made_from"]
    except (KeyError, TypeError, ArgumentError) as error:
        raise DataError(f"{path} is damaged ({error}). Fit the model again.") from error
    path_of_model = folder / "model.pt"
    saved = SavedModel(
        model=StackedGP.load(path_of_model)
        if recipe.model == STACK
        else GPRegression.load(path_of_model, kernel=kernel_object(recipe.model)),
        encoding=TableEncoding.load(folder / "table.json"),
        fitted=fitted,
        made_from=made_from,
    )
    if record.get("version") != 1:  # which had no checksums
        _check_unchanged(folder, record)
    return saved


def _check_unchanged(folder: Path, record: Mapping[str, Any]) -> None:
    """Checks that all files are those that the record was written with.

    This is done after the files are read, so that a run that replaces them meanwhile is noticed.
    """
    path = folder / MODEL.record
    if read_record(path) != record:
        raise DataError(f"{path} was replaced while it was read. Run the command again.")
    files = files_of(path, MODEL, record)
    for name in MODEL_FILES:
        if files.get(name) != sha256_of(folder / name):
            raise DataError(
                f"{folder / name} is not the file that {path} was written with: one of them has "
                "been changed, or a run was killed while it replaced them. Repeat the command that "
                "wrote the folder."
            )


def load_model_made_from(folder: Path, made_from: Mapping[str, Any]) -> SavedModel | None:
    """The saved model in a folder if it was made from the given data, rows, recipe and packages."""
    record = read_record(folder / MODEL.record)
    if record is None or record.get("made_from") != dict(made_from):
        return None
    try:
        return load_model(folder)
    except DataError:
        return None
