"""The command ``compare``: fits models of a table, tests methods and writes a report."""

from __future__ import annotations

import base64
import datetime
import io
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas
import torch
import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import style
from matplotlib.figure import Figure
from torch import Tensor

from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.evaluation import (
    CRITERIA,
    Comparison,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
    score_models,
)
from gpclml.evaluation.comparison import failed_fits, joined
from gpclml.evaluation.plots import GUIDE, style_of
from gpclml.models import GPRegression
from gpclml.tables.data import TableData, read_table_data
from gpclml.tables.fitting import (
    AVERAGES,
    MODEL_FILE,
    MODELS,
    ONLY_MODELS,
    PREDICTED_SHARE,
    STACK,
    Recipe,
    RunOptions,
    SavedModel,
    check_size,
    default_models,
    fit_recipe,
    limit_threads,
    load_model_made_from,
    made_from,
    package_versions,
    save_model,
)
from gpclml.tables.folders import open_work_folder, work_folder_of, write_record
from gpclml.tables.methods import (
    TEXTS,
    YARDSTICKS,
    AnyScores,
    Choice,
    ClassScores,
    ColumnEffect,
    PredictionScores,
    Predictor,
    Scores,
    choose,
    choose_by_log_loss,
    column_effects,
    prediction_scores,
    yardsticks,
)
from gpclml.tables.missing import filled
from gpclml.tables.terminal import (
    INTERRUPTED,
    FitError,
    error_text,
    give,
    shows_progress,
    tell,
    warned,
)

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

_BASE_WORDS = {
    "regression": "its mean",
    "classification": "the shares of its classes",
    "counts": "its distribution",
}
_COMPARED = {"mean": "the mean has", "linear": "a linear model", "trees": "trees"}
_MOST_NAMED = 4  # columns


def headline(choice: Choice, target: str, task: str = "regression") -> str:
    """Which method to use."""
    if not choice.explains:
        return f"Nothing here predicts {target} clearly better than {_BASE_WORDS[task]}."
    return f"To predict {target}, use {choice.name}."


def answer(
    choice: Choice, what: str, scores: Scores, rows: str, task: str = "regression"
) -> list[str]:
    """Sentences on how the chosen method predicts the test rows, and how others do.

    ``what`` says what the method is, ``rows`` what the test rows are, such as "the 88 test rows".
    """
    name, score = choice.name, scores[choice.name]
    said = [f"{name} is {what}."] if what else []
    less = "Its errors are clearly smaller than those of"
    if task == "regression":
        said += _errors_in_words(choice, cast("Mapping[str, PredictionScores]", scores), rows)
    else:
        less = "Its log loss is clearly smaller than that of"
        values = {key: value for key, (value, _) in score.values.items()}
        more = f"its Brier score {figure(values.get('Brier score', 0))}, and it has the right class"
        share = f"for {percent(values.get('accuracy', 0))}"
        if task == "counts":
            more = f"its typical error {figure(values['typical error'])}, and its 90 % intervals"
            share = f"hold {percent(values['rows inside'])}"
        said.append(
            f"On {rows} its log loss is {figure(values['log loss'])} nats a row, {more} {share} of "
            "them."
        )
    if name != choice.pick:
        said.append(
            f"Before the test the choice was {choice.pick}; on the test rows {name} is clearly "
            "better."
        )
    same = [
        other for other in scores
        if other not in (name, choice.pick, *choice.beaten) and not scores[other].is_missing
    ]  # fmt: skip
    if choice.beaten:
        said.append(f"{less} {_listed(choice.beaten)}.")
    if same:
        said.append(f"Between {_listed([name, *same])} the differences may be chance.")
    return said


