"""Command line: ``python -m benchmarks.speed.tasks``: the GP part of a few-shot training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, cast

import pandas as pd
import torch
import typer
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, LikelihoodList
from gpytorch.mlls import SumMarginalLogLikelihood
from gpytorch.models import ExactGP, IndependentModelList
from torch import Tensor
from typer import Option

from benchmarks._process import keep_freed_memory
from benchmarks.speed.runs import (
    Device,
    Rounds,
    interleaved_times,
    ratio_table,
    sweep_command,
)
from gpclml.conditioning import LastPoints
from gpclml.meta import Conv4, DeepKernelTransfer, Episodes
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["PLAIN", "measure_tasks", "task_steps"]

_FEATURES = 64
PLAIN = "plain, LML"
"""The step by GPyTorch's classes, way by way."""


class _Way(ExactGP):
    """The GP of one way, with mean, kernel and noise of its own as in the original code."""

    def __init__(self, features: Tensor, targets: Tensor, kernel: str) -> None:
        super().__init__(features, targets, GaussianLikelihood())
        parts = DeepKernelTransfer(torch.nn.Identity(), kernel, _FEATURES)
        self.mean_module, self.covar_module = parts.mean_module, parts.covar_module

    def forward(self, features: Tensor) -> MultivariateNormal:
        mean = cast(Tensor, self.mean_module(features))
        return MultivariateNormal(mean, self.covar_module(features))


def measure_tasks(
    kernel: Annotated[str, Option(help="Kernel on features; may be repeated.")] = "rbf",
    ways: int = 5,
    images: int = 17,
    tasks: Annotated[int, Option(help="Tasks of a step; may be repeated.")] = 1,
    rounds: Rounds = 21,
    device: Device = "cpu",
) -> pd.DataFrame:
    """Time of value and gradient on given features, and of a Conv4 step on the same images.

    ``plain, LML`` is a GPyTorch ``ExactGP`` for each way of each task in an
    ``IndependentModelList`` under a ``SumMarginalLogLikelihood``; ``speedup`` the median over
    rounds of its time over a method's own, ``low`` and ``high`` the quartiles. On a CPU it is the
    processor's time: a step of a millisecond often has a core for itself where others of ten share
    it with other programs.
    """
    keep_freed_memory()
    clock = time.process_time if device == "cpu" else time.perf_counter
    steps = task_steps(kernel, ways, images, tasks, device)
    times = interleaved_times(steps, rounds, device, clock=clock)
    more = {"kernel": kernel, "tasks": tasks, "milliseconds": 1e3 * times.median()}
    return ratio_table(1 / times, PLAIN, ratio="speedup", name="step", more=more)


def task_steps(
    kernel: str, ways: int, images: int, tasks: int, device: str
) -> dict[str, Callable[[], object]]:
    """What is compared by :func:`measure_tasks`, whose arguments these are, by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tasks, ways * images, _FEATURES, generator=generator).to(device)
    labels = torch.arange(ways).repeat(images).expand(tasks, -1).to(device)  # support first
    episodes = Episodes(x[:, :ways], labels[:, :ways], x[:, ways:], labels[:, ways:], ways)
    pictures = torch.rand(tasks * ways * images, 1, 28, 28, generator=generator).to(device)
    return {
        PLAIN: _plain_step(episodes, kernel, device),
        "ours, LML": _our_step(episodes, kernel, 0, device),
        "ours, CLML": _our_step(episodes, kernel, ways, device),
        "Conv4": _network_step(pictures, device),
    }


def _our_step(episodes: Episodes, kernel: str, m: int, device: str) -> Callable[[], object]:
    model = DeepKernelTransfer(torch.nn.Identity(), kernel, _FEATURES).to(device)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))
    mll.train()
    support, query = (part.requires_grad_() for part in (episodes.support_x, episodes.query_x))
    given = Episodes(support, episodes.support_y, query, episodes.query_y, episodes.ways)

    def step() -> None:
        loss = -model.objective(mll, given).mean()
        loss.backward()

    return step


def _plain_step(episodes: Episodes, kernel: str, device: str) -> Callable[[], object]:
    x, labels = episodes.points()
    x = x.detach().requires_grad_()
    targets = [
        torch.where(of_task == way, 1.0, -1.0).to(x)
        for of_task in labels
        for way in range(episodes.ways)
    ]
    inputs = [of_task for of_task in x for _ in range(episodes.ways)]
    members = [_Way(a.detach(), b, kernel) for a, b in zip(inputs, targets, strict=True)]
    model = IndependentModelList(*members).to(device)
    likelihood = LikelihoodList(*[member.likelihood for member in members])
    mll = SumMarginalLogLikelihood(likelihood, model)
    mll.train()

    def step() -> None:
        for member, features, target in zip(members, inputs, targets, strict=True):
            member.set_train_data(features, target, strict=False)
        loss = -cast(Tensor, mll(model(*model.train_inputs), model.train_targets))
        loss.backward(retain_graph=True)  # of the slices of x

    return step


def _network_step(pictures: Tensor, device: str) -> Callable[[], object]:
    network = Conv4().to(device)

    def step() -> None:
        network(pictures).sum().backward()

    return step


main = sweep_command(
    "benchmarks.speed.tasks",
    measure_tasks,
    {"kernel": ["linear", "cosine", "rbf", "polynomial_1"], "tasks": [1]},
    "The GP part of a 5-way step on 85 images: ours, GPyTorch's classes way by way, Conv4.",
)

if __name__ == "__main__":
    typer.run(main)
