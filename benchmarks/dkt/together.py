"""Cells of all targets of a training, computed together; on a GPU of all its seeds too."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.dkt.baselines import (
    BASELINES,
    Baseline,
    LinearTransfer,
    baseline_log_probabilities,
    evaluate_baseline,
)
from benchmarks.dkt.stacks import Stack
from benchmarks.dkt.studies import Sources, study_named
from gpclml.conditioning import Conditioning, LastPoints, RandomHoldout
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.evaluation import fit_temperature
from gpclml.meta import (
    DeepKernelTransfer,
    Episodes,
    ImageTasks,
    Tasks,
    TaskScores,
    evaluate_tasks,
)
from gpclml.meta.evaluation import class_scores, task_log_probabilities
from gpclml.meta.tasks import NumberedTasks, task_generator, unit_range
from gpclml.meta.training import parameter_groups
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = [
    "LOOK_EVERY", "VALIDATION_TASKS", "ClassifiedImages", "conditioning", "evaluate",
    "label", "size", "sources_on_device", "summary", "test_scores", "train_together",
]  # fmt: skip

VALIDATION_TASKS, LOOK_EVERY = 100, 500
_AT_ONCE = 50  # steps whose tasks are drawn at once
_SEEDS = 10  # that a GPU trains together
_TARGETS = 3  # of one training, at most

Model = DeepKernelTransfer | Baseline


class ClassifiedImages(NumberedTasks):
    """Images drawn from all classes of a source, each turn a class, as the query points of a task.

    Args:
        tasks: The source; a batch has as many images as one of its tasks.
    """

    def __init__(self, tasks: ImageTasks) -> None:
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


@dataclass
class _Member:
    """A model of one seed, its tasks, and the best of its looks."""

    model: Model
    train: Tasks
    validation: Tasks | None
    score: float = -math.inf
    step: int = 0
    state: dict[str, Any] | None = None

    def look(self, step: int) -> None:
        """Keeps the state where it is the best so far; any where nothing validates."""
        score = math.inf
        if self.validation is not None:
            score = float(evaluate(self.model, self.validation, VALIDATION_TASKS).gain.mean())
        if score > self.score or self.validation is None:
            self.score, self.step = score, step
            self.state = copy.deepcopy(self.model.state_dict())


def train_together(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Trains a model for each seed of the cells, all at once, and tests it on their studies.

    The models see the tasks and take the steps of :func:`gpclml.meta.train_on_tasks`, and agree
    with it up to rounding.

    Args:
        cells: Cells of one :func:`label`, of :func:`benchmarks.dkt.cells.run_cell`.

    Raises:
        NonFiniteError: The loss of one of the models is not finite.
    """
    start, first = time.perf_counter(), cells[0]
    seeds = list(dict.fromkeys(cell["seed"] for cell in cells))
    members = [_member(first, seed) for seed in seeds]
    _train(members, first)
    seconds = (time.perf_counter() - start) / len(seeds)
    temperatures = [_temperature(member) for member in members]
    answers = []
    for cell in cells:
        place = seeds.index(cell["seed"])
        member, test = members[place], sources_on_device(cell).test
        done = {"train_seconds": seconds, "best_step": float(member.step)}
        scores = test_scores(member.model, test, cell["test_tasks"], temperatures[place])
        answers.append({**scores, **done})
    return answers


def label(cell: Mapping[str, Any]) -> Hashable:
    """Equal for cells that :func:`train_together` can compute together."""
    apart = ("study",) if not _trains_seeds_together(cell) else ("study", "seed")
    rest = sorted((name, one) for name, one in cell.items() if name not in apart)
    return study_named(cell["study"]).training, tuple(rest)


def size(cell: Mapping[str, Any]) -> int:
    """How many cells to compute together: three studies', and of ten seeds where it pays."""
    return _TARGETS * (_SEEDS if _trains_seeds_together(cell) else 1)


def _trains_seeds_together(cell: Mapping[str, Any]) -> bool:
    """Steps of convolutional networks take a CPU as long together as one by one."""
    study, one_task = study_named(cell["study"]), cell["tasks_per_step"] in (None, 1)
    on_gpu = study.classes and cell["device"] != "cpu"
    return one_task and (study.training == "periodic" or on_gpu)


def conditioning(objective: str, tasks: Tasks) -> Conditioning:
    """What an objective holds out: the query points, a half of all points at random, or all."""
    if objective == "clml-half":
        return RandomHoldout(0.5)
    return LastPoints(m=tasks.draw([0]).num_support if objective == "clml" else 0)


def _temperature(member: _Member) -> float | None:
    """What is best for validation tasks; None in regression and where nothing validates."""
    if member.validation is None or member.train.draw([0]).ways == 0:
        return None
    log_p, labels = _log_probabilities(member.model, member.validation, VALIDATION_TASKS)
    return fit_temperature(log_p.flatten(0, 1), labels.flatten())


def test_scores(
    model: Model, tasks: Tasks, count: int, temperature: float | None
) -> dict[str, float]:
    """The metrics of a model on test tasks; with a temperature also of tempered probabilities."""
    if tasks.draw([0]).ways == 0:
        return summary(evaluate(model, tasks, count))
    log_p, labels = _log_probabilities(model, tasks, count)
    scores = summary(class_scores(log_p, labels))
    if temperature is not None:
        tempered = summary(class_scores(log_p, labels, temperature))
        scores["temperature"] = temperature
        scores |= {f"tempered_{name}": tempered[name] for name in ("nll", "calibration_error")}
    return scores