def _errors_in_words(
    choice: Choice, scores: Mapping[str, PredictionScores], rows: str
) -> list[str]:
    """Sentences on typical error and intervals of the chosen model of numbers."""
    score = scores[choice.name]
    values = {key: value for key, (value, _) in score.values.items()}
    others = [
        f"{words} {figure(scores[other].values['typical error'][0])}"
        for other, words in _COMPARED.items()
        if other != choice.name and other in scores and not scores[other].is_missing
    ]
    where = f", where {joined(others)}" if others else ""
    said = f"On {rows} its typical error is {figure(values['typical error'])}{where}."
    if not score.has_intervals:
        return [said, f"It gives no intervals; if you need them, use {choice.pick}."]
    off = values["rows inside"] - PREDICTED_SHARE
    verdict = ""
    if abs(off) > 2 * math.sqrt(PREDICTED_SHARE * (1 - PREDICTED_SHARE) / len(score.means)):
        verdict = ", so they are too narrow" if off < 0 else ", so they are wider than needed"
    width, held = figure(values["interval width"]), percent(values["rows inside"])
    intervals = (
        f"Its {percent(PREDICTED_SHARE)} intervals are about {width} wide and hold {held} of the "
        f"true values{verdict}."
    )
    return [said, intervals]


def _listed(names: Sequence[str]) -> str:
    return joined(["the mean" if name == "mean" else name for name in names])


def columns_in_words(effects: Sequence[ColumnEffect]) -> str:
    """A sentence on the columns that clearly matter."""
    clear = [effect for effect in effects if effect.is_clear]
    if not clear:
        return "No single column clearly matters to the predictions."
    named = [effect.column for effect in clear[:_MOST_NAMED]]
    if more := len(clear) - len(named):
        named.append(f"{more} other{'s' if more > 1 else ''}")
    what = "columns that clearly matter are"
    if len(clear) == 1:
        what = "one column that clearly matters is"
    return (
        f"The {what} {joined(named)}: if the values of {named[0]} are shuffled among the test "
        f"rows, the typical error rises by {figure(clear[0].rise, 2)}."
    )


def score_table(
    choice: Choice,
    scores: Scores,
    marked: Mapping[str, str] | None = None,
    ordered_by_errors: bool = True,
) -> pandas.DataFrame:
    """Test scores as texts: the chosen method, then the others from the best on.

    ``marked`` has for models whose fit is in doubt what is shown after the name. Numbers are
    ``ordered_by_errors``, classes and counts by log loss.
    """
    mean = scores["mean"].values["typical error"][0] if "mean" in scores else math.nan

    def rank(name: str) -> tuple[bool, bool, float]:
        score = scores[name]
        loss = score.values["typical error" if ordered_by_errors else "log loss"][0]
        return score.is_missing, name != choice.name, loss

    def cells(score: AnyScores) -> dict[str, str]:
        shown = {key: value_and_error(*pair) for key, pair in score.values.items()}
        if isinstance(score, ClassScores):
            return shown | {"calibration error": f"{score.calibration_error:.3f}"}
        if not ordered_by_errors:
            return shown
        error = score.values["typical error"][0]
        return {
            "typical error": shown["typical error"],
            "explained": percent(1 - (error / mean) ** 2 if mean > 0 else math.nan),
            "interval width": figure(score.values["interval width"][0]),
            "rows inside": percent(score.values["rows inside"][0]),
        }

    order = sorted(scores, key=rank)
    rows = {name + (marked or {}).get(name, ""): cells(scores[name]) for name in order}
    return pandas.DataFrame.from_dict(rows, orient="index")


_MARKS = {"fit-failed": "fit failed", "predicts-mean": "predicts the mean"}
_NOISE_AT_BOUND = "The noise ended at its lower bound"


def marks(comparison: Comparison, fitted: Mapping[str, SavedModel]) -> dict[str, str]:
    """What is shown after the name of each model whose fit failed or is in doubt; else nothing."""
    marked = {}
    for name, findings in comparison.table["findings"].items():
        said = dict.fromkeys(_MARKS[finding] for finding in findings if finding in _MARKS)
        if not said and fitted[str(name)].note.startswith(_NOISE_AT_BOUND):
            said = ["noise at its bound"]
        marked[str(name)] = f" ({', '.join(said)})" if said else ""
    return marked


