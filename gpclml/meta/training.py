"""Training of a Deep Kernel Transfer model over many tasks, with checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood

from gpclml._utils.arguments import check_counts, checked
from gpclml._utils.environment import progress_bar
from gpclml._utils.files import read_checkpoint
from gpclml._utils.resuming import (
    ResumableRun,
    check_state,
    copied_state,
    digest,
    module_classes,
)
from gpclml.errors import ArgumentError, NonFiniteError
from gpclml.fit import FitResult
from gpclml.meta.deep_kernel_transfer import DeepKernelTransfer
from gpclml.meta.episodes import placed
from gpclml.meta.evaluation import Tasks, evaluate_tasks

__all__ = ["TasksFitResult", "load_model", "parameter_groups", "train_on_tasks"]

_CHECKPOINT = "gpclml.DeepKernelTransfer"


@dataclass(frozen=True, kw_only=True)
class TasksFitResult(FitResult):
    """What :func:`train_on_tasks` did, in all runs where it was resumed.

    ``history`` is the objective at each step, the mean over tasks and ways in nats per held-out
    target; ``objective`` is that of the step whose parameters the model keeps.

    Attributes:
        validated: Numbers of steps after which validation tasks were scored.
        scores: Mean accuracy, or negative squared error, of the validation tasks at each of them.
        best: Number of steps at the best score; all steps if there was no validation.
    """

    validated: list[int] = field(repr=False)
    scores: list[float] = field(repr=False)
    best: int


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

    With k tasks per step, step ``s`` takes tasks ``s k`` to ``(s + 1) k - 1`` of the source, so the
    same sources and objective give the same training. A checkpoint is saved at every validation
    and, as of the last whole step, at an interrupt. A resumed training gives the same numbers bit
    for bit; only layers that draw from PyTorch's global generator, such as dropout, draw others.
    Tasks (the first one is compared) and settings must be the same; ``steps`` and ``patience`` may
    differ.

    Args:
        model: Trained in place; left in eval mode, with the best parameters.
        mll: An objective of the model, which decides which points of a task are conditioned on. A
            checkpoint contains its state.
        tasks: Source of training tasks.
        steps: Number of steps.
        tasks_per_step: Tasks in the one batched GP of a step.
        lr: Learning rate of Adam for the network, including a batch normalization of its features.
            Kernel, mean and noise have a tenth of it.
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
        NonFiniteError: The objective, a gradient or features are not finite; the model keeps the
            parameters of the last step.
        NotPSDError: A covariance is not positive definite even with jitter.
        DataError: The checkpoint cannot be written or read, is damaged, or is of another
            architecture, objective or training.

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
    dtype = next(model.parameters()).dtype
    if not 0 < lr <= torch.finfo(dtype).max:
        raise ArgumentError("lr", lr, f"a positive number that {dtype} can hold")
    if all(module is not model for module in mll.modules()):
        raise ArgumentError("mll", f"a {type(mll).__name__} of another model", "one of the model")
    optimizer = torch.optim.Adam(parameter_groups(model, mll, lr, 0.1 * lr))
    run = ResumableRun(_CHECKPOINT, mll, model, [optimizer])
    run.best = copied_state(model)
    run.open(
        checkpoint,
        lambda: {
            "tasks": _first_task(tasks),
            "validation": None if validation is None else _first_task(validation),
            "objective": digest([module_classes(mll), getattr(mll, "conditioning", None)]),
            "tasks_per_step": tasks_per_step,
            "lr": lr,
            "validation_tasks": validation_tasks,
            "look_every": look_every,
        },
    )
    course = run.course
    done = len(course.objectives)
    with (
        progress_bar(total=steps, initial=done, desc="steps", progress=progress) as bar,
        run.steps(),
    ):
        for step in range(done, steps):
            if patience is not None and course.looks_since_best >= patience:
                break
            run.begin_step()
            numbers = range(step * tasks_per_step, (step + 1) * tasks_per_step)
            course.objectives.append(_step(model, mll, optimizer, tasks, numbers))
            bar.update()
            if (step + 1) % look_every == 0 or step + 1 == steps:
                if validation is None:
                    course.best, run.best = step + 1, copied_state(model)
                else:
                    scores = evaluate_tasks(model, validation, validation_tasks)
                    run.note(float(scores.gain.mean()))
                bar.set_postfix(best=course.best, refresh=False)
                run.save()
    run.keep_best()
    model.eval()
    return TasksFitResult(
        objective=course.objectives[course.best - 1] if course.best else math.nan,
        history=course.objectives, seconds=course.seconds, validated=course.looks,
        scores=course.scores, best=course.best,
    )  # fmt: skip


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


def _step(
    model: DeepKernelTransfer,
    mll: MarginalLogLikelihood,
    optimizer: torch.optim.Optimizer,
    tasks: Tasks,
    numbers: range,
) -> float:
    """A step on the tasks of these numbers; the objective before it."""
    episodes = placed(tasks.draw(numbers), next(model.parameters()))
    mll.train()
    optimizer.zero_grad()
    value = model.objective(mll, episodes).mean()
    (-value).backward()
    gradients = [p.grad for p in mll.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    objective, norm = torch.stack([value.detach(), norm.to(value)]).tolist()
    if not math.isfinite(objective) or not math.isfinite(norm):
        got = f"value {objective} with a gradient of norm {norm} at task {numbers.start}"
        raise NonFiniteError("objective", got, "finite values", "Lower the learning rate.")
    optimizer.step()
    return objective


def _first_task(tasks: Tasks) -> str:
    """A digest of the first task, by which data, sizes and seed of all tasks are compared."""
    first = tasks.draw([0])
    return digest([first.support_x, first.support_y, first.query_x, first.query_y, first.ways])
