r"""Weights of a linear combination of models, learned along their training.

The prediction of point i is :math:`\sum_j w_j f_{ij}` with :math:`f_{ij}` what model j predicts
there at a draw of its parameters. Stochastic gradient descent on its squared error gives more
weight to models that train fast (Lyle et al. 2020, Section 3.3), if draws are concurrent. Draws
of different models and steps are independent, so everything in expectation follows from means
:math:`m_i` and variances :math:`v_i` of the predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.finite import all_finite
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.training_speed._checks import check_count
from gpclml.evidence.training_speed.predictions import ModelPredictions

__all__ = [
    "Combination",
    "expected_combination",
    "optimal_combination",
    "sampled_combination",
]

_STABLE = 0.1  # of a step that is stable in the mean


@dataclass(frozen=True)
class Combination:
    """Weights that descent learned.

    Attributes:
        weights: After the last step, ``(M,)``; ``(runs, M)`` if sampled.
        course: At the start and after each of T steps, ``(T + 1, M)``; ``(runs, T + 1, M)`` if
            sampled.
    """

    weights: Tensor
    course: Tensor


@checked
def optimal_combination(predictions: ModelPredictions) -> Tensor:
    r"""The weights of least expected squared error, ``(M,)``.

    .. math:: \arg\min_w \sum_i E (y_i - w^\top f_i)^2
        = \Big[\sum_i m_i m_i^\top + \mathrm{diag}(v_i)\Big]^{-1} \sum_i y_i m_i

    With the matrix a multiple of the identity, and noise of variance one, weights have the
    order of the models' :math:`L(D)` in the concurrent scheme: both then depend on the model
    through :math:`\sum_i y_i m_{ij}` alone (Lyle et al. 2020, Section 3.3). Under a prior of mean
    zero they are zero: its draws know nothing of the targets.

    Args:
        predictions: Of the models, from :func:`model_predictions` or of one's own.

    Returns:
        The weights; of least norm where several are best.
    """
    m, v, y = predictions.means, predictions.variances, predictions.target
    # Rows for the variances, so that the matrix is not squared.
    rows = torch.cat([m, torch.diag(v.sum(0).sqrt())])
    right = torch.cat([y, y.new_zeros(m.shape[-1])])
    return torch.linalg.pinv(rows) @ right


@checked(start="float (M,)")
def expected_combination(
    predictions: ModelPredictions,
    *,
    learning_rate: float | None = None,
    passes: int = 1,
    start: Tensor | None = None,
) -> Combination:
    r"""The mean over draws of the weights that :func:`sampled_combination` learns.

    .. math:: E w \leftarrow E w - 2 \eta\,
        \big[(m_i m_i^\top + \mathrm{diag}(v_i))\, E w - y_i m_i\big],

    exact, as draws are new at each step.

    Args:
        predictions: Of the models, from :func:`model_predictions` or of one's own.
        learning_rate: η; if None a tenth of :math:`1 / \max_i E |f_i|^2`.
        passes: How often the points are gone through, in their order.
        start: First weights, ``(M,)``; 1 / M each if None.

    Returns:
        Mean weights and their course.

    Raises:
        ArgumentError: A number is out of range.
        ShapeError: The start does not fit.
        NonFiniteError: The weights diverge.
    """
    rate, weights = _check(predictions, learning_rate, passes, start)
    course = [weights]
    for _ in range(passes):
        for m, v, y in _points(predictions):
            weights = weights - 2 * rate * ((weights @ m - y) * m + v * weights)
            course.append(weights)
    return _combination(course, rate)


@checked(start="float (M,)")
def sampled_combination(
    predictions: ModelPredictions,
    *,
    learning_rate: float | None = None,
    passes: int = 1,
    start: Tensor | None = None,
    runs: int = 1,
    seed: int = 0,
) -> Combination:
    r"""Weights learned by stochastic gradient descent on draws of the models' predictions.

    At each step all models predict the next point, each at a draw of its own, and

    .. math:: w \leftarrow w - 2 \eta\, (w^\top f_i - y_i) f_i

    (Lyle et al. 2020, Section 4.1). Which draws, says the scheme of
    :func:`model_predictions`; the concurrent one draws from :math:`p(\theta_j \mid D_{<i})` in
    later passes too.

    Args:
        predictions: As for :func:`expected_combination`.
        learning_rate: As there.
        passes: As there.
        start: As there.
        runs: Number of independent runs.
        seed: Of the draws.

    Returns:
        Weights and course of each run.

    Raises:
        ArgumentError, ShapeError, NonFiniteError: As :func:`expected_combination`.
    """
    check_count("runs", runs, 1)
    rate, weights = _check(predictions, learning_rate, passes, start)
    generator = torch.Generator().manual_seed(seed)
    weights = weights.expand(runs, -1)
    course = [weights]
    for _ in range(passes):
        for m, v, y in _points(predictions):
            normal = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
            f = m + v.sqrt() * normal.to(m)
            error = (weights * f).sum(-1, keepdim=True) - y
            weights = weights - 2 * rate * error * f
            course.append(weights)
    return _combination(course, rate)


def _check(
    predictions: ModelPredictions,
    learning_rate: float | None,
    passes: int,
    start: Tensor | None,
) -> tuple[float, Tensor]:
    """The learning rate and the first weights."""
    check_count("passes", passes, 1)
    m, v = predictions.means, predictions.variances
    if learning_rate is None:
        size = float((m.square() + v).sum(-1).max())
        learning_rate = _STABLE / size if size > 0 else _STABLE
    if not 0 < learning_rate < math.inf:
        raise ArgumentError("learning_rate", learning_rate, "a positive number")
    count = m.shape[-1]
    if start is None:
        return learning_rate, m.new_full((count,), 1 / count)
    if start.shape != (count,):
        raise ShapeError("start", tuple(start.shape), f"({count},), a weight for each model")
    return learning_rate, start.to(m)


def _points(predictions: ModelPredictions):
    columns = (predictions.means, predictions.variances, predictions.target)
    return zip(*columns, strict=True)


def _combination(course: list[Tensor], rate: float) -> Combination:
    if not all_finite(course[-1]):
        raise NonFiniteError(
            "learning_rate", f"weights that diverge at {rate:.3g}", "finite ones", "Lower it."
        )
    return Combination(course[-1], torch.stack(course, dim=-2))
