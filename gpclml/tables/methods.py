"""The methods that ``compare`` tests: what each is, how well it predicts, and which to use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import nbinom, t
from sklearn import ensemble, linear_model, model_selection, pipeline, preprocessing
from torch import Tensor

from gpclml._utils.arguments import check_finite, seeded
from gpclml.evaluation import paired_difference
from gpclml.likelihoods import LogNegativeBinomialLikelihood, TargetMixture, TargetPrediction
from gpclml.tables.encoding import InputEncoding
from gpclml.tables.fitting import CLASSIFIER, COUNT_GPS, PREDICTED_SHARE, STACK
from gpclml.tables.missing import filled
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.stacked import StackedGP
from gpclml.tables.terminal import error_text

_CHANCE = 0.025  # that any model seems clearly better or worse without being so
_LEAST_ROWS, _MOST_ROWS, _MOST_POINTS, _MOST_SHUFFLES = 25, 250, 10_000, 10  # of column effects
_CLEAR = 2.0  # standard errors
_ROUNDING = 1e-9
_BINS, _LEAST_PROBABILITY = 10, 1e-6


@dataclass(frozen=True, eq=False)
class PredictionScores:
    """Scores of predictions, in the units of the target.

    What predicts no intervals or densities has NaN for them.

    Attributes:
        targets: Observed targets, ``(t,)``.
        means: Predicted means, ``(t,)``.
        log_densities: Log densities of the targets, or log probabilities of counts, ``(t,)``.
        lower: Lower ends of the central 90 % intervals, ``(t,)``.
        upper: Upper ends, ``(t,)``.
    """

    targets: Tensor
    means: Tensor
    log_densities: Tensor
    lower: Tensor
    upper: Tensor

    @staticmethod
    def missing(targets: Tensor) -> PredictionScores:
        """Scores that are all NaN, for a model that cannot predict these rows."""
        return prediction_scores(targets, torch.full_like(targets, math.nan))

    @property
    def errors(self) -> Tensor:
        """Targets minus predictions, ``(t,)``."""
        return self.targets - self.means

    @property
    def is_missing(self) -> bool:
        """Whether there are no predictions."""
        return bool(self.means.isnan().any())

    @property
    def has_intervals(self) -> bool:
        """Whether there are intervals and densities beside the means."""
        return not bool(self.log_densities.isnan().any())

    @property
    def values(self) -> dict[str, tuple[float, float]]:
        """Scores by name, each with its standard error over rows.

        Log loss is the mean negative log density in nats, typical error the root mean squared error
        with a standard error by the delta method, interval width a median.
        """
        squares = self.errors.square()
        rmse = math.sqrt(float(squares.mean()))
        inside = ((self.lower <= self.targets) & (self.targets <= self.upper)).to(self.means)
        inside = inside.where(~self.lower.isnan(), math.nan)
        return {
            "log loss": _mean_and_error(-self.log_densities),
            "typical error": (rmse, _mean_and_error(squares)[1] / (2 * rmse) if rmse else 0.0),
            "rows inside": _mean_and_error(inside),
            "interval width": (float((self.upper - self.lower).median()), 0.0),
        }


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Scores of probabilities ``(classes, t)`` of test rows whose classes are ``numbers``."""

    probabilities: Tensor
    numbers: Tensor
    is_missing = False

    @property
    def log_densities(self) -> Tensor:
        """Log probabilities of the classes of the rows, ``(t,)``, in nats."""
        right = self.probabilities.gather(0, self.numbers[None])[0]
        return right.clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY).log()

    @property
    def values(self) -> dict[str, tuple[float, float]]:
        """Log loss, Brier score and accuracy, each a mean over rows with its standard error."""
        true = torch.nn.functional.one_hot(self.numbers, len(self.probabilities)).T
        # Of two classes that of class 1: half the sum over both.
        brier = 0.5 * (self.probabilities - true).square().sum(0)
        right = (self.probabilities.argmax(0) == self.numbers).double()
        every = {"log loss": -self.log_densities, "Brier score": brier, "accuracy": right}
        return {name: _mean_and_error(rows) for name, rows in every.items()}

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
    def calibration(self) -> dict[str, Any]:
        """The curve and its error in primitives."""
        curve = self.curve.to_dict("records")
        return {"calibration error": self.calibration_error, "calibration": curve}

    @property
    def calibration_error(self) -> float:
        """Mean distance of probabilities and shares in the bins of :attr:`curve`."""
        probability, share, rows = self.curve.to_numpy().T
        return float(np.average(np.abs(probability - share), weights=rows))


AnyScores = PredictionScores | ClassScores
Scores = Mapping[str, AnyScores]


