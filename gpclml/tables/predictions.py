"""What predicts the test rows and how well, the model to use, and the columns that matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from scipy.stats import t
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor

from gpclml._utils.arguments import check_finite, seeded
from gpclml.evaluation import paired_difference
from gpclml.likelihoods import TargetMixture
from gpclml.models import GPRegression
from gpclml.tables.averages import CountModels
from gpclml.tables.encoding import InputEncoding
from gpclml.tables.missing import averaged, filled
from gpclml.tables.mixture import StackedPrediction
from gpclml.tables.recipes import STACK
from gpclml.tables.stacked import StackedGP
from gpclml.tables.terminal import error_text

PREDICTED_SHARE = 0.9
"""Share of new observations that should lie in a predicted interval."""

_CHANCE = 0.025  # that any model seems clearly better or worse without being so
_LEAST_ROWS, _MOST_ROWS, _MOST_POINTS, _MOST_SHUFFLES = 25, 250, 10_000, 10  # of column effects
_CLEAR = 2.0  # standard errors
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class PredictionScores:
    """Scores of predictions, in the units of the target, with standard errors over rows.

    What predicts no intervals or densities has NaN for them.

    Attributes:
        rmse: Root mean squared error.
        rmse_se: Its standard error, by the delta method.
        nll: Mean negative log density of the targets, in nats per row.
        nll_se: Its standard error.
        coverage: Share of targets in their central 90 % intervals.
        coverage_se: Its standard error.
        width: Median width of the central 90 % intervals.
        errors: Targets minus predictions, ``(t,)``.
        log_densities: Log densities of the targets, ``(t,)``.
        means: Predicted means, ``(t,)``.
        lower: Lower ends of the 90 % intervals, ``(t,)``.
        upper: Upper ends, ``(t,)``.
    """

    rmse: float
    rmse_se: float
    nll: float
    nll_se: float
    coverage: float
    coverage_se: float
    width: float
    errors: Tensor
    log_densities: Tensor
    means: Tensor
    lower: Tensor
    upper: Tensor

    @staticmethod
    def missing(count: int) -> PredictionScores:
        """Scores of ``count`` rows that are all NaN, for a model that cannot predict them."""
        return prediction_scores(*torch.full((2, count), math.nan, dtype=torch.float64))

    @property
    def is_missing(self) -> bool:
        """Whether there are no predictions."""
        return math.isnan(self.rmse)

    @property
    def has_intervals(self) -> bool:
        """Whether there are intervals and densities beside the means."""
        return not math.isnan(self.nll)

    @property
    def losses(self) -> Tensor:
        """Negative log densities of the targets, or log probabilities of counts, in nats."""
        return -self.log_densities

    @property
    def values(self) -> dict[str, tuple[float, float]]:
        """What a report of counts shows, each with its standard error."""
        return {
            "log loss": (self.nll, self.nll_se),
            "typical error": (self.rmse, self.rmse_se),
            "rows inside": (self.coverage, self.coverage_se),
            "interval width": (self.width, 0.0),
        }


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
        means = prediction
        densities = inside = lower = upper = torch.full_like(means, math.nan)
    else:
        means, (lower, upper) = prediction.mean, prediction.interval(PREDICTED_SHARE)
        check_finite("mean", means)
        of_counts = isinstance(prediction, TargetMixture)
        log_density = prediction.log_prob if of_counts else prediction.log_density
        densities = log_density(targets.to(means))
        inside = ((lower <= targets) & (targets <= upper)).to(means)
    errors = targets - means
    rmse = math.sqrt(float(errors.square().mean()))
    return PredictionScores(
        rmse=rmse,
        rmse_se=_error_of_mean(errors.square()) / (2 * rmse) if rmse else 0.0,
        nll=-float(densities.mean()),
        nll_se=_error_of_mean(densities),
        coverage=float(inside.mean()),
        coverage_se=_error_of_mean(inside),
        width=float((upper - lower).median()),
        errors=errors, log_densities=densities, means=means, lower=lower, upper=upper,
    )  # fmt: skip


def _error_of_mean(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


class Choice(NamedTuple):
    """Which model to use, by a rule that is fixed before the test, and by clear test results.

    The pick is the stack, or the first-ranked GP where there is none. Another model takes its place
    only if it predicts the test rows clearly better: if its errors are smaller, or its log
    densities higher with errors that are not clearly larger (:func:`clearly_smaller`, and a paired
    t-test for densities). Half of a chance of 2.5 % to find a lead where there is none is for the
    pick against the mean; the other models share the other half. ``explains`` says whether the
    model is clearly better than the mean, ``beaten`` names those whose errors are clearly larger.
    """

    name: str
    pick: str
    explains: bool
    beaten: tuple[str, ...]


def choose(
    ranked: Iterable[str], scores: Mapping[str, PredictionScores], failed: Collection[str] = ()
) -> Choice:
    """Chooses a model; ``ranked`` are GPs from the first on, ``"mean"`` is never chosen.

    Those whose fit ``failed`` are chosen only if there is nothing else.
    """
    there = [name for name in scores if not scores[name].is_missing and name != "mean"]
    count = len(scores[there[0]].errors)
    # Bonferroni: all other models share one half of the chance.
    chance = _CHANCE / 2 / max(len(there) - 1, 1)
    limit = float(t.ppf(1 - chance, max(count - 1, 1)))
    pick = next(name for name in (STACK, *ranked) if name in there)

    def is_closer(name: str, other: str) -> bool:
        level = _CHANCE / 2 if (name, other) == (pick, "mean") else chance
        return clearly_smaller(scores[name].errors, scores[other].errors, level)

    def is_better(name: str, other: str) -> bool:
        if is_closer(name, other):
            return True
        if not (scores[name].has_intervals and scores[other].has_intervals):
            return False
        lead = paired_difference(scores[name].log_densities, scores[other].log_densities)
        return lead.value > limit * lead.standard_error and not is_closer(other, name)

    sound = [name for name in there if name not in failed]
    rivals = [name for name in sound if name != pick and is_better(name, pick)]
    name = min(rivals, key=lambda rival: scores[rival].rmse, default=pick)
    beaten = tuple(
        other for other in (*there, "mean") if other in scores and is_closer(name, other)
    )
    return Choice(name, pick, "mean" in beaten or "mean" not in scores, beaten)


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
    # One call for all: a stack has a factorization for each call.
    prediction = predict(torch.cat(points))
    means = prediction if isinstance(prediction, Tensor) else prediction.mean
    squares = (means.reshape(-1, count) - y).square()
    true, shuffled = squares[0], squares[1:].reshape(len(columns), shuffles, count).mean(1)
    effects = []
    for name, changed in zip(columns, shuffled, strict=True):
        rmse = math.sqrt(float(changed.mean()))
        rise = rmse - math.sqrt(float(true.mean()))
        rise = 0.0 if abs(rise) < _ROUNDING * rmse else rise
        error = _error_of_mean(changed - true) / (2 * rmse) if rmse else 0.0
        effects.append(ColumnEffect(name, rise, error))
    return tuple(sorted(effects, key=lambda effect: -effect.rise))


YARDSTICKS = {
    "stack": "a calibrated mixture of several Gaussian processes",
    "trees": "a tree ensemble (HistGradientBoostingRegressor of scikit-learn)",
    "mean": "always the mean of the training rows; its typical error is the spread of the target",
}
"""What beside the models predicts the test rows."""

_MOST_STACKED = 5000  # of the stack, whose fit then takes a few minutes of one core


def yardsticks(
    train: tuple[Tensor, Tensor], seed: int, categories: Sequence[Sequence[int]] = ()
) -> tuple[dict[str, Predictor], list[str]]:
    """Fits the stack, a tree ensemble and the mean; sentences say what could not be fitted."""
    x, y = train
    predictors: dict[str, Predictor] = {}
    failures: list[str] = []

    def fit_stack() -> Predictor:
        return StackedGP(seed=seed).fit(x, y, categories=categories, progress=False).predict

    def fit_trees() -> Predictor:
        model = HistGradientBoostingRegressor(random_state=seed % 2**32)
        model.fit(x.numpy(), y.numpy())
        return lambda new: torch.from_numpy(
            model.predict(filled(new, categories, seed, x).numpy())
        ).to(new)

    fits = {"stack": fit_stack, "trees": fit_trees}
    if len(y) > _MOST_STACKED:
        del fits["stack"]
        failures.append(
            f"stack is left out because it takes minutes with more than {_MOST_STACKED} training "
            "rows: 'gpclml fit' fits it."
        )
    for name, fit in fits.items():
        try:
            predictors[name] = fit()
        except Exception as error:  # whatever it is, the others are worth having
            failures.append(f"{name} failed ({error_text(error)}).")
    return predictors | {"mean": lambda new: y.mean().expand(len(new))}, failures
