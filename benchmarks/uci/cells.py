"""Cells: a model trained on a few rows of a data set and tested on others; or several at once."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.data import TrainTestSplit, load, split, subset
from benchmarks.tables.scores import normal, score
from benchmarks.uci.training import has_fixed_steps, make_objective, noting_failed_fits, train
from gpclml.errors import ArgumentError
from gpclml.fit import FitResult, fit_batch, suggest_batch_size
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss
from gpclml.models import GPRegression

__all__ = [
    "CONFIGURATION", "SOURCES", "Metrics", "Prepared", "Training", "batch_label", "evaluate",
    "most_in_batch", "prepare", "rmse", "run_cell", "run_cells", "train_cell",
    "training_rows",
]  # fmt: skip

SOURCES = ("benchmarks.tables.scores", "benchmarks.uci.training")
"""The modules beside this one that decide the results of :func:`run_cell`."""

CONFIGURATION = (
    "dataset", "n", "seed", "objective", "kernel", "mean", "optimizer", "steps", "lr",
    "held_out", "trace", "dtype", "device",
)  # fmt: skip
"""The settings of a cell."""

Metrics = dict[str, float | list[float]]

_TRACED_STEPS = (25, 50, 100, 200, 300, 500, 700, 1000)


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be trained, and what it is to be tested on.

    Args:
        mll: Its objective, in train mode.
        test_x: Inputs of the rows set apart, ``(num_test, d)``.
        test_y: Their targets, ``(num_test,)``.
        unit: Sample standard deviation of all targets of the data set.
        seconds: Wall time of building the model.
    """

    mll: ExactMarginalLogLikelihood
    test_x: Tensor
    test_y: Tensor
    unit: float
    seconds: float

    @property
    def model(self) -> GPRegression:
        """The model of the objective."""
        return cast(GPRegression, self.mll.model)


@dataclass(frozen=True)
class Training:
    """What became of the training of a model.

    Args:
        steps: Number of steps that the optimizer did.
        message: Why the fit ended early; empty if it did not.
        seconds: Wall time, without that of looking at the test error.
        steps_at: Numbers of steps at which the test error was looked at.
        rmse_at: The test error after so many steps, as the metric ``rmse``.
    """

    steps: int
    message: str
    seconds: float
    steps_at: list[int] = field(default_factory=list)
    rmse_at: list[float] = field(default_factory=list)


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
            ``held_out``, ``trace``, ``dtype`` and ``device``; None for a setting that is not
            used.

    Returns:
        The metrics of :func:`evaluate`.

    Raises:
        NonFiniteError: A metric is not finite.
    """
    prepared = prepare(cell)
    return evaluate(prepared, train_cell(prepared, cell))


def prepare(cell: Mapping[str, Any]) -> Prepared:
    """Builds the model of a cell and its objective.

    Args:
        cell: Its configuration, see :func:`run_cell`.
    """
    importlib.import_module("botorch.optim.fit")  # else the first fit would, and be timed
    data = load(cell["dataset"])
    rows = training_rows(data.num_data, cell["n"], cell["seed"])
    units = {"dtype": getattr(torch, cell["dtype"]), "device": cell["device"]}
    x, y = data.inputs.to(**units), data.targets.to(**units)
    start = time.perf_counter()
    model = GPRegression(
        x[rows.train], y[rows.train], cell["kernel"], cell["mean"], seed=cell["seed"]
    )
    mll = make_objective(cell["objective"], model, held_out=cell["held_out"], seed=cell["seed"])
    seconds = time.perf_counter() - start
    return Prepared(mll, x[rows.test], y[rows.test], float(data.targets.std()), seconds)


def train_cell(prepared: Prepared, cell: Mapping[str, Any]) -> Training:
    """Trains the model of a cell in place.

    Args:
        prepared: The model, as :func:`prepare` gives it.
        cell: Its configuration, see :func:`run_cell`.
    """
    trace = _Trace(prepared, cell["steps"]) if cell["trace"] else None
    start = time.perf_counter()
    with noting_failed_fits() as notes:  # of a warm start too
        steps, message = train(
            prepared.mll, cell["optimizer"], cell["steps"], cell["lr"], cell["seed"], trace
        )
    seconds, message = time.perf_counter() - start, message or " ".join(notes)
    if trace is None:
        return Training(steps, message, seconds)
    return Training(
        steps, message, seconds - trace.seconds, list(trace.rmse), [*trace.rmse.values()]
    )


def evaluate(prepared: Prepared, training: Training) -> Metrics:
    """Tests a trained model.

    Returns:
        - ``rmse``, ``nll``, ``crps``, ``coverage_95``: see
          :func:`benchmarks.tables.scores.score`;
        - ``train_objective``: the objective at the end of the training, nats per point, in
          units of the training targets' standard deviation, as are the noise variance
          ``noise`` and GPRegression's training;
        - ``num_steps``: steps that the optimizer did;
        - ``train_seconds``: wall time of building and training the model;
        - ``ended_early``: 1 if the optimizer or the warm start of a deep kernel gave up before its
          goal and kept what it had, else 0;
        - ``steps_at``, ``rmse_at``: where traced, the ``rmse`` after so many steps.

    Raises:
        NonFiniteError: A score is not finite.
    """
    prepared.mll.train()
    with torch.no_grad():
        objective = -float(fixed_loss(prepared.mll))
        predicted = prepared.model.predict(prepared.test_x, marginal=True)
    mean, variance = predicted.mean.cpu().numpy(), predicted.variance.cpu().numpy()
    scores = score(normal(mean, variance**0.5), prepared.test_y.cpu().numpy(), prepared.unit)
    metrics: Metrics = {
        **{name: scores[name] for name in ("rmse", "nll", "crps", "coverage_95")},
        "train_objective": objective,
        "noise": float(cast(Tensor, prepared.model.likelihood.noise).detach().mean()),
        "num_steps": float(training.steps),
        "train_seconds": prepared.seconds + training.seconds,
        "ended_early": float(bool(training.message)),
    }
    if training.steps_at:
        metrics |= {"steps_at": [float(n) for n in training.steps_at], "rmse_at": training.rmse_at}
    return metrics


class _Trace:
    """Looks at the test error after some steps of a training, and leaves the model as it is."""

    def __init__(self, prepared: Prepared, steps: int) -> None:
        self.rmse: dict[int, float] = {}
        self.seconds = 0.0
        self._prepared = prepared
        self._looks = {*_TRACED_STEPS, steps}

    def __call__(self, step: int) -> None:
        if step not in self._looks:
            return
        start = time.perf_counter()
        with torch.no_grad():
            mean = self._prepared.model.predict(self._prepared.test_x, marginal=True).mean
        self.rmse[step] = rmse(mean, self._prepared.test_y, self._prepared.unit)
        self.seconds += time.perf_counter() - start


_SHARED = ("dataset", "n", "kernel", "mean", "steps", "lr", "dtype", "device")
_OF_OBJECTIVE = ("objective", "held_out")


def batch_label(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What cells that are trained together have in common.

    On a CPU that includes the objective: its gain is in few large operations on small
    matrices. A GPU takes all objectives at once.
    """
    names = (*_SHARED, *_OF_OBJECTIVE) if cell["device"] == "cpu" else _SHARED
    return tuple(cell[name] for name in names)


