"""Cells: a model trained on the tasks of a study and tested on others, or a baseline."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.dkt.baselines import BASELINES, Baseline, LinearTransfer, baseline_log_probabilities
from benchmarks.dkt.studies import Sources, study_named
from gpclml.conditioning import Conditioning, LastPoints, RandomHoldout
from gpclml.errors import NonFiniteError
from gpclml.evaluation import fit_temperature
from gpclml.fit import fit_mll
from gpclml.meta import (
    DeepKernelTransfer,
    Episodes,
    ImageTasks,
    Tasks,
    TaskScores,
    evaluate_tasks,
    train_on_tasks,
)
from gpclml.meta.evaluation import class_scores, task_log_probabilities
from gpclml.meta.tasks import NumberedTasks, task_generator, unit_range
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

BASELINE = "pixels"
"""In place of a kernel: the baseline on raw inputs."""
OBJECTIVES = ("lml", "clml", "clml-half")

VALIDATION_TASKS, LOOK_EVERY = 100, 500

Model = DeepKernelTransfer | Baseline


class ClassifiedImages(NumberedTasks):
    """Images drawn from all classes of a source, each turn a class, as the query points of a task.

    Args:
        tasks: The source; a batch has as many images as one of its tasks.
    """

    def __init__(self, tasks: ImageTasks) -> None:
        # Each quarter turn is a class, as in the tasks that the others learn from.
        turns = tasks.num_classes // len(tasks.labels.unique())
        self.images = torch.cat([torch.rot90(tasks.images, k, (-2, -1)) for k in range(turns)])
        _, places = tasks.labels.unique(return_inverse=True)
        self.num_classes = tasks.num_classes
        self.labels = torch.cat([places + k * (int(places.max()) + 1) for k in range(turns)])
        self.count, self.seed = tasks.ways * (tasks.shots + tasks.queries), tasks.seed

    def _task(self, index: int) -> Episodes:
        generator = task_generator(self.seed, index)
        rows = torch.randint(len(self.images), (1, self.count), generator=generator)
        rows = rows.to(self.images.device)
        x, y = unit_range(self.images[rows]), self.labels[rows]
        return Episodes(x[:, :0], y[:, :0], x, y)


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


def run_together(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The same of cells that differ in what they test on alone, which train once.

    Args:
        cells: As for :func:`run_cell`, all of one :func:`label`.

    Raises:
        NonFiniteError: The loss is not finite.
    """
    first = cells[0]
    if first["kernel"] == BASELINE:
        return [_baseline(cell) for cell in cells]
    # One training serves all targets: they differ in what is tested on alone.
    start, sources = time.perf_counter(), sources_on_device(first)
    model, best = _trained(first, sources)
    done = {"train_seconds": time.perf_counter() - start, "best_step": float(best)}
    temperature = None
    if sources.validation is not None and sources.train.draw([0]).ways:
        log_p, labels = _log_probabilities(model, sources.validation, VALIDATION_TASKS)
        temperature = fit_temperature(log_p.flatten(0, 1), labels.flatten())
    return [
        test_scores(model, sources_on_device(cell).test, cell["test_tasks"], temperature) | done
        for cell in cells
    ]


def label(cell: Mapping[str, Any]) -> Hashable:
    """Equal for cells that :func:`run_together` can compute together."""
    others = sorted((name, value) for name, value in cell.items() if name != "study")
    return study_named(cell["study"]).training, tuple(others)


def _trained(cell: Mapping[str, Any], sources: Sources) -> tuple[Model, int]:
    """A trained model and the step whose look at validation tasks was the best."""
    study, train = study_named(cell["study"]), cast(ImageTasks, sources.train)
    backbone = study.network(generator=torch.Generator().manual_seed(cell["seed"]))
    if cell["kernel"] in BASELINES:
        make = BASELINES[cell["kernel"]]
        baseline = make(backbone, study.num_features, train.ways, train.num_classes)
        baseline = baseline.to(cell["device"])
        tasks = ClassifiedImages(train) if isinstance(baseline, LinearTransfer) else train
        return baseline, train_baseline(baseline, tasks, sources.validation, cell)
    # Targets as they are, as in the published code.
    model = DeepKernelTransfer(backbone, cell["kernel"], study.num_features, standardize=False)
    model = model.to(cell["device"])
    held_out = conditioning(cell["objective"], train)
    mll = ConditionalMarginalLogLikelihood(cast(Any, model.likelihood), model, held_out)
    fit = train_on_tasks(
        model, mll, train, steps=cell["steps"], tasks_per_step=cell["tasks_per_step"],
        lr=cell["lr"], validation=sources.validation, validation_tasks=VALIDATION_TASKS,
        look_every=LOOK_EVERY, progress=False,
    )  # fmt: skip
    return model, fit.best


