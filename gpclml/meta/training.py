"""Training of a Deep Kernel Transfer model over many tasks, with checkpoints."""

from __future__ import annotations

import copy
import math
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood

from gpclml._utils.arguments import callers_level, check_counts, check_learning_rate, checked
from gpclml._utils.checkpoint import read_checkpoint, write_checkpoint
from gpclml._utils.progress import progress_bar
from gpclml._utils.resuming import (
    Course,
    check_fingerprint,
    check_state,
    digest,
    load_optimizer_state,
    module_classes,
)
from gpclml.errors import ArgumentError, DataError, NonFiniteError
from gpclml.fit import FitResult
from gpclml.meta.deep_kernel_transfer import DeepKernelTransfer
from gpclml.meta.evaluation import Tasks, evaluate_tasks

__all__ = ["TasksFitResult", "load_model", "parameter_groups", "train_on_tasks"]

_CHECKPOINT = "gpclml.DeepKernelTransfer"
_REQUIRED = {"best": dict, "optimizer": dict, "training": dict}


@dataclass(frozen=True, kw_only=True)
class TasksFitResult(FitResult):
    """What :func:`train_on_tasks` did, in all runs where it was resumed.

    ``history`` is the objective at each step, the mean over tasks and ways in nats per held-out
    target; ``objective`` is that of the last step that the model keeps.

    Attributes:
        validated: Numbers of steps after which validation tasks were scored.
        scores: Mean accuracy, or negative squared error, of the validation tasks at each of them.
        best: Number of steps with the best score; of the last step without validation.
    """

    validated: list[int] = field(repr=False)
    scores: list[float] = field(repr=False)
    best: int


@dataclass
class _Course(Course):
    """With the score of each validation."""

    scores: list[float] = field(default_factory=list)

    def result(self) -> TasksFitResult:
        return TasksFitResult(
            objective=self.objectives[self.best - 1] if self.best else math.nan,
            history=self.objectives, seconds=self.seconds, validated=self.looks,
            scores=self.scores, best=self.best,
        )  # fmt: skip


