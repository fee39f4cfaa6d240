"""The cells of a sweep, checked before any of them is computed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.uci.objectives import DEFAULT_HELD_OUT, objective_names, uses_held_out
from benchmarks.uci.training import optimizer_for
from gpclml import datasets
from gpclml.errors import ArgumentError, UnknownNameError

__all__ = ["make_grid"]


def make_grid(
    names: Sequence[str],
    sizes: Sequence[int],
    seeds: int,
    objectives: Sequence[str],
    kernels: Sequence[str],
    *,
    mean: str = "constant",
    steps: int = 300,
    lr: float = 0.01,
    held_out: float = DEFAULT_HELD_OUT,
    device: str = "cpu",
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Every combination of data set, n, seed, kernel and objective as a cell.

    A setting that does not decide a cell's result is None there (``steps`` and ``lr`` under
    L-BFGS, ``held_out`` outside the CLML), so that a sweep with another value shares the cell.
    Loads every data set, which fetches what is missing.

    Args:
        names: Data sets.
        sizes: Numbers of training rows, n.
        seeds: Number of seeds; they are 0 to ``seeds - 1``.
        objectives: Objectives.
        kernels: Kernels.
        mean: The mean of every model.
        steps: Number of Adam steps.
        lr: Learning rate of Adam.
        held_out: Share of training points that the CLML holds out, in (0, 1).
        device: Where models are trained.
        folder: The data folder, as for ``gpclml.datasets.load``.
        progress: Whether a download shows a progress bar.

    Raises:
        UnknownNameError: A name is not known; the message lists the nearest known ones.
        ArgumentError: A number is out of range, or a data set has too few rows for an n.
        DataError: A data file is corrupt or cannot be fetched.
    """
    _check_names("datasets", names, datasets.names())
    _check_names("objectives", objectives, objective_names())
    optimizers = {kernel: optimizer_for(kernel, mean) for kernel in kernels}
    _check_numbers(seeds, steps, lr, held_out)
    _check_device(device)
    for name in names:
        _check_sizes(datasets.load(name, folder=folder, progress=progress), sizes)
    cells = []
    for name, n, seed, kernel, objective in itertools.product(
        names, sizes, range(seeds), kernels, objectives
    ):
        adam = optimizers[kernel] == "adam"
        cells.append(
            {
                "dataset": name,
                "n": n,
                "seed": seed,
                "objective": objective,
                "kernel": kernel,
                "mean": mean,
                "optimizer": optimizers[kernel],
                "steps": steps if adam else None,
                "lr": lr if adam else None,
                "held_out": held_out if uses_held_out(objective) else None,
                "dtype": "float64",
                "device": device,
            }
        )
    return cells


def _check_names(argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(argument, name, known)


def _check_numbers(seeds: int, steps: int, lr: float, held_out: float) -> None:
    if seeds < 1:
        raise ArgumentError("seeds", seeds, "a number of seeds, at least 1")
    if steps < 1:
        raise ArgumentError("steps", steps, "at least 1")
    if not 0 < lr < float("inf"):
        raise ArgumentError("lr", lr, "a positive number")
    if not 0 < held_out < 1:
        mend = "The whole, a share of 1, is the objective lml."
        raise ArgumentError("held_out", held_out, "a share between 0 and 1", mend)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        mend = f"Use 'cpu'. ({reason})"
        raise ArgumentError("device", repr(device), "a device at hand", mend) from None


def _check_sizes(data: datasets.RegressionData, sizes: Sequence[int]) -> None:
    num_train = len(datasets.split(data, 0).train)
    for n in sizes:
        if not 2 <= n <= num_train:
            raise ArgumentError(
                "n",
                f"{n} for {data.name}",
                f"2 to {num_train}, the {data.name} rows to train on (90% of {data.num_data})",
                "Take another n, or leave out the data set.",
            )
