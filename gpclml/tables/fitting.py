"""The models of a table: how each is fitted, and the commands ``fit`` and ``predict``."""

from __future__ import annotations

import json
import math
import platform
import shlex
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pandas
import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml import __version__
from gpclml._utils.arguments import check_counts, checked, seeded
from gpclml._utils.files import write_atomically
from gpclml.conditioning import Conditioning, KFold, LastPoints, LeaveOneOut
from gpclml.errors import ArgumentError, DataError, UnknownNameError
from gpclml.fit import FitWarning, NetworksFitResult, fit_mll, fit_networks
from gpclml.kernels import FeatureKernel, PolynomialFeatures, initialize_spectral_mixture
from gpclml.likelihoods import TargetMixture
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression
from gpclml.tables.averages import AVERAGED, ClassModels, CountModels, ModelAverage
from gpclml.tables.data import TableData, TableOptions, read_table, read_table_data
from gpclml.tables.encoding import InputEncoding
from gpclml.tables.folders import files_of, open_work_folder, read_record, sha256_of, write_record
from gpclml.tables.missing import averaged, unknown_inputs
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.stacked import StackedGP
from gpclml.tables.terminal import FitError, give, shows_progress, tell, warned

MODELS = "linear", "rbf", "rq", "matern", "sm", "deep"
"""Names of models, from the cheapest to the most expensive."""

STACK = "stack"
"""The calibrated mixture of GPs: a model of ``fit``, which ``compare`` shows below its own."""

OBJECTIVES: dict[str, Conditioning] = {
    "lml": LastPoints(m=0), "clml": KFold(10), "loo": LeaveOneOut(),
}  # fmt: skip
"""The objectives that a fit can maximize: by name, what they condition on."""

_STEPS = {"sm": 50, "deep": 300}  # the others have no limit


CLASSIFIER, COUNT_GPS = "classifier", "count-gps"
AVERAGES: Mapping[str, type[ModelAverage]] = {CLASSIFIER: ClassModels, COUNT_GPS: CountModels}
"""The averages of GPs of :class:`gpclml.Classifier` and of a :class:`gpclml.Regressor` of counts:
the models of a target of classes, and of counts."""


class RecipeFit(NamedTuple):
    """A fitted model; sentences on the fit; and why it failed, or empty.

    A fit that reached its largest number of steps has not failed, nor one whose noise ended at its
    bound.
    """

    model: GPRegression | StackedGP | ModelAverage
    note: str
    problem: str