@checked
def train_on_tasks(
    model: DeepKernelTransfer,
    mll: MarginalLogLikelihood,
    tasks: Tasks,
    *,
    steps: int,
    tasks_per_step: int = 1,
    lr: float = 1e-3,
    validation: Tasks | None = None,
    validation_tasks: int = 100,
    look_every: int = 500,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> TasksFitResult:
    """Trains a model by Adam on new tasks at each step, and keeps the best validated parameters.

    With k tasks a step, step ``s`` takes tasks ``s k`` to ``(s + 1) k - 1`` of the source: the same
    sources and objective give the same training. A checkpoint is saved at every validation and, as
    of the last whole step, at an interrupt. A training that is resumed from it gives the same
    numbers bit for bit, with the same redrawn hold-outs; only layers that draw from PyTorch's
    global generator, such as dropout, draw others. Tasks, of which the first is compared, and
    settings must be the same; ``steps`` and ``patience`` may differ.

    Args:
        model: Trained in place; left in eval mode, with the best parameters.
        mll: An objective of the model, which decides what of a task is conditioned on. Its state
            is saved too, so that its draws go on.
        tasks: Source of training tasks.
        steps: Number of steps.
        tasks_per_step: Tasks in the one batched GP of a step.
        lr: Learning rate of Adam for the network, which includes a batch normalization of its
            features; of kernel, mean and noise a tenth of it.
        validation: Source of validation tasks; if None the last parameters are kept.
        validation_tasks: Number of validation tasks.
        look_every: Steps between validations.
        patience: Number of validations in a row without a better score after which the training
            ends before ``steps``; None trains all steps.
        checkpoint: File to save to and to resume from.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The course of the training.

    Raises:
        ArgumentError: A number is out of range, the objective is of another model, or there is
            patience without validation tasks.
        NonFiniteError: Objective or gradient is not finite, or features are not; the model is
            then as after the last step.
        NotPSDError: A covariance is not positive definite even with jitter.
        DataError: The checkpoint cannot be written or read, is damaged, or is of another
            architecture, objective, training, or of a release whose training cannot be resumed.

    Note:
        A checkpoint costs a copy of the parameters and of Adam's moments a step.
    """
    check_counts(
        steps=steps, tasks_per_step=tasks_per_step, look_every=look_every,
        validation_tasks=validation_tasks,
    )  # fmt: skip
    if patience is not None:
        check_counts(patience=patience)
        if validation is None:
            fix = "Give validation tasks, or leave patience out."
            raise ArgumentError("patience", patience, "None without validation tasks", fix)
    check_learning_rate(lr, next(model.parameters()).dtype)
    if all(module is not model for module in mll.modules()):
        raise ArgumentError("mll", f"a {type(mll).__name__} of another model", "one of the model")
    run = _Run(model, mll, lr)
    decided_by: dict[str, Any] = {}
    if checkpoint is not None:
        decided_by = {
            "tasks": _first_task(tasks),
            "validation": None if validation is None else _first_task(validation),
            "objective": digest([module_classes(mll), getattr(mll, "conditioning", None)]),
            "tasks_per_step": tasks_per_step,
            "lr": lr,
            "validation_tasks": validation_tasks,
            "look_every": look_every,
        }
        if Path(checkpoint).exists():
            run.read(checkpoint, decided_by)

    def save(path: str | Path, content: dict[str, Any]) -> None:
        write_checkpoint(path, _CHECKPOINT, {**content, "fingerprint": decided_by})

    start = time.perf_counter() - run.training.seconds
    done = len(run.training.objectives)
    whole: dict[str, Any] = {}
    with progress_bar(total=steps, initial=done, desc="steps", progress=progress) as bar:
        try:
            for step in range(done, steps):
                if patience is not None and run.looks_since_best >= patience:
                    break
                whole = run.content() if checkpoint is not None else {}
                run.step(tasks, range(step * tasks_per_step, (step + 1) * tasks_per_step))
                bar.update()
                if (step + 1) % look_every == 0 or step + 1 == steps:
                    run.look(validation, validation_tasks)
                    bar.set_postfix(best=run.training.best, refresh=False)
                    run.training.seconds = time.perf_counter() - start
                    if checkpoint is not None:
                        save(checkpoint, run.content())
        except KeyboardInterrupt:
            # A step or a validation that has begun is left out, and repeated on resuming.
            if checkpoint is not None and whole:
                whole["training"]["seconds"] = time.perf_counter() - start
                save(checkpoint, whole)
            raise
    run.keep_best()
    return run.training.result()


@checked
def load_model(model: DeepKernelTransfer, path: str | Path) -> DeepKernelTransfer:
    """Loads the best parameters of a checkpoint into a model.

    Args:
        model: A model of the architecture that was trained; changed in place, left in eval mode.
        path: A checkpoint of :func:`train_on_tasks`.

    Returns:
        The same model.

    Raises:
        DataError: There is no such file, it is damaged, or of another architecture.
    """
    device = next(model.parameters()).device
    content = read_checkpoint(path, _CHECKPOINT, device, {"best": dict})
    check_state(path, model, content["best"])
    model.load_state_dict(content["best"])
    return model.eval()


def parameter_groups(
    model: DeepKernelTransfer, mll: MarginalLogLikelihood, lr: float, gp_rate: float
) -> list[dict[str, Any]]:
    """Groups of learning rates: the network, and kernel, mean and noise."""
    network = model.network_parameters()
    inside = {id(parameter) for parameter in network}
    others = [parameter for parameter in mll.parameters() if id(parameter) not in inside]
    return [{"params": network, "lr": lr}, {"params": others, "lr": gp_rate}]


class _Run:
    """Model, optimizer and course of a training, as they are saved together."""

    def __init__(self, model: DeepKernelTransfer, mll: MarginalLogLikelihood, lr: float) -> None:
        self.model, self.mll = model, mll
        self.optimizer = torch.optim.Adam(parameter_groups(model, mll, lr, 0.1 * lr))
        self.training = _Course()
        self.best = _state(model)

    def step(self, tasks: Tasks, indices: range) -> None:
        own = next(self.model.parameters())
        episodes = tasks.draw(indices).to(own.device, own.dtype)
        self.mll.train()
        self.optimizer.zero_grad()
        value = self.model.objective(self.mll, episodes).mean()
        (-value).backward()
        gradients = [p.grad for p in self.mll.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        objective, norm = torch.stack([value.detach(), norm.to(value)]).tolist()
        if not math.isfinite(objective) or not math.isfinite(norm):
            got = f"value {objective} with a gradient of norm {norm} at task {indices.start}"
            suggestion = "Lower the learning rate."
            raise NonFiniteError("objective", got, "finite values", suggestion)
        self.optimizer.step()
        self.training.objectives.append(objective)

    def look(self, validation: Tasks | None, count: int) -> None:
        training, done = self.training, len(self.training.objectives)
        if validation is not None:
            score = float(evaluate_tasks(self.model, validation, count).gain.mean())
            is_best = score > max(training.scores, default=-math.inf)
            training.looks.append(done)
            training.scores.append(score)
            if not is_best:
                return
        training.best, self.best = done, _state(self.model)

    @property
    def looks_since_best(self) -> int:
        """Number of validations since the one of the best score."""
        scores = self.training.scores
        return len(scores) - 1 - scores.index(max(scores)) if scores else 0

    def keep_best(self) -> None:
        self.model.load_state_dict(self.best)
        self.model.eval()

    def content(self) -> dict[str, Any]:
        """A copy of the state that a resumed training needs."""
        return {
            "objective": _state(self.mll),
            "best": self.best,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "training": self.training.content(),
        }

    def read(self, path: str | Path, decided_by: dict[str, Any]) -> None:
        device = next(self.model.parameters()).device
        content = read_checkpoint(path, _CHECKPOINT, device, _REQUIRED)
        check_fingerprint(path, content.get("fingerprint"), decided_by)
        if isinstance(content.get("objective"), dict):
            module, state = self.mll, content["objective"]
        elif isinstance(content.get("model"), dict):  # earlier releases kept the model alone
            module, state = self.model, content["model"]
            warnings.warn(
                f"{path} was written by an earlier release, without the state of the objective. "
                "Held-out points that are drawn at random are drawn from the seed on again.",
                stacklevel=callers_level(),
            )
        else:
            raise DataError(
                f"checkpoint: {path} lacks the state of the objective. Restore a copy of it, or "
                "give another file to train again."
            )
        check_state(path, module, state)
        check_state(path, self.model, content["best"])
        try:
            training = _Course(**self.training.restored(content["training"]))
            load_optimizer_state(self.optimizer, content["optimizer"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"checkpoint: {path} was trained with other groups of learning rates, as batch "
                "normalization of features was in earlier releases, or is not complete, and cannot "
                f"be resumed ({error}). Give another file to train again, or use what it has "
                "by load_model."
            ) from error
        module.load_state_dict(state)
        self.best, self.training = content["best"], training


def _first_task(tasks: Tasks) -> str:
    """A digest of the first task, by which data, sizes and seed of all tasks are compared."""
    first = tasks.draw([0])
    return digest([first.support_x, first.support_y, first.query_x, first.query_y, first.ways])


def _state(module: torch.nn.Module) -> dict[str, Any]:
    return copy.deepcopy(module.state_dict())
