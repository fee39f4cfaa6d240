"""Stochastic gradient Langevin dynamics over the weights of a network."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from gpclml._utils.arguments import check_learning_rate, checked
from gpclml.conditioning.partitions import partition_at_random
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = ["sample_sgld"]


@checked(train_x="(N, *event)", train_y="(N, *outputs)")
def sample_sgld(
    mll: LaplaceMarginalLogLikelihood,
    train_x: Tensor,
    train_y: Tensor,
    *,
    count: int = 20,
    cycles: int = 4,
    epochs_per_cycle: int = 20,
    batch_size: int | None = None,
    lr: float = 1e-3,
    exploration: float = 0.8,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Tensor]:
    r"""Draws from the posterior of the weights by Langevin dynamics with a cyclical step.

    .. math:: w \leftarrow w + \epsilon \nabla \frac1N \log p(w, \mathcal D)
        + \sqrt{2 \epsilon / N}\, \xi, \qquad
        \epsilon_k = \frac{\epsilon_0}2 \Big[\cos\Big(\pi \frac{k \bmod M}{M}\Big) + 1\Big]

    with the gradient of a mini-batch (Welling and Teh 2011) and M steps a cycle (Zhang et al.
    2020, Eq. 1). The first part of a cycle explores, without noise; draws are taken evenly over
    the rest of each. The smaller the step the nearer the draws are to the posterior, and to each
    other.

    Args:
        mll: The objective, whose :meth:`~gpclml.mlls.LaplaceMarginalLogLikelihood.log_joint` is
            the density; its hyperparameters stay as they are. Weights end where the chain does.
        train_x: Points, ``(N, *event)``.
        train_y: Their targets.
        count: Number S of draws, a multiple of the cycles.
        cycles: Number of cycles.
        epochs_per_cycle: Passes over the data in a cycle.
        batch_size: Points of a batch; all if None.
        lr: The largest step :math:`\epsilon_0`, per point: N times what it is for the total.
        exploration: Share of a cycle that is no draw from.
        seed: Seed of the batches and the noise.
        progress: Whether to show a progress bar on standard error.

    Returns:
        Weights by name, ``(S, *shape)``.

    Raises:
        ArgumentError: A number is out of range.
        ShapeError: Points and targets are not as many.
        NonFiniteError: The weights are not finite any more.
    """
    _check(count=count, cycles=cycles, epochs_per_cycle=epochs_per_cycle, batch_size=batch_size)
    check_learning_rate(lr)
    if not 0 <= exploration < 1:
        raise ArgumentError("exploration", exploration, "at least 0 and below 1")
    if len(train_x) != len(train_y):
        raise ShapeError("train_y", f"{len(train_y)} targets", f"{len(train_x)}, as the points")
    size = batch_size or len(train_x)
    steps = epochs_per_cycle * math.ceil(len(train_x) / size)
    if count % cycles or count // cycles > steps - round(exploration * steps):
        most = steps - round(exploration * steps)
        expected = f"a multiple of {cycles} cycles, at most {most} for each"
        raise ArgumentError("count", count, expected, "Take more epochs a cycle, or batches.")
    from tqdm import tqdm

    chain = _Chain(mll, train_x, train_y, size, seed)
    per_cycle = count // cycles
    first = round(exploration * steps)
    kept = {steps - 1 - ((steps - first) * i) // per_cycle for i in range(per_cycle)}
    draws: list[dict[str, Tensor]] = []
    with tqdm(total=cycles * steps, desc="SGLD", disable=not progress) as bar:
        for _ in range(cycles):
            for k in range(steps):
                chain.step(lr / 2 * (math.cos(math.pi * k / steps) + 1), noise=k >= first)
                if k in kept:
                    draws.append(chain.weights())
                bar.update()
    return {name: torch.stack([one[name] for one in draws]) for name in draws[0]}


class _Chain:
    def __init__(
        self, mll: LaplaceMarginalLogLikelihood, x: Tensor, y: Tensor, size: int, seed: int
    ) -> None:
        self._mll, self._x, self._y, self._size = mll, x, y, size
        self._model = cast(LinearizedNetwork, mll.model)
        self._trained = {n: p for n, p in self._model.network.named_parameters() if p.requires_grad}
        self._generator = torch.Generator().manual_seed(seed)
        self._batches: list[Tensor] = []

    def step(self, step: float, noise: bool) -> None:
        if not self._batches:
            self._batches = partition_at_random(len(self._x), self._size, self._generator)
        rows = self._batches.pop()
        output = self._model(self._x[rows.to(self._x.device)])
        value = self._mll.log_joint(output, self._y[rows.to(self._y.device)])
        weights = list(self._trained.values())
        gradients = torch.autograd.grad(value, weights, allow_unused=True)
        deviation = math.sqrt(2 * step / self._mll.num_data) if noise else 0.0
        with torch.no_grad():
            for p, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    p.add_(gradient, alpha=step)
                if noise:
                    p.add_(torch.randn(p.shape, generator=self._generator).to(p), alpha=deviation)

    def weights(self) -> dict[str, Tensor]:
        draw = {name: p.detach().clone() for name, p in self._trained.items()}
        for name, value in draw.items():
            if not bool(torch.isfinite(value).all()):
                raise NonFiniteError("weights", name, "finite values", "Lower lr.")
        return draw


def _check(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ArgumentError(name, number, "at least 1")
