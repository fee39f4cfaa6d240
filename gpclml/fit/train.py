"""The loop of every training by a stochastic optimizer, with its history and its checkpoints."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpclml._utils.arguments import tensor_like
from gpclml._utils.environment import load_botorch, progress_bar
from gpclml._utils.files import read_checkpoint, write_checkpoint
from gpclml._utils.resuming import check_state, copied_state
from gpclml.errors import DataError, NonFiniteError, UnknownNameError, UnsupportedError

STEPS = 300
"""Steps of a torch optimizer that are taken if no number is given."""

OptimizerFactory = Callable[..., torch.optim.Optimizer]

_COURSE = ("history", "looks", "scores", "best")  # what a checkpoint has of a training


def optimizer_factory(optimizer: str | OptimizerFactory) -> OptimizerFactory | None:
    """What makes an optimizer of parameters and ``lr``; None for the line search."""
    if isinstance(optimizer, str):
        factories = {"lbfgs": None, "adam": torch.optim.Adam}
        if optimizer not in factories:
            raise UnknownNameError("optimizer", optimizer, factories)
        return factories[optimizer]
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if isinstance(optimizer, type) and not issubclass(optimizer, torch.optim.Optimizer):
        raise UnsupportedError("optimizer", name, "a class of torch.optim")
    expected = "a class of torch.optim, or a function of parameters and lr that makes one"

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        try:
            made = cast(Any, optimizer)(parameters, lr=lr)
        except (TypeError, ValueError) as error:
            raise UnsupportedError("optimizer", f"{name} ({error})", expected) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise UnsupportedError("optimizer", f"{name}, which made no optimizer", expected)
        return made

    return make


def trainable(mll: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that a fit changes, by name."""
    return {name: p for name, p in mll.named_parameters() if p.requires_grad}


def limits_of(mll: MarginalLogLikelihood) -> dict[str, list[Tensor]]:
    """Bounds of constraints without a transform, by the parameter's name."""
    load_botorch()
    from botorch.optim.utils import get_parameters_and_bounds

    named, bounds = get_parameters_and_bounds(cast(Any, mll), requires_grad=True)
    pairs = cast(Any, bounds).items()
    return {name: [tensor_like(end, named[name]) for end in pair] for name, pair in pairs}


def falling(first: float, last: float, steps: int) -> Callable[[int], float]:
    """The learning rate after so many steps, which falls to the last step's by half a cosine."""

    def rate(number: int) -> float:
        done = min(number / max(1, steps - 1), 1.0)
        return last + (first - last) * (0.5 + 0.5 * math.cos(math.pi * done))

    return rate


def non_finite(value: float, names: list[str]) -> NonFiniteError:
    """The error of an objective that has no finite value or gradient."""
    return NonFiniteError(
        "objective",
        f"value {value}, non-finite gradients of {names[:4] or 'none'}",
        "finite values",
        "Lower the learning rate, or look for degenerate hyperparameters.",
    )


def set_gradients(optimizer: torch.optim.Optimizer, loss: Tensor, mll: torch.nn.Module) -> float:
    """Sets the gradients of the optimizer's parameters to those of a loss, and returns the loss.

    A NonFiniteError names the parameters whose gradients are not finite.
    """
    optimizer.zero_grad()
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    # A norm of infinite order is NaN or infinite where an entry is.
    largest = torch.nn.utils.get_total_norm(gradients, math.inf)
    value, largest = torch.stack([loss.detach(), largest.to(loss)]).tolist()  # one read of a device
    if not (math.isfinite(value) and math.isfinite(largest)):
        named = [(name, p.grad) for name, p in mll.named_parameters() if p.grad is not None]
        raise non_finite(value, [name for name, grad in named if not bool(grad.isfinite().all())])
    return value


