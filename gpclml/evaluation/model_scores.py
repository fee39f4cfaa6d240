"""Scores of a model, the criteria and differences by which models are compared, and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import torch
from gpytorch.models import ExactGP
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import all_finite, check_finite, checked
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evaluation.scores import learning_curve
from gpclml.inference.laplace import LatentCovariance
from gpclml.inference.observations import training_observations
from gpclml.inference.units import Units, units_of_targets
from gpclml.linalg import DenseCovariance, ExactCovariance

Criterion = Literal["loo", "clml", "lml"]

CRITERIA: tuple[Criterion, ...] = ("lml", "clml", "loo")
"""Names of the criteria that models are compared by."""

T = TypeVar("T")

ROUNDING = 1e-6
"""Nats within which two models score the same."""

_NUMBERS_IN_BLOCKS = 2**25  # in the covariances of held-out blocks
_WORTH_AN_INVERSE = 4  # held-out blocks at once
_TOLERANCE = 1e-12  # of the objective of weights a point
_MOST_STEPS = 1000
_MOST_EM_STEPS = 100_000
_WEIGHT_ROUNDING = 1e-10


@dataclass(frozen=True)
class PairedDifference:
    """Difference of the scores of a model and a reference, with its error.

    Attributes:
        value: Difference in nats; negative if the model is worse.
        standard_error: Its standard error, from the spread of paired terms; NaN for one term.
    """

    value: float
    standard_error: float

    @property
    def p_worse(self) -> float:
        r"""The probability that the model is worse, :math:`\Phi(-d / s)`.

        It is a normal approximation, as in R's ``loo_compare``, and 0.5 if value and error are both
        within 1e-6 nats of zero.
        """
        # Equal models differ by rounding, whose sign says nothing; NaN passes both conditions.
        if max(abs(self.value), self.standard_error) < ROUNDING:
            return 0.5
        if self.standard_error == 0.0:
            return float(self.value < 0)
        return 0.5 * math.erfc(self.value / self.standard_error / math.sqrt(2))


@takes_arrays()
@checked(terms="float (n,)", reference="float (n,)")
def paired_difference(terms: ArrayLike, reference: ArrayLike) -> PairedDifference:
    r"""The sum of n paired differences, with error :math:`\sqrt n` times their standard deviation.

    (Vehtari, Gelman and Gabry 2017, Eq. 24.)

    Args:
        terms: Log densities of points under the model, ``(n,)``.
        reference: Log densities of the same points under the reference, ``(n,)``.

    Raises:
        ShapeError: If the shapes differ.
    """
    difference = terms - reference
    count = len(difference)
    spread = float(difference.std()) if count > 1 else math.nan
    return PairedDifference(float(difference.sum()), math.sqrt(count) * spread)


@dataclass(frozen=True, eq=False)
class ModelScores:
    """Scores of a model on its n observed training targets, in nats, in float64 on the CPU.

    Attributes:
        lml: The log marginal likelihood.
        clml: Log densities of the points after the m-th given the first m, one for each
            ordering, ``(k,)``.
        loo: Log densities of points given all others, ``(n,)``.
        loo_mean: Predictive means of points given all others, in the units of the comparison,
            ``(n,)``.
        loo_variance: Predictive variances of points given all others, with noise, ``(n,)``.
        curves: Terms log p(y_i | y_<i) of the first orderings, ``(c, n)``.
        condition_number: Condition number of the observations' covariance, in the 1-norm; for a
            model of fewer features than points the ratio of its extreme eigenvalues.
        rounding: The condition number times the machine precision of the covariance's dtype.
        failures: Reasons why parts are NaN, by name: "LML", "CLML", "LOO", "learning curves",
            "condition number". Empty if all could be computed.
    """

    lml: float
    clml: Tensor
    loo: Tensor
    loo_mean: Tensor
    loo_variance: Tensor
    curves: Tensor
    condition_number: float
    rounding: float
    failures: Mapping[str, str] = field(default_factory=dict)

    def value(self, criterion: Criterion) -> float:
        """The value of a criterion; NaN if it could not be computed."""
        values = {"lml": self.lml, "clml": self.clml.mean(), "loo": self.loo.sum()}
        return float(values[criterion])

    def difference(self, reference: ModelScores, criterion: Criterion) -> PairedDifference:
        """Difference in a criterion, paired over points for LOO, over orderings for the CLML."""
        if criterion == "loo":
            return paired_difference(self.loo, reference.loo)
        if criterion == "lml":
            return PairedDifference(self.lml - reference.lml, math.nan)
        total, count = paired_difference(self.clml, reference.clml), len(self.clml)
        return PairedDifference(total.value / count, total.standard_error / count)


def scored_in(criterion: Criterion, scores: Mapping[str, ModelScores]) -> list[str]:
    """Names of the models whose criterion could be computed, in their order."""
    return [name for name, model in scores.items() if not math.isnan(model.value(criterion))]


def favourites(scores: Mapping[str, ModelScores]) -> dict[Criterion, str]:
    """The best model by each criterion that some model has; of equal ones the first."""
    best: dict[Criterion, str] = {}
    for criterion in CRITERIA:
        values = {name: scores[name].value(criterion) for name in scored_in(criterion, scores)}
        if values:
            # Of models that differ by rounding the first-ranked, not the one that rounding favours.
            least = max(values.values()) - ROUNDING
            best[criterion] = next(name for name, value in values.items() if value >= least)
    return best


@torch.no_grad()
def score_model(
    name: str,
    model: ExactGP,
    targets: Tensor,
    orders: Tensor,
    m: int,
    num_curves: int,
    units: Units,
) -> tuple[ModelScores, Mapping[str, Exception]]:
    """Scores a model on its training data, without changing its parameters, mode and caches.

    A score that fails is NaN and does not affect the others; an interrupt ends everything. The
    errors are returned by the scores' names. ``orders`` are of all rows, those with missing targets
    last; targets are in the units asked for.
    """
    rows = (~targets.isnan()).nonzero().squeeze(-1)
    count = len(rows)
    scale = units_of_targets(model, units)[0].cpu()
    errors: dict[str, Exception] = {}
    observed = _attempt(lambda: _observed_gaussian(model, rows))
    # Without a covariance every score fails by the same error, which is told once.
    nothing = DenseCovariance(scale.new_empty(0, 0)), scale.new_empty(0)
    covariance, residual = nothing if isinstance(observed, Exception) else observed
    if len(covariance.shape) != 2 or residual.ndim != 1:
        got = f"a covariance of shape {tuple(covariance.shape)}"
        raise ShapeError(f"models[{name!r}]", got, "(n, n), one output and no batch")
    index = torch.full((len(targets),), -1)  # of each row among the observed ones
    index[rows] = torch.arange(count)
    tails = index[orders[:, m:count]]
    # A density of targets in other units is that in training units over the scale.
    log_scale = float(scale.log())

    def score(
        which: str, compute: Callable[[], Sequence[Tensor]], *shapes: tuple[int, ...]
    ) -> Sequence[Tensor]:
        """The tensors of a score; NaN and an error where it, or the covariance, fails."""
        result = observed if isinstance(observed, Exception) else _attempt(compute)
        if not isinstance(result, Exception):
            if which == "condition number" or all(map(all_finite, result)):
                return [values.detach().to("cpu", torch.float64) for values in result]
            result = NonFiniteError(
                f"models[{name!r}]", f"{which}: values that are not finite", "finite ones",
                "Its covariance is singular: add noise.",
            )  # fmt: skip
        errors[which] = result
        return [torch.full(shape, torch.nan, dtype=torch.float64) for shape in shapes]

    (lml,) = score("LML", lambda: [covariance.log_density(residual)], ())
    (clml,) = score("CLML", lambda: [_tail_densities(covariance, residual, tails)], (len(orders),))
    loo, error, variance = score(
        "LOO", lambda: _leave_one_out(covariance, residual), (count,), (count,), (count,)
    )
    (curves,) = score(
        "learning curves",
        lambda: [learning_curve(model, orders[:num_curves], units=units)[:, :count]],
        (num_curves, count),
    )
    (number,) = score(
        "condition number",
        lambda: [torch.tensor(covariance.condition_number(), dtype=torch.float64)],
        (),
    )
    scores = ModelScores(
        lml=float(lml) - count * log_scale,
        clml=clml - (count - m) * log_scale,
        loo=loo - log_scale,
        loo_mean=targets[rows] - scale * error,
        loo_variance=scale.square() * variance,
        curves=curves,
        condition_number=float(number),
        rounding=float(number) * torch.finfo(covariance.dtype).eps,
        failures={which: _in_one_line(error) for which, error in errors.items()},
    )
    return scores, errors


def _attempt(compute: Callable[[], T]) -> T | Exception:
    """A result, or the error in its place; warnings that the caller has made errors are raised."""
    try:
        return compute()
    except Warning:
        raise
    except Exception as error:
        return error


def _in_one_line(error: Exception) -> str:
    """The text of an error and its notes."""
    notes = getattr(error, "__notes__", ())
    return " ".join(" ".join([str(error) or type(error).__name__, *notes]).split())


def _observed_gaussian(model: ExactGP, rows: Tensor) -> tuple[ExactCovariance, Tensor]:
    """Covariance and residuals of the observed rows."""
    data = training_observations(model)
    if len(rows) == data.num_rows:
        return data.covariance, data.residual
    rows = rows.to(data.residual.device)
    return data.covariance.take(rows), data.residual[rows]


def _leave_one_out(covariance: ExactCovariance, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities, errors and variances of points given all others, ``(n,)`` in float64."""
    rows = torch.arange(len(residual))
    mean, variance = (values.double() for values in covariance.leave_one_out(residual, rows))
    error = residual.double() - mean
    if isinstance(covariance, LatentCovariance):
        log_densities = covariance.block_log_densities(residual, [rows.unsqueeze(-1)])
        return log_densities.double(), error, variance
    normal = Normal(torch.zeros_like(error), variance.sqrt(), validate_args=False)
    return normal.log_prob(error), error, variance


