"""Saves fitted models with the encoding of their table in a folder, and loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpclml.cli.folders import MODEL, files_of, read_record, sha256_of, write_record
from gpclml.cli.report import Recipe
from gpclml.cli.report.recipes import STACK, FittedModel, kernel_object, package_versions
from gpclml.cli.tables import TableEncoding
from gpclml.errors import DataError
from gpclml.estimators import StackedGP
from gpclml.models import GPRegression

__all__ = ["MODEL_FILES", "SavedModel", "load_model", "load_model_made_from", "save_model"]

MODEL_FILES = ("model.pt", "table.json")
"""The files of a model beside its record."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A fitted model of a table.

    ``made_from`` has all that decides the model: data, rows, recipe and versions of packages.
    """

    model: GPRegression | StackedGP
    encoding: TableEncoding
    fitted: FittedModel
    made_from: Mapping[str, Any]


def save_model(folder: Path, saved: SavedModel) -> None:
    """Writes a model to a folder: ``model.pt``, ``table.json``, and last its record."""
    folder.mkdir(parents=True, exist_ok=True)
    saved.model.save(folder / "model.pt")
    saved.encoding.save(folder / "table.json")
    content = {
        "recipe": asdict(saved.fitted.recipe),
        "seconds": saved.fitted.seconds,
        "note": saved.fitted.note,
        "problem": saved.fitted.problem,
        "made_from": dict(saved.made_from),
        "packages": package_versions(),
    }
    write_record(folder, MODEL, content, MODEL_FILES)


def load_model(folder: Path) -> SavedModel:
    """Reads the model in a folder, without running any code from there.

    Damaged and changed models are refused, and files of two models.
    """
    if not folder.is_dir():
        said = f"{folder} is a file" if folder.exists() else f"There is no folder {folder}"
        raise DataError(f"{said}. Give a folder that 'gpclml fit' wrote.")
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
    files = files_of(path, record)
    recipe = Recipe(**record["recipe"])
    fitted = FittedModel(recipe, record["seconds"], record["note"], record["problem"])
    path_of_model = folder / "model.pt"
    saved = SavedModel(
        model=StackedGP.load(path_of_model)
        if recipe.model == STACK
        else GPRegression.load(path_of_model, kernel=kernel_object(recipe.model)),
        encoding=TableEncoding.load(folder / "table.json"),
        fitted=fitted,
        made_from=record["made_from"],
    )
    # Last, so that a run that replaces the files meanwhile is noticed.
    for name in MODEL_FILES:
        if files.get(name) != sha256_of(folder / name):
            raise DataError(
                f"{folder / name} is not the file that {path} was written with: one of them has "
                "been changed, or a run was killed while it replaced them. Repeat the command that "
                "wrote the folder."
            )
    return saved


def load_model_made_from(folder: Path, made_from: Mapping[str, Any]) -> SavedModel | None:
    """The saved model in a folder if it was made from the given data, rows, recipe and packages."""
    record = read_record(folder / MODEL.record)
    if record is None or record.get("made_from") != dict(made_from):
        return None
    try:
        return load_model(folder)
    except DataError:
        return None
