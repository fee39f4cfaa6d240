"""Training of a Deep Kernel Transfer model over many tasks, with checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gpclml._utils.arguments import check_counts, checked
from gpclml._utils.resuming import digest, module_classes
from gpclml.errors import ArgumentError, NonFiniteError, UnsupportedError
from gpclml.fit import FitResult
from gpclml.fit.train import OptimizerFactory, Training, optimizer_factory, set_gradients
from gpclml.meta.deep_kernel_transfer import CHECKPOINT, DeepKernelTransfer
from gpclml.meta.evaluation import evaluate_tasks
from gpclml.meta.tasks import Tasks


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
    optimizer: str | OptimizerFactory = "adam",
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    callback: Callable[[int], Any] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> TasksFitResult:
    """Trains a model on new tasks at each step, and keeps the best validated parameters.

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
        lr: Learning rate of the network, including a batch normalization of its features. Kernel,
            mean and noise have a tenth of it.
        validation: Source of validation tasks; if None the last parameters are kept.
        validation_tasks: Number of validation tasks.
        look_every: Steps between validations, and between checkpoints.
        patience: Number of validations in a row without a better score after which the training
            ends before ``steps``; None trains all steps.
        optimizer: ``"adam"``, a ``torch.optim`` class, or a function of parameters and ``lr`` that
            makes an optimizer.
        scheduler: Makes a ``torch.optim.lr_scheduler`` of the optimizer, which takes a step after
            each of the training. Its state is in the checkpoint.
        callback: Called after each step with the number of steps.
        checkpoint: File to save to and to resume from.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The course of the training.

    Raises:
        ArgumentError: A number is out of range, the objective is of another model, or there is
            patience without validation tasks.
        UnsupportedError: The optimizer needs a line search, or the scheduler a score.
        NonFiniteError: The objective, a gradient or features are not finite; the model keeps the
            parameters of the last step.
        NotPSDError: A covariance is not positive definite even with jitter.
        DataError: The checkpoint cannot be written or read, is damaged, or is of another
            architecture, objective or training.

    Note:
        A checkpoint costs a copy of the parameters and of the optimizer's state a step.

    Examples:
        >>> import torch
        >>> from gpclml import MLP, ConditionalMarginalLogLikelihood, DeepKernelTransfer, LastPoints
        >>> from gpclml.meta import PeriodicTasks, train_on_tasks
        >>> model = DeepKernelTransfer(MLP([1, 40, 40]), "rbf")
        >>> mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        >>> cosine = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        >>> result = train_on_tasks(
        ...     model, mll, PeriodicTasks(), steps=20, optimizer=torch.optim.AdamW, scheduler=cosine
        ... )
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
    factory = optimizer_factory(optimizer)
    if factory is None or optimizer is torch.optim.LBFGS:
        raise UnsupportedError("optimizer", "L-BFGS", "an optimizer of single steps", "Use 'adam'.")
    # By identity: an objective may have parameters beside those of its model.
    network = [*model.backbone.parameters(), *model.normalization.parameters()]
    inside = {id(parameter) for parameter in network}
    others = [parameter for parameter in mll.parameters() if id(parameter) not in inside]
    groups = [{"params": network, "lr": lr}, {"params": others, "lr": 0.1 * lr}]
    stepper = factory(groups, lr=lr)
    schedule = None if scheduler is None else scheduler(stepper)
    kinds = type(None) if scheduler is None else LRScheduler
    if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, kinds):
        expected = "a function that makes a torch.optim.lr_scheduler whose steps need no score"
        raise UnsupportedError("scheduler", f"one of {type(schedule).__name__}", expected)
    stateful: list[Any] = [stepper, *([] if schedule is None else [schedule])]
    training = Training(model)
    training.note_state()
    if checkpoint is not None:
        settings = {
            "tasks": _first_task(tasks),
            "validation": None if validation is None else _first_task(validation),
            "objective": digest([module_classes(mll), getattr(mll, "conditioning", None)]),
            "tasks_per_step": tasks_per_step,
            "lr": lr,
            "optimizer": digest([type(stepper).__name__, stepper.defaults]),
            "scheduler": schedule and digest([type(schedule).__name__, schedule.state_dict()]),
            "validation_tasks": validation_tasks,
            "look_every": look_every,
        }
        training.resume(checkpoint, CHECKPOINT, mll, stateful, settings)

    def step(number: int) -> float:
        first = number * tasks_per_step
        drawn = tasks.draw(range(first, first + tasks_per_step))
        episodes = drawn.to(next(model.parameters()))
        mll.train()
        try:
            loss = set_gradients(stepper, -model.objective(mll, episodes).mean(), mll)
        except NonFiniteError as error:
            error.add_note(f"At task {first}.")
            raise
        for each in stateful:
            each.step()
        return -loss

    def look(done: int) -> dict[str, Any]:
        if done % look_every == 0 or done == steps:
            # Nothing to choose by: the last state is the best, and a checkpoint needs one.
            if validation is None:
                training.note_state()
            else:
                scores = evaluate_tasks(model, validation, validation_tasks)
                training.note(float(scores.gain.mean()))
            training.save()
        if callback is not None:
            callback(done)
        return {"best": training.best}

    training.run(step, steps, callback=look, patience=patience, desc="steps", progress=progress)
    training.keep_best()
    model.eval()
    return TasksFitResult(
        objective=training.history[training.best - 1] if training.best else math.nan,
        history=training.history, seconds=training.seconds, validated=training.looks,
        scores=training.scores, best=training.best,
    )  # fmt: skip


def _first_task(tasks: Tasks) -> str:
    """A digest of the first task, by which data, sizes and seed of all tasks are compared."""
    return digest(vars(tasks.draw([0])))