class Training:
    """Steps of a training and their history, the best state so far, and a file to go on from.

    Attributes:
        history: What each step returned.
        looks, scores: Numbers of steps after which a score was noted, and these scores.
        best: Number of steps at the best score; 0 before a score was noted.
        best_state: The state then of the module that is kept.
    """

    def __init__(self, kept: torch.nn.Module | None = None) -> None:
        self.history: list[float] = []
        self.looks: list[int] = []
        self.scores: list[float] = []
        self.best = 0
        self.best_state: dict[str, Any] | None = None
        self._kept = kept
        self._start = time.perf_counter()
        self._path: str | os.PathLike[str] | None = None

    def run(
        self,
        step: Callable[[int], float],
        steps: int,
        *,
        callback: Callable[[int], Mapping[str, Any] | None] = lambda number: None,
        patience: int | None = None,
        desc: str = "",
        progress: bool | None = False,
    ) -> None:
        """Takes steps until there are so many in all, or scores have stopped to become better.

        A step takes its number, from 0, and returns the objective before it. The callback is given
        the number of steps after each, and returns what the progress bar shows beside the
        objective, if anything. So many scores after the best one (``patience``) end the training.
        """
        whole: dict[str, Any] = {}  # what there was after the last whole step
        done = len(self.history)
        with progress_bar(total=steps, initial=done, desc=desc, progress=progress) as bar:
            try:
                for number in range(done, steps):
                    if self.scores and patience is not None:
                        best = self.scores.index(max(self.scores))
                        if len(self.scores) - 1 - best >= patience:
                            break
                    if self._path is not None:
                        whole = self._content()
                    self.history.append(step(number))
                    bar.update()
                    shown = {"objective": f"{self.history[-1]:.4f}", **(callback(number + 1) or {})}
                    bar.set_postfix(shown, refresh=False)
            except KeyboardInterrupt:
                if whole:
                    self.save(whole)
                raise

    def note(self, score: float) -> None:
        """Notes a score after the last step, and the state if it is the best one."""
        if score > max(self.scores, default=-math.inf):
            self.note_state()
        self.looks.append(len(self.history))
        self.scores.append(score)

    def note_state(self) -> None:
        """Takes the state after the last step for the best one."""
        assert self._kept is not None
        self.best, self.best_state = len(self.history), copied_state(self._kept)

    def keep_best(self) -> None:
        """Puts back the best state; where none was noted the current one stays."""
        if self._kept is None or self.best_state is None:
            self.best = len(self.history)
        else:
            self._kept.load_state_dict(self.best_state)

    @property
    def seconds(self) -> float:
        """Wall time so far, with that of the runs before it was resumed."""
        return time.perf_counter() - self._start

    def resume(
        self,
        path: str | os.PathLike[str],
        kind: str,
        mll: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Mapping[str, Any],
        generator: torch.Generator | None = None,
    ) -> None:
        """Takes a file to save to, and goes on from it bit for bit where it is there.

        The objective's own draws are part of its state; the generator is the training's. Settings
        are what decides the course, numbers and digests of data: a DataError names those that
        differ in the file, and nothing is changed.
        """
        self._path, self._kind, self._settings = path, kind, dict(settings)
        self._mll, self._optimizers, self._generator = mll, optimizers, generator
        if os.path.exists(path):
            self._read(path)

    def save(self, content: dict[str, Any] | None = None) -> None:
        """Saves the training as it is, or this content, if there is a file."""
        if self._path is not None:
            write_checkpoint(self._path, self._kind, content or self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "state": copied_state(self._mll),
            "best_state": self.best_state,
            "optimizers": copy.deepcopy([each.state_dict() for each in self._optimizers]),
            "generator": None if self._generator is None else self._generator.get_state(),
            "course": {name: copy.copy(getattr(self, name)) for name in (*_COURSE, "seconds")},
            "settings": self._settings,
        }

    def _read(self, path: str | os.PathLike[str]) -> None:
        module = cast(torch.nn.Module, self._kept)
        required = {
            "state": dict, "best_state": dict if self.best_state else (dict, type(None)),
            "optimizers": list, "generator": Tensor if self._generator else type(None),
            "course": dict, "settings": dict,
        }  # fmt: skip
        content = read_checkpoint(path, self._kind, next(module.parameters()).device, required)
        # All that may be refused comes before anything is changed.
        check_state(path, self._mll, content["state"])
        if content["best_state"] is not None:
            check_state(path, module, content["best_state"])
        _check_settings(path, content["settings"], self._settings)
        try:
            course = dict(content["course"])
            self._start -= course.pop("seconds")
            for name in _COURSE:
                setattr(self, name, course[name])
            for optimizer, state in zip(self._optimizers, content["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            if self._generator is not None:
                self._generator.set_state(content["generator"].cpu())
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"checkpoint: {path} does not hold a training that can go on ({error}). Give "
                "another file to start anew."
            ) from error
        self._mll.load_state_dict(content["state"])
        self.best_state = content["best_state"]


def _check_settings(
    path: str | os.PathLike[str], stored: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raises a DataError, which names all differences, where it is of another training."""
    absent = object()
    differences = []
    for name in {**given, **stored}:
        if stored.get(name, absent) != given.get(name, absent):
            there, here = repr(stored.get(name)), repr(given.get(name))
            values = f" ({there} there, {here} here)" if max(len(there), len(here)) < 40 else ""
            differences.append(name + values)
    if differences:
        raise DataError(
            f"checkpoint: {path} is of a training that differs in {', '.join(differences)}. Give "
            "data and settings as they were to resume it, with the release that wrote it if names "
            "of classes changed since, or another file to start again."
        )
