"""How well a model predicts the query points of tasks it has not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError
from gpclml.evaluation.calibration import expected_calibration_error
from gpclml.meta.class_probabilities import class_log_probabilities
from gpclml.meta.deep_kernel_transfer import DeepKernelTransfer
from gpclml.meta.episodes import Episodes

__all__ = ["TaskScores", "Tasks", "evaluate_tasks"]

_AT_ONCE = 20


class Tasks(Protocol):
    """What gives numbered tasks: :class:`~gpclml.meta.ImageTasks` and the like."""

    def draw(self, indices: Sequence[int]) -> Episodes:
        """These tasks as one batch."""
        ...


@dataclass(frozen=True)
class TaskScores:
    """Scores a task, each the mean over its query points.

    Attributes:
        metric: ``"accuracy"``, the share of query points whose likeliest class is theirs, or in
            regression ``"mse"``, the squared error of predictive means in squared units of the
            targets.
        values: That score, ``(tasks,)``.
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
            scores: One a task, ``(tasks,)``.
        """
        return 1.96 * float(scores.std()) / math.sqrt(len(scores))


@checked
def evaluate_tasks(model: DeepKernelTransfer, tasks: Tasks, count: int) -> TaskScores:
    """Scores predictions of the first tasks of a source; the model's mode stays as it is.

    Args:
        model: A model.
        tasks: Where tasks come from.
        count: How many, from number 0.

    Returns:
        The scores.

    Raises:
        ArgumentError: If ``count`` is below 1.
    """
    if count < 1:
        raise ArgumentError("count", count, "at least 1")
    own = next(model.parameters())
    values: list[Tensor] = []
    nlls: list[Tensor] = []
    probabilities: list[Tensor] = []
    labels: list[Tensor] = []
    for first in range(0, count, _AT_ONCE):
        episodes = tasks.draw(range(first, min(first + _AT_ONCE, count))).to(own.device, own.dtype)
        predictive = model.predict(episodes)
        truth = episodes.query_y
        if episodes.ways:
            log_p = class_log_probabilities(predictive)
            values.append((log_p.argmax(-1) == truth).to(own.dtype).mean(-1))
            nlls.append(-log_p.gather(-1, truth.unsqueeze(-1)).mean((-2, -1)))
            probabilities.append(log_p.exp())
            labels.append(truth)
        else:
            density = predictive.log_prob(truth.unsqueeze(-2)).squeeze(-2)
            values.append((predictive.mean.squeeze(-2) - truth).square().mean(-1))
            nlls.append(-density.mean(-1))
    score, nll = torch.cat(values), torch.cat(nlls)
    if not probabilities:
        return TaskScores("mse", score, nll, math.nan)
    calibration = expected_calibration_error(torch.cat(probabilities), torch.cat(labels))
    return TaskScores("accuracy", score, nll, calibration)
