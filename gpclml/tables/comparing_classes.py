"""The command ``compare`` for a target of classes or counts: models, scores and the report."""

from __future__ import annotations

import datetime
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import nbinom, t
from sklearn import ensemble, linear_model, model_selection, pipeline, preprocessing
from torch import Tensor

from gpclml.errors import ArgumentError
from gpclml.evaluation.comparison import joined
from gpclml.evaluation.plots import GUIDE, style_of
from gpclml.likelihoods import LogNegativeBinomialLikelihood, TargetMixture, TargetPrediction
from gpclml.tables.data import TableData
from gpclml.tables.fitting import (
    MODEL_FILE,
    RunOptions,
    SavedModel,
    fit_recipe,
    limit_threads,
    load_model_made_from,
    made_from,
    package_versions,
    recipe_of,
    save_model,
)
from gpclml.tables.folders import open_work_folder, write_record
from gpclml.tables.missing import filled
from gpclml.tables.page import drawn, figure, percent, rendered, value_and_error
from gpclml.tables.predictions import PredictionScores, prediction_scores
from gpclml.tables.recipes import AVERAGES, CLASSIFIER, COUNT_GPS, MODELS, STACK
from gpclml.tables.terminal import error_text, give, shows_progress, tell, warned

_SHARES, _DISTRIBUTION = "shares", "distribution"
_BASES = {
    CLASSIFIER: (_SHARES, "the shares of its classes"),
    COUNT_GPS: (_DISTRIBUTION, "its distribution"),
}
ABOUT = {
    CLASSIFIER: "an average of Gaussian process classifiers: linear, additive, and rough",
    "logistic": "a logistic regression (LogisticRegression of scikit-learn, standardized inputs)",
    "forest": "a forest (RandomForestClassifier of scikit-learn, a vote added to each class)",
    "boosting": "boosted trees (HistGradientBoostingClassifier of scikit-learn)",
    _SHARES: "always the shares of the classes in the training rows",
    COUNT_GPS: "an average of Gaussian processes of counts: linear, additive, and rough",
    "poisson": "a negative binomial around the mean of a Poisson regression (PoissonRegressor of "
    "scikit-learn, standardized inputs, penalty by cross-validation)",
    "boosting-poisson": "a negative binomial around the mean of boosted trees "
    "(HistGradientBoostingRegressor of scikit-learn, Poisson loss)",
    _DISTRIBUTION: "always a negative binomial of the counts of the training rows",
}
"""What each method is."""