def train_baseline(
    model: Baseline, tasks: Tasks, validation: Tasks | None, cell: Mapping[str, Any]
) -> int:
    """Adam steps of a baseline as those of :func:`gpclml.meta.train_on_tasks`.

    Returns:
        The step whose parameters are kept: those of the best look at validation tasks.

    Raises:
        NonFiniteError: The loss is not finite.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["lr"])
    best, kept, state = -math.inf, 0, {}
    each, steps = cell["tasks_per_step"], cell["steps"]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        # Tasks are numbered, so that any two methods see the same ones.
        numbers = range((step - 1) * each, step * each)
        loss = model.train().loss(tasks.draw(numbers)).mean()
        if not loss.isfinite():
            fix = "Lower the learning rate."
            raise NonFiniteError("loss", f"{loss:g} at step {step}", "finite values", fix)
        loss.backward()
        optimizer.step()
        if step % LOOK_EVERY == 0 or step == steps:
            score = math.inf
            if validation is not None:
                answers = baseline_log_probabilities(model, validation, VALIDATION_TASKS)
                score = float(class_scores(*answers).gain.mean())
            # Strictly better: of equal looks the first is kept.
            if score > best or validation is None:
                best, kept, state = score, step, copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    model.eval()
    return kept


def conditioning(objective: str, tasks: Tasks) -> Conditioning:
    """What an objective holds out: the query points, a half of all points at random, or all."""
    if objective == "clml-half":
        return RandomHoldout(0.5)
    return LastPoints(m=tasks.draw([0]).num_support if objective == "clml" else 0)


def test_scores(
    model: Model, tasks: Tasks, count: int, temperature: float | None
) -> dict[str, float]:
    """The metrics of a model on test tasks; with a temperature also of tempered probabilities."""
    if tasks.draw([0]).ways == 0:
        return _summary(evaluate_tasks(cast(DeepKernelTransfer, model), tasks, count))
    log_p, labels = _log_probabilities(model, tasks, count)
    scores = _summary(class_scores(log_p, labels))
    if temperature is not None:
        tempered = _summary(class_scores(log_p, labels, temperature))
        scores["temperature"] = temperature
        scores |= {f"tempered_{name}": tempered[name] for name in ("nll", "calibration_error")}
    return scores


def _log_probabilities(model: Model, tasks: Tasks, count: int) -> tuple[Tensor, Tensor]:
    if isinstance(model, Baseline):
        return baseline_log_probabilities(model, tasks, count)
    return task_log_probabilities(model, tasks, count)


def _summary(scores: TaskScores) -> dict[str, float]:
    """The metrics of a cell."""
    mean, interval = float(scores.values.mean()), TaskScores.interval(scores.values)
    summary = {scores.metric: mean, "interval": interval, "nll": float(scores.nll.mean())}
    if scores.metric == "accuracy":
        summary["calibration_error"] = scores.calibration_error
    return summary


def sources_on_device(cell: Mapping[str, Any]) -> Sources:
    """The tasks of a cell, whose images are on its device."""
    sources = study_named(cell["study"]).sources_of(cell)
    moved = (cast(NumberedTasks, tasks) and cast(NumberedTasks, tasks).to(cell["device"])
             for tasks in (sources.train, sources.validation, sources.test))  # fmt: skip
    return Sources(*moved)  # pyright: ignore[reportArgumentType]


def _baseline(cell: Mapping[str, Any]) -> dict[str, float]:
    episodes = sources_on_device(cell).test.draw(range(cell["test_tasks"]))
    if episodes.ways:
        name, scores, further = "accuracy", nearest_neighbour_accuracy(episodes), {}
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a fit to few points may stop early
            scores, nlls = plain_gp_scores(episodes)
        name, further = "mse", {"nll": float(nlls.mean())}
    return {name: float(scores.mean()), "interval": TaskScores.interval(scores), **further}


def nearest_neighbour_accuracy(episodes: Episodes) -> Tensor:
    """The share of query points whose nearest support point, pixel by pixel, is of their class.

    Returns:
        One a task, ``(tasks,)``.
    """
    support, query = episodes.support_x.flatten(2).double(), episodes.query_x.flatten(2).double()
    # In double precision: distances of images are sums of hundreds of squares.
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