def figure(value: float, digits: int = 3) -> str:
    """A number rounded to so many digits, written out where that is short; empty for NaN."""
    if math.isnan(value) or value == 0:
        return "" if math.isnan(value) else "0"
    if _is_long(value):
        return f"{value:.{digits}g}"
    return f"{Decimal(f'{value:#.{digits}g}'):f}"


def percent(share: float) -> str:
    """A share in percent, rounded to a whole number, with a non-breaking space; empty for NaN."""
    return "" if math.isnan(share) else f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


def criterion_text(value: float, error: float = math.nan, digits: int = 1) -> str:
    """A number and its error, if it has one, as text; empty for NaN."""
    text = "" if math.isnan(value) else f"{value:.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def value_and_error(value: float, error: float) -> str:
    """A value and its error, rounded to two digits of the error."""
    if not error > 0:
        return figure(value)
    if _is_long(value):
        return f"{figure(value)} ± {figure(error, 2)}"
    digits = Decimal(f"{error:.1e}")
    return f"{Decimal(value).quantize(digits):f} ± {digits:f}"


def _is_long(value: float) -> bool:
    return not 1e-4 <= abs(value) < 1e7


@dataclass(frozen=True, eq=False)
class Report:
    """The content of a report.

    ``comparison`` is of the models on the training rows, for numbers alone; ``scores`` are those on
    the test rows, of the models and of others; ``effects`` are of the chosen model of numbers;
    ``notes`` say what was done with rows, columns and models, and why.
    """

    options: RunOptions
    data: TableData
    comparison: Comparison | None
    scores: Scores
    choice: Choice
    effects: tuple[ColumnEffect, ...]
    fitted: Mapping[str, SavedModel]
    notes: tuple[str, ...]
    made: str

    @property
    def words(self) -> dict[str, Any]:
        """What page and terminal both say: headline, answer, table of scores, and columns."""
        count, column, task = len(self.data.test[1]), self.options.table.time_column, self.data.task
        rows = f"{count} test rows" if column is None else f"latest {count} rows by {column}"
        rows = f"the {rows}, which no fit has seen,"
        marked = {} if self.comparison is None else marks(self.comparison, self.fitted)
        said = answer(self.choice, TEXTS[self.choice.name], self.scores, rows, task)
        return {
            "headline": headline(self.choice, self.options.table.target, task),
            "answer": " ".join(said),
            "score_table": score_table(self.choice, self.scores, marked, task == "regression"),
            "columns": columns_in_words(self.effects),
            "marks": marked,
        }


def page_of(report: Report) -> str:
    """The page as HTML, with style and figures in it, so that it needs no other file."""
    choice, recipe, data = report.choice, report.options.recipe, report.data
    comparison, score = report.comparison, report.scores[choice.name]
    fitted = choice.name if choice.name in (*MODELS, STACK) else choice.pick
    if fitted == STACK:  # which has no other objective and no limit of steps
        recipe = replace(recipe, objective="lml", steps=None)
    command = RunOptions(report.options.table, replace(recipe, model=fitted), Path("model"))
    shown, figures = "", {}
    if data.classes:
        shown = figure_of_calibration(report.scores)
    if comparison is not None:
        shown = figure_of_test_rows(data.test[1], cast(PredictionScores, score))
        figures = figures_of_criteria(comparison, one_input=len(data.encoding.names) == 1)
    # Names of columns, levels and files are escaped.
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.filters["percent"] = percent
    return templates.get_template("page.html.jinja").render(
        report=report,
        task=data.task,
        **report.words,
        texts=TEXTS,
        fitted=fitted,
        fit_command=command.command("fit"),
        versions=package_versions(),
        num_train=len(data.train[1]),
        num_test=len(data.test[1]),
        most_drawn=_MOST_DRAWN,
        figure=shown,
        figures=figures,
        percent=percent,
        value_and_error=value_and_error,
        criterion_text=criterion_text,
        joined=joined,
    )


_ON_FITS = "fit-failed", "not-scored"


