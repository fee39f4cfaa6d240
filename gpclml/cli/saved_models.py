"""Models with the encoding of their table, in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpclml.cli.folders import WorkFolder, finish_interrupted
from gpclml.cli.records import MODEL, files_of, read_record, record_text, sha256_of
from gpclml.cli.report import FittedModel, Recipe, package_versions
from gpclml.cli.report.recipes import kernel_object
from gpclml.cli.tables import TableEncoding
from gpclml.errors import ArgumentError, DataError
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
"""The files of a model, beside its record."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A fitted model of a table.

    Attributes:
        model: It.
        encoding: What makes its inputs of a table.
        fitted: How it was fitted.
        made_from: What decides it: data, rows, recipe.
    """

    model: GPRegression
    encoding: TableEncoding
    fitted: FittedModel
    made_from: Mapping[str, Any]


def add_model(work: WorkFolder, saved: SavedModel) -> None:
    """Writes a model to a work folder: ``model.pt`` and ``table.json``.

    Args:
        work: Where to; it becomes the folder of the model.
        saved: The model.

    Raises:
        DataError: It cannot be written.
    """
    work.add({"model.pt": saved.model.save, "table.json": saved.encoding.save})


def add_named_model(work: WorkFolder, name: str, saved: SavedModel) -> None:
    """Writes a model to a folder of its own in a work folder, with its record, which is last.

    Args:
        work: Where to.
        name: Of the model.
        saved: The model.

    Raises:
        DataError: It cannot be written.
    """
    path, table, record = names_of_model(name)
    work.add({path: saved.model.save, table: saved.encoding.save})
    files = {"model.pt": work.files[path], "table.json": work.files[table]}
    work.add_text(record, record_text(MODEL, record_of(saved), files))


def names_of_model(name: str) -> tuple[str, str, str]:
    """The files of a model that has a folder of its own in a work folder; its record is last.

    Args:
        name: Of the model.
    """
    path, table, record = (f"models/{name}/{file}" for file in (*MODEL_FILES, MODEL.record))
    return path, table, record


def record_of(saved: SavedModel) -> dict[str, Any]:
    """What the record of a model says.

    Args:
        saved: The model.
    """
    return {
        "recipe": asdict(saved.fitted.recipe),
        "seconds": saved.fitted.seconds,
        "note": saved.fitted.note,
        "problem": saved.fitted.problem,
        "made_from": dict(saved.made_from),
        "packages": package_versions(),
    }


def load_model(folder: Path) -> SavedModel:
    """Reads the model in a folder; runs no code from it.

    Where a run was killed while it replaced the model by another that was finished, that one is put
    in place first.

    Args:
        folder: Where from.

    Raises:
        DataError: There is no such folder, it holds no model, or a damaged or changed one.
    """
    finish_interrupted(folder)
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}. Give one that 'gpclml fit' wrote.")
    path = folder / MODEL.record
    record = read_record(path)
    if record is None or not MODEL.is_record(record) or record.get("work") == "begun":
        mend = "Give one that 'gpclml fit' wrote."
        if (folder / "models").is_dir():
            names = sorted(entry.name for entry in (folder / "models").iterdir())
            mend = f"It is a report: give one of its models, {folder}/models/{{{','.join(names)}}}."
        raise DataError(f"{folder} holds no model. {mend}")
    if not MODEL.is_known_version(record):
        raise DataError(f"{folder} was written by another release. Fit the model again.")
    try:
        recipe = Recipe(**record["recipe"])
        fitted = FittedModel(recipe, record["seconds"], record["note"], record["problem"])
        made_from = record["made_from"]
    except (KeyError, TypeError, ArgumentError) as error:
        raise DataError(f"{path} is damaged ({error}). Fit the model again.") from error
    saved = SavedModel(
        model=GPRegression.load(folder / "model.pt", kernel=kernel_object(recipe.model)),
        encoding=TableEncoding.load(folder / "table.json"),
        fitted=fitted,
        made_from=made_from,
    )
    if record.get("version") != 1:  # the first noted no checksums
        _check_unchanged(folder, record)
    return saved


def _check_unchanged(folder: Path, record: Mapping[str, Any]) -> None:
    """Raises where a file is not the one that the record was written with.

    It comes after the reading, so that nothing is missed that another run replaced meanwhile.
    """
    path = folder / MODEL.record
    if read_record(path) != record:
        raise DataError(f"{path} was replaced while it was read. Run the command again.")
    files = files_of(path, MODEL, record)
    for name in MODEL_FILES:
        if files.get(name) != sha256_of(folder / name):
            said = f"{folder / name} is not the file that {path} was written with"
            raise DataError(f"{said}: one of them has been changed. Fit the model again.")


def load_model_made_from(folder: Path, made_from: Mapping[str, Any]) -> SavedModel | None:
    """A saved model if there is one and it was made from just this.

    Args:
        folder: Where it would be.
        made_from: What decides it.
    """
    record = read_record(folder / MODEL.record)
    if record is None or record.get("made_from") != dict(made_from):
        return None
    try:
        return load_model(folder)
    except DataError:
        return None
