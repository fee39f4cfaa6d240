"""Deep Kernel Transfer as a study: its grid and its tables."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from benchmarks._options import (
    Device,
    check_device,
    check_known,
    check_positive,
    names,
    whole_numbers,
)
from benchmarks.dkt.cells import BASELINE, CHECKPOINTS, OBJECTIVES, SOURCES, run_cell
from benchmarks.dkt.studies import study_named
from benchmarks.dkt.tables import sections
from benchmarks.study import Study
from gpclml.meta import KERNELS

__all__ = ["STUDY", "make_grid"]


def make_grid(
    study: Annotated[
        tuple[str, ...],
        Option(
            help="Studies, comma-separated: digits, omniglot, omniglot-part, "
            "omniglot-part-to-cyrillic, omniglot-part-to-mnist, omniglot-to-emnist, periodic, "
            "periodic-out-of-range, qmul, qmul-out-of-range, rotation."
        ),
        names,
    ],
    shots: Annotated[
        tuple[int, ...] | None,
        Option(help="Images a class or points to learn from, comma-separated; the study's."),
        whole_numbers,
    ] = None,
    kernels: Annotated[
        tuple[str, ...],
        Option(help="Kernels on features, comma-separated; pixels: the baseline."),
        names,
    ] = ("cosine", "batch-norm-cosine", "linear", BASELINE),
    objectives: Annotated[
        tuple[str, ...], Option(help="lml, clml, comma-separated."), names
    ] = OBJECTIVES,
    seeds: Annotated[int, Option(min=1, help="Number of seeds, 0, 1, ....")] = 10,
    steps: Annotated[int, Option(min=1, help="Adam steps.")] = 2500,
    tasks_per_step: Annotated[int, Option(min=1, help="Tasks of a step.")] = 1,
    lr: Annotated[float, Option(help="Learning rate of Adam.")] = 1e-3,
    test_tasks: Annotated[int, Option(min=1, help="Tasks to test on.")] = 600,
    checkpoints: Annotated[
        Path | None,
        Option(
            help="A folder to keep trainings in: an interrupted one goes on, and studies that "
            "learn from the same tasks share one."
        ),
    ] = None,
    device: Device = "cpu",
) -> list[dict[str, Any]]:
    """Every combination of these settings, each cell once; draws one task of each to check.

    Raises:
        UnknownNameError: A name is not known; the message lists the nearest known ones.
        ArgumentError: A number is out of range, or data do not suffice for so many shots.
        DataError: Data are not there and cannot be fetched.
    """
    if checkpoints is not None:
        checkpoints.mkdir(parents=True, exist_ok=True)
    check_known("kernels", kernels, (*KERNELS, BASELINE))
    check_known("objectives", objectives, OBJECTIVES)
    check_positive(
        seeds=seeds, steps=steps, tasks_per_step=tasks_per_step, test_tasks=test_tasks, lr=lr
    )
    check_device(device)
    pairs = [(name, k) for name in study for k in shots or study_named(name).shots]
    for name, k in pairs:
        study_named(name).sources(k, 0)
    cells = []
    for (name, k), kernel, objective, seed in itertools.product(
        pairs, kernels, objectives, range(seeds)
    ):
        trained = kernel != BASELINE
        cell = {
            "study": name, "shots": k, "seed": seed, "kernel": kernel,
            "objective": objective if trained else None, "steps": steps if trained else None,
            "tasks_per_step": tasks_per_step if trained else None, "lr": lr if trained else None,
            "test_tasks": test_tasks, "device": device,
        }  # fmt: skip
        cells.append(cell)
    return list({tuple(cell.items()): cell for cell in cells}.values())


STUDY = Study(
    name="dkt",
    about="Deep Kernel Transfer on few-shot tasks under the LML and the CLML.",
    title="Deep Kernel Transfer",
    running="Trains a model for each study, number of shots, kernel, objective and seed on tasks "
    "of some classes, and tests it on tasks of others.",
    reporting="means over seeds, and the CLML less the LML by seed.",
    grid=make_grid,
    cell=run_cell,
    sources=SOURCES,
    needed=("study", "shots", "kernel", "objective", "interval"),
    label="{study} shots={shots} {kernel} {objective} seed {seed}",
    tables=sections,
    folders=(("folder", "GPCLML_DATA"), ("checkpoints", CHECKPOINTS)),
)