def report_text(report: Report) -> list[str]:
    """What the page says, in lines for a terminal."""
    comparison, fitted, words = report.comparison, report.fitted, report.words
    rows = words["score_table"].to_string().split("\n")
    said = [words["headline"], words["answer"], "", *rows]
    if comparison is None:
        return said
    # Sentences end with the findings, of which a terminal shows those on fits alone.
    criteria = comparison.sentences[: len(comparison.sentences) - len(comparison.findings)]
    return [
        *said,
        "",
        words["columns"],
        *([f"Of the single Gaussian processes: {' '.join(criteria)}"] if criteria else []),
        *(finding.text for finding in comparison.findings if finding.name in _ON_FITS),
        *(f"{name}: {fit.note}" for name, fit in fitted.items() if fit.note and not fit.problem),
    ]


# Letters of 10 points in 5.6 inches are legible on a page 390 pixels wide, and not large on a wide
# one; 1120 dots are sharp on both.
_INCHES, _DOTS_PER_INCH = 5.6, 200
_MOST_DRAWN = 150  # test rows


def figure_of_test_rows(targets: Tensor, scores: PredictionScores) -> str:
    """The test rows: true values against predictions, with 90 % intervals if there are any."""
    rows = torch.linspace(0, len(targets) - 1, min(len(targets), _MOST_DRAWN)).round().long()
    true, mean, lower, upper = (
        values[rows].numpy() for values in (targets, scores.means, scores.lower, scores.upper)
    )
    outside = (true < lower) | (true > upper)

    def draw(panels: NDArray[np.object_]) -> None:
        axes: Axes = panels[0]
        ends = [min(true.min(), mean.min()), max(true.max(), mean.max())]
        axes.plot(ends, ends, **GUIDE)
        if scores.has_intervals:
            axes.vlines(mean, lower, upper, color="gray", alpha=0.35, linewidth=1.5)
        for shown, style_number, mark, size, where in (
            (~outside, 0, "o", 18, "inside"),
            (outside, 5, "X", 36, "outside"),
        ):
            if shown.any():
                label = f"{where} its 90 % interval" if scores.has_intervals else "test row"
                axes.scatter(
                    mean[shown], true[shown], s=size, marker=mark,
                    color=style_of(style_number)["color"],
                    label=label, zorder=3,
                )  # fmt: skip
        axes.set(xlabel="prediction", ylabel="true value")
        axes.legend(loc="upper left", frameon=False, fontsize=9)

    return drawn(draw, 1, 4.2)


def figure_of_calibration(scores: Scores) -> str:
    """Shares of test rows of a class against probabilities, a curve for each method."""

    def draw(panels: NDArray[np.object_]) -> None:
        axes: Axes = panels[0]
        axes.plot([0, 1], [0, 1], **GUIDE)
        for number, (name, score) in enumerate(scores.items()):
            if isinstance(score, ClassScores) and name != YARDSTICKS["classification"][-1]:
                probabilities, shares = score.curve["probability"], score.curve["share"]
                color = style_of(number)["color"]
                axes.plot(probabilities, shares, label=name, marker="o", markersize=4, color=color)
        axes.set(xlabel="predicted probability", ylabel="share of rows of the class")
        axes.legend(loc="upper left", frameon=False, fontsize=9)

    return drawn(draw, 1, 4.2)


def figures_of_criteria(comparison: Comparison, one_input: bool) -> dict[str, str]:
    """What the criteria say of the GPs on the training rows: addresses of figures by name."""
    count = len(comparison.models)

    def criteria(axes: NDArray[np.object_]) -> None:
        for criterion, panel in zip(CRITERIA, axes, strict=True):
            plot_compare(comparison, criterion, ax=panel)

    figures = {
        "criteria": drawn(criteria, 3, 1.2 + 3 * (0.55 + 0.35 * count)),
        "curves": drawn(lambda axes: plot_learning_curves(comparison, ax=axes), 2, 5.6),
        "calibration": drawn(lambda axes: plot_calibration(comparison, ax=axes), 2, 5.6),
    }
    if one_input:
        height = 0.6 + 1.9 * count
        figures["fits"] = drawn(lambda axes: plot_fit(comparison, ax=axes), count, height)
    return figures