def prediction_scores(
    targets: Tensor, prediction: StackedPrediction | TargetMixture | Tensor
) -> PredictionScores:
    """Scores of predicted distributions, or of means alone.

    Args:
        targets: Observed targets, ``(t,)``.
        prediction: The distributions of the rows, or their means, ``(t,)``.

    Raises:
        NonFiniteError: A prediction is not finite.
    """
    if isinstance(prediction, Tensor):
        lacking = torch.full_like(prediction, math.nan)
        return PredictionScores(targets, prediction, lacking, lacking, lacking)
    check_finite("mean", prediction.mean)
    is_counts = isinstance(prediction, TargetMixture)
    log_density = prediction.log_prob if is_counts else prediction.log_density
    densities = log_density(targets.to(prediction.mean))
    ends = prediction.interval(PREDICTED_SHARE)
    return PredictionScores(targets, prediction.mean, densities, *ends)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


class Choice(NamedTuple):
    """Which method to use, by a rule that is fixed before the test, and by clear test results.

    ``pick`` is the choice before the test. ``explains`` says whether the method is clearly better
    than the one that uses no input, ``beaten`` names those that it is clearly better than.
    """

    name: str
    pick: str
    explains: bool
    beaten: tuple[str, ...]


def choose(
    ranked: Iterable[str], scores: Mapping[str, PredictionScores], failed: Collection[str] = ()
) -> Choice:
    """Chooses a model of numbers; ``ranked`` are GPs from the first on, the mean is never chosen.

    The pick is the stack, or the first-ranked GP where there is none. Another model takes its place
    only if it predicts the test rows clearly better: if its errors are smaller, or its log
    densities higher with errors that are not clearly larger (:func:`clearly_smaller`, and a paired
    t-test for densities). Half of a chance of 2.5 % to find a lead where there is none is for the
    pick against the mean; the other models share the other half. Those whose fit ``failed`` are
    chosen only if there is nothing else.
    """
    there = [name for name in scores if not scores[name].is_missing and name != "mean"]
    # Bonferroni: all other models share one half of the chance.
    chance = _CHANCE / 2 / max(len(there) - 1, 1)
    pick = next(name for name in (STACK, *ranked) if name in there)

    def is_closer(name: str, other: str) -> bool:
        level = _CHANCE / 2 if (name, other) == (pick, "mean") else chance
        return clearly_smaller(scores[name].errors, scores[other].errors, level)

    def is_better(name: str, other: str) -> bool:
        if is_closer(name, other):
            return True
        if not (scores[name].has_intervals and scores[other].has_intervals):
            return False
        is_denser = _has_less_log_loss(scores[name], scores[other], chance)
        return is_denser and not is_closer(other, name)

    sound = [name for name in there if name not in failed]
    rivals = [name for name in sound if name != pick and is_better(name, pick)]
    name = min(rivals, key=lambda rival: scores[rival].errors.square().mean(), default=pick)
    beaten = tuple(
        other for other in (*there, "mean") if other in scores and is_closer(name, other)
    )
    return Choice(name, pick, "mean" in beaten or "mean" not in scores, beaten)


def choose_by_log_loss(pick: str, base: str, scores: Scores) -> Choice:
    """Chooses a method of classes or counts: the pick, or what clearly has less log loss.

    By paired t-tests, which share a chance of 2.5 %. ``base`` is the method without inputs.
    """

    def beaten(name: str) -> tuple[str, ...]:
        chance = _CHANCE / len(scores)
        return tuple(o for o in scores if _has_less_log_loss(scores[name], scores[o], chance))

    better = [name for name in scores if pick in beaten(name)]
    name = min(better, key=lambda name: -scores[name].log_densities.mean(), default=pick)
    return Choice(name, pick, base in beaten(name), beaten(name))


def _has_less_log_loss(score: AnyScores, other: AnyScores, chance: float) -> bool:
    """Whether log densities are higher, with this chance of a yes where they are not."""
    lead = paired_difference(score.log_densities, other.log_densities)
    limit = float(t.isf(chance, max(len(score.log_densities) - 1, 1)))
    return lead.value > limit * lead.standard_error


def clearly_smaller(errors: Tensor, others: Tensor, chance: float) -> bool:
    r"""Whether errors are smaller than others of the same rows, in the root mean square, by a test.

    Where two errors e and f of a row spread equally over rows, their sum and their difference are
    uncorrelated (Pitman 1939, Morgan 1939). So the slope of f - e by f + e is tested by a t-test of
    t - 2 degrees of freedom, with the standard error HC3 (MacKinnon and White 1985) for variances
    that differ between rows. Of perfect predictions the slope is one, without error. The t-test of
    the squares, which asks the same, has a statistic of at most about :math:`\sqrt{t / 2}`, since
    the squares f² themselves scatter.

    Args:
        errors: e, ``(t,)``.
        others: f, ``(t,)``.
        chance: Probability of a yes where neither spreads less.
    """
    count = len(errors)
    if count < 3 or not bool(errors.square().sum() < others.square().sum()):
        return False
    total, apart = (
        (values - values.mean()).double() for values in (others + errors, others - errors)
    )
    size = float(total.square().sum())
    if size == 0:
        return False
    slope = float(total @ apart) / size
    # HC3: each residual by what it would be without its row.
    leverage = total.square() / size + 1 / count
    residual = (apart - slope * total) / (1 - leverage).clamp_min(_ROUNDING)
    error = float((total * residual).norm()) / size
    return slope > max(float(t.ppf(1 - chance, count - 2)) * error, _ROUNDING)


