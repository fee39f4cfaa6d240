"""``python -m benchmarks.dkt.regression``: LML and CLML on sine waves, in settings step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, cast

import pandas as pd
import torch
import typer
from torch import Tensor
from typer import Option

from benchmarks._options import Csv, errors_as_text
from benchmarks._tables import print_tables, with_interval
from benchmarks.dkt.cells import conditioning
from gpclml.errors import UnknownNameError
from gpclml.kernels.networks import MLP
from gpclml.meta import DeepKernelTransfer, PeriodicTasks, evaluate_tasks
from gpclml.meta.training import parameter_groups
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["SETTINGS", "Setting", "measure_setting"]

_SUPPORT, _OBJECTIVES = 5, ("lml", "clml", "clml-half")


@dataclass(frozen=True)
class Setting:
    """How a model starts and is trained.

    Attributes:
        queries: Points of a training task beside five support points.
        published_start: Whether kernel and noise start where GPyTorch has them, at ln 2, as in the
            code of Patacchiola et al. (2020), or as in this library.
        gp_rate: Learning rate of kernel, mean and noise; that of the network is 0.001.
        mean_under_clml: Whether the CLML trains a constant mean; the code of Lotfi et al. (2022)
            for deep kernels leaves it out.
    """

    queries: int = 50
    published_start: bool = False
    gp_rate: float = 1e-4
    mean_under_clml: bool = True


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "study": Setting(),
        "short tasks": Setting(queries=5),
        "and published start": Setting(queries=5, published_start=True, gp_rate=1e-3),
        "and no mean": Setting(5, published_start=True, gp_rate=1e-3, mean_under_clml=False),
    }
)
"""From the setting of the study to that of the published code, one change after another."""


def measure_setting(
    setting: str, kernel: str, steps: int, seeds: int, test_tasks: int
) -> pd.DataFrame:
    """Squared errors and NLLs of new sine waves given five points, under each objective.

    Returns:
        A row an objective, each with half the 95% interval over seeds; ``less LML`` is paired.

    Raises:
        UnknownNameError: There is no such setting.
    """
    if setting not in SETTINGS:
        raise UnknownNameError("setting", setting, SETTINGS)
    rows, scores = [], {}
    for objective in _OBJECTIVES:
        models = [
            _train(SETTINGS[setting], kernel, objective, steps, seed) for seed in range(seeds)
        ]
        scores[objective] = _test(models, test_tasks)
        row: dict[str, object] = {"setting": setting, "kernel": kernel, "objective": objective}
        for column, name in enumerate(("mse", "nll")):
            values = scores[objective][:, column]
            row |= {name: with_interval(values)}
            row |= {f"{name} less LML": with_interval(values - scores["lml"][:, column], sign="+")}
        rows.append(row)
    return pd.DataFrame(rows)


def _train(
    setting: Setting, kernel: str, objective: str, steps: int, seed: int
) -> DeepKernelTransfer:
    network = MLP([1, 40, 40, 40], generator=torch.Generator().manual_seed(seed))
    # Targets as they are, as in the published code.
    model = DeepKernelTransfer(network, kernel, 40, standardize=False)
    tasks = PeriodicTasks(_SUPPORT, setting.queries, seed=3 * seed)
    for name, raw in model.named_parameters() if setting.published_start else ():
        if "raw_" in name and raw.requires_grad:
            torch.nn.init.zeros_(raw)  # softplus is ln 2 there
    if objective != "lml" and not setting.mean_under_clml:
        cast(Tensor, model.mean_module.raw_constant).requires_grad_(False)
    held_out = conditioning(objective, tasks)
    mll = ConditionalMarginalLogLikelihood(cast(Any, model.likelihood), model, held_out)
    optimizer = torch.optim.Adam(parameter_groups(model, mll, 1e-3, setting.gp_rate))
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        (-model.objective(mll, tasks.draw([step])).mean()).backward()
        optimizer.step()
    return model


def _test(models: list[DeepKernelTransfer], count: int) -> Tensor:
    """Squared error and NLL of each model on tasks of its seed, ``(seeds, 2)``."""
    rows = []
    for seed, model in enumerate(models):
        scores = evaluate_tasks(model, PeriodicTasks(_SUPPORT, 50, seed=3 * seed + 2), count)
        rows.append(torch.stack([scores.values.mean(), scores.nll.mean()]))
    return torch.stack(rows)


def main(
    setting: Annotated[list[str], Option(help="A setting; may be repeated.")] = [*SETTINGS],  # noqa: B006
    kernel: Annotated[str, Option(help="Kernel on features.")] = "rbf",
    steps: Annotated[int, Option(min=1, help="Adam steps, of one task each.")] = 2500,
    seeds: Annotated[int, Option(min=2, help="Seeds.")] = 10,
    test_tasks: Annotated[int, Option(min=1, help="Tasks to test on.")] = 600,
    csv: Csv = None,
) -> None:
    """LML and CLML on sine waves, from the study's setting to that of the published code."""
    with errors_as_text():
        tables = (measure_setting(name, kernel, steps, seeds, test_tasks) for name in setting)
        print_tables("benchmarks.dkt.regression", tables, csv=csv)


if __name__ == "__main__":
    typer.run(main)
