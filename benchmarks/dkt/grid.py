"""The cells of a sweep over studies, checked before any of them is computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks._commands import check_device
from benchmarks.dkt.cells import BASELINE, OBJECTIVES
from benchmarks.dkt.studies import study_named
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.meta import KERNELS

__all__ = ["make_grid"]


def make_grid(
    studies: Sequence[str],
    *,
    shots: Sequence[int] | None = None,
    kernels: Sequence[str] = ("cosine", "batch-norm-cosine", "linear", BASELINE),
    objectives: Sequence[str] = OBJECTIVES,
    seeds: int = 10,
    steps: int = 2500,
    tasks_per_step: int = 1,
    lr: float = 1e-3,
    test_tasks: int = 600,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Every combination of these settings, each cell once; draws one task of each to check.

    Args:
        studies: Names of ``benchmarks.dkt.studies.STUDIES``.
        shots: Images of a class, or support points, to learn from; each study's own if None.
        kernels: Kernels of ``DeepKernelTransfer``; ``"pixels"`` is the baseline.
        objectives: ``"lml"`` and ``"clml"``.
        seeds: Number of seeds; they are 0 to ``seeds - 1``.
        steps: Adam steps.
        tasks_per_step: Tasks of a step.
        lr: Learning rate.
        test_tasks: Tasks to test on.
        device: Where models are trained.

    Raises:
        UnknownNameError: A name is not known; the message lists the nearest known ones.
        ArgumentError: A number is out of range, or data do not suffice for so many shots.
        DataError: Data are not there and cannot be fetched.
    """
    for name in kernels:
        if name not in (*KERNELS, BASELINE):
            raise UnknownNameError("kernels", name, (*KERNELS, BASELINE))
    for name in objectives:
        if name not in OBJECTIVES:
            raise UnknownNameError("objectives", name, OBJECTIVES)
    for argument, number in (
        ("seeds", seeds), ("steps", steps), ("tasks_per_step", tasks_per_step),
        ("test_tasks", test_tasks),
    ):  # fmt: skip
        if number < 1:
            raise ArgumentError(argument, number, "at least 1")
    if not 0 < lr < float("inf"):
        raise ArgumentError("lr", lr, "a positive number")
    check_device(device)
    pairs = [(study, k) for study in studies for k in shots or study_named(study).shots]
    for study, k in pairs:
        study_named(study).sources(k, 0)
    cells = []
    for (study, k), kernel, objective, seed in itertools.product(
        pairs, kernels, objectives, range(seeds)
    ):
        trained = kernel != BASELINE
        cell = {
            "study": study,
            "shots": k,
            "seed": seed,
            "kernel": kernel,
            "objective": objective if trained else None,
            "steps": steps if trained else None,
            "tasks_per_step": tasks_per_step if trained else None,
            "lr": lr if trained else None,
            "test_tasks": test_tasks,
            "device": device,
        }
        cells.append(cell)
    return list({tuple(cell.items()): cell for cell in cells}.values())
