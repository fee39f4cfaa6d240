"""Scores of predictions for tasks that were not trained on, and class probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import check_counts, checked
from gpclml.errors import ArgumentError
from gpclml.evaluation.calibration import expected_calibration_error, fit_temperature
from gpclml.meta.deep_kernel_transfer import DeepKernelTransfer
from gpclml.meta.episodes import Episodes

__all__ = [
    "TaskScores",
    "Tasks",
    "batches",
    "class_log_probabilities",
    "class_probabilities",
    "class_scores",
    "evaluate_tasks",
    "fit_task_temperature",
    "task_log_probabilities",
]

_AT_ONCE = 20
_AT_ONCE_ON_A_GPU = 40  # where a call costs more than its arithmetic
_NODES = 48
_MOST_AT_ONCE = 2**25  # numbers in an array of a quadrature


class Tasks(Protocol):
    """A source of numbered tasks, such as :class:`~gpclml.meta.ImageTasks`."""

    def draw(self, indices: Sequence[int]) -> Episodes:
        """Draws tasks by their numbers, as one batch."""
        ...


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
        count: Number of tasks, from number 0.
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
    ways, first, second = _results(model, tasks, count)
    if ways:
        return class_scores(first, second, temperature)
    if temperature != 1:
        raise ArgumentError("temperature", temperature, "1 for regression, which has no classes")
    return TaskScores("mse", first, second, math.nan)


@checked
def fit_task_temperature(model: DeepKernelTransfer, tasks: Tasks, count: int = 100) -> float:
    """The temperature at which the classes of tasks are most probable.

    Log probabilities that are divided by it and normalized are usually better calibrated, for tasks
    of other classes too. The most probable class does not change (Guo et al. 2017).

    Args:
        model: The model.
        tasks: Source of tasks that were not trained on, such as those of validation.
        count: Number of tasks, from number 0.

    Returns:
        The temperature, for :func:`evaluate_tasks`.

    Raises:
        ArgumentError: If ``count`` is below 1, or the tasks are of regression.
    """
    check_counts(count=count)
    log_p, labels = task_log_probabilities(model, tasks, count)
    return fit_temperature(log_p.flatten(0, 1), labels.flatten())


def task_log_probabilities(
    model: DeepKernelTransfer, tasks: Tasks, count: int
) -> tuple[Tensor, Tensor]:
    """Log probabilities of classes ``(tasks, q, ways)`` and the classes ``(tasks, q)``."""
    ways, log_p, labels = _results(model, tasks, count)
    if not ways:
        raise ArgumentError("tasks", "regression tasks", "classification tasks")
    return log_p, labels


def _results(model: DeepKernelTransfer, tasks: Tasks, count: int) -> tuple[int, Tensor, Tensor]:
    """Ways, log probabilities and classes; in regression 0, squared errors and NLLs of tasks."""
    ways, pairs = 0, list[tuple[Tensor, Tensor]]()
    for episodes in batches(tasks, count, next(model.parameters())):
        predictive, truth, ways = model.predict(episodes), episodes.query_y, episodes.ways
        if ways:
            pairs.append((class_log_probabilities(predictive), truth))
        else:
            density = predictive.log_prob(truth.unsqueeze(-2)).squeeze(-2)
            errors = (predictive.mean.squeeze(-2) - truth).square()
            pairs.append((errors.mean(-1), -density.mean(-1)))
    first, second = (torch.cat(part) for part in zip(*pairs, strict=True))
    return ways, first, second


def batches(tasks: Tasks, count: int, like: Tensor) -> Iterator[Episodes]:
    """The first tasks of a source, as many at once as is fast, in type and place of a tensor."""
    at_once = _AT_ONCE if like.device.type == "cpu" else _AT_ONCE_ON_A_GPU
    for first in range(0, count, at_once):
        drawn = tasks.draw(range(first, min(first + at_once, count)))
        yield drawn.to(like.device, like.dtype)


def class_scores(log_p: Tensor, labels: Tensor, temperature: float = 1.0) -> TaskScores:
    """The scores of log probabilities ``(tasks, q, ways)`` of the classes ``(tasks, q)``."""
    log_p = log_p if temperature == 1 else torch.log_softmax(log_p / temperature, dim=-1)
    values = (log_p.argmax(-1) == labels).to(log_p.dtype).mean(-1)
    nll = -log_p.gather(-1, labels.unsqueeze(-1)).mean((-2, -1))
    calibration = expected_calibration_error(log_p.exp(), labels)
    return TaskScores("accuracy", values, nll, calibration)


@checked
def class_probabilities(predictive: Normal) -> Tensor:
    r"""The probability of each class: that its one-vs-rest target is the largest.

    .. math:: p_c = \int \mathcal N(t; \mu_c, \sigma_c^2)
        \prod_{k \ne c} \Phi\!\left(\frac{t - \mu_k}{\sigma_k}\right) dt

    for independent one-vs-rest targets: the multiclass probit rule on the predictive marginals. It
    is computed by Gauss-Hermite quadrature and normalized to one. If the variances are equal the
    most probable class is that of the largest mean.

    Args:
        predictive: Marginals of the one-vs-rest targets, ``(*batch, ways, q)``.

    Returns:
        Probabilities, ``(*batch, q, ways)``.
    """
    return class_log_probabilities(predictive).exp()


def class_log_probabilities(predictive: Normal) -> Tensor:
    """The logarithms of :func:`class_probabilities`, finite where these underflow."""
    *batch, ways, q = predictive.mean.shape
    if batch and batch[0] > 1 and math.prod(batch) * q * ways**2 * _NODES > _MOST_AT_ONCE:
        parts = (one.tensor_split(2) for one in (predictive.mean, predictive.stddev))
        halves = zip(*parts, strict=True)
        return torch.cat([class_log_probabilities(Normal(*half)) for half in halves])
    mean, scale = predictive.mean.mT, predictive.stddev.mT  # (*batch, q, ways)
    nodes, weights = (
        torch.as_tensor(part).to(mean) for part in numpy.polynomial.hermite_e.hermegauss(_NODES)
    )
    at = mean.unsqueeze(-1) + scale.unsqueeze(-1) * nodes  # (*batch, q, ways, nodes)
    standard = (at.unsqueeze(-2) - mean[..., None, :, None]) / scale[..., None, :, None]
    below = torch.special.log_ndtr(standard)  # (*batch, q, ways, ways, nodes)
    own = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device).unsqueeze(-1)
    others = below.masked_fill(own, 0.0).sum(-2)
    log_terms = others + weights.log()
    return torch.log_softmax(log_terms.logsumexp(-1), dim=-1)