_BINS, _LEAST, _CHANCE = 10, 1e-6, 0.025
_MOST_SIZE = 1e7  # of negative binomials, as good as infinite


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Scores of probabilities ``(classes, t)`` of test rows whose classes are ``numbers``."""

    probabilities: Tensor
    numbers: Tensor

    @property
    def losses(self) -> Tensor:
        """Negative log probabilities of the classes of the rows, ``(t,)``, in nats."""
        right = self.probabilities.gather(0, self.numbers[None])[0]
        return -right.clamp(_LEAST, 1 - _LEAST).log()

    @property
    def values(self) -> dict[str, tuple[float, float]]:
        """Log loss, Brier score and accuracy, each a mean over rows with its standard error."""
        true = torch.nn.functional.one_hot(self.numbers, len(self.probabilities)).T
        # Of two classes that of class 1: half the sum over both.
        brier = 0.5 * (self.probabilities - true).square().sum(0)
        right = (self.probabilities.argmax(0) == self.numbers).double()
        every = {"log loss": self.losses, "Brier score": brier, "accuracy": right}
        count = math.sqrt(len(self.numbers))
        return {
            name: (float(rows.mean()), float(rows.std()) / count) for name, rows in every.items()
        }

    @property
    def curve(self) -> pandas.DataFrame:
        """Calibration: mean probability, share of rows of the class and count for ten bins.

        Of two classes for the second, of more for all of them together.
        """
        classes = range(1 if len(self.probabilities) == 2 else 0, len(self.probabilities))
        p = np.concatenate([self.probabilities[k].numpy() for k in classes])
        true = np.concatenate([(self.numbers == k).numpy() for k in classes])
        bins = np.minimum((_BINS * p).astype(int), _BINS - 1)
        frame = pandas.DataFrame({"probability": p, "share": true.astype(float), "rows": 1})
        return frame.groupby(bins).agg({"probability": "mean", "share": "mean", "rows": "sum"})

    @property
    def calibration_error(self) -> float:
        """Mean distance of probabilities and shares in the bins of :attr:`curve`."""
        probability, share, rows = self.curve.to_numpy().T
        return float(np.average(np.abs(probability - share), weights=rows))


Scores = ClassScores | PredictionScores


@dataclass(frozen=True, eq=False)
class TargetReport:
    """What a report of classes or counts says: test scores by method, the choice, and notes."""

    options: RunOptions
    data: TableData
    saved: SavedModel
    scores: Mapping[str, Scores]
    choice: str
    notes: tuple[str, ...]
    made: str

    @property
    def pick(self) -> str:
        """The choice before the test."""
        return self.saved.recipe.model

    @property
    def headline(self) -> str:
        """Which method to use."""
        target, (base, words) = self.options.table.target, _BASES[self.pick]
        if self.choice == base or not _is_clear(self.scores, self.choice, base):
            return f"Nothing here predicts {target} clearly better than {words}."
        return f"To predict {target}, use {self.choice}."

    @property
    def answer(self) -> str:
        """Sentences on how well that predicts the test rows, and on the others."""
        count, score = len(self.data.test[1]), self.scores[self.choice]
        values = {name: figure(value) for name, (value, _) in score.values.items()}
        others = [name for name in self.scores if name != self.choice]
        beaten = [name for name in others if _is_clear(self.scores, self.choice, name)]
        if self.data.classes:
            more = f"its Brier score {values['Brier score']}, and it has the right class for"
        else:
            more = f"its typical error {values['typical error']}, and its 90 % intervals hold"
        share = float(values["accuracy" if self.data.classes else "rows inside"] or 0)
        said = [
            f"{self.choice} is {ABOUT[self.choice]}.",
            f"On the {count} test rows, which no fit has seen, its log loss is "
            f"{values['log loss']} nats a row, {more} {percent(share)} of them.",
        ]
        if self.choice != self.pick:
            said.append(
                f"Before the test the choice was {self.pick}; on the test rows {self.choice} is "
                "clearly better."
            )
        if beaten:
            said.append(f"Its log loss is clearly smaller than that of {joined(beaten)}.")
        if same := [name for name in others if name not in beaten]:
            named = joined([self.choice, *same])
            said.append(f"Between {named} the differences may be chance.")
        return " ".join(said)

    @property
    def table(self) -> pandas.DataFrame:
        """Test scores as texts, the chosen method first, then by log loss."""
        order = sorted(
            self.scores, key=lambda name: (name != self.choice, self.scores[name].losses.mean())
        )
        rows = {
            name: {key: value_and_error(*pair) for key, pair in self.scores[name].values.items()}
            for name in order
        }
        for name, score in self.scores.items():
            if isinstance(score, ClassScores):
                rows[name]["calibration error"] = f"{score.calibration_error:.3f}"
        return pandas.DataFrame.from_dict(rows, orient="index")


def _calibration(score: Scores) -> dict[str, Any]:
    if not isinstance(score, ClassScores):
        return {}
    curve = score.curve.to_dict("records")
    return {"calibration error": score.calibration_error, "calibration": curve}


def compare_only(options: RunOptions, data: TableData, quiet: bool = False) -> TargetReport:
    """Fits the only model of the task and others, tests them and writes the report it returns."""
    if options.models is not None:
        suggestion = "Leave it out, or pass --task regression to predict numbers."
        expected = f"none for {'classes' if data.classes else 'counts'}"
        raise ArgumentError("models", ",".join(options.models), expected, suggestion)
    recipe = recipe_of(replace(options.recipe, model=STACK), data)
    for note in () if quiet else data.notes:
        tell(note)
    with open_work_folder(options.out, "report") as folder:
        limit_threads(len(data.train[1]))
        # Models that an interrupted run left would be taken for those of this report.
        for name in {*MODELS, *AVERAGES} - {recipe.model}:
            shutil.rmtree(folder / "models" / name, ignore_errors=True)
        place = folder / "models" / recipe.model
        saved = load_model_made_from(place, made_from(recipe, data))
        if saved is None:
            saved = fit_recipe(recipe, data, shows_progress(quiet))
            save_model(place, saved)
        report = _make_report(replace(options, recipe=recipe), data, saved)
        tell(*(note for note in report.notes if note not in data.notes))
        _write_report(folder, report)
    give(report.headline, report.answer, "", *report.table.to_string().split("\n"))
    give("", f"Report: {options.out / 'index.html'}")
    return report


def _make_report(options: RunOptions, data: TableData, saved: SavedModel) -> TargetReport:
    (test_x, y), pick = data.test, saved.recipe.model
    scores: dict[str, Scores] = {}
    failures, predict, others = [], saved.predict, _others_of_counts
    score: Any = partial(prediction_scores, y)
    if data.classes:
        predict, others = saved.probabilities, _others
        score = partial(ClassScores, numbers=y.long())
    with warned() as said:
        scores[pick] = score(predict(test_x))
        for name, fit in others(data, options.table.seed).items():
            try:
                scores[name] = score(fit())
            except Exception as error:  # whatever it is, the others are worth having
                failures.append(f"{name} failed ({error_text(error)}).")
    better = [name for name in scores if _is_clear(scores, name, pick)]
    choice = min(better, key=lambda name: scores[name].losses.mean(), default=pick)
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    notes = (*data.notes, *failures, *said)
    return TargetReport(options, data, saved, scores, choice, notes, made)


def _others(data: TableData, seed: int) -> dict[str, Callable[[], Tensor]]:
    """Fits of other packages' methods: each gives probabilities of the test rows."""
    (x, y), categories = data.train, data.encoding.categories
    new = filled(data.test[0], categories, seed, x).numpy()
    random_state = seed % 2**32

    def probabilities(model: Any, votes: int = 0) -> Tensor:
        p = torch.from_numpy(model.fit(x.numpy(), y.numpy()).predict_proba(new).T)
        # No tree's vote for a class is no proof that it cannot be.
        return (votes * p + 1) / (votes + len(p)) if votes else p

    logistic = linear_model.LogisticRegression(max_iter=1000)
    forest = ensemble.RandomForestClassifier(random_state=random_state)
    boosting = ensemble.HistGradientBoostingClassifier(random_state=random_state)
    shares = torch.bincount(y.long()) / len(y)
    return {
        "logistic": partial(
            probabilities, pipeline.make_pipeline(preprocessing.StandardScaler(), logistic)
        ),
        "forest": partial(probabilities, forest, forest.n_estimators),
        "boosting": partial(probabilities, boosting),
        _SHARES: lambda: shares.double()[:, None].expand(-1, len(new)),
    }


