"""Weights and hyperparameters of a network in one training, the latter by its Laplace evidence."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gpclml._checkpoint import read_checkpoint, write_checkpoint
from gpclml.curvature import Kernel
from gpclml.errors import ArgumentError, DataError, NonFiniteError, ShapeError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["OnlineFit", "fit_online"]

_CHECKPOINT = "gpclml.OnlineFit"


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


def fit_online(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor,
    train_y: Tensor,
    *,
    epochs: int = 100,
    batch_size: int | None = None,
    lr: float = 1e-3,
    hyper_lr: float = 0.1,
    hyper_steps: int = 10,
    burn_in: int = 10,
    every: int = 1,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> OnlineFit:
    """Alternates Adam steps on the weights and on the hyperparameters (Immer et al. 2021, Alg. 1).

    Weights climb the log joint density of mini-batches, in the network's own mode; after a
    burn-in, every few epochs, prior precisions, noise and a temperature that is a parameter climb
    the evidence, in eval mode. Its curvature is computed once a time, over all data in batches;
    ``Kernel`` and estimates from one output take a fresh batch a step. What was best by the
    evidence is kept, weights and hyperparameters together.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``.
        train_y: Their targets.
        epochs: Number of passes over the data.
        batch_size: Points of a batch; all if None.
        lr: Learning rate of the weights.
        hyper_lr: That of the hyperparameters.
        hyper_steps: Steps on the hyperparameters at a time.
        burn_in: Epochs before the first of them.
        every: Epochs between them.
        patience: Looks without a better evidence after which training ends; None never ends it.
        seed: Seed of the order of the points.
        checkpoint: File to save to at every look and at an interrupt, and to go on from.
        progress: Whether to show a progress bar on standard error.

    Returns:
        The course of the training.

    Raises:
        ArgumentError: A number is out of range, or ``num_data`` is another.
        ShapeError: Points and targets are not as many.
        NonFiniteError: A log joint density or an evidence is not finite.
        UnsupportedError, ModelModeError, NotPSDError: As the objective.
        DataError: The checkpoint cannot be written or read, or is of another model.
    """
    _check_numbers(
        epochs=epochs, batch_size=batch_size, hyper_steps=hyper_steps, every=every,
        patience=patience,
    )  # fmt: skip
    for name, rate in (("lr", lr), ("hyper_lr", hyper_lr)):
        if not 0 < rate < math.inf:
            raise ArgumentError(name, rate, "a positive number")
    if burn_in < 0:
        raise ArgumentError("burn_in", burn_in, "0 or more epochs")
    if len(train_x) != len(train_y):
        raise ShapeError("train_y", f"{len(train_y)} targets", f"{len(train_x)}, as the points")
    if mll.num_data != len(train_x):
        expected = f"num_data = {mll.num_data}, as the objective has it"
        raise ArgumentError("train_x", f"{len(train_x)} points", expected)
    run = _Run(mll, train_x, train_y, batch_size or len(train_x), lr, hyper_lr, seed)
    if checkpoint is not None and Path(checkpoint).exists():
        run.read(checkpoint)
    from tqdm import tqdm

    fit = run.fit
    start = time.perf_counter() - fit.seconds
    done = len(fit.objectives)
    with tqdm(total=epochs, initial=done, desc="epochs", disable=not progress) as bar:
        try:
            for epoch in range(done + 1, epochs + 1):
                run.train_weights()
                bar.update()
                if epoch > burn_in and (epoch - burn_in - 1) % every == 0:
                    run.train_hyperparameters(hyper_steps)
                    bar.set_postfix(evidence=f"{fit.evidences[-1]:.4f}", refresh=False)
                    fit.seconds = time.perf_counter() - start
                    run.write(checkpoint)
                    if patience is not None and run.looks_since_best() >= patience:
                        break
        except KeyboardInterrupt:
            fit.seconds = time.perf_counter() - start
            run.write(checkpoint)
            raise
    run.keep_best()
    fit.seconds = time.perf_counter() - start
    return fit


class _Run:
    """Objective, data, optimizers and course of a training."""

    def __init__(
        self,
        mll: LaplaceMarginalLogLikelihood,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        lr: float,
        hyper_lr: float,
        seed: int,
    ) -> None:
        self.mll, self.x, self.y, self.batch_size = mll, x, y, batch_size
        self.model = cast(LinearizedNetwork, mll.model)
        weights = [p for p in self.model.network.parameters() if p.requires_grad]
        own = {id(p) for p in self.model.network.parameters()}
        hyper = [p for p in mll.parameters() if id(p) not in own and p.requires_grad]
        if not hyper:
            raise ArgumentError("mll", "no trainable hyperparameter", "at least one")
        self.of_weights = torch.optim.Adam(weights, lr=lr)
        self.of_hyperparameters = torch.optim.Adam(hyper, lr=hyper_lr)
        self.hyperparameters = hyper
        self.generator = torch.Generator().manual_seed(seed)
        self.fit = OnlineFit()
        self.best: dict[str, Any] | None = None

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All data once, in a fresh order."""
        order = torch.randperm(len(self.x), generator=self.generator)
        for rows in order.split(self.batch_size):
            yield self.x[rows.to(self.x.device)], self.y[rows.to(self.y.device)]

    def train_weights(self) -> None:
        values = []
        for x, y in self.batches():
            self.of_weights.zero_grad()
            value = self.mll.log_joint(self.model(x), y)
            (-value).backward()
            self.of_weights.step()
            values.append(value.detach())
        mean = float(torch.stack(values).mean())
        _check_finite("log joint density", mean, "Lower lr.")
        self.fit.objectives.append(mean)

    def train_hyperparameters(self, steps: int) -> None:
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
        _check_finite("evidence", number, "Lower hyper_lr.")
        if number > max(self.fit.evidences, default=-math.inf):
            self.best, self.fit.best = self._state(), len(self.fit.objectives)
        self.fit.looks.append(len(self.fit.objectives))
        self.fit.evidences.append(number)

    def _adds_up(self) -> bool:
        one_batch = self.batch_size >= len(self.x)
        whole = self.mll.hessian == "ef" or self.mll.outputs == "all"
        return whole and (one_batch or not isinstance(self.mll.curvature, Kernel))

    def _evidence_of_all(self) -> Any:
        total: Any = None
        for x, y in self.batches():
            part = self._evidence_of(x, y)
            total = part if total is None else total + part
        return total

    def _evidence_of(self, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            output = self.model(x)
        return self.mll.evidence_at(output, y)

    def _value_of_a_batch(self) -> Tensor:
        x, y = next(self.batches())
        return self._evidence_of(x, y)()

    def _mean_over_batches(self) -> Tensor:
        values = [self._evidence_of(x, y)() * len(x) for x, y in self.batches()]
        return torch.stack(values).sum() / len(self.x)

    def looks_since_best(self) -> int:
        return len(self.fit.looks) - 1 - self.fit.looks.index(self.fit.best)

    def keep_best(self) -> None:
        if self.best is None:
            self.fit.best = len(self.fit.objectives)
        else:
            self.mll.load_state_dict(self.best)

    def write(self, path: str | Path | None) -> None:
        if path is None:
            return
        content = {
            "state": self._state(),
            "best": self.best,
            "of_weights": self.of_weights.state_dict(),
            "of_hyperparameters": self.of_hyperparameters.state_dict(),
            "generator": self.generator.get_state(),
            "fit": vars(self.fit),
        }
        write_checkpoint(path, _CHECKPOINT, content)

    def read(self, path: str | Path) -> None:
        content = read_checkpoint(path, _CHECKPOINT, self.x.device)
        mine, theirs = (
            {name: tuple(value.shape) for name, value in state.items()}
            for state in (self.mll.state_dict(), content["state"])
        )
        if mine != theirs:
            raise DataError(
                f"checkpoint: {path} is of another model. Build the model as it was, or give "
                "another file."
            )
        self.mll.load_state_dict(content["state"])
        self.best = content["best"]
        self.of_weights.load_state_dict(content["of_weights"])
        self.of_hyperparameters.load_state_dict(content["of_hyperparameters"])
        self.generator.set_state(content["generator"].cpu())
        self.fit.__dict__.update(content["fit"])

    def _state(self) -> dict[str, Any]:
        return copy.deepcopy(self.mll.state_dict())


def _check_numbers(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ArgumentError(name, number, "at least 1")


def _check_finite(what: str, value: float, mend: str) -> None:
    if not math.isfinite(value):
        raise NonFiniteError(what, value, "a finite number", mend)