@checked
@dataclass(frozen=True)
class Recipe:
    """A model of a table, and how it is fitted.

    - ``"linear"``: a Bayesian linear model of the standardized inputs and a constant;
    - ``"rbf"``, ``"rq"``, ``"matern"``: a GP with that kernel and a lengthscale for each input;
      ``"rq"`` contains ``"rbf"`` and starts from its fit, because from other starts it may end far
      below;
    - ``"sm"``: a GP with a spectral mixture kernel of four components, whose start treats the
      inputs as points on a grid;
    - ``"deep"``: a GP with an RBF kernel, plus a kernel on learned features if held-out folds
      support it, trained by :func:`gpclml.fit.fit_networks`;
    - ``"stack"``: a :class:`gpclml.tables.StackedGP`, whose GPs are fitted by the LML;
    - ``"classifier"``: the models of :class:`gpclml.Classifier`, for targets that number classes;
    - ``"count-gps"``: the models of a :class:`gpclml.Regressor` of counts.

    The first five are fitted by L-BFGS. The objective ``"clml"`` holds out each of ten fixed
    folds given the others; for ``"deep"`` it holds out a new random tenth at each step.

    Attributes:
        model: Name of the model.
        objective: The objective that is maximized: ``"lml"``, ``"clml"`` or ``"loo"``.
        seed: Seed of networks, starts and folds.
        steps: Largest number of steps. If None: 50 for ``"sm"``, 300 for ``"deep"``, and no limit
            for the others.
        restarts: Number of further fits from other starts, of which the best is kept. ``"deep"``
            has none; ``"stack"`` restarts each of its GPs.
        time_budget: Seconds after which ``"stack"`` begins no further GP; None for no limit.

    Raises:
        UnknownNameError: There is no such model or objective.
        ArgumentError: A number is out of range.
    """

    model: str
    objective: str = "lml"
    seed: int = 0
    steps: int | None = None
    restarts: int = 0
    time_budget: float | None = None

    def __post_init__(self) -> None:
        if self.model not in (*MODELS, STACK, *AVERAGES):
            raise UnknownNameError("model", self.model, (*MODELS, STACK, *AVERAGES))
        if self.objective not in OBJECTIVES:
            raise UnknownNameError("objective", self.objective, OBJECTIVES)
        check_counts(steps=self.steps)
        if self.model == STACK and (self.steps is not None or self.objective != "lml"):
            got = f"{self.objective}, {self.steps or 'no'} steps"
            expected = "lml without a limit of steps, by which the GPs of a stack are fitted"
            suggestion = "Leave both options out, or name another --model, such as matern."
            raise ArgumentError("objective", got, expected, suggestion)
        check_counts(0, restarts=self.restarts)
        options = self.objective, self.steps, self.restarts, self.time_budget
        if self.model in AVERAGES and options != ("lml", None, 0, None):
            got, expected = "options of the fit", "none for classes and counts but --seed"
            suggestion = "Leave out --objective, --steps, --restarts and --time-budget."
            raise ArgumentError("model", f"{self.model} with {got}", expected, suggestion)
        if self.model != STACK and self.time_budget is not None:
            expected, suggestion = "none for a single GP", "Leave it out, or limit --steps."
            raise ArgumentError("time_budget", self.time_budget, expected, suggestion)

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        progress: bool = True,
        categories: Sequence[Sequence[int]] = (),
    ) -> RecipeFit:
        """Fits the model to inputs ``(n, d)`` and targets ``(n,)``; ``categories`` for a stack.

        Raises:
            NonFiniteError, NotPSDError: The objective cannot be evaluated at the start of the fit.
        """
        if self.model == STACK:
            stack = StackedGP(restarts=self.restarts, seed=self.seed)
            stack.fit(x, y, categories=categories, time_budget=self.time_budget, progress=progress)
            return RecipeFit(stack, "", "")
        if self.model in AVERAGES:
            targets, groups = y.long() if self.model == CLASSIFIER else y, [*map(list, categories)]
            models = AVERAGES[self.model](x, targets, groups, self.seed)
            models.fit(AVERAGED, None, progress)
            return RecipeFit(models, "", "")
        steps = self.steps or _STEPS.get(self.model)
        conditioning = OBJECTIVES[self.objective]
        if self.model == "deep" and self.objective == "clml":
            conditioning = None  # which redraws the held-out points
        kernel = kernel_object(self.model) or {"sm": "spectral_mixture"}.get(self.model, self.model)
        mean = "zero" if self.model == "linear" else "constant"
        model = GPRegression(x, y, kernel, mean, seed=self.seed)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FitWarning)  # the result has the problem
            if self.model == "sm":
                # As if the inputs were on a grid: random inputs have gaps far below their typical
                # spacing, and frequencies up to the smallest gap cannot be resolved.
                inputs = model.input_standardizer.transform(x)
                targets = cast(Tensor, model.train_targets)
                initialize_spectral_mixture(
                    cast(Kernel, model.covar_module), inputs, targets, seeded(self.seed), "grid"
                )
            elif self.model == "rq":
                # RQ contains RBF; from other starts it may end far below.
                rbf = model.with_kernel("rbf")
                rbf_mll = ConditionalMarginalLogLikelihood(rbf.likelihood, rbf, conditioning)
                fit_mll(rbf_mll, steps=steps, progress=progress)
                model.load_state_dict(rbf.state_dict(), strict=False)
            elif self.model == "deep":
                result = fit_networks(
                    mll, steps=cast(int, steps), seed=self.seed, progress=progress
                )
                return RecipeFit(model, _networks_in_words(result), result.message)
            fitted = fit_mll(
                mll, steps=steps, restarts=self.restarts, seed=self.seed, progress=progress
            )
        # The limit of steps was asked for, and targets may be exact.
        failed = fitted.problem not in ("", "limit", "noise")
        return RecipeFit(model, fitted.message, fitted.message if failed else "")