def drawn(draw: Callable[[NDArray[np.object_]], object], panels: int, height: float) -> str:
    """Draws a figure, with no regard to the user's own style; an address that holds it."""
    with style.context("default"):
        figure = Figure(figsize=(_INCHES, height), layout="constrained")
        draw(figure.subplots(panels, 1, squeeze=False).ravel())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


PAGE = "index.html"
"""The page of a report."""


def compare_table(options: RunOptions, quiet: bool = False) -> Report:
    """Fits models of a table, tests them beside others and writes the report, which it returns.

    Each model is saved in the work folder as soon as it is fitted. If the run is interrupted, the
    next run takes the models from there that it would fit in the same way from the same data.
    """
    data = read_table_data(options.table, tests=True)
    models, notes = _models(options, data)
    recipes = {name: replace(options.recipe, model=name) for name in models}
    for note in () if quiet else (*data.notes, *notes):
        tell(note)
    try:
        with open_work_folder(options.out, "report") as folder:
            limit_threads(len(data.train[1]))
            saved, failures = _fit_all(recipes, data, folder, quiet)
            categories = data.encoding.categories
            others, missing = yardsticks(data.train, options.table.seed, categories, data.task)
            tell(*missing)
            said = (*notes, *failures, *missing)
            report = make_report(options, data, saved, said, shows_progress(quiet), others)
            tell(*(note for note in report.notes if note not in (*data.notes, *said)))
            write_report(folder, report)
    except KeyboardInterrupt:
        folder = work_folder_of(options.out)
        kept = sorted(name for name in models if (folder / "models" / name / "model.json").exists())
        if not kept:
            raise
        fewer = f"; with --models {','.join(kept)} it compares only these"
        tell(
            "",
            f"Interrupted. Fitted models are kept in {folder}: {', '.join(kept)}. The same command "
            f"continues from there{fewer if data.task == 'regression' else ''}.",
        )
        raise typer.Exit(INTERRUPTED) from None
    give(*report_text(report), "", f"Report: {options.out / PAGE}")
    return report


