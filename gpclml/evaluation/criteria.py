"""Criteria that models are compared by, paired differences of models, and stacking weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gpclml._utils.arguments import check_finite, checked
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml.errors import ArgumentError
from gpclml.evaluation.model_scores import ModelScores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CRITERIA",
    "ROUNDING",
    "Criterion",
    "PairedDifference",
    "Scores",
    "difference_in",
    "favourites",
    "paired_difference",
    "scored_in",
    "stacking_weights",
    "value_of",
]

Criterion = Literal["loo", "clml", "lml"]
Scores = Mapping[str, ModelScores]

CRITERIA: tuple[Criterion, ...] = ("lml", "clml", "loo")
"""Names of the criteria that models are compared by."""

_VALUES: dict[Criterion, Callable[[ModelScores], float]] = {
    "lml": lambda scores: scores.lml,
    "clml": lambda scores: float(scores.clml.mean()),
    "loo": lambda scores: float(scores.loo.sum()),
}

ROUNDING = 1e-6
"""Nats within which two models score the same."""

_TOLERANCE = 1e-12  # of the objective a point
_MOST_STEPS = 1000
_MOST_EM_STEPS = 100_000
_ROUNDING = 1e-10  # of a weight


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
    """
    import numpy as np
    from scipy.optimize import minimize

    check_finite("log_densities", log_densities)
    if not 0 <= pseudo_counts < math.inf:
        raise ArgumentError("pseudo_counts", pseudo_counts, "0 or more, and finite")
    count = len(log_densities)
    logs = log_densities.detach().to("cpu", torch.float64)
    densities = (logs - logs.amax(0)).exp().numpy()  # relative to the best model of each point
    start = np.full(count, 1 / count)
    if count > 1 and pseudo_counts:
        start = _regularized_weights(densities, pseudo_counts)
    elif count > 1:
        found = minimize(
            lambda w: -float(np.log(w @ densities).mean()),
            start,
            jac=lambda w: -(densities / (w @ densities)).mean(1),
            method="SLSQP",
            bounds=[(0.0, 1.0)] * count,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            options={"ftol": _TOLERANCE, "maxiter": _MOST_STEPS},
        )
        start = np.where(found.x > _ROUNDING, found.x, 0.0)
    return torch.as_tensor(start / start.sum()).to(log_densities)


def _regularized_weights(
    densities: NDArray[np.float64], pseudo_counts: float
) -> NDArray[np.float64]:
    """Weights by expectation maximization; every step raises the objective."""
    count, points = densities.shape
    weights = densities.sum(1) * 0 + 1 / count
    for _ in range(_MOST_EM_STEPS):
        shares = weights[:, None] * densities
        shares /= shares.sum(0)
        after = (shares.sum(1) + pseudo_counts) / (points + count * pseudo_counts)
        moved = float(abs(after - weights).max())
        weights = after
        if moved < _ROUNDING:
            break
    return weights


def value_of(criterion: Criterion, scores: ModelScores) -> float:
    """The value of a criterion for a model; NaN if it could not be computed."""
    return _VALUES[criterion](scores)


def scored_in(criterion: Criterion, scores: Scores) -> list[str]:
    """Names of the models whose criterion could be computed, in their order."""
    return [name for name in scores if not math.isnan(value_of(criterion, scores[name]))]


def favourites(scores: Scores) -> dict[Criterion, str]:
    """The best model by each criterion; of equal ones the first in their order.

    A criterion that no model has is left out.
    """
    found: dict[Criterion, str] = {}
    for criterion in CRITERIA:
        values = {name: value_of(criterion, scores[name]) for name in scored_in(criterion, scores)}
        if values:
            least = max(values.values()) - ROUNDING
            found[criterion] = next(name for name, value in values.items() if value >= least)
    return found


def difference_in(
    criterion: Criterion, scores: ModelScores, reference: ModelScores
) -> PairedDifference:
    """Difference in a criterion, paired over points for LOO, over orderings for the CLML."""
    if criterion == "loo":
        return paired_difference(scores.loo, reference.loo)
    if criterion == "lml":
        return PairedDifference(scores.lml - reference.lml, math.nan)
    total, count = paired_difference(scores.clml, reference.clml), len(scores.clml)
    return PairedDifference(total.value / count, total.standard_error / count)