def kernel_object(model: str) -> Kernel | None:
    """The kernel object of a model; None for models whose kernel is given by name."""
    return FeatureKernel(PolynomialFeatures(1)) if model == "linear" else None


def _networks_in_words(result: NetworksFitResult) -> str:
    """A sentence on whether learned features help."""
    if result.message:
        return f"Training on all rows failed, so the model is the RBF GP: {result.message}"
    if result.chosen == 0:
        said = "Learned features do not help on held-out rows, so the model is the RBF GP"
        return f"{said}, fitted by LML."
    gain, error = result.gains[result.chosen], result.standard_errors[result.chosen]
    steps = result.steps[result.chosen]
    trained = f"trained for {steps} steps" if steps else "fitted by line searches"
    return (
        f"Learned features help on held-out rows, so they are a second kernel, {trained}: "
        f"{gain:.3f} ± {error:.3f} nats per row better than the RBF GP."
    )


PREDICTED_SHARE = 0.9
"""Share of new observations that should lie in a predicted interval."""

MODEL_FILE = "model.pt"
"""The file of a model beside its record."""

ONLY_MODELS: Mapping[str, str] = {"classification": CLASSIFIER, "counts": COUNT_GPS}
"""Of tasks that have one model, which."""

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


@torch.no_grad()
def predicted(
    model: GPRegression | StackedGP | CountModels,
    x: Tensor,
    progress: bool = False,
    categories: Sequence[Sequence[int]] = (),
) -> StackedPrediction | TargetMixture:
    """The distributions of new observations; those of one GP are mixtures of one normal each.

    Where inputs are missing, or of a level that no training row has, they are averaged over what
    these may be, as by :meth:`gpclml.StackedGP.predict`. ``progress`` and ``categories`` are of a
    GP.
    """
    if len(x) == 0:
        return normal_predictions(x.new_zeros(0), x.new_zeros(0))
    if isinstance(model, StackedGP | CountModels):
        return model.predict(x)

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        normal = model.predict(x, marginal=True, progress=progress)
        return normal.mean[None], normal.stddev[None]

    train_x = cast(Any, model.train_inputs)[0]
    means, deviations = averaged(moments, x, train_x, categories, x.new_ones(1, 1))
    return normal_predictions(means[0], deviations[0])


def normal_predictions(means: Tensor, deviations: Tensor) -> StackedPrediction:
    """Normal distributions of these means and standard deviations, ``(t,)``."""
    weight = means.new_ones(1)
    return StackedPrediction(weight, means[None], deviations[None], math.inf * weight)


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
    saved = {name: record[name] for name in names}
    return SavedModel(recipe, model, encoding, **saved, classes=classes)


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
    recipe, only = options.recipe, ONLY_MODELS.get(data.task)
    if only is not None:
        if recipe.model not in (STACK, only):  # the stack is taken where none is named
            suggestion = "Leave it out, or pass --task regression to predict numbers."
            raise ArgumentError("model", recipe.model, f"{only}, for {data.task}", suggestion)
        recipe = replace(recipe, model=only)
    elif recipe.model in AVERAGES:
        suggestion = "Leave it out, or pass --task classification or counts."
        raise ArgumentError("model", recipe.model, "a model of a regression", suggestion)
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
    """All that decides the fitted model: the table's bytes, options, recipe and packages."""
    options = json.loads(json.dumps(asdict(data.options), default=str))  # as read from a record
    del options["data"]
    packages = {"recipe": asdict(recipe), "packages": package_versions()}
    return {"sha256": data.sha256, **options, **packages}


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
        class_headers = f"{_CLASS},{_PROBABILITY}", f'{_CLASS},"{_PROBABILITY}'
        if header != ",".join(_COLUMNS).encode() and not header.decode(errors="replace").startswith(
            class_headers
        ):
            said = f"{path} is there and holds no predictions of gpclml"
            raise DataError(f"--out: {said}. Name another file, or remove it first.")
