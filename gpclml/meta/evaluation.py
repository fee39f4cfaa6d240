"""Scores of predictions for tasks that were not trained on, and class probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn.utils.rnn import pad_sequence

from gpclml._utils.arguments import check_counts, checked
from gpclml.errors import ArgumentError
from gpclml.evaluation.calibration import expected_calibration_error, fit_temperature
from gpclml.meta.deep_kernel_transfer import DeepKernelTransfer
from gpclml.meta.tasks import NO_CLASS, Episodes, Tasks

_TASKS_AT_ONCE = 20
# Numbers in the inputs that are evaluated at once. Arrays of Conv4 have 16 times as many.
_INPUTS_AT_ONCE = 2**21
_PER_DEVIATION = 4  # points of a sum in the smallest standard deviation
_REACH = 6.0  # standard deviations below the least mean, and above the largest, of these points
_MOST_POINTS = 10_000
_STEPS_AN_OCTAVE = 4  # of numbers of points
_SUM_AT_ONCE = 2**22  # numbers in an array


@dataclass(frozen=True)
class TaskScores:
    """Scores of tasks, each the mean over the query points of a task.

    Attributes:
        metric: ``"accuracy"``, the share of query points whose most probable class is right, or in
            regression ``"mse"``, the mean squared error of predictive means in squared units of
            the targets.
        values: The score of each task, ``(tasks,)``.
        nll: Negative log probability of the classes, or density of the targets, ``(tasks,)``,
            in nats.
        calibration_error: Expected calibration error over the query points of all tasks; NaN
            in regression.
    """

    metric: str
    values: Tensor
    nll: Tensor
    calibration_error: float

    @property
    def gain(self) -> Tensor:
        """Accuracy, or the negative squared error: larger is better, ``(tasks,)``."""
        return self.values if self.metric == "accuracy" else -self.values

    @staticmethod
    def interval(scores: Tensor) -> float:
        """Half the 95% interval of the mean over tasks: 1.96 standard errors.

        Args:
            scores: The score of each task, ``(tasks,)``.
        """
        return 1.96 * float(scores.std()) / math.sqrt(len(scores))


@checked
def evaluate_tasks(
    model: DeepKernelTransfer, tasks: Tasks, count: int, *, temperature: float = 1.0
) -> TaskScores:
    """Scores predictions of the first tasks of a source, without changing the model's mode.

    Args:
        model: The model.
        tasks: Source of tasks.
        count: Number of tasks, from number 0; all tasks of a source that has fewer by ``len``.
        temperature: Divisor of the log probabilities of classes, from :func:`fit_task_temperature`.

    Returns:
        The scores.

    Raises:
        ArgumentError: If ``count`` is below 1, or the temperature is not positive, or not 1 in
            regression.
    """
    check_counts(count=count)
    if not 0 < temperature < math.inf:
        raise ArgumentError("temperature", temperature, "a positive number")
    if tasks.draw([0]).ways:
        return class_scores(*task_log_probabilities(model, tasks, count), temperature)
    if temperature != 1:
        raise ArgumentError("temperature", temperature, "1 for regression, which has no classes")
    errors, nlls = [], []
    for episodes in batches(tasks, count, next(model.parameters())):
        (y, known), predictive = _query_targets(episodes), model.predict(episodes)
        y = y.masked_fill(~known, 0.0).unsqueeze(-2)
        errors.append(_mean((predictive.mean - y).square().squeeze(-2), known))
        nlls.append(-_mean(predictive.log_prob(y).squeeze(-2), known))
    return TaskScores("mse", torch.cat(errors), torch.cat(nlls), math.nan)


@checked
def fit_task_temperature(model: DeepKernelTransfer, tasks: Tasks, count: int = 100) -> float:
    """The temperature at which the classes of tasks are most probable.

    Log probabilities that are divided by it and normalized are usually better calibrated, for tasks
    of other classes too. The most probable class does not change (Guo et al. 2017).

    Args:
        model: The model.
        tasks: Source of tasks that were not trained on, such as those of validation.
        count: Number of tasks, from number 0; all tasks of a source that has fewer by ``len``.

    Returns:
        The temperature, for :func:`evaluate_tasks`.

    Raises:
        ArgumentError: If ``count`` is below 1, or the tasks are of regression.
    """
    check_counts(count=count)
    log_p, labels = task_log_probabilities(model, tasks, count)
    return fit_temperature(log_p[labels >= 0], labels[labels >= 0])


def task_log_probabilities(
    model: DeepKernelTransfer, tasks: Tasks, count: int
) -> tuple[Tensor, Tensor]:
    """Log probabilities of classes ``(tasks, q, ways)`` and the classes ``(tasks, q)``.

    Padding is of the class -100.
    """
    log_p, labels = [], []
    for episodes in batches(tasks, count, next(model.parameters())):
        if not episodes.ways:
            raise ArgumentError("tasks", "regression tasks", "classification tasks")
        y, known = _query_targets(episodes)
        log_p.extend(class_log_probabilities(model.predict(episodes)))
        labels.extend(y.masked_fill(~known, NO_CLASS))
    return pad_sequence(log_p, True), pad_sequence(labels, True, NO_CLASS)


def _query_targets(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Targets of the query points, ``(tasks, q)``, and which of them are no padding."""
    y, mask, s = episodes.points()[1], episodes.mask(), episodes.num_support
    known = torch.ones_like(y, dtype=torch.bool) if mask is None else mask.to(y.device)
    return y[:, s:], known[:, s:]