def _tail_densities(covariance: ExactCovariance, residual: Tensor, tails: Tensor) -> Tensor:
    """The joint density of each tail given all other points, ``(k,)``."""
    # From an inverse all small blocks come at once; a few large ones are cheaper, and lose fewer
    # digits, by factors of their own.
    size = _NUMBERS_IN_BLOCKS // tails.shape[-1] ** 2
    if size < _WORTH_AN_INVERSE:
        return torch.stack([covariance.conditional_log_density(residual, tail) for tail in tails])
    return covariance.block_log_densities(residual, tails.split(size))


@takes_arrays()
@checked(log_densities="float (M, n)")
def stacking_weights(log_densities: ArrayLike, pseudo_counts: float = 0.0) -> Tensor:
    r"""Stacking weights: the mixture of models with the best leave-one-out predictions.

    .. math:: \max_w \sum_i \log \sum_k w_k\, p_k(y_i \mid y_{-i}) + c \sum_k \log w_k, \qquad
        w_k \ge 0, \; \sum_k w_k = 1

    (Yao et al. 2018, Eq. 5, where c is 0). The problem is convex. A weight says what a model adds
    to the others, not how probable it is: of two models with the same predictions one may get
    weight zero. With few points the weights follow chance; then some pseudo-counts predict better,
    the mode under a Dirichlet prior whose exponents are c.

    Args:
        log_densities: log p_k(y_i | y_-i) of n points under M models, ``(M, n)``.
        pseudo_counts: c, the number of points that each model is given beforehand. With c > 0 no
            weight is below c / (n + M c), and equal models share.

    Returns:
        The weights, ``(M,)``, with sum one.

    Raises:
        ShapeError: If the shape is not ``(M, n)``.
        NonFiniteError: If a log density is not finite.
        ArgumentError: If the pseudo-counts are negative or infinite.

    Note:
        n M operations a step of sequential quadratic programming, on the CPU in float64; with
        pseudo-counts of expectation maximization, some ten to hundreds of steps.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, leave_one_out, stacking_weights
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> models = [GPRegression(x, (9 * x).sin(), name) for name in ("rbf", "matern")]
        >>> stacking_weights(torch.stack([leave_one_out(model) for model in models])).sum()
        tensor(1., dtype=torch.float64)
    """
    from scipy.optimize import minimize

    check_finite("log_densities", log_densities)
    if not 0 <= pseudo_counts < math.inf:
        raise ArgumentError("pseudo_counts", pseudo_counts, "0 or more, and finite")
    count = len(log_densities)
    logs = log_densities.detach().to("cpu", torch.float64)
    densities = (logs - logs.amax(0)).exp().numpy()  # relative to the best model of each point
    weights = np.full(count, 1 / count)
    if count > 1 and pseudo_counts:
        weights = _regularized_weights(densities, pseudo_counts)
    elif count > 1:
        optimum = minimize(
            lambda w: -float(np.log(w @ densities).mean()),
            weights,
            jac=lambda w: -(densities / (w @ densities)).mean(1),
            method="SLSQP",
            bounds=[(0.0, 1.0)] * count,
            # The simplex; without the gradients a step would take as many evaluations as models.
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            options={"ftol": _TOLERANCE, "maxiter": _MOST_STEPS},
        ).x
        weights = np.where(optimum > _WEIGHT_ROUNDING, optimum, 0.0)
    return torch.as_tensor(weights / weights.sum()).to(log_densities)


def _regularized_weights(densities: np.ndarray, pseudo_counts: float) -> np.ndarray:
    """Weights by expectation maximization; every step raises the objective."""
    count, points = densities.shape
    weights = np.full(count, 1 / count)
    for _ in range(_MOST_EM_STEPS):
        # Every point is shared among the models by their posterior probabilities there.
        shares = weights[:, None] * densities
        shares /= shares.sum(0)
        previous = weights
        weights = (shares.sum(1) + pseudo_counts) / (points + count * pseudo_counts)
        if float(abs(weights - previous).max()) < _WEIGHT_ROUNDING:
            break
    return weights