def _others_of_counts(data: TableData, seed: int) -> dict[str, Callable[[], TargetMixture]]:
    """The same of counts, negative binomial around means of other packages' methods."""
    x, y = (values.numpy() for values in data.train)
    new = filled(data.test[0], data.encoding.categories, seed, data.train[0]).numpy()
    random_state = seed % 2**32

    def around(means: Any, held_out: Any) -> TargetMixture:
        likelihood = LogNegativeBinomialLikelihood().double()
        likelihood.size = fitted_size(y, held_out)
        logs = torch.from_numpy(means).clamp_min(_LEAST).log()
        return TargetMixture([TargetPrediction(likelihood, logs, torch.full_like(logs, _LEAST**2))])

    def fitted(model: Any) -> TargetMixture:
        folds = model_selection.KFold(5, shuffle=True, random_state=random_state)
        # The spread about the means of training rows would be far too small.
        held_out = model_selection.cross_val_predict(model, x, y, cv=folds)
        return around(model.fit(x, y).predict(new), held_out)

    poisson = model_selection.GridSearchCV(
        linear_model.PoissonRegressor(max_iter=1000), {"alpha": np.logspace(-4, 1, 6)},
        scoring="neg_mean_poisson_deviance",
    )  # fmt: skip
    trees = ensemble.HistGradientBoostingRegressor(loss="poisson", random_state=random_state)
    scaled = pipeline.make_pipeline(preprocessing.StandardScaler(), poisson)
    means = (np.full(len(rows), y.mean()) for rows in (new, y))
    return {
        "poisson": partial(fitted, scaled),
        "boosting-poisson": partial(fitted, trees),
        _DISTRIBUTION: partial(around, *means),
    }


