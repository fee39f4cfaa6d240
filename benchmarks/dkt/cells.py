"""One cell: a model trained on the tasks of a study and tested on others, or a baseline."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.dkt.together import sources_on_device, train_together
from gpclml.conditioning import LastPoints
from gpclml.fit import fit_mll
from gpclml.meta import Episodes, TaskScores
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = [
    "BASELINE", "OBJECTIVES", "SOURCES", "nearest_neighbour_accuracy", "plain_gp_scores",
    "run_cell", "run_together",
]  # fmt: skip


BASELINE = "pixels"
"""In place of a kernel: the baseline on raw inputs."""
OBJECTIVES = ("lml", "clml", "clml-half")
SOURCES = (
    "benchmarks.dkt.baselines", "benchmarks.dkt.stacks",
    "benchmarks.dkt.studies", "benchmarks.dkt.together",
)  # fmt: skip
"""The modules beside this one that decide the results of :func:`run_cell`."""


def run_cell(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """Trains and tests one model.

    Args:
        cell: Its configuration: ``study``, ``shots``, ``seed`` (of tasks and network),
            ``kernel`` (or :data:`BASELINE`), ``objective``, ``steps``, ``tasks_per_step``,
            ``lr``, ``test_tasks`` and ``device``; None for a setting that is not used.

    Returns:
        - ``accuracy`` and ``calibration_error`` in classification, ``mse`` in regression (squared
          units of the targets), means over test tasks;
        - ``interval``: half the 95% interval of the accuracy or error over test tasks;
        - ``nll``: nats a query point; not of the nearest neighbour;
        - ``temperature``: what is best for validation tasks, ``tempered_nll`` and
          ``tempered_calibration_error`` with it; where there are such tasks;
        - ``train_seconds``, ``best_step``: of the training.
    """
    return run_together([cell])[0]


def run_together(cells: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The same of cells that differ in seed and target alone, of which each seed trains once.

    Args:
        cells: As for :func:`run_cell`, all of one :func:`benchmarks.dkt.together.label`.
    """
    if cells[0]["kernel"] == BASELINE:
        return [_baseline(cell) for cell in cells]
    return train_together(cells)


def _baseline(cell: Mapping[str, Any]) -> dict[str, float]:
    episodes = sources_on_device(cell).test.draw(range(cell["test_tasks"]))
    if episodes.ways:
        return _mean("accuracy", nearest_neighbour_accuracy(episodes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a fit to few points may stop early
        errors, nlls = plain_gp_scores(episodes)
    return {**_mean("mse", errors), "nll": float(nlls.mean())}


def _mean(name: str, scores: Tensor) -> dict[str, float]:
    return {name: float(scores.mean()), "interval": TaskScores.interval(scores)}


def nearest_neighbour_accuracy(episodes: Episodes) -> Tensor:
    """The share of query points whose nearest support point, pixel by pixel, is of their class.

    Returns:
        One a task, ``(tasks,)``.
    """
    support, query = episodes.support_x.flatten(2).double(), episodes.query_x.flatten(2).double()
    nearest = torch.cdist(query, support).argmin(-1)
    guess = episodes.support_y.gather(-1, nearest)
    return (guess == episodes.query_y).double().mean(-1)


def plain_gp_scores(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Scores of a GP with an RBF kernel of one lengthscale, fitted to each task alone by the LML.

    Returns:
        Mean squared errors and negative log densities, ``(tasks,)`` each.
    """
    errors, nlls = [], []
    for task in range(episodes.num_tasks):
        x, y = episodes.support_x[task].flatten(1).double(), episodes.support_y[task].double()
        model = GPRegression(x, y, "rbf", ard=False)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        fit_mll(mll, progress=False)
        truth = episodes.query_y[task].double()
        with torch.no_grad():
            normal = model.predict(episodes.query_x[task].flatten(1).double(), marginal=True)
            predictive = torch.distributions.Normal(normal.mean, normal.variance.sqrt())
            errors.append((normal.mean - truth).square().mean())
            nlls.append(-predictive.log_prob(truth).mean())
    return torch.stack(errors), torch.stack(nlls)