def _models(options: RunOptions, data: TableData) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the models to fit, and sentences on those that are left out."""
    if only := ONLY_MODELS.get(data.task):
        if options.models is not None:
            suggestion = "Leave it out, or pass --task regression to predict numbers."
            expected = f"none for {'classes' if data.classes else 'counts'}"
            raise ArgumentError("models", ",".join(options.models), expected, suggestion)
        return (only,), ()
    if options.models is None:
        return default_models(*data.train[0].shape)
    if unknown := [name for name in options.models if name not in MODELS]:
        raise UnknownNameError("models", unknown[0], MODELS)
    check_size(options.models, *data.train[0].shape)
    return options.models, ()


def _fit_all(
    recipes: Mapping[str, Recipe], data: TableData, folder: Path, quiet: bool
) -> tuple[dict[str, SavedModel], list[str]]:
    """The fitted models, and a sentence for each model that could not be fitted.

    Models of an interrupted run that these recipes would make of this data are taken as they are,
    and others removed.
    """
    kept = {
        name: load_model_made_from(folder / "models" / name, made_from(recipe, data))
        for name, recipe in recipes.items()
    }
    # Models of other recipes or data would be taken for those of this report.
    for name in (*MODELS, *AVERAGES):
        if kept.get(name) is None:
            shutil.rmtree(folder / "models" / name, ignore_errors=True)
    saved: dict[str, SavedModel] = {}
    failures: list[str] = []
    for number, (name, recipe) in enumerate(recipes.items(), start=1):
        model = kept[name]
        if not quiet:
            doing = "kept from before" if model else "fitting"
            tell(f"{name} ({number} of {len(recipes)}): {doing}")
        if model is None:
            try:
                model = fit_recipe(recipe, data, shows_progress(quiet))
            except FitError as error:
                failures.append(error_text(error))
                tell(failures[-1])
                continue
            save_model(folder / "models" / name, model)
        saved[name] = model
    if not saved:
        raise FitError("no model could be fitted. Look for columns with extreme values.")
    return saved, failures


def make_report(
    options: RunOptions,
    data: TableData,
    saved: Mapping[str, SavedModel],
    notes: tuple[str, ...],
    progress: bool,
    others: Mapping[str, Predictor],
) -> Report:
    """Scores fitted models on the training rows and on the test rows, and chooses one."""
    seed, (test_x, test_y) = options.table.seed, data.test
    is_regression, comparison, effects = data.task == "regression", None, ()
    with warned() as said:
        if is_regression:
            # None of them is a stack.
            models = {name: cast(GPRegression, model.model) for name, model in saved.items()}
            problems = {name: model.problem for name, model in saved.items()}
            comparison = score_models(models, seed=seed, problems=problems, progress=progress)
            saved = {name: saved[name] for name in comparison.models}
        predictors: dict[str, Predictor] = {
            name: model.probabilities if data.classes else partial(model.predict, progress=progress)
            for name, model in saved.items()
        }
        predictors.update(others)
        scores: dict[str, AnyScores] = {}
        failures = []
        for name, predict in predictors.items():
            try:
                prediction: Any = predict(test_x)
                scores[name] = (
                    ClassScores(prediction, test_y.long()) if data.classes
                    else prediction_scores(test_y, prediction)
                )  # fmt: skip
            except Exception as error:
                if is_regression:
                    scores[name] = PredictionScores.missing(test_y)
                failures.append(f"{name} could not predict the test rows: {error_text(error)}")
        if all(name not in scores or scores[name].is_missing for name in saved):
            raise FitError(" ".join(failures))
        # The choice is before the test, but for what the test rows show clearly.
        if comparison is not None:
            numbers = cast("dict[str, PredictionScores]", scores)
            choice = choose(comparison.models, numbers, failed_fits(comparison.findings))
            whole = filled(test_x, data.encoding.categories, seed, data.train[0])
            effects = column_effects(predictors[choice.name], data.encoding, (whole, test_y), seed)
        else:
            choice = choose_by_log_loss(next(iter(saved)), YARDSTICKS[data.task][-1], scores)
    notes = (*data.notes, *notes, *failures, *said)
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return Report(options, data, comparison, scores, choice, effects, saved, notes, made)


def write_report(folder: Path, report: Report) -> None:
    """Writes the page, and last the record, beside the saved models."""
    # Names of files may have bytes that are no UTF-8.
    (folder / PAGE).write_bytes(page_of(report).encode("utf-8", "backslashreplace"))
    files = [
        f"models/{name}/{file}" for name in report.fitted for file in (MODEL_FILE, "model.json")
    ]
    if report.comparison is None:
        scores: dict[str, Any] = {
            "scores": {
                name: score.values | getattr(score, "calibration", {})
                for name, score in report.scores.items()
            }
        }
    else:
        others = {name: _test_scores(score) for name, score in report.scores.items()}
        models = {
            str(name): _without_nan(line) | others.pop(str(name))
            for name, line in report.comparison.table.to_dict("index").items()
        }
        scores = {
            "chosen": next(iter(models)),
            "models": models,
            "others": others,
            "columns": [effect._asdict() for effect in report.effects],
            "sentences": list(report.comparison.sentences),
        }
    content = {
        "command": report.options.command("compare"),
        "data": str(report.options.table.data),
        "sha256": report.data.sha256,
        "task": report.data.task,
        "classes": list(report.data.classes),
        "recommended": report.choice.name,
        **scores,
        "fitted": {name: model.record for name, model in report.fitted.items()},
        "notes": list(report.notes),
        "packages": package_versions(),
        "made": report.made,
    }
    write_record(folder, "report", content, [PAGE, *files])


def _test_scores(scores: Any) -> dict[str, Any]:
    names = {"typical error": "rmse", "log loss": "nll", "rows inside": "coverage"}
    values = {"test_width": scores.values["interval width"][0]}
    for score, name in names.items():
        values[f"test_{name}"], values[f"test_{name}_se"] = scores.values[score]
    return _without_nan(values)


def _without_nan(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Values by name, with null for NaN, which JSON does not have."""
    return {str(name): None if value != value else value for name, value in values.items()}
