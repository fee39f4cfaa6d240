"""One cell: a model trained on the tasks of a study and tested on others, or a baseline."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.dkt.baselines import BASELINES
from benchmarks.dkt.studies import FewShotStudy, Sources, study_named
from benchmarks.dkt.together import (
    LOOK_EVERY,
    VALIDATION_TASKS,
    conditioning,
    sources_on_device,
    test_scores,
    train_together,
)
from benchmarks.runner import cell_key, code_version
from gpclml.conditioning import LastPoints
from gpclml.fit import fit_mll
from gpclml.meta import DeepKernelTransfer, Episodes, TaskScores, train_on_tasks
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = [
    "BASELINE", "CHECKPOINTS", "OBJECTIVES", "SOURCES", "nearest_neighbour_accuracy",
    "plain_gp_scores", "run_cell", "run_together",
]  # fmt: skip


BASELINE = "pixels"
"""In place of a kernel: the baseline on raw inputs."""
OBJECTIVES = ("lml", "clml", "clml-half")
SOURCES = (
    "benchmarks._images", "benchmarks.dkt.baselines", "benchmarks.dkt.stacks",
    "benchmarks.dkt.studies", "benchmarks.dkt.together",
)  # fmt: skip
"""The modules beside this one that decide the results of :func:`run_cell`."""
CHECKPOINTS = "GPCLML_DKT_CHECKPOINTS"
"""Environment variable: the folder of checkpoints; without it a cell keeps none."""

_TRAINING = (
    "ways",
    "shots",
    "seed",
    "kernel",
    "objective",
    "steps",
    "tasks_per_step",
    "lr",
    "device",
)


def run_cell(cell: Mapping[str, Any]) -> dict[str, float]:
    """Trains and tests one model.

    With a folder of checkpoints an interrupted training goes on, and studies that train on the
    same tasks share one training.

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
    study = study_named(cell["study"])
    if cell["kernel"] in BASELINES:
        return dict(train_together([cell], _checkpoint(study, [cell]))[0])
    sources = sources_on_device(cell)
    if cell["kernel"] == BASELINE:
        return _baseline(study, sources, cell["test_tasks"])
    generator = torch.Generator().manual_seed(cell["seed"])
    model = DeepKernelTransfer(study.network(generator), cell["kernel"], study.num_features)
    model = model.to(cell["device"])
    held_out = conditioning(cell["objective"], sources.train)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, held_out)
    training = train_on_tasks(
        model, mll, sources.train, steps=cell["steps"], tasks_per_step=cell["tasks_per_step"],
        lr=cell["lr"], validation=sources.validation, validation_tasks=VALIDATION_TASKS,
        look_every=LOOK_EVERY, checkpoint=_checkpoint(study, [cell]), progress=False,
    )  # fmt: skip
    return {
        **test_scores(model, sources, cell["test_tasks"]),
        "train_seconds": training.seconds,
        "best_step": float(training.best),
    }


def run_together(cells: list[dict[str, Any]]) -> list[Mapping[str, Any] | Exception]:
    """The same of cells that differ in seed and target alone, of which each seed trains once.

    Args:
        cells: As for :func:`run_cell`, all of one :func:`benchmarks.dkt.together.label`.
    """
    if cells[0]["kernel"] == BASELINE:
        return [run_cell(cell) for cell in cells]
    return list(train_together(cells, _checkpoint(study_named(cells[0]["study"]), cells)))


def _checkpoint(study: FewShotStudy, cells: Sequence[Mapping[str, Any]]) -> Path | None:
    """The file of a training of some seeds: named for all that decides it, the code included."""
    folder = os.environ.get(CHECKPOINTS)
    if not folder:
        return None
    training = {name: cells[0].get(name) for name in _TRAINING}
    seeds = list(dict.fromkeys(cell["seed"] for cell in cells))
    training |= {"training": study.training, "seed": seeds if len(seeds) > 1 else seeds[0]}
    key = cell_key(training, code_version(run_cell, SOURCES))
    return Path(folder) / f"{study.training}-{key[:16]}.pt"


def _baseline(study: FewShotStudy, sources: Sources, count: int) -> dict[str, float]:
    episodes = sources.test.draw(range(count))
    if study.classes:
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
