"""Training the weights of a network by Adam, to the mode of their posterior."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from gpclml._utils.arguments import all_finite, checked
from gpclml._utils.progress import progress_bar
from gpclml.conditioning import partition_at_random, partition_by_class
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.fit.result import FitResult
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["WeightTraining", "check_finite", "check_training", "fit_map"]


class WeightTraining:
    """Objective, data in batches, and the optimizer of the weights.

    Args:
        mll: The objective, whose log joint density the weights climb.
        x: Points.
        y: Their targets.
        batch_size: Points of a batch; all if None.
        lr: Learning rate of the first epoch.
        final_lr: That of the last, by half a cosine; the first throughout if None.
        epochs: Number of epochs that the rate falls over.
        seed: Seed of the order of the points.
        by_class: Whether :meth:`parts` are of one class each.
    """

    def __init__(
        self,
        mll: LaplaceMarginalLogLikelihood,
        x: Tensor,
        y: Tensor,
        *,
        batch_size: int | None,
        lr: float,
        final_lr: float | None,
        epochs: int,
        seed: int,
        by_class: bool = False,
    ) -> None:
        self.mll = mll
        self.x = x
        self.y = y
        self.model: LinearizedNetwork = cast(LinearizedNetwork, mll.model)
        self.batch_size: int = batch_size or len(x)
        self.by_class = by_class
        self.weights: list[torch.nn.Parameter] = [
            p for p in self.model.network.parameters() if p.requires_grad
        ]
        self.of_weights: torch.optim.Adam = torch.optim.Adam(self.weights, lr=lr)
        self.generator: torch.Generator = torch.Generator().manual_seed(seed)
        self._rates = (lr, lr if final_lr is None else final_lr, epochs)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All data once, in a fresh order."""
        return map(self.rows, partition_at_random(len(self.x), self.batch_size, self.generator))

    def parts(self) -> list[Tensor]:
        """Indices of the batches that an evidence is estimated from; all data once."""
        if self.by_class:
            return partition_by_class(self.y, self.batch_size, self.generator)
        return partition_at_random(len(self.x), self.batch_size, self.generator)

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Points and targets of these indices."""
        return self.x[rows.to(self.x.device)], self.y[rows.to(self.y.device)]

    def epoch(self, done: int) -> float:
        """Trains on all data once.

        Args:
            done: Number of epochs before.

        Returns:
            The log joint density in nats per point, the mean over batches before each step.

        Raises:
            NonFiniteError: It is not finite.
        """
        first, last, epochs = self._rates
        along = min(done / max(epochs - 1, 1), 1.0)
        self.of_weights.param_groups[0]["lr"] = last + (first - last) * (
            0.5 + 0.5 * math.cos(math.pi * along)
        )
        values = []
        for x, y in self.batches():
            value = self.mll.log_joint(self.model(x), y)
            gradients = torch.autograd.grad(-value, self.weights, allow_unused=True)
            for p, gradient in zip(self.weights, gradients, strict=True):
                p.grad = gradient
            self.of_weights.step()
            values.append(value.detach())
        mean = float(torch.stack(values).mean())
        check_finite("log joint density", mean, "Lower lr.")
        return mean


def check_training(
    mll: LaplaceMarginalLogLikelihood, train_x: Tensor, train_y: Tensor, **numbers: float | None
) -> None:
    """Raises where data are not the objective's, a count is below 1 or a rate not positive.

    Args:
        mll: The objective.
        train_x: Points.
        train_y: Their targets.
        **numbers: Counts; those with ``lr`` in their name are rates. None is not checked.

    Raises:
        ArgumentError: A number is out of range, or ``num_data`` is another.
        ShapeError: Points and targets are not as many.
        NonFiniteError: An input or a target is NaN or infinite.
    """
    for name, number in numbers.items():
        if number is None:
            continue
        if "lr" in name:
            if not 0 < number < math.inf:
                raise ArgumentError(name, number, "a positive number")
        elif number < 1:
            raise ArgumentError(name, number, "at least 1")
    if len(train_x) != len(train_y):
        raise ShapeError("train_y", f"{len(train_y)} targets", f"{len(train_x)}, as the points")
    for name, values in (("train_x", train_x), ("train_y", train_y)):
        if not all_finite(values):
            count = int((~values.isfinite()).sum())
            suggestion = "A network needs them all: leave out the points without."
            raise NonFiniteError(name, f"{count} NaN or infinite values", "finite ones", suggestion)
    if mll.num_data != len(train_x):
        expected = f"num_data = {mll.num_data}, as the objective has it"
        raise ArgumentError("train_x", f"{len(train_x)} points", expected)


def check_finite(what: str, value: float, suggestion: str) -> None:
    """Raises a NonFiniteError for another number than a finite one."""
    if not math.isfinite(value):
        raise NonFiniteError(what, value, "a finite number", suggestion)


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_map(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor,
    train_y: Tensor,
    *,
    epochs: int = 100,
    batch_size: int | None = None,
    lr: float = 1e-3,
    final_lr: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> FitResult:
    """Trains the weights alone, by Adam, to the mode of their posterior.

    They climb :meth:`~gpclml.mlls.LaplaceMarginalLogLikelihood.log_joint` in the network's own
    mode; the hyperparameters stay as they are.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``.
        train_y: Their targets.
        epochs: Number of passes over the data.
        batch_size: Points of a batch; all if None.
        lr: Learning rate of the first epoch.
        final_lr: That of the last, by half a cosine; the first throughout if None.
        seed: Seed of the order of the points.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The log joint density in nats per point at each epoch, the mean over its batches before
        their steps; ``objective`` is that of the last.

    Raises:
        ArgumentError: A number is out of range, or ``num_data`` is another.
        ShapeError: Points and targets are not as many.
        NonFiniteError: A log joint density is not finite.

    Examples:
        >>> fit_map(mll, train_x, train_y, epochs=50, batch_size=128, final_lr=1e-5)
        >>> evidence = mll(model(train_x), train_y).item()
    """
    check_training(
        mll, train_x, train_y, epochs=epochs, batch_size=batch_size, lr=lr, final_lr=final_lr
    )
    training = WeightTraining(
        mll, train_x, train_y, batch_size=batch_size, lr=lr, final_lr=final_lr, epochs=epochs,
        seed=seed,
    )  # fmt: skip
    start = time.perf_counter()
    bar = progress_bar(range(epochs), desc="epochs", progress=progress)
    history = [training.epoch(done) for done in bar]
    seconds = time.perf_counter() - start
    return FitResult(objective=history[-1], history=history, seconds=seconds)
