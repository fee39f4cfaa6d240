"""``python -m benchmarks.dkt.steps``: whole training steps, ours and in the published way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import pandas as pd
import torch
import typer
from typer import Option

from benchmarks._process import keep_freed_memory
from benchmarks.dkt.published import published_model
from benchmarks.speed.runs import Rounds, interleaved_times, ratio_table, sweep_command
from gpclml.conditioning import LastPoints
from gpclml.inference import evaluating
from gpclml.meta import Conv4, DeepKernelTransfer, ImageTasks
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["measure_steps"]

_FEATURES, _WAYS = 64, 5
_BASE = "way by way, with scores"


def measure_steps(
    kernel: Annotated[str, Option(help="Kernel on features; may be repeated.")] = "linear",
    shots: Annotated[int, Option(help="Images a class to learn from; may be repeated.")] = 1,
    images: Annotated[int, Option(min=8, help="Pixels a side.")] = 28,
    rounds: Rounds = 15,
) -> pd.DataFrame:
    """Time of a step of Conv4 on one 5-way task: drawing, forward, backward and Adam.

    Returns:
        A row a method: ``way by way`` is a GPyTorch ``ExactGP`` for each class in an
        ``IndependentModelList`` under a ``SumMarginalLogLikelihood``, as in the code of Patacchiola
        et al. (2020), which after each step also predicts support and query points, ``with
        scores``; ours under LML and CLML. ``milliseconds`` is the median, ``speedup`` the median
        over rounds of the first method's time over its own, ``low`` and ``high`` their quartiles.
    """
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (800, 1, images, images), generator=generator, dtype=torch.uint8)
    labels = torch.arange(40).repeat_interleave(20)
    tasks = ImageTasks(pictures, labels, ways=_WAYS, shots=shots, rotations=True)
    steps = {
        _BASE: _plain_step(tasks, kernel, scores=True),
        "way by way": _plain_step(tasks, kernel, scores=False),
        "ours, LML": _our_step(tasks, kernel, 0),
        "ours, CLML": _our_step(tasks, kernel, _WAYS * shots),
    }
    times = interleaved_times(steps, rounds)
    more = {"kernel": kernel, "shots": shots, "milliseconds": 1e3 * times.median()}
    return ratio_table(1 / times, _BASE, ratio="speedup", name="step", more=more)


def _our_step(tasks: ImageTasks, kernel: str, m: int) -> Callable[[], object]:
    model = DeepKernelTransfer(Conv4(), kernel, _FEATURES)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=m))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> float:
        model.train()
        optimizer.zero_grad()
        loss = -model.objective(mll, tasks.draw([0])).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _plain_step(tasks: ImageTasks, kernel: str, scores: bool) -> Callable[[], object]:
    model = published_model(kernel, _WAYS, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> float:
        model.train()
        task = tasks.draw([0])
        optimizer.zero_grad()
        loss = model.loss(task)
        loss.backward()
        optimizer.step()
        if scores:
            with torch.no_grad(), evaluating(model):
                for x in (task.support_x[0], task.query_x[0]):
                    model.classes(x)
        return float(loss.detach())

    return step


main = sweep_command(
    "benchmarks.dkt.steps",
    measure_steps,
    {"kernel": ["linear", "cosine", "rbf"], "shots": [1, 5]},
    "Steps of a few-shot training: ours, and GPyTorch's classes way by way.",
)

if __name__ == "__main__":
    typer.run(main)
