"""Models with the encoding of their table, in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpclml.command_line.folders import open_work_folder, publish, read_record, write_record
from gpclml.errors import ArgumentError, DataError
from gpclml.models import GPRegression
from gpclml.report import FittedModel, Recipe, package_versions
from gpclml.report.recipes import kernel_object
from gpclml.tables import TableEncoding

__all__ = ["MODEL_RECORD", "SavedModel", "load_model", "load_model_made_from", "save_model"]

MODEL_RECORD = "model.json"
"""The file by which the folder of a model is known."""

_FORMAT, _VERSION = "gpclml.TableModel", 1


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


def save_model(folder: Path, saved: SavedModel) -> None:
    """Writes a model to a folder: ``model.pt``, ``table.json`` and ``model.json``.

    Args:
        folder: Where to; replaced if it is there and holds a model.
        saved: The model.

    Raises:
        DataError: It cannot be written, or the folder is there and holds no model.
    """
    part = open_work_folder(folder, MODEL_RECORD)
    saved.model.save(part / "model.pt")
    saved.encoding.save(part / "table.json")
    record = {
        "format": _FORMAT,
        "version": _VERSION,
        "recipe": asdict(saved.fitted.recipe),
        "seconds": saved.fitted.seconds,
        "note": saved.fitted.note,
        "problem": saved.fitted.problem,
        "made_from": dict(saved.made_from),
        "packages": package_versions(),
    }
    write_record(part / MODEL_RECORD, record)
    publish(part, folder)


def load_model(folder: Path) -> SavedModel:
    """Reads what :func:`save_model` wrote; runs no code from it.

    Args:
        folder: Where from.

    Raises:
        DataError: There is no such folder, it holds no model, or a damaged one.
    """
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}. Give one that 'gpclml fit' wrote.")
    record = read_record(folder / MODEL_RECORD)
    if record is None or record.get("format") != _FORMAT:
        mend = "Give one that 'gpclml fit' wrote."
        if (folder / "models").is_dir():
            names = sorted(entry.name for entry in (folder / "models").iterdir())
            mend = f"It is a report: give one of its models, {folder}/models/{{{','.join(names)}}}."
        raise DataError(f"{folder} holds no model. {mend}")
    if record.get("version") != _VERSION:
        raise DataError(f"{folder} was written by another release. Fit the model again.")
    try:
        recipe = Recipe(**record["recipe"])
        fitted = FittedModel(recipe, record["seconds"], record["note"], record["problem"])
        made_from = record["made_from"]
    except (KeyError, TypeError, ArgumentError) as error:
        damaged = f"{folder / MODEL_RECORD} is damaged ({error})"
        raise DataError(f"{damaged}. Fit the model again.") from error
    return SavedModel(
        model=GPRegression.load(folder / "model.pt", kernel=kernel_object(recipe.model)),
        encoding=TableEncoding.load(folder / "table.json"),
        fitted=fitted,
        made_from=made_from,
    )


def load_model_made_from(folder: Path, made_from: Mapping[str, Any]) -> SavedModel | None:
    """A saved model if there is one and it was made from just this.

    Args:
        folder: Where it would be.
        made_from: What decides it.
    """
    record = read_record(folder / MODEL_RECORD)
    if record is None or record.get("made_from") != dict(made_from):
        return None
    try:
        return load_model(folder)
    except DataError:
        return None
