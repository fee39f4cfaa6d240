"""Training the weights of a network by Adam, to the mode of their posterior."""

from __future__ import annotations

import math
import time
from typing import cast

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, check_positive, checked
from gpclml._utils.progress import progress_bar
from gpclml.conditioning.batches import Loader, TrainingBatches
from gpclml.fit.result import FitResult
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["WeightTraining", "fit_map"]


class WeightTraining:
    """Objective, data in batches, and the optimizer of the weights; arguments as in ``fit_map``."""

    def __init__(
        self,
        mll: LaplaceMarginalLogLikelihood,
        x: Tensor | Loader,
        y: Tensor | None,
        *,
        batch_size: int | None,
        lr: float,
        final_lr: float | None,
        epochs: int,
        seed: int,
        by_class: bool = False,
    ) -> None:
        self.mll = mll
        self.model: LinearizedNetwork = cast(LinearizedNetwork, mll.model)
        self.generator: torch.Generator = torch.Generator().manual_seed(seed)
        self.weights: list[torch.nn.Parameter] = [
            p for p in self.model.network.parameters() if p.requires_grad
        ]
        self.device: torch.device = next(iter(self.model.network.parameters())).device
        self.data: TrainingBatches = TrainingBatches(
            x, y, mll.num_data, batch_size=batch_size, generator=self.generator,
            device=self.device, by_class=by_class,
        )  # fmt: skip
        self.of_weights: torch.optim.Adam = torch.optim.Adam(self.weights, lr=lr)
        self._rates = (lr, lr if final_lr is None else final_lr, epochs)

    def epoch(self, done: int) -> float:
        """Trains on all data once, after so many epochs; the mean log joint density a point."""
        first, last, epochs = self._rates
        along = min(done / max(epochs - 1, 1), 1.0)
        self.of_weights.param_groups[0]["lr"] = last + (first - last) * (
            0.5 + 0.5 * math.cos(math.pi * along)
        )
        values = []
        for x, y in self.data:
            value = self.mll.log_joint(self.model(x), y)
            gradients = torch.autograd.grad(-value, self.weights, allow_unused=True)
            for p, gradient in zip(self.weights, gradients, strict=True):
                p.grad = gradient
            self.of_weights.step()
            values.append(value.detach())
        mean = torch.stack(values).mean()
        check_finite("log joint density", mean, "Lower lr.")
        return float(mean)


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def fit_map(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor | Loader,
    train_y: Tensor | None = None,
    *,
    epochs: int = 100,
    batch_size: int | None = None,
    lr: float = 1e-3,
    final_lr: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> FitResult:
    """Trains the weights alone, by Adam, to the mode of their posterior.

    They maximize :meth:`~gpclml.mlls.LaplaceMarginalLogLikelihood.log_joint`, in the network's own
    mode and with fixed hyperparameters.

    Args:
        mll: The objective; ``num_data`` is the number of training points. Trained in place.
        train_x: Points, ``(N, *event)``; or a ``DataLoader`` of pairs of points and targets,
            whose batches are read as they are needed.
        train_y: Their targets; None with a loader.
        epochs: Number of passes over the data.
        batch_size: Points of a batch of tensors; all if None.
        lr: Learning rate of the first epoch.
        final_lr: Learning rate of the last epoch, reached by half a cosine; constant if None.
        seed: Seed of the order of the points.
        progress: Whether to show a progress bar; None shows it on terminals and in notebooks.

    Returns:
        The log joint density in nats per point at each epoch, the mean over its batches before
        their steps; ``objective`` is that of the last.

    Raises:
        ArgumentError: A number is out of range, ``num_data`` is another, or a loader gives
            nothing or no pairs.
        ShapeError: Points and targets are not as many, or the network does not take the points.
        NonFiniteError: Data or a log joint density are not finite.

    Examples:
        >>> fit_map(mll, train_x, train_y, epochs=50, batch_size=128, final_lr=1e-5)
        >>> evidence = mll(model(train_x), train_y).item()
    """
    check_counts(epochs=epochs, batch_size=batch_size)
    check_positive(lr=lr, final_lr=final_lr)
    training = WeightTraining(
        mll, train_x, train_y, batch_size=batch_size, lr=lr, final_lr=final_lr, epochs=epochs,
        seed=seed,
    )  # fmt: skip
    start = time.perf_counter()
    bar = progress_bar(range(epochs), desc="epochs", progress=progress)
    history = [training.epoch(done) for done in bar]
    seconds = time.perf_counter() - start
    return FitResult(objective=history[-1], history=history, seconds=seconds)