def _log_probabilities(model: Model, tasks: Tasks, count: int) -> tuple[Tensor, Tensor]:
    if isinstance(model, Baseline):
        return baseline_log_probabilities(model, tasks, count)
    return task_log_probabilities(model, tasks, count)


def summary(scores: TaskScores) -> dict[str, float]:
    """The metrics of a cell."""
    mean, interval = float(scores.values.mean()), TaskScores.interval(scores.values)
    summary = {scores.metric: mean, "interval": interval, "nll": float(scores.nll.mean())}
    if scores.metric == "accuracy":
        summary["calibration_error"] = scores.calibration_error
    return summary


def evaluate(model: Model, tasks: Tasks, count: int) -> TaskScores:
    """The scores of a GP or of a baseline."""
    if isinstance(model, Baseline):
        return evaluate_baseline(model, tasks, count)
    return evaluate_tasks(model, tasks, count)


def sources_on_device(cell: Mapping[str, Any]) -> Sources:
    """The tasks of a cell, whose images are on its device."""
    study = study_named(cell["study"])
    sources = study.sources(cell["shots"], cell["seed"], *study.ways_of(cell))
    moved = (cast(NumberedTasks, one) and cast(NumberedTasks, one).to(cell["device"])
             for one in (sources.train, sources.validation, sources.test))  # fmt: skip
    return Sources(*moved)  # pyright: ignore[reportArgumentType]


def _member(cell: Mapping[str, Any], seed: int) -> _Member:
    study, sources = study_named(cell["study"]), sources_on_device({**cell, "seed": seed})
    backbone = study.network(generator=torch.Generator().manual_seed(seed))
    train = cast(ImageTasks, sources.train)
    if cell["kernel"] in BASELINES:
        make = BASELINES[cell["kernel"]]
        model = make(backbone, study.num_features, train.ways, train.num_classes)
    else:
        # Targets as they are, as in the published code.
        model = DeepKernelTransfer(backbone, cell["kernel"], study.num_features, standardize=False)
    source = ClassifiedImages(train) if isinstance(model, LinearTransfer) else train
    return _Member(model.to(cell["device"]), source, sources.validation)


def _train(members: Sequence[_Member], cell: Mapping[str, Any]) -> None:
    """Adam steps on tasks of each model, as many as the cell says; the best looks are kept."""
    models, steps = [member.model for member in members], cell["steps"]
    each = cell["tasks_per_step"]
    if len(models) > 1 and each > 1:
        expected = "1 where several seeds train together"
        raise UnsupportedError("tasks_per_step", each, expected, "Give the seeds one by one.")
    stack = Stack(models) if len(models) > 1 else None
    module = models[0] if stack is None else cast(Model, stack.module)
    loss, groups = _objective(module, cell, members[0].train)
    optimizer = torch.optim.Adam(groups)
    losses: list[Tensor] = []
    sources = [member.train for member in members]
    for step, episodes in enumerate(_draws(sources, range(steps), each), 1):
        module.train()
        optimizer.zero_grad()
        values = loss(episodes).unflatten(0, (-1, each)).mean(1)
        values.sum().backward()
        optimizer.step()
        losses.append(values.detach())
        if step % LOOK_EVERY == 0 or step == steps:
            _check(losses, step)
            if stack is not None:
                stack.write_back()
            for member in members:
                member.look(step)
            losses.clear()
    for member in members:
        member.model.load_state_dict(cast(dict[str, Any], member.state))
        member.model.eval()


def _objective(
    module: Model, cell: Mapping[str, Any], tasks: Tasks
) -> tuple[Callable[[Episodes], Tensor], list[dict[str, Any]]]:
    """The loss of each task, and groups of learning rates."""
    lr = cell["lr"]
    if isinstance(module, Baseline):
        return module.loss, [{"params": list(module.parameters()), "lr": lr}]
    held_out = conditioning(cell["objective"], tasks)
    mll = ConditionalMarginalLogLikelihood(module.likelihood, module, held_out)

    def loss(episodes: Episodes) -> Tensor:
        return -module.objective(mll, episodes).mean(-1)

    return loss, parameter_groups(module, mll, lr, 0.1 * lr)


def _draws(sources: Sequence[Tasks], steps: range, each: int) -> Iterator[Episodes]:
    """The tasks of each step: so many of each source, those of the first source first."""
    for first in steps[::_AT_ONCE]:
        last = min(first + _AT_ONCE, steps.stop)
        parts = [one.draw(range(first * each, last * each)) for one in sources]
        by_step = []
        for name in ("support_x", "support_y", "query_x", "query_y"):
            of_sources = [getattr(part, name).unflatten(0, (-1, each)) for part in parts]
            by_step.append(torch.stack(of_sources, 1).flatten(1, 2))
        for tensors in zip(*by_step, strict=True):
            yield Episodes(*tensors, ways=parts[0].ways)


def _check(losses: Sequence[Tensor], step: int) -> None:
    finite = torch.stack(list(losses)).isfinite()  # (steps, models)
    if bool(finite.all()):
        return
    place, model = (~finite).nonzero()[0].tolist()
    got = f"a value that is not at step {step - len(losses) + place} of model {model}"
    raise NonFiniteError("loss", got, "finite values", "Lower the learning rate.")