def fitted_size(y: Any, means: Any) -> float:
    """The size of negative binomials of these means that makes the counts most likely."""

    def loss(log_size: float) -> float:
        size = math.exp(log_size)
        return -float(nbinom.logpmf(y, size, size / (size + np.maximum(means, _LEAST))).sum())

    optimum: Any = minimize_scalar(loss, bounds=(-5, math.log(_MOST_SIZE)), method="bounded")
    return math.exp(optimum.x)


def _is_clear(scores: Mapping[str, Scores], better: str, worse: str) -> bool:
    """Whether chance alone would seldom show such a difference of log losses, for any method."""
    if better == worse or not {better, worse} <= scores.keys():
        return False
    less = scores[worse].losses - scores[better].losses
    limit = float(t.isf(_CHANCE / len(scores), len(less) - 1))
    return float(less.mean()) > limit * float(less.std()) / math.sqrt(len(less))


def _calibration_figure(report: TargetReport) -> str:
    def draw(panels: Any) -> None:
        panels[0].plot([0, 1], [0, 1], **GUIDE)
        for number, (name, score) in enumerate(report.scores.items()):
            if isinstance(score, ClassScores) and name != _SHARES:
                curve = score.curve
                panels[0].plot(
                    curve["probability"], curve["share"], label=name, marker="o", markersize=4,
                    color=style_of(number)["color"],
                )  # fmt: skip
        panels[0].set(xlabel="predicted probability", ylabel="share of rows of the class")
        panels[0].legend(loc="upper left", frameon=False, fontsize=9)

    return drawn(draw, 1, 4.2)


def _write_report(folder: Path, report: TargetReport) -> None:
    """Writes the page, and last the record, beside the saved model."""
    command = RunOptions(report.options.table, report.options.recipe, Path("model"))
    page = rendered(
        "classes.html.jinja", report=report, about=ABOUT,
        figure=_calibration_figure(report) if report.data.classes else "",
        num_train=len(report.data.train[1]), num_test=len(report.data.test[1]),
        fit_command=command.command("fit"), versions=package_versions(),
    )  # fmt: skip
    (folder / "index.html").write_bytes(page.encode("utf-8", "backslashreplace"))
    files = [f"models/{report.pick}/{file}" for file in (MODEL_FILE, "model.json")]
    content = {
        "command": report.options.command("compare"),
        "data": str(report.options.table.data),
        "sha256": report.data.sha256,
        "task": report.data.task,
        "classes": list(report.data.classes),
        "recommended": report.choice,
        "scores": {
            name: {key: list(pair) for key, pair in score.values.items()} | _calibration(score)
            for name, score in report.scores.items()
        },
        "fitted": {report.pick: report.saved.record},
        "notes": list(report.notes),
        "packages": package_versions(),
        "made": report.made,
    }
    write_record(folder, "report", content, ["index.html", *files])