class ColumnEffect(NamedTuple):
    """How much the typical error rises if a column's values are shuffled among the test rows.

    ``error`` is the standard error of the rise over the test rows.
    """

    column: str
    rise: float
    error: float

    @property
    def is_clear(self) -> bool:
        """Whether the rise is more than two standard errors."""
        return self.rise > _CLEAR * self.error


Predictor = Callable[[Tensor], StackedPrediction | TargetMixture | Tensor]
"""Predicts distributions, or means alone, at inputs ``(t, d)``, NaN where missing."""


@torch.no_grad()
def column_effects(
    predict: Predictor, encoding: InputEncoding, test: tuple[Tensor, Tensor], seed: int
) -> tuple[ColumnEffect, ...]:
    """The effect of each column on the error of a fitted model, the largest first.

    The model is not fitted again: it is given the values of other rows. All inputs of a column,
    such as the levels of a category, are shuffled together, up to ten times. At most 250 of the
    test rows are taken, fewer with many columns: about 10,000 points are predicted, or 25 for each
    column if these are more.
    """
    generator, columns = seeded(seed), encoding.slices
    count = min(len(test[1]), _MOST_ROWS, max(_LEAST_ROWS, _MOST_POINTS // len(columns)))
    rows = torch.linspace(0, len(test[1]) - 1, count).round().long()
    x, y = test[0][rows], test[1][rows]
    shuffles = max(1, min(_MOST_SHUFFLES, _MOST_POINTS // (count * len(columns))))
    points = [x]
    for inputs in columns.values():
        for _ in range(shuffles):
            points.append(x.clone())
            points[-1][:, inputs] = x[torch.randperm(count, generator=generator), inputs]
    # One call for all: factors above half a GiB are not kept for the next.
    prediction = predict(torch.cat(points))
    means = prediction if isinstance(prediction, Tensor) else prediction.mean
    squares = (means.reshape(-1, count) - y).square()
    true, shuffled = squares[0], squares[1:].reshape(len(columns), shuffles, count).mean(1)
    effects = []
    for name, changed in zip(columns, shuffled, strict=True):
        rmse = math.sqrt(float(changed.mean()))
        rise = rmse - math.sqrt(float(true.mean()))
        rise = 0.0 if abs(rise) < _ROUNDING * rmse else rise
        error = _mean_and_error(changed - true)[1] / (2 * rmse) if rmse else 0.0
        effects.append(ColumnEffect(name, rise, error))
    return tuple(sorted(effects, key=lambda effect: -effect.rise))


YARDSTICKS = {
    "regression": (STACK, "trees", "mean"),
    "classification": ("logistic", "forest", "boosting", "shares"),
    "counts": ("poisson", "boosting-poisson", "distribution"),
}
"""By task what is tested beside the saved models; the last of them uses no input."""

TEXTS: Mapping[str, str] = {
    "linear": "a straight line (plane): the effects of the columns add up",
    "rbf": "a Gaussian process: a smooth function, with a length scale for each column",
    "rq": "a Gaussian process like rbf, smooth on several length scales at once",
    "matern": "a Gaussian process of a rougher function than rbf",
    "sm": "a Gaussian process of four patterns that may repeat along the inputs (spectral mixture)",
    "deep": "rbf, with features that a network learns where they help on held-out rows",
    STACK: "a calibrated mixture of several Gaussian processes",
    "trees": "a tree ensemble (HistGradientBoostingRegressor of scikit-learn)",
    "mean": "always the mean of the training rows; its typical error is the spread of the target",
    CLASSIFIER: "an average of Gaussian process classifiers: linear, additive, and rough",
    "logistic": "a logistic regression (LogisticRegression of scikit-learn, standardized inputs)",
    "forest": "a forest (RandomForestClassifier of scikit-learn, a vote added to each class)",
    "boosting": "boosted trees (HistGradientBoostingClassifier of scikit-learn)",
    "shares": "always the shares of the classes in the training rows",
    COUNT_GPS: "an average of Gaussian processes of counts: linear, additive, and rough",
    "poisson": "a negative binomial around the mean of a Poisson regression (PoissonRegressor of "
    "scikit-learn, standardized inputs, penalty by cross-validation)",
    "boosting-poisson": "a negative binomial around the mean of boosted trees "
    "(HistGradientBoostingRegressor of scikit-learn, Poisson loss)",
    "distribution": "always a negative binomial of the counts of the training rows",
}
"""What each method is, for people who do not know Gaussian processes."""

_MOST_STACKED = 5000  # rows of the stack, whose fit then takes a few minutes of one core
_LEAST = 1e-6  # mean of counts
_MOST_SIZE = 1e7  # of negative binomials, as good as infinite


def yardsticks(
    train: tuple[Tensor, Tensor],
    seed: int,
    categories: Sequence[Sequence[int]] = (),
    task: str = "regression",
) -> tuple[dict[str, Predictor], list[str]]:
    """Fits what is tested beside the saved models of a task; sentences say what failed.

    For numbers the stack, trees and the mean; for classes and counts methods of scikit-learn, and
    the distribution of the training rows.
    """
    x, y = train
    random_state = seed % 2**32

    def fitted(model: Any, method: str = "predict", votes: int = 0) -> Predictor:
        model.fit(x.numpy(), y.numpy())

        def predict(new: Tensor) -> Tensor:
            whole = filled(new, categories, seed, x).numpy()
            p = torch.from_numpy(getattr(model, method)(whole).T)
            # No tree's vote for a class is no proof that it cannot be.
            return (votes * p + 1) / (votes + len(p)) if votes else p

        return predict

    def around(predict: Any, held_out: Any) -> Predictor:
        """Negative binomials around predicted means, with the size of rows held out."""
        likelihood = LogNegativeBinomialLikelihood().double()
        likelihood.size = fitted_size(y.numpy(), held_out)

        def distribution(new: Tensor) -> TargetMixture:
            logs = predict(new).clamp_min(_LEAST).log()
            variance = torch.full_like(logs, _LEAST**2)
            return TargetMixture([TargetPrediction(likelihood, logs, variance)])

        return distribution

    def counts(model: Any) -> Predictor:
        folds = model_selection.KFold(5, shuffle=True, random_state=random_state)
        # The spread about the means of training rows would be far too small.
        held_out = model_selection.cross_val_predict(model, x.numpy(), y.numpy(), cv=folds)
        return around(fitted(model), held_out)

    def constant(values: Tensor) -> Predictor:
        return lambda new: values[..., None].expand(*values.shape, len(new))

    def stack() -> Predictor:
        return StackedGP(seed=seed).fit(x, y, categories=categories, progress=False).predict

    def standardized(model: Any) -> Any:
        return pipeline.make_pipeline(preprocessing.StandardScaler(), model)

    poisson = model_selection.GridSearchCV(
        linear_model.PoissonRegressor(max_iter=1000), {"alpha": np.logspace(-4, 1, 6)},
        scoring="neg_mean_poisson_deviance",
    )  # fmt: skip
    logistic = standardized(linear_model.LogisticRegression(max_iter=1000))
    forest = ensemble.RandomForestClassifier(random_state=random_state)
    boosting = ensemble.HistGradientBoostingClassifier(random_state=random_state)
    trees = partial(ensemble.HistGradientBoostingRegressor, random_state=random_state)
    fits: dict[str, Callable[[], Predictor]] = {
        STACK: stack,
        "trees": partial(fitted, trees()),
        "mean": lambda: constant(y.mean()),
        "logistic": partial(fitted, logistic, "predict_proba"),
        "forest": partial(fitted, forest, "predict_proba", forest.n_estimators),
        "boosting": partial(fitted, boosting, "predict_proba"),
        "shares": lambda: constant((torch.bincount(y.long()) / len(y)).double()),
        "poisson": partial(counts, standardized(poisson)),
        "boosting-poisson": partial(counts, trees(loss="poisson")),
        "distribution": lambda: around(constant(y.mean()), np.full(len(y), y.numpy().mean())),
    }
    predictors: dict[str, Predictor] = {}
    failures: list[str] = []
    for name in YARDSTICKS[task]:
        if name == STACK and len(y) > _MOST_STACKED:
            failures.append(
                f"stack is left out because it takes minutes with more than {_MOST_STACKED} "
                "training rows: 'gpclml fit' fits it."
            )
            continue
        try:
            predictors[name] = fits[name]()
        except Exception as error:  # whatever it is, the others are worth having
            failures.append(f"{name} failed ({error_text(error)}).")
    return predictors, failures


def fitted_size(y: Any, means: Any) -> float:
    """The size of negative binomials of these means that makes the counts most likely."""

    def loss(log_size: float) -> float:
        size = math.exp(log_size)
        return -float(nbinom.logpmf(y, size, size / (size + np.maximum(means, _LEAST))).sum())

    optimum: Any = minimize_scalar(loss, bounds=(-5, math.log(_MOST_SIZE)), method="bounded")
    return math.exp(optimum.x)
