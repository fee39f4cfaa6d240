"""The commands ``fit`` and ``predict``: one model of a table is fitted, saved, loaded and used."""

from __future__ import annotations

import math
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml._utils.files import write_atomically
from gpclml.datasets.columns import category_places
from gpclml.errors import ArgumentError, DataError
from gpclml.evaluation.scores import leave_one_out, log_marginal_likelihood
from gpclml.models import GPRegression
from gpclml.tables import StackedGP, StackedPrediction
from gpclml.tables.data import TableData, read_table_data
from gpclml.tables.encoding import TableEncoding
from gpclml.tables.folders import (
    MODEL,
    files_of,
    open_work_folder,
    read_record,
    sha256_of,
    write_record,
)
from gpclml.tables.predictions import PREDICTED_SHARE, predicted, prediction_scores
from gpclml.tables.reading import read_table
from gpclml.tables.recipes import (
    STACK,
    FittedModel,
    Recipe,
    RunOptions,
    kernel_object,
    package_versions,
)
from gpclml.tables.terminal import FitError, error_text, give, shows_progress, tell, warned
from gpclml.tables.words import figure, percent

if TYPE_CHECKING:
    import pandas

__all__ = [
    "MODEL_FILES",
    "SavedModel",
    "check_size",
    "default_models",
    "fit_recipe",
    "fit_table",
    "load_model",
    "load_model_made_from",
    "made_from",
    "one_thread_serves",
    "predict_table",
    "save_model",
    "threads_for",
]

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


def fit_table(options: RunOptions, quiet: bool = False) -> SavedModel:
    """Fits a model of a table and saves it; wrong input, failures and Ctrl-C write nothing."""
    data = read_table_data(options.table, tests=False)
    check_size((options.recipe.model,), *data.train[0].shape)
    for note in () if quiet else data.notes:
        tell(note)
    with open_work_folder(options.out, MODEL, MODEL_FILES) as folder:
        with threads_for(len(data.train[1])):
            saved = fit_recipe(options.recipe, data, progress=shows_progress(quiet))
        save_model(folder, saved)
    count = len(data.train[1])
    if saved.fitted.note:
        tell(saved.fitted.note)
    if isinstance(saved.model, StackedGP):
        parts = [f"{one.weight:.2f} {one.name}" for one in saved.model.components if one.weight]
        said = f"weights {', '.join(parts)}"
    else:
        scores = {"LML": log_marginal_likelihood, "LOO": leave_one_out}
        said = ", ".join(_score(name, score, saved.model) for name, score in scores.items())
    name, seconds = options.recipe.model, f"{saved.fitted.seconds:.1f} seconds"
    words = shlex.join(["gpclml", "predict", str(options.out), "new.csv"])
    give(f"{name} fitted to {count} rows in {seconds}: {said}")
    give(f"Model: {options.out}", f"Predict new rows: {words}")
    return saved


def _score(name: str, score: Callable[..., Tensor], model: GPRegression) -> str:
    """A score as text. If it cannot be computed, the text says so: the model is saved by then."""
    try:
        return f"{name} {float(score(model).sum()):.1f} nats"
    except Exception as error:
        return f"no {name} ({error_text(error)})"


def fit_recipe(recipe: Recipe, data: TableData, progress: bool) -> SavedModel:
    """Fits a model on the training rows, and keeps the warnings of the fit as its note."""
    start = time.perf_counter()
    with warned() as said:
        try:
            categories = category_places(data.encoding.columns)
            fit = recipe.fit(*data.train, progress=progress, categories=categories)
        except (NanError, NotPSDError) as error:
            raise FitError(f"{recipe.model} could not be fitted: {error}") from error
    told = " ".join(filter(None, (fit.note, *said)))
    fitted = FittedModel(recipe, time.perf_counter() - start, told, fit.problem)
    return SavedModel(fit.model, data.encoding, fitted, made_from(recipe, data))


def made_from(recipe: Recipe, data: TableData) -> dict[str, object]:
    """All that decides the fitted model: data, rows, recipe and versions of packages."""
    return {**data.made_from, "recipe": asdict(recipe), "packages": package_versions()}


# Pairs of rows times inputs. A step of "sm" computes four numbers for each, and their gradients. It
# takes a second on one core at the first limit, and a few GB of memory at the second.
_SM_BY_DEFAULT, _SM_AT_MOST = 1_300_000, 8_000_000
_ALL_SMOOTH = 2000  # rows up to which rq and matern are fitted by default beside rbf


