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
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml._utils.files import write_atomically
from gpclml.errors import ArgumentError, DataError
from gpclml.evaluation.scores import leave_one_out, log_marginal_likelihood
from gpclml.models import GPRegression
from gpclml.tables.data import TableData, read_table_data
from gpclml.tables.encoding import InputEncoding, column_of, numbers_of
from gpclml.tables.folders import (
    MODEL,
    files_of,
    open_work_folder,
    read_record,
    sha256_of,
    write_record,
)
from gpclml.tables.missing import unknown_inputs
from gpclml.tables.mixture import StackedPrediction
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
from gpclml.tables.stacked import StackedGP
from gpclml.tables.terminal import FitError, error_text, give, shows_progress, tell, warned
from gpclml.tables.words import figure, percent

if TYPE_CHECKING:
    import pandas

__all__ = [
    "MODEL_FILE",
    "SavedModel",
    "check_size",
    "default_models",
    "fit_recipe",
    "fit_table",
    "load_model",
    "load_model_made_from",
    "made_from",
    "predict_table",
    "save_model",
    "threads_for",
]

MODEL_FILE = "model.pt"
"""The file of a model beside its record."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A fitted model of a table.

    ``made_from`` has all that decides the model: data, rows, recipe and versions of packages;
    ``decimal`` is the decimal mark of the table.
    """

    model: GPRegression | StackedGP
    encoding: InputEncoding
    fitted: FittedModel
    made_from: Mapping[str, Any]
    decimal: str

    def predict(self, x: Tensor, progress: bool = False) -> StackedPrediction:
        """The distributions of new observations at inputs ``(t, d)``, NaN where missing."""
        return predicted(self.model, x, progress, self.encoding.categories)

    def note_on_unknown(self, x: Tensor) -> str:
        """A sentence on inputs ``(t, d)`` that are averaged over; empty if there are none."""
        if isinstance(self.model, StackedGP):
            unknown = self.model.unknown_inputs(x)
        else:
            train_x = cast(Any, self.model.train_inputs)[0]
            unknown = unknown_inputs(x, train_x, self.encoding.categories)
        return self.encoding.note_on_unknown(unknown.numpy())


def save_model(folder: Path, saved: SavedModel) -> None:
    """Writes a model to a folder: ``model.pt``, and last its record."""
    folder.mkdir(parents=True, exist_ok=True)
    saved.model.save(folder / MODEL_FILE)
    content = {
        **asdict(saved.fitted),
        "made_from": dict(saved.made_from),
        "decimal": saved.decimal,
        "encoding": asdict(saved.encoding),
        "packages": package_versions(),
    }
    write_record(folder, MODEL, content, [MODEL_FILE])


def load_model(folder: Path) -> SavedModel:
    """Reads the model in a folder, without running any code from there.

    Damaged and changed models are refused, and files of two models.
    """
    if not folder.is_dir():
        said = f"{folder} is a file" if folder.exists() else f"There is no folder {folder}"
        raise DataError(f"{said}. Give a folder that 'gpclml fit' wrote.")
    path, model_path = folder / MODEL.record, folder / MODEL_FILE
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
    if recipe.model == STACK:
        model = StackedGP.load(model_path)
    else:
        model = GPRegression.load(model_path, kernel=kernel_object(recipe.model))
    # Last, so that a run that replaces the files meanwhile is noticed.
    if files.get(MODEL_FILE) != sha256_of(model_path):
        raise DataError(
            f"{model_path} is not the file that {path} was written with. Repeat the command that "
            "wrote the folder."
        )
    return SavedModel(
        model=model,
        encoding=InputEncoding.from_content(record["encoding"]),
        fitted=FittedModel(recipe, record["seconds"], record["note"], record["problem"]),
        made_from=record["made_from"],
        decimal=record["decimal"],
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


def fit_table(options: RunOptions, quiet: bool = False) -> SavedModel:
    """Fits a model of a table and saves it; wrong input, failures and Ctrl-C write nothing."""
    data = read_table_data(options.table, tests=False)
    check_size((options.recipe.model,), *data.train[0].shape)
    for note in () if quiet else data.notes:
        tell(note)
    count = len(data.train[1])
    with open_work_folder(options.out, MODEL) as folder:
        with threads_for(count):
            saved = fit_recipe(options.recipe, data, progress=shows_progress(quiet))
        save_model(folder, saved)
    if saved.fitted.note:
        tell(saved.fitted.note)
    if isinstance(saved.model, StackedGP):
        components = [member for member in saved.model.components if member.weight]
        weights = [f"{member.weight:.2f} {member.name}" for member in components]
        said = f"weights {', '.join(weights)}"
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
            fit = recipe.fit(*data.train, progress=progress, categories=data.encoding.categories)
        except (NanError, NotPSDError) as error:
            raise FitError(f"{recipe.model} could not be fitted: {error}") from error
    told = " ".join(filter(None, (fit.note, *said)))
    fitted = FittedModel(recipe, time.perf_counter() - start, told, fit.problem)
    origin = made_from(recipe, data)
    return SavedModel(fit.model, data.encoding, fitted, origin, data.decimal)


def made_from(recipe: Recipe, data: TableData) -> dict[str, Any]:
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


_FEW_ROWS = 1000


@contextmanager
def threads_for(num_train: int) -> Iterator[None]:
    """Uses one thread within the block with up to 1000 rows, else as many as before.

    Such a fit takes steps of milliseconds. They gain little from more threads, and take ten times
    as long if the cores have other work.
    """
    before = torch.get_num_threads()
    if num_train <= _FEW_ROWS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_COLUMNS = "mean", "standard_deviation", "lower_90", "upper_90"


def predict_table(
    folder: Path, data: Path, out: Path | None = None, quiet: bool = False
) -> pandas.DataFrame:
    """Predicts the rows of a table and writes a line of CSV for each, in their order."""
    import pandas

    out = Path("predictions.csv") if out is None else out
    saved = load_model(folder)
    _check_output(out, data, *folder.iterdir())
    table = read_table(data, saved.made_from["missing"], saved.decimal)
    x = torch.from_numpy(saved.encoding.encode(table))
    prediction = saved.predict(x, shows_progress(quiet))
    columns = prediction.mean, prediction.std, *prediction.interval(PREDICTED_SHARE)
    result = pandas.DataFrame(
        {name: values.numpy() for name, values in zip(_COLUMNS, columns, strict=True)}
    )
    text = result.to_csv(index=False).encode()
    write_atomically(out, lambda file: file.write(text))
    if not quiet:
        if note := saved.note_on_unknown(x):
            tell(note)
        tell(f"{len(table)} rows predicted: {out}")
        _tell_scores(saved.made_from["target"], table, prediction)
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


def _tell_scores(target: str, table: pandas.DataFrame, prediction: StackedPrediction) -> None:
    """Prints how good the predictions are, if the table has the target."""
    if target not in table.columns:
        return
    try:
        targets = torch.from_numpy(np.array(numbers_of(column_of(table, target), "number")))
    except ArgumentError:  # nobody asked for it, so a column of texts is no error
        return
    count = int((~targets.isnan()).sum())
    if count:
        scores = prediction_scores(targets, prediction)
        if not math.isfinite(scores.rmse) or not math.isfinite(scores.nll):
            tell(f"No scores: values of {target} are too far from the predictions to be squared.")
            return
        tell(
            f"The table has {target} in {count} of these rows: typical error (RMSE) "
            f"{figure(scores.rmse)}, {percent(scores.coverage)} in their 90 % intervals, negative "
            f"log density (NLL) {scores.nll:.3f} a row."
        )