def _mean(values: Tensor, known: Tensor) -> Tensor:
    """Means over the known query points of each task, ``(tasks, q)`` to ``(tasks,)``."""
    return values.masked_fill(~known, 0.0).sum(-1) / known.sum(-1)


def batches(tasks: Tasks, count: int, like: Tensor) -> Iterator[Episodes]:
    """The first tasks of a source, as many at once as is fast, in type and place of a tensor."""
    count = min(count, len(tasks)) if isinstance(tasks, Sized) else count
    size = min(_TASKS_AT_ONCE, max(1, _INPUTS_AT_ONCE // tasks.draw([0]).inputs().numel()))
    for first in range(0, count, size):
        yield tasks.draw(range(first, min(first + size, count))).to(like)


def class_scores(log_p: Tensor, labels: Tensor, temperature: float = 1.0) -> TaskScores:
    """The scores of log probabilities ``(tasks, q, ways)`` of the classes ``(tasks, q)``.

    Classes below 0 are padding.
    """
    # Division keeps the order of classes, and so the accuracy.
    log_p = log_p if temperature == 1 else torch.log_softmax(log_p / temperature, dim=-1)
    known = labels >= 0
    values = _mean((log_p.argmax(-1) == labels).to(log_p.dtype), known)
    nll = -_mean(log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1), known)
    calibration = expected_calibration_error(log_p[known].exp(), labels[known])
    return TaskScores("accuracy", values, nll, calibration)


@checked
def class_probabilities(predictive: Normal) -> Tensor:
    r"""The probability of each class: that its one-vs-rest target is the largest.

    .. math:: p_c = \int \mathcal N(t; \mu_c, \sigma_c^2)
        \prod_{k \ne c} \Phi\!\left(\frac{t - \mu_k}{\sigma_k}\right) dt

    for independent one-vs-rest targets: the multiclass probit rule on the predictive marginals. The
    integrals are sums over evenly spaced points, a quarter of the smallest standard deviation
    apart, and are normalized to one. Standard deviations below 1/2,500 of the range of points count
    as that. If the variances are equal the most probable class is that of the largest mean.

    Args:
        predictive: Marginals of the one-vs-rest targets, ``(*batch, ways, q)``.

    Returns:
        Probabilities, ``(*batch, q, ways)``.
    """
    return class_log_probabilities(predictive).exp()


def class_log_probabilities(predictive: Normal) -> Tensor:
    """The logarithms of :func:`class_probabilities`, finite where these underflow."""
    mean, scale = predictive.mean.mT, predictive.stddev.mT  # (*batch, q, ways)
    shape, ways = mean.shape, mean.shape[-1]
    mean, scale = mean.reshape(-1, ways), scale.reshape(-1, ways)
    low = (mean - _REACH * scale).amin(-1, keepdim=True)
    width = mean.amax(-1, keepdim=True) + _REACH * scale.amax(-1, keepdim=True) - low
    scale = torch.maximum(scale, _PER_DEVIATION / _MOST_POINTS * width)
    counts = (_PER_DEVIATION * width / scale.amin(-1, keepdim=True)).squeeze(-1)
    # Rows of about the same number of points are summed together, whatever the others need.
    steps = (_STEPS_AN_OCTAVE * counts.log2()).ceil().nan_to_num()
    log_p = torch.empty_like(mean)
    for step in steps.unique().tolist():
        points = torch.linspace(0, 1, math.ceil(2 ** (step / _STEPS_AN_OCTAVE)) + 1).to(mean)
        size = max(1, _SUM_AT_ONCE // (ways * len(points)))
        for rows in (steps == step).nonzero()[:, 0].split(size):
            log_p[rows] = _summed(mean[rows], scale[rows], low[rows] + width[rows] * points)
    return log_p.view(shape)


def _summed(mean: Tensor, scale: Tensor, points: Tensor) -> Tensor:
    """Log probabilities ``(q, ways)`` by sums over evenly spaced points, ``(q, points)``.

    The error of such sums of smooth functions falls exponentially with the number of points.
    """
    # In logarithms throughout: the product over other classes underflows for many of them.
    standard = (points.unsqueeze(-2) - mean.unsqueeze(-1)) / scale.unsqueeze(-1)
    below = torch.special.log_ndtr(standard)  # (q, ways, points)
    others = below.sum(-2, keepdim=True) - below
    log_terms = others - 0.5 * standard.square() - scale.log().unsqueeze(-1)
    return torch.log_softmax(log_terms.logsumexp(-1), dim=-1)
