"""One cell: a model trained on a few rows of a data set and tested on the rows set apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.uci.objectives import make_objective
from benchmarks.uci.training import noting_failed_fits, train
from gpclml import datasets
from gpclml.errors import NonFiniteError
from gpclml.models import GPRegression

__all__ = ["run_cell", "training_rows"]

_STANDARD_NORMAL_975 = 1.959963984540054  # 95% lie between plus and minus this


def training_rows(data: datasets.RegressionData, n: int, seed: int) -> datasets.Split:
    """The rows of a cell: n random ones of a random 90% to train on, the other 10% to test on.

    They depend on data set, n and seed alone, so that kernels and objectives are compared on
    the same rows; those of a smaller n are among those of a larger one, and the rows to test
    on are the same for every n.

    Args:
        data: The data set.
        n: Number of rows to train on.
        seed: Seed of both draws.

    Raises:
        ArgumentError: There are fewer than n rows to train on.
    """
    rows = datasets.split(data, seed)
    return datasets.Split(train=datasets.subset(rows.train, n, seed), test=rows.test)


def run_cell(cell: Mapping[str, Any]) -> dict[str, float]:
    """Trains and tests one model.

    Errors and densities are in units of the sample standard deviation of *all* targets of the
    data set: one unit for every seed, n and kernel.

    Args:
        cell: Its configuration: ``dataset``, ``n``, ``seed`` (of rows, model and held-out
            points), ``objective``, ``kernel``, ``mean``, ``optimizer``, ``steps``, ``lr``,
            ``held_out``, ``dtype`` and ``device``; None for a setting that is not used.

    Returns:
        - ``rmse``: root mean squared error of the predictive mean on the test rows;
        - ``nll``: mean negative log predictive density of one test target, nats;
        - ``coverage_95``: share of test targets within their central 95% interval;
        - ``train_objective``: the objective at the end of the training, nats per point, in
          units of the training targets' standard deviation, as are the noise variance
          ``noise`` and GPRegression's training;
        - ``num_steps``: steps that the optimizer did;
        - ``ended_early``: 1 if the optimizer or the warm start of a deep kernel gave up before its
          goal and kept what it had, else 0.

    Raises:
        NonFiniteError: A metric is not finite.
    """
    data = datasets.load(cell["dataset"], progress=False)
    rows = training_rows(data, cell["n"], cell["seed"])
    units = {"dtype": getattr(torch, cell["dtype"]), "device": cell["device"]}
    x, y = data.inputs.to(**units), data.targets.to(**units)
    with noting_failed_fits() as failed_fits:
        model = GPRegression(
            x[rows.train], y[rows.train], cell["kernel"], cell["mean"], seed=cell["seed"]
        )
        mll = make_objective(cell["objective"], model, held_out=cell["held_out"], seed=cell["seed"])
        steps, message = train(mll, cell["optimizer"], cell["steps"], cell["lr"], cell["seed"])
        mll.train()
        with torch.no_grad():
            objective = -float(mll.compute_custom_loss())
            prediction = model.predict(x[rows.test], observation_noise=True, marginal=True)
    metrics = {
        **_test_metrics(prediction.mean, prediction.variance, y[rows.test], data.targets.std()),
        "train_objective": objective,
        "noise": float(model.likelihood.noise.detach().mean()),
        "num_steps": float(steps),
        "ended_early": float(bool(message or failed_fits)),
    }
    _check_finite(metrics)
    return metrics


def _test_metrics(mean: Tensor, variance: Tensor, target: Tensor, unit: Tensor) -> dict[str, float]:
    """Errors in the given unit of the targets; all tensors have shape (num_test,)."""
    error = (target - mean) / float(unit)
    variance = variance / float(unit) ** 2
    nll = 0.5 * (error.square() / variance + variance.log() + math.log(2 * math.pi))
    inside = error.abs() <= _STANDARD_NORMAL_975 * variance.sqrt()
    return {
        "rmse": float(error.square().mean().sqrt()),
        "nll": float(nll.mean()),
        "coverage_95": float(inside.to(nll).mean()),
    }


def _check_finite(metrics: Mapping[str, float]) -> None:
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:  # averaged over seeds it would be left out unseen; as a failure it is listed
        raise NonFiniteError("metrics", bad, "finite numbers")
