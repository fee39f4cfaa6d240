"""Steps, fits and predictions of many points given their nearest neighbours."""

from __future__ import annotations

import gc
import time
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.speed.timing import Row, highest_resident, in_fresh_process, start_of_peak
from benchmarks.tables.large import split_rows
from benchmarks.tables.large_methods import fit_given_neighbors
from gpclml.conditioning import NearestNeighbors
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

_FEATURES, _NOISE, _GIVEN = 512, 0.1, 64


def measure_neighbors(
    n: int, dimensions: int, steps: int = 100, new: int = 2000, memory: bool = False,
    *, device: str = "cpu",
) -> list[Row]:  # fmt: skip
    """A fit of the plain Matern kernel to a drawn function by Adam, and predictions, in float32.

    Args:
        n: Number of points.
        dimensions: Number of inputs.
        steps: Steps of Adam, each of 128 points given 32 neighbours.
        new: Number of new points, each predicted given 64 neighbours.
        memory: Peak memory too, each in a process of its own.
        device: Where.

    Returns:
        One row: processor ``ms`` of a step without the lookup of neighbours; ``lookup ms``, the
        median, and ``refresh s``, what lookups took beyond that in all; seconds of the ``fit`` and
        of ``predict``; root mean square error to the function; and with ``memory`` the peaks of
        making the ``model``, fitting and predicting as multiples of the bytes of the data,
        themselves included.
    """
    few = [values.to(device) for values in drawn_function(500, dimensions)]
    loaded = GPRegression(few[0], few[2])  # what the first fit loads is not timed
    strategy = NearestNeighbors()
    _fit(ConditionalMarginalLogLikelihood(loaded.likelihood, loaded, strategy), 2)
    x, f, y = (values.to(device) for values in drawn_function(n + new, dimensions))
    model = GPRegression(x[:n], y[:n])
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, strategy)
    conditioning: Any = mll.conditioning
    split, lookups = conditioning.split, []

    def timed_split(*arguments: Any) -> Any:
        start = time.process_time()
        result = split(*arguments)
        lookups.append(time.process_time() - start)
        return result

    conditioning.split = timed_split
    start, wall = time.process_time(), time.perf_counter()
    _fit(mll, steps)
    fitted, spent = time.perf_counter(), time.process_time() - start
    prediction = model.predict(x[n:], neighbors=_GIVEN, progress=False)
    predicted = time.perf_counter()
    median = float(torch.tensor(lookups).median())
    error = (prediction.mean - f[n:]).square().mean().sqrt()
    row: Row = {
        "ms": 1e3 * (spent - sum(lookups)) / steps, "lookup ms": 1e3 * median,
        "refresh s": sum(lookups) - median * len(lookups),
        "fit s": fitted - wall, "predict s": predicted - fitted, "RMSE": float(error),
    }  # fmt: skip
    if memory:
        size = 4 * n * (dimensions + 1)
        for what in ("model", "fit", "predict"):
            peak = in_fresh_process(_peak, n, dimensions, what)
            row[f"{what} memory"] = 1 + peak / size
    return [row]


def measure_accuracy_given(
    data: str, kernel: str = "matern", k: int = 32, batch: int = 128, steps: int = 300,
    given: int = 64, order: Literal["all", "previous"] = "all", seed: int = 0,
) -> list[Row]:  # fmt: skip
    """Errors of a model that is trained and predicts given neighbours, in float32.

    Args:
        data: A table, of which 90 % are training rows.
        kernel: "matern", or "deep" with a network of width 256.
        k: Neighbours of a point of a batch.
        batch: Points of a step of Adam.
        steps: Their number.
        given: Neighbours of a new row.
        order: Of neighbours, see :class:`NearestNeighbors`.
        seed: Of the split and of batches and weights at the start.

    Returns:
        One row: root mean square error and mean negative log density of at most 2,000 test rows,
        targets standardized, and processor seconds of the fit and of predictions.
    """
    x, y, test_x, test_y = split_rows(data, seed, 10**9)
    times = [time.process_time()]
    strategy = NearestNeighbors(k, batch, order)
    model = fit_given_neighbors(kernel, x, y, strategy, steps, seed)
    times.append(time.process_time())
    new, targets = (torch.tensor(values[:2000]).float() for values in (test_x, test_y))
    with torch.no_grad():
        normal = model.predict(new, neighbors=given)
    times.append(time.process_time())
    errors = (normal.mean - targets).double()
    densities = torch.distributions.Normal(0.0, normal.stddev.double()).log_prob(errors)
    return [{
        "RMSE": float(errors.square().mean().sqrt()), "NLL": -float(densities.mean()),
        "fit s": times[1] - times[0], "predict s": times[2] - times[1],
    }]  # fmt: skip


def drawn_function(n: int, dimensions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Points of [-2, 2]^d, a function drawn from a Matern 5/2 kernel there, and noisy targets.

    By 512 random Fourier features; lengthscales are .4 to 2.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(_FEATURES, dimensions, generator=generator)
    chi = torch.randn(_FEATURES, 5, generator=generator).square().mean(-1, keepdim=True)
    frequencies = normal / torch.linspace(0.4, 2.0, dimensions) / chi.sqrt()
    phases = torch.rand(_FEATURES, generator=generator) * 2 * torch.pi
    weights = torch.randn(_FEATURES, generator=generator) * (2 / _FEATURES) ** 0.5
    x, f = torch.empty(n, dimensions), torch.empty(n)
    for points, values in zip(x.split(10_000), f.split(10_000), strict=True):
        points.uniform_(-2, 2, generator=generator)
        values.copy_((points @ frequencies.T + phases).cos() @ weights)
    return x, f, f + _NOISE * torch.randn(n, generator=generator)


def _fit(mll: ConditionalMarginalLogLikelihood, steps: int) -> None:
    fit_mll(mll, "adam", steps=steps, lr=0.1, final_lr=0.01, progress=False)


def _peak(n: int, dimensions: int, what: str) -> int:
    """Bytes at the peak beyond the data and the libraries."""
    for size in (1000, n):  # the first loads what is loaded once
        x, _, y = drawn_function(size, dimensions)
        new = x[:1000].clone()
        before = _resident()
        model = GPRegression(x, y)
        if what != "model":
            before = _resident()  # the model has the data, and buffers of a few numbers
            mll = ConditionalMarginalLogLikelihood(model.likelihood, model, NearestNeighbors())
            _fit(mll, 12 if what == "fit" else 1)
        if what == "predict":
            _resident()
            model.predict(new, neighbors=_GIVEN, progress=False)
    return highest_resident() - before


def _resident() -> int:
    gc.collect()
    return start_of_peak()
