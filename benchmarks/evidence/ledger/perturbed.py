"""Experiments whose trainings start a millionth elsewhere: no verdict may depend on that."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import scipy.optimize
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.evidence.ledger.page import EXPERIMENTS

_SCALE = 1e-6


@contextmanager
def perturbed_starts(seed: int = 0) -> Iterator[None]:
    """Multiplies what any search starts from by 1 + 1e-6 N(0, 1), while the context lasts.

    That is the parameters of each optimizer of PyTorch before its first step, and the start of each
    of SciPy's searches.

    Args:
        seed: Seed of the factors.
    """
    generator = torch.Generator().manual_seed(seed)
    begun = weakref.WeakSet[torch.optim.Optimizer]()
    minimize = scipy.optimize.minimize

    def factors(shape: Any) -> torch.Tensor:
        return 1 + _SCALE * torch.randn(shape, generator=generator, dtype=torch.float64)

    @torch.no_grad()
    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in begun:
            begun.add(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(factors(parameter.shape).to(parameter))

    def minimize_from_there(fun: Any, x0: Any, *args: Any, **options: Any) -> Any:
        start = np.asarray(x0)
        return minimize(fun, start * factors(start.shape).numpy(), *args, **options)

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        with mock.patch.object(scipy.optimize, "minimize", minimize_from_there):
            yield
    finally:
        hook.remove()


def run_perturbed(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell of an experiment with other starts.

    Args:
        cell: That of the experiment, and ``perturbed``, the seed of the factors.
    """
    given = {name: value for name, value in cell.items() if name != "perturbed"}
    with perturbed_starts(cell["perturbed"]):
        return EXPERIMENTS[cell["experiment"]].run(given)
