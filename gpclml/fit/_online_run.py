"""A training of weights and hyperparameters: its course, what was best, and both on disk."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpclml._utils.checkpoint import read_checkpoint
from gpclml._utils.resuming import (
    check_fingerprint,
    digest,
    load_optimizer_state,
    module_classes,
    restored,
    warn_of_no_fingerprint,
)
from gpclml.curvature import FunctionSpace
from gpclml.errors import ArgumentError, DataError
from gpclml.fit._weight_training import WeightTraining, check_finite
from gpclml.mlls import LaplaceMarginalLogLikelihood

__all__ = ["CHECKPOINT", "OnlineFit", "OnlineRun"]

CHECKPOINT = "gpclml.OnlineFit"
_REQUIRED = {
    "state": dict, "best": (dict, type(None)), "of_weights": dict, "of_hyperparameters": dict,
    "generator": Tensor, "fit": dict,
}  # fmt: skip


@dataclass
class OnlineFit:
    """What an online training has done.

    Attributes:
        objectives: Log joint density in nats per point at each epoch, the mean over its batches.
        looks: Numbers of epochs after which hyperparameters were fitted.
        evidences: The evidence there after that, nats per point.
        best: Number of epochs of the largest; that of the last epoch if there was none.
        seconds: Wall time, of all runs where it was resumed.
    """

    objectives: list[float] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    evidences: list[float] = field(default_factory=list)
    best: int = 0
    seconds: float = 0.0


class OnlineRun(WeightTraining):
    """Optimizers and course of a training of weights and hyperparameters.

    Args:
        mll: The objective.
        x: Points.
        y: Their targets.
        hyper_lr: Learning rate of the hyperparameters.
        **options: Of :class:`WeightTraining`.
    """

    def __init__(
        self, mll: LaplaceMarginalLogLikelihood, x: Tensor, y: Tensor, hyper_lr: float,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(mll, x, y, **options)
        own = {id(p) for p in self.model.network.parameters()}
        hyper = [p for p in mll.parameters() if id(p) not in own and p.requires_grad]
        if not hyper:
            raise ArgumentError("mll", "no trainable hyperparameter", "at least one")
        self.of_hyperparameters = torch.optim.Adam(hyper, lr=hyper_lr)
        self.hyperparameters = hyper
        self.fit = OnlineFit()
        self.best: dict[str, Any] | None = None

    def train_weights(self, done: int) -> None:
        """An epoch on the weights, after so many."""
        self.fit.objectives.append(self.epoch(done))

    def train_hyperparameters(self, steps: int) -> None:
        """Steps on the hyperparameters and the evidence after them, in eval mode."""
        network = self.model.network
        modes = {module: module.training for module in network.modules()}
        network.eval()
        try:
            evidence = self._evidence_of_all() if self._adds_up() else None
            for _ in range(steps):
                self.of_hyperparameters.zero_grad()
                value = evidence() if evidence is not None else self._value_of_a_batch()
                gradients = torch.autograd.grad(-value, self.hyperparameters, allow_unused=True)
                for p, gradient in zip(self.hyperparameters, gradients, strict=True):
                    p.grad = gradient
                self.of_hyperparameters.step()
            with torch.no_grad():
                value = evidence() if evidence is not None else self._mean_over_batches()
        finally:
            for module, mode in modes.items():
                module.training = mode
        number = float(value)
        check_finite("evidence", number, "Lower hyper_lr.")
        if number > max(self.fit.evidences, default=-math.inf):
            self.best, self.fit.best = self._state(), len(self.fit.objectives)
        self.fit.looks.append(len(self.fit.objectives))
        self.fit.evidences.append(number)

    def _adds_up(self) -> bool:
        """Whether the evidence of all data is known from curvature that is computed once."""
        one_batch = self.batch_size >= len(self.x)
        every_output = self.mll.hessian == "ef" or self.mll.outputs == "all"
        same_points = self.model.augmentation is None
        sums = one_batch or not isinstance(self.mll.curvature, FunctionSpace)
        return every_output and same_points and sums

    def _evidence_of_all(self) -> Any:
        total: Any = None
        for batch in self.batches():
            part = self.mll.evidence_of(*batch)
            total = part if total is None else total + part
        return total

    def _value_of_a_batch(self) -> Tensor:
        """Of a part drawn by its size, whose expectation is the mean over all."""
        parts = self.parts()
        sizes = torch.tensor([float(len(rows)) for rows in parts])
        place = int(torch.multinomial(sizes, 1, generator=self.generator))
        return self.mll.evidence_of(*self.rows(parts[place]))()

    def _mean_over_batches(self) -> Tensor:
        values = [self.mll.evidence_of(*self.rows(rows))() * len(rows) for rows in self.parts()]
        return torch.stack(values).sum() / len(self.x)

    def looks_since_best(self) -> int:
        """Number of looks after the best."""
        return len(self.fit.looks) - 1 - self.fit.looks.index(self.fit.best)

    def keep_best(self) -> None:
        """Puts back what was best; what there is without a look."""
        if self.best is None:
            self.fit.best = len(self.fit.objectives)
        else:
            self.mll.load_state_dict(self.best)

    def fingerprint(self, **settings: Any) -> dict[str, Any]:
        """What decides the course: digests of data and objective, and settings as they are.

        Args:
            **settings: Those of the training.
        """
        mll = self.mll
        return {
            "train_x": digest(self.x),
            "train_y": digest(self.y),
            "objective": digest(
                [module_classes(mll), mll.num_data, mll.hessian, mll.outputs, mll.curvature]
            ),
            **settings,
        }

    def content(self) -> dict[str, Any]:
        """All that decides how the training goes on, the objective's draws included; a copy."""
        course = {
            name: list(entry) if isinstance(entry, list) else entry
            for name, entry in vars(self.fit).items()
        }
        return {
            "state": self._state(),
            "best": self.best,
            "of_weights": copy.deepcopy(self.of_weights.state_dict()),
            "of_hyperparameters": copy.deepcopy(self.of_hyperparameters.state_dict()),
            "generator": self.generator.get_state(),
            "fit": course,
        }

    def read(self, path: str | Path, fingerprint: dict[str, Any]) -> None:
        """Goes on from a file.

        Args:
            path: The file.
            fingerprint: What decides this training.

        Raises:
            DataError: It is of another model or training, or damaged; nothing is changed then.
        """
        content = read_checkpoint(path, CHECKPOINT, self.x.device, _REQUIRED)
        mine, *theirs = (
            {name: getattr(value, "shape", None) for name, value in state.items()}
            for state in (self.mll.state_dict(), content["state"], content["best"])
            if state is not None
        )
        if any(mine != state for state in theirs):
            raise DataError(
                f"checkpoint: {path} is of another model. Build the model as it was, or give "
                "another file."
            )
        if "fingerprint" in content:
            check_fingerprint(path, content["fingerprint"], fingerprint)
        else:
            warn_of_no_fingerprint(path)
        try:
            fit = restored(self.fit, content["fit"])
            load_optimizer_state(self.of_weights, content["of_weights"])
            load_optimizer_state(self.of_hyperparameters, content["of_hyperparameters"])
            self.generator.set_state(content["generator"].cpu())
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"checkpoint: {path} does not hold a training that can go on ({error}). Give "
                "another file to start anew."
            ) from error
        self.mll.load_state_dict(content["state"])
        self.best = content["best"]
        self.fit.__dict__.update(fit)

    def _state(self) -> dict[str, Any]:
        return copy.deepcopy(self.mll.state_dict())