def most_in_batch(cell: Mapping[str, Any]) -> int:
    """How many cells like this one are best trained together; 1 for those that cannot be."""
    fixed = has_fixed_steps(cell["kernel"], cell["mean"]) and not cell["trace"]
    if not fixed or cell["objective"] == "lml-subset":
        return 1
    return suggest_batch_size(cell["n"], cell["device"], keeps_memory=True)  # the runner sees to it


def run_cells(cells: list[dict[str, Any]]) -> list[Mapping[str, Any] | Exception]:
    """Trains and tests the models of cells with one label, as ``run_cell`` would each.

    A cell that cannot be prepared, started or tested gives its error in place of metrics and
    leaves the others as they are. ``train_seconds`` is an equal share of the batch's.

    Returns:
        Metrics or an error a cell, in order.
    """
    # Members with one objective side by side are evaluated in one pass.
    order = sorted(range(len(cells)), key=lambda i: str([cells[i][k] for k in _OF_OBJECTIVE]))
    prepared = {i: _prepared(cells[i]) for i in order}
    ready = {i: one for i, one in prepared.items() if isinstance(one, Prepared)}
    fits = _fit(list(ready.values()), cells[0]) if ready else []
    answers: dict[int, Metrics | Exception] = {
        i: one for i, one in prepared.items() if isinstance(one, Exception)
    }
    for (i, one), fit in zip(ready.items(), fits, strict=True):
        answers[i] = _answer(one, fit, cells[i])
    return [answers[i] for i in range(len(cells))]


def _prepared(cell: Mapping[str, Any]) -> Prepared | Exception:
    try:
        return prepare(cell)
    except Exception as error:  # it is the answer of this cell
        return error


def _fit(prepared: list[Prepared], cell: Mapping[str, Any]) -> list[FitResult]:
    mlls = [cast(ConditionalMarginalLogLikelihood, one.mll) for one in prepared]
    with noting_failed_fits():  # the messages tell of them
        return fit_batch(mlls, "adam", steps=cell["steps"], lr=cell["lr"], progress=False)


def _answer(prepared: Prepared, fit: FitResult, cell: Mapping[str, Any]) -> Metrics | Exception:
    try:
        if not fit.history:  # alone it raises the error that tells why
            return run_cell(cell)
        return evaluate(prepared, Training(len(fit.history), fit.message, fit.seconds))
    except Exception as error:  # it is the answer of this cell
        return error


def rmse(mean: Tensor, target: Tensor, unit: float) -> float:
    """Root mean squared error, in the given unit of the targets.

    Args:
        mean: Predicted means, ``(num_test,)``.
        target: Test targets, ``(num_test,)``.
        unit: The unit.
    """
    return float(np.sqrt(np.mean((mean - target).cpu().numpy() ** 2)) / unit)
