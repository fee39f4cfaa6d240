"""The commands ``fit`` and ``predict``: one model of a table is fitted, saved, loaded and used."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas
import torch
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml import __version__
from gpclml._utils.files import write_atomically
from gpclml.errors import ArgumentError, DataError
from gpclml.likelihoods import TargetMixture
from gpclml.models import GPRegression
from gpclml.tables.averages import CountModels, ModelAverage
from gpclml.tables.classifier import ClassModels
from gpclml.tables.data import TableData, TableOptions, read_table_data
from gpclml.tables.encoding import InputEncoding
from gpclml.tables.folders import (
    files_of,
    open_work_folder,
    read_record,
    sha256_of,
    write_record,
)
from gpclml.tables.missing import unknown_inputs
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.predictions import PREDICTED_SHARE, predicted
from gpclml.tables.reading import read_table
from gpclml.tables.recipes import AVERAGES, CLASSIFIER, COUNT_GPS, STACK, Recipe, kernel_object
from gpclml.tables.stacked import StackedGP
from gpclml.tables.terminal import FitError, give, shows_progress, tell, warned

MODEL_FILE = "model.pt"
"""The file of a model beside its record."""


_PACKAGES = "torch", "gpytorch", "linear-operator", "botorch", "numpy", "scipy", "pandas"


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute the results, by name."""
    ours = {"python": platform.python_version(), "gpclml": __version__}
    return ours | {name: metadata.version(name) for name in _PACKAGES}