def default_models(num_train: int, num_inputs: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the models to compare by default, and sentences on those that cost too much."""
    names, said = ["linear", "rbf"], []
    if num_train <= _ALL_SMOOTH:
        names += ["rq", "matern"]
    else:
        said.append(
            f"rq and matern are left out because they take long with more than {_ALL_SMOOTH} "
            "training rows: name them in --models to have them."
        )
    pairs = num_train**2 * num_inputs
    if pairs <= _SM_BY_DEFAULT:
        names.append("sm")
    elif pairs <= _SM_AT_MOST:
        said.append(
            f"sm is left out because it takes long with {num_train} rows and {num_inputs} inputs: "
            "name it in --models to have it."
        )
    else:
        said.append(
            f"sm is left out: {num_train} rows with {num_inputs} inputs take too much memory."
        )
    return (*names, "deep"), tuple(said)


def check_size(names: tuple[str, ...], num_train: int, num_inputs: int) -> None:
    """Checks that the models fit in memory."""
    if "sm" in names and num_train**2 * num_inputs > _SM_AT_MOST:
        most = int((_SM_AT_MOST / num_inputs) ** 0.5)
        got = f"sm with {num_train} rows and {num_inputs} inputs"
        raise ArgumentError(
            "models", got, f"at most {most} rows for it", f"Leave it out, or pass --rows {most}."
        )


_SMALL = 1000  # rows


def one_thread_serves(num_train: int) -> bool:
    """Whether a fit should use one thread only: up to 1000 rows.

    Such a fit takes steps of milliseconds. They gain little from more threads, and take ten times
    as long if the cores have other work.
    """
    return num_train <= _SMALL


@contextmanager
def threads_for(num_train: int) -> Iterator[None]:
    """Uses one thread within the block if :func:`one_thread_serves`, else as many as before."""
    before = torch.get_num_threads()
    if one_thread_serves(num_train):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_COLUMNS = "mean", "standard_deviation", "lower_90", "upper_90"


def predict_table(
    folder: Path, data: Path, out: Path | None = None, quiet: bool = False
) -> pandas.DataFrame:
    """Predicts the rows of a table and writes a line of CSV for each, in their order.

    The cells are empty if an input that the model needs is missing.
    """
    import pandas

    out = Path("predictions.csv") if out is None else out
    saved = load_model(folder)
    _check_output(out, data, *folder.iterdir())
    table = read_table(data, saved.encoding.missing, saved.encoding.decimal)
    encoded = saved.encoding.encode(table)
    found = predicted(saved.model, encoded.inputs, shows_progress(quiet))
    parts = found.mean, found.std, *found.interval(PREDICTED_SHARE)
    columns = dict(zip(_COLUMNS, parts, strict=True))
    rows = encoded.rows.numpy()
    result = pandas.DataFrame({name: values.numpy() for name, values in columns.items()}, rows)
    result = result.reindex(range(len(table)))
    text = result.to_csv(index=False).encode()
    write_atomically(out, lambda file: file.write(text))
    if not quiet:
        for note in encoded.notes:
            tell(note)
        tell(f"{len(rows)} of {len(table)} rows predicted: {out}")
        _tell_scores(saved, table, rows, found)
    return result


def _check_output(path: Path, *others: Path) -> None:
    """Checks that predictions can be written and replace nothing but predictions."""
    folder = path.absolute().parent
    if path.is_symlink():
        raise DataError(f"--out: {path} is a link. Name the file itself.")
    if path.is_dir():
        raise DataError(f"--out: {path} is a folder. Name a file.")
    if (there := path.exists()) and not path.is_file():
        raise DataError(f"--out: {path} is not a regular file. Name one.")
    if not folder.is_dir():
        raise DataError(f"--out: there is no folder {folder}. Make it first.")
    if there and any(other.exists() and path.samefile(other) for other in others):
        raise DataError(f"--out: {path} is a file that is read. Name another.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
        writable = os.access(path, os.W_OK) or not there
    except OSError:  # only trying tells: permissions do not bind every user
        writable = False
    if not writable:
        raise DataError(f"--out: cannot write {path}. Name a file elsewhere.")
    if there and not _holds_predictions(path):
        said = f"{path} is there and holds no predictions of gpclml"
        raise DataError(f"--out: {said}. Name another file, or remove it first.")


def _holds_predictions(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline(1000).strip() == ",".join(_COLUMNS).encode()


def _tell_scores(
    saved: SavedModel, table: pandas.DataFrame, rows: np.ndarray, found: StackedPrediction
) -> None:
    """Prints how good the predictions are, if the table has the target."""
    target = saved.encoding.target
    if target not in table.columns:
        return
    try:
        targets = saved.encoding.targets(table)[rows]
    except ArgumentError:  # nobody asked for it, so a column of texts is no error
        return
    count = int((~targets.isnan()).sum())
    if count:
        scores = prediction_scores(targets, found)
        if not math.isfinite(scores.rmse) or not math.isfinite(scores.nll):
            tell(f"No scores: values of {target} are too far from the predictions to be squared.")
            return
        tell(
            f"The table has {target} in {count} of these rows: typical error (RMSE) "
            f"{figure(scores.rmse)}, {percent(scores.coverage)} in their 90 % intervals, negative "
            f"log density (NLL) {scores.nll:.3f} a row."
        )
