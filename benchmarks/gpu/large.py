"""Exact fits of ten to twenty thousand points: which objective picks and fits the better model."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.data import VARIABLE, has_files, load
from benchmarks.gpu.records import Records, Row, message_of
from benchmarks.speed.methods import sampled_data
from benchmarks.speed.runs import wait_for
from gpclml.conditioning import Conditioning, KFold, LastPoints, LeaveOneOut
from gpclml.errors import DataError
from gpclml.evaluation import leave_one_out, log_marginal_likelihood
from gpclml.fit import FitWarning, fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["KERNELS", "OBJECTIVES", "TABLE", "Rows", "run"]

TABLE = "kin40k"
_TEST = 5000

Rows = tuple[str, Tensor, Tensor]
"""A name, inputs and targets."""


def _matern(smoothness: float) -> Callable[[int], gpytorch.kernels.Kernel]:
    return lambda d: MaternKernel(smoothness, ard_num_dims=d)


KERNELS: dict[str, Callable[[int], gpytorch.kernels.Kernel]] = {
    "rbf": lambda d: RBFKernel(ard_num_dims=d), "matern 5/2": _matern(2.5),
    "matern 3/2": _matern(1.5), "matern 1/2": _matern(0.5),
}  # fmt: skip

OBJECTIVES: dict[str, Conditioning | None] = {
    "LML": LastPoints(m=0), "leave-one-out": LeaveOneOut(), "ten folds": KFold(10),
    "GPyTorch's LML": None,
}  # fmt: skip
"""Conditionings; None is GPyTorch's own objective under the same search."""


def run(records: Records, device: str, small: bool) -> None:
    """Fits and scores by kernel, objective and number of points, what tells most first.

    Args:
        records: Where they are kept.
        device: The GPU; a CPU serves to try it.
        small: Tiny sizes.
    """
    rows: Rows = ("drawn", *sampled_data(60 if small else 25_000, torch.float64, "cpu", 0))
    if not small:
        try:
            rows = _real_rows()
        except (DataError, ImportError) as error:
            key = {"study": "large fits", "data": TABLE}
            records.skip(key, f"{message_of(error)}; drawn rows serve")
    if small:
        _fit(records, device, rows, 40, "matern 5/2", "LML")
        _fit(records, device, rows, 40, "matern 5/2", "GPyTorch's LML")
        return
    for kernel, objective in [
        ("matern 5/2", "LML"), ("matern 5/2", "GPyTorch's LML"), ("rbf", "LML"),
        ("matern 3/2", "LML"), ("matern 1/2", "LML"), ("matern 5/2", "leave-one-out"),
        ("rbf", "leave-one-out"), ("matern 3/2", "leave-one-out"), ("matern 5/2", "ten folds"),
    ]:  # fmt: skip
        _fit(records, device, rows, 10_000, kernel, objective)
    for kernel in KERNELS:
        _fit(records, device, rows, 2000, kernel, "LML")
    for objective in ("LML", "leave-one-out", "GPyTorch's LML"):
        _fit(records, device, rows, 20_000, "matern 5/2", objective)


def _real_rows() -> Rows:
    """The table from the folder that GPCLML_DATA names; nothing is downloaded."""
    if not os.environ.get(VARIABLE) or not has_files(TABLE):
        raise DataError(f"{TABLE} is not in the folder that {VARIABLE} names")
    data = load(TABLE)
    return TABLE, data.inputs.double(), data.targets.double()


def _fit(records: Records, device: str, rows: Rows, n: int, kernel: str, objective: str) -> None:
    key = {
        "study": "large fits", "data": rows[0], "device": device, "dtype": "float64", "n": n,
        "kernel": kernel, "method": objective,
    }  # fmt: skip
    records.measure(key, partial(_fit_row, device, rows, n, kernel, objective))


def _fit_row(device: str, rows: Rows, n: int, kernel: str, objective: str) -> list[Row]:
    _, x, y = rows
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:n], order[n:][-_TEST:]
    model = GPRegression(
        x[train].to(device), y[train].to(device), ScaleKernel(KERNELS[kernel](x.shape[-1]))
    )
    conditioning = OBJECTIVES[objective]
    mll = (
        ExactMarginalLogLikelihood(model.likelihood, model)
        if conditioning is None
        else ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    )
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    wait_for(device)
    start = time.perf_counter()
    with warnings.catch_warnings(), gpytorch.settings.max_cholesky_size(n + 1):
        warnings.simplefilter("ignore", FitWarning)
        result = fit_mll(mll, progress=False)
    wait_for(device)
    row = {
        "seconds": time.perf_counter() - start, "steps": len(result.history),
        "ended": result.problem or "converged",
    }  # fmt: skip
    if on_gpu:
        row["GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    with torch.no_grad():
        row["LML a point"] = float(log_marginal_likelihood(model, units="training")) / n
        row["LOO a point"] = float(leave_one_out(model, units="training").mean())
        row |= _predicted(model, x[test].to(device), y[test].to(device))
    row["noise"] = float(model.likelihood.noise.detach())
    return [row]


def _predicted(model: GPRegression, x: Tensor, y: Tensor) -> Row:
    """Scores of held-out rows in standardized units, in which a variance of 1 knows nothing."""
    found = model.predict(x, marginal=True, solver="cholesky", progress=False)
    mean, variance = found.mean, found.variance
    scale = model.target_scale
    normal = torch.distributions.Normal(mean, variance.sqrt())
    density = normal.log_prob(y) + scale.log()
    return {
        "test NLL": -float(density.mean()),
        "its error": float(density.std() / len(y) ** 0.5),
        "test RMSE": float((mean - y).square().mean().sqrt() / scale),
    }