@dataclass(frozen=True)
class RunOptions:
    """The options of ``compare``, which fits each of its models by the recipe, and of ``fit``."""

    table: TableOptions
    recipe: Recipe
    out: Path
    models: tuple[str, ...] | None = None

    def command(self, name: Literal["compare", "fit"]) -> str:
        """The command line that gives these options."""
        options: dict[str, Any] = {**asdict(self.table), **asdict(self.recipe), "out": self.out}
        words = ["gpclml", name, str(options.pop("data"))]
        if name == "compare":
            options["models"] = ",".join(self.models or ())
            del options["model"]
        for option, value in options.items():
            for text in value if isinstance(value, tuple) else (value,):
                if text not in (None, ""):
                    words += [f"--{option.replace('_', '-')}", str(text)]
        return shlex.join(words)


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A fitted model of a table.

    ``note`` has sentences on the fit, ``problem`` says why it failed; ``made_from`` has all that
    decides the model: data, rows, recipe and versions of packages; ``decimal`` is the decimal mark
    of the table; ``classes`` has the labels of a classification.
    """

    recipe: Recipe
    model: GPRegression | StackedGP | ModelAverage
    encoding: InputEncoding
    seconds: float
    note: str
    problem: str
    decimal: str
    made_from: Mapping[str, Any]
    classes: tuple[str, ...] = ()

    @property
    def record(self) -> dict[str, Any]:
        """How the model was fitted, in primitives."""
        names = "seconds", "note", "problem"
        return {"recipe": asdict(self.recipe), **{name: getattr(self, name) for name in names}}

    def predict(self, x: Tensor, progress: bool = False) -> StackedPrediction | TargetMixture:
        """The distributions of new observations at inputs ``(t, d)``, NaN where missing."""
        model = cast("GPRegression | StackedGP | CountModels", self.model)
        return predicted(model, x, progress, self.encoding.categories)

    def probabilities(self, x: Tensor) -> Tensor:
        """Of each class at inputs ``(t, d)``, NaN where missing: ``(classes, t)``."""
        return cast(ClassModels, self.model).probabilities(x)

    def note_on_unknown(self, x: Tensor) -> str:
        """A sentence on inputs ``(t, d)`` that are averaged over; empty if there are none."""
        if isinstance(self.model, StackedGP | ModelAverage):
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
        **saved.record,
        "made_from": dict(saved.made_from),
        "decimal": saved.decimal,
        "classes": list(saved.classes),
        "encoding": asdict(saved.encoding),
    }
    write_record(folder, "model", content, [MODEL_FILE])


def load_model(folder: Path) -> SavedModel:
    """Reads the model in a folder, without running any code from there.

    Damaged and changed models are refused, and files of two models.
    """
    if not folder.is_dir():
        said = f"{folder} is a file" if folder.exists() else f"There is no folder {folder}"
        raise DataError(f"{said}. Give a folder that 'gpclml fit' wrote.")
    path, model_path = folder / "model.json", folder / MODEL_FILE
    record = read_record(folder, "model")
    if record is None:
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
    elif recipe.model in AVERAGES:
        model = AVERAGES[recipe.model].load(model_path)
    else:
        model = GPRegression.load(model_path, kernel=kernel_object(recipe.model))
    # Last, so that a run that replaces the files meanwhile is noticed.
    if files.get(MODEL_FILE) != sha256_of(model_path):
        raise DataError(
            f"{model_path} is not the file that {path} was written with. Repeat the command that "
            "wrote the folder."
        )
    encoding = InputEncoding.from_content(record["encoding"])
    names = "seconds", "note", "problem", "decimal", "made_from"
    classes = tuple(record.get("classes", ()))
    parts = {name: record[name] for name in names}
    return SavedModel(recipe, model, encoding, **parts, classes=classes)


def load_model_made_from(folder: Path, made_from: Mapping[str, Any]) -> SavedModel | None:
    """The saved model in a folder if it was made from the given data, rows, recipe and packages."""
    record = read_record(folder, "model")
    if record is None or record.get("made_from") != dict(made_from):
        return None
    try:
        return load_model(folder)
    except DataError:
        return None


def fit_table(options: RunOptions, quiet: bool = False) -> SavedModel:
    """Fits a model of a table and saves it; wrong input, failures and Ctrl-C write nothing."""
    data = read_table_data(options.table, tests=False)
    recipe = recipe_of(options.recipe, data)
    check_size((recipe.model,), *data.train[0].shape)
    for note in () if quiet else data.notes:
        tell(note)
    count = len(data.train[1])
    with open_work_folder(options.out, "model") as folder:
        limit_threads(count)
        saved = fit_recipe(recipe, data, progress=shows_progress(quiet))
        save_model(folder, saved)
    if saved.note:
        tell(saved.note)
    said = f"{recipe.model} fitted to {count} rows in {saved.seconds:.1f} seconds"
    if isinstance(saved.model, StackedGP):
        weights = [f"{c.weight:.2f} {c.name}" for c in saved.model.components if c.weight]
        said += f": weights {', '.join(weights)}"
    words = shlex.join(["gpclml", "predict", str(options.out), "new.csv"])
    give(said, f"Model: {options.out}", f"Predict new rows: {words}")
    return saved


def recipe_of(recipe: Recipe, data: TableData) -> Recipe:
    """The recipe that is asked for; of a target of classes or counts that of its only model."""
    only = {"classification": CLASSIFIER, "counts": COUNT_GPS}.get(data.task)
    # ``fit`` takes the stack where none is named.
    if only is not None and recipe.model not in (STACK, only):
        suggestion = "Leave it out, or pass --task regression to predict numbers."
        raise ArgumentError("model", recipe.model, f"{only}, for {data.task}", suggestion)
    if only is None and recipe.model in AVERAGES:
        suggestion = "Leave it out, or pass --task classification or counts."
        raise ArgumentError("model", recipe.model, "a model of a regression", suggestion)
    return recipe if only is None else replace(recipe, model=only)


def fit_recipe(recipe: Recipe, data: TableData, progress: bool) -> SavedModel:
    """Fits a model on the training rows, and keeps the warnings of the fit as its note."""
    start = time.perf_counter()
    with warned() as said:
        try:
            fit = recipe.fit(*data.train, progress=progress, categories=data.encoding.categories)
        except (NanError, NotPSDError) as error:
            raise FitError(f"{recipe.model} could not be fitted: {error}") from error
    seconds, note = time.perf_counter() - start, " ".join(filter(None, (fit.note, *said)))
    made = made_from(recipe, data)
    return SavedModel(
        recipe, fit.model, data.encoding, seconds, note, fit.problem, data.decimal, made,
        data.classes,
    )  # fmt: skip


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
    if num_train**2 * num_inputs <= _SM_BY_DEFAULT:
        names.append("sm")
    else:
        said.append(
            f"sm is left out because it takes long with {num_train} rows and {num_inputs} inputs: "
            "name it in --models to have it."
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


def limit_threads(num_train: int) -> None:
    """Uses one thread with up to 1000 rows.

    Such a fit takes steps of milliseconds. They gain little from more threads, and take ten times
    as long if the cores have other work.
    """
    if num_train <= _FEW_ROWS:
        torch.set_num_threads(1)


_CLASS, _PROBABILITY = "class", "probability of "
_COLUMNS = "mean", "standard_deviation", "lower_90", "upper_90"


def predict_table(folder: Path, data: Path, out: Path, quiet: bool = False) -> pandas.DataFrame:
    """Predicts the rows of a table and writes a line of CSV for each, in their order."""
    saved = load_model(folder)
    _check_output(out)
    table = read_table(data, saved.made_from["missing"], saved.decimal)
    x = torch.from_numpy(saved.encoding.encode(table))
    if saved.classes:
        probabilities = saved.probabilities(x).numpy()
        result = pandas.DataFrame(
            probabilities.T, columns=[f"{_PROBABILITY}{label}" for label in saved.classes]
        )
        result.insert(0, _CLASS, np.array(saved.classes)[probabilities.argmax(0)])
    else:
        prediction = saved.predict(x, shows_progress(quiet))
        columns = prediction.mean, prediction.std, *prediction.interval(PREDICTED_SHARE)
        result = pandas.DataFrame(
            {name: values.numpy() for name, values in zip(_COLUMNS, columns, strict=True)}
        )
    # Whole or not at all: predictions that are there already may be replaced.
    text = result.to_csv(index=False).encode()
    write_atomically(out, lambda file: file.write(text))
    if not quiet:
        if note := saved.note_on_unknown(x):
            tell(note)
        tell(f"{len(table)} rows predicted: {out}")
    return result


def _check_output(path: Path) -> None:
    """Checks that predictions can be written and replace nothing but predictions."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise DataError(f"--out: there is no folder {folder}. Make it first.")
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_file():
        raise DataError(f"--out: {path} is not a regular file. Name one.")
    with path.open("rb") as file:
        header = file.readline(1000).strip()
        of_classes = f"{_CLASS},{_PROBABILITY}", f'{_CLASS},"{_PROBABILITY}'
        if header != ",".join(_COLUMNS).encode() and not header.decode(errors="replace").startswith(
            of_classes
        ):
            said = f"{path} is there and holds no predictions of gpclml"
            raise DataError(f"--out: {said}. Name another file, or remove it first.")
