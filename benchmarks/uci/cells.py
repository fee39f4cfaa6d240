"""Cells: a model trained on a few rows of a data set and tested on others; or several at once."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.data import TrainTestSplit, load, split, subset
from benchmarks.tables.scores import attempt, normal, score
from benchmarks.uci.training import make_objective, noting_failed_fits, optimizer_for, train
from gpclml.errors import ArgumentError, DataError
from gpclml.fit import fit_batch, suggest_batch_size
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss
from gpclml.models import GPRegression

CONFIGURATION = (
    "dataset", "n", "seed", "objective", "kernel", "mean", "optimizer", "steps", "lr",
    "held_out", "dtype", "device",
)  # fmt: skip
"""The settings of a cell."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class _Prepared:
    """An objective whose model is to be trained, and the rows that it is to be tested on.

    ``unit`` is the sample standard deviation of all targets of the data set, ``seconds`` the wall
    time of building the model.
    """

    mll: ConditionalMarginalLogLikelihood
    test_x: Tensor
    test_y: Tensor
    unit: float
    seconds: float


def training_rows(num_data: int, n: int, seed: int) -> TrainTestSplit:
    """The rows of a cell: n random ones of a random 90% to train on, the other 10% to test on.

    They depend on data set, n and seed alone, so that kernels and objectives are compared on
    the same rows; those of a smaller n are among those of a larger one, and the rows to test
    on are the same for every n.

    Raises:
        ArgumentError: There are fewer than n rows to train on.
    """
    rows = split(num_data, seed)
    if n > len(rows.train):
        raise ArgumentError("n", n, f"at most the {len(rows.train)} rows to train on")
    return TrainTestSplit(train=subset(rows.train, n, seed), test=rows.test)


def run_cell(cell: Mapping[str, Any]) -> Metrics:
    """Trains and tests one model.

    Errors and densities are in units of the sample standard deviation of *all* targets of the
    data set: one unit for every seed, n and kernel.

    Args:
        cell: Its configuration: ``dataset``, ``n``, ``seed`` (of rows, model and held-out
            points), ``objective``, ``kernel``, ``mean``, ``optimizer``, ``steps``, ``lr``,
            ``held_out``, ``dtype`` and ``device``; None for a setting that is not used. Of a file
            of the user's also its absolute path ``file`` and its ``sha256``.

    Returns:
        - ``rmse``, ``nll``, ``crps``, ``coverage_95``: see
          :func:`benchmarks.tables.scores.score`;
        - ``train_objective``: the objective at the end of the training, nats per point, in
          units of the training targets' standard deviation, as are the noise variance
          ``noise`` and GPRegression's training;
        - ``num_steps``: steps that the optimizer did;
        - ``train_seconds``: wall time of building and training the model;
        - ``ended_early``: 1 if the optimizer or the warm start of a deep kernel gave up before its
          goal and kept what it had, else 0.

    Raises:
        NonFiniteError: A metric is not finite.
    """
    prepared = _prepare(cell)
    start = time.perf_counter()
    options = (cell[name] for name in ("optimizer", "steps", "lr", "seed"))
    with noting_failed_fits() as notes:  # of a warm start too
        steps, message = train(prepared.mll, *options)
    return _evaluate(prepared, steps, message or " ".join(notes), time.perf_counter() - start)


def _prepare(cell: Mapping[str, Any]) -> _Prepared:
    """Builds the model of a cell and its objective."""
    importlib.import_module("botorch.optim.fit")  # else the first fit would, and be timed
    data = load(cell["dataset"], cell.get("file"))
    if data.origin.get("sha256") != cell.get("sha256"):
        fix = "Run the command again."
        raise DataError(f"{cell['file']}: the file has changed since the run began. {fix}")
    rows = training_rows(data.num_data, cell["n"], cell["seed"])
    # Standardization happens in this type too, as a user's would.
    units = {"dtype": getattr(torch, cell["dtype"]), "device": cell["device"]}
    x, y = data.inputs.to(**units), data.targets.to(**units)
    start = time.perf_counter()
    model = GPRegression(
        x[rows.train], y[rows.train], cell["kernel"], cell["mean"], seed=cell["seed"]
    )
    mll = make_objective(cell["objective"], model, held_out=cell["held_out"], seed=cell["seed"])
    seconds = time.perf_counter() - start
    return _Prepared(mll, x[rows.test], y[rows.test], float(data.targets.std()), seconds)


def _evaluate(prepared: _Prepared, steps: int, message: str, seconds: float) -> Metrics:
    """Tests a model after so many steps and seconds of training."""
    model = cast(GPRegression, prepared.mll.model)
    # Predictions leave the model in eval mode.
    prepared.mll.train()
    with torch.no_grad():
        objective = -float(fixed_loss(prepared.mll))
        predicted = model.predict(prepared.test_x, marginal=True)
    mean, variance = predicted.mean.cpu().numpy(), predicted.variance.cpu().numpy()
    scores = score(normal(mean, variance**0.5), prepared.test_y.cpu().numpy(), prepared.unit)
    return {
        **{name: scores[name] for name in ("rmse", "nll", "crps", "coverage_95")},
        "train_objective": objective,
        "noise": float(cast(Tensor, model.likelihood.noise).detach().mean()),
        "num_steps": float(steps),
        "train_seconds": prepared.seconds + seconds,
        "ended_early": float(bool(message)),
    }


_SHARED = ("dataset", "n", "kernel", "mean", "steps", "lr", "dtype", "device")


def batch_label(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What cells that are trained together have in common.

    On a CPU that includes the objective: its gain is in few large operations on small
    matrices. A GPU takes all objectives at once.
    """
    names = (*_SHARED, "objective", "held_out") if cell["device"] == "cpu" else _SHARED
    return tuple(cell[name] for name in names)


def most_in_batch(cell: Mapping[str, Any]) -> int:
    """How many cells like this one are best trained together; 1 for those that cannot be."""
    # The residual deep kernel chooses its number of steps.
    fixed = optimizer_for(cell["kernel"], cell["mean"]) == "adam" and cell["kernel"] != "deep"
    if not fixed or cell["objective"] == "lml-subset":  # whose points others do not condition on
        return 1
    return suggest_batch_size(cell["n"], cell["device"])


def run_cells(cells: list[dict[str, Any]]) -> list[Mapping[str, Any] | Exception]:
    """Trains and tests the models of cells with one label, as :func:`run_cell` would each.

    A cell that cannot be prepared, started or tested gives its error in place of metrics and
    leaves the others as they are. ``train_seconds`` is an equal share of the batch's.

    Returns:
        Metrics or an error a cell, in order.
    """
    answers: list[Any] = [attempt(_prepare, cell) for cell in cells]
    ready = [i for i, prepared in enumerate(answers) if isinstance(prepared, _Prepared)]
    # Members with one objective side by side are evaluated in one pass.
    ready.sort(key=lambda i: (cells[i]["objective"], str(cells[i]["held_out"])))
    if not ready:
        return answers
    first = cells[0]
    with noting_failed_fits():  # the messages tell of them
        mlls = [answers[i].mll for i in ready]
        fits = fit_batch(mlls, "adam", steps=first["steps"], lr=first["lr"], progress=False)
    for i, fit in zip(ready, fits, strict=True):
        if fit.history:
            steps = len(fit.history)
            answers[i] = attempt(_evaluate, answers[i], steps, fit.message, fit.seconds)
        else:  # alone it raises the error that tells why
            answers[i] = attempt(run_cell, cells[i])
    return answers
