"""Steps and fits on a GPU beside GPyTorch's and the CPU's, rates of the card, memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gpytorch
import torch

from benchmarks.gpu.graphs import graph_rows
from benchmarks.gpu.profiles import profile_rows
from benchmarks.gpu.records import Records, Row
from benchmarks.gpu.timing import timed
from benchmarks.speed import searches
from benchmarks.speed.methods import (
    BASE,
    DENSE_METHODS,
    LOO_BASE,
    SCALE_METHODS,
    Problem,
    gradient_step,
)
from benchmarks.speed.runs import interleaved_times
from gpclml.fit import FitWarning
from gpclml.inference.observations import MATRICES_AT_PEAK
from gpclml.linalg.matrices import inverse_of_factor

__all__ = ["OPERATIONS", "run"]

OPERATIONS = {
    BASE: 1.0, "LastPoints(m=0)": 1.0, "RandomHoldout(0.1)": 1 / 3 + 0.05 + 0.1,
    "textbook m=0.9n": 1 / 3 + 0.05 + 0.1, "KFold(10)": 2.0, LOO_BASE: 2.0, "LeaveOneOut()": 2.0,
}  # fmt: skip
"""Least floating-point operations of value and gradient, by n³, where of a symmetric or triangular
matrix one half is computed: a factor takes 1/3, its inverse 2/3 more; of a tenth b the solve
n² b / 2 and a symmetric product n² b; of all points a symmetric product n³."""

OPERATIONS |= {name: OPERATIONS[name.removesuffix(", dense")] for name in DENSE_METHODS}

_OURS = ["LastPoints(m=0)", "RandomHoldout(0.1)", "KFold(10)", "LeaveOneOut()", *DENSE_METHODS]
_ALL = [BASE, *_OURS, LOO_BASE, "textbook m=0.9n"]
_FEW = [BASE, "LastPoints(m=0)", "RandomHoldout(0.1)", "KFold(10)"]
_ONE_BLOCK = ["LastPoints(m=0)", "RandomHoldout(0.1)", BASE]
_LML = "fit_mll, LastPoints(m=0)"
_FITS = [
    searches.BASE, _LML, "botorch, fit_gpytorch_mll_fused", "fit_mll, gpytorch LML",
    "fit_mll, KFold(10)", "fit_mll, LeaveOneOut()",
]  # fmt: skip
_INPUTS = 8


def run(records: Records, device: str, small: bool) -> None:
    """All measurements of the part, what tells most first.

    Args:
        records: Where they are kept.
        device: The GPU; a CPU serves to try it.
        small: Tiny sizes.
    """
    if small:
        for dtype in ("float32", "float64"):
            _rates(records, device, dtype, 64)
        _batched_rates(records, device, 2, 10)
        _steps(records, device, "float64", 40, _ALL, 0.1)
        _steps(records, device, "float32", 40, _ONE_BLOCK, 0.1)
        _fits(records, device, 20, _FITS[:2], 0.0)
        _graphs(records, device, [20])
        _profiles(records, device, [20])
        _scale(records, device, 300, ["CLML of 256, cg"], 0.0)
        return
    beside_cpu = device != "cpu"
    for dtype in ("float64", "float32"):
        _rates(records, device, dtype, 8192)
        for n in (500, 2000, 5000, 1000, 10_000):
            _steps(records, device, dtype, n, _ALL, 2.0)
    for n in (100, 500, 2000):
        _fits(records, device, n, _FITS, 3.0)
    if beside_cpu:
        _rates(records, "cpu", "float64", 4000)
        for n in (500, 1000, 2000):
            _steps(records, "cpu", "float64", n, _FEW, 3.0)
        for n in (100, 500):
            _fits(records, "cpu", n, _FITS[:2], 4.0)
    for count, n in ((100, 100), (100, 300), (256, 50)):
        _batched_rates(records, device, count, n)
    _graphs(records, device, [100, 500, 1000, 2000])
    _profiles(records, device, [500, 5000])
    _scale(records, device, 20_000, list(SCALE_METHODS), 0.0)
    for dtype in ("float32", "float64"):
        _steps(records, device, dtype, 20_000, _ALL, 6.0)
    _scale(records, device, 50_000, [name for name in SCALE_METHODS if name != BASE], 0.0)
    _steps(records, device, "float32", 40_000, _ONE_BLOCK, 0.0)
    _steps(records, device, "float32", 50_000, _ONE_BLOCK, 0.0)
    _fits(records, device, 5000, _FITS[:3], 6.0)
    if beside_cpu:
        _steps(records, "cpu", "float64", 5000, _FEW, 0.0)
        _fits(records, "cpu", 2000, _FITS[:2], 0.0)


def _rates(records: Records, device: str, dtype: str, n: int) -> None:
    records.measure(
        {"study": "rates", "device": device, "dtype": dtype, "n": n},
        lambda: _rate_rows(device, dtype, n),
    )


def _rate_rows(device: str, dtype: str, n: int) -> list[Row]:
    kind = getattr(torch, dtype)
    x = torch.rand(n, _INPUTS, generator=torch.Generator().manual_seed(0)).to(device, kind)
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=_INPUTS).to(device, kind)
    with torch.no_grad():
        one = torch.eye(n, device=device, dtype=kind)
        K = kernel(x).to_dense() + one
        L = torch.linalg.cholesky(K)
        steps: dict[str, tuple[float, Callable[[], Any]]] = {
            "product": (2 * n**3, lambda: K @ K),
            "Cholesky factor": (n**3 / 3, lambda: torch.linalg.cholesky_ex(K)),
            "inverse of a factor's product": (2 * n**3 / 3, lambda: torch.cholesky_inverse(L)),
            "the same, this library's": (2 * n**3 / 3, lambda: inverse_of_factor(L)),
            "triangular solve, n columns": (
                n**3, lambda: torch.linalg.solve_triangular(L, K, upper=False),
            ),
            "sum of two matrices": (n**2, lambda: K + one),
            "kernel entries": (n**2, lambda: kernel(x, x + 1).to_dense()),
        }  # fmt: skip
        rounds = 5
        times = interleaved_times({name: step for name, (_, step) in steps.items()}, rounds, device)
    return [
        {"method": name, "ms": 1e3 * seconds, "Gflop/s": steps[name][0] / seconds / 1e9}
        for name, seconds in times.median().items()
    ]


def _batched_rates(records: Records, device: str, count: int, n: int) -> None:
    """Ways to the inverse of many small matrices, of which steps of stacked models consist."""

    def rows() -> list[Row]:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(count, n, _INPUTS, generator=generator).to(device, torch.float64)
        one = torch.eye(n, device=device, dtype=x.dtype).expand(count, n, n)
        K = (-0.5 * torch.cdist(x, x).square()).exp() + one
        L = torch.linalg.cholesky(K)
        steps: dict[str, Callable[[], Any]] = {
            "product": lambda: K @ K,
            "Cholesky factor": lambda: torch.linalg.cholesky_ex(K),
            "cholesky_inverse": lambda: torch.cholesky_inverse(L),
            "cholesky_solve of one": lambda: torch.cholesky_solve(one, L),
            "solve_triangular of one": lambda: torch.linalg.solve_triangular(L, one, upper=False),
            "inv": lambda: torch.linalg.inv_ex(K),
        }
        return [{"method": name, **row} for name, row in timed(steps, device, 0.5).items()]

    key = {"study": "batched rates", "device": device, "dtype": "float64", "n": n}
    records.measure(key | {"matrices": count}, rows)


def _steps(
    records: Records, device: str, dtype: str, n: int, methods: list[str], seconds: float
) -> None:
    records.measure(
        {"study": "step", "device": device, "dtype": dtype, "n": n},
        lambda: _step_rows(device, dtype, n, methods, seconds),
    )


def _step_rows(device: str, dtype: str, n: int, methods: list[str], seconds: float) -> list[Row]:
    kind = getattr(torch, dtype)
    problem = Problem(n, kind, device)
    steps = {name: gradient_step(name, problem) for name in methods}
    predicted = MATRICES_AT_PEAK * n * n * kind.itemsize / 2**30
    found = timed(steps, device, seconds, base=BASE, memory=True)
    rows = []
    for name, row in found.items():
        more = {"predicted GiB": predicted} if name in _OURS else {}
        rows.append({"method": name, **row, **more, "Gflop": 1e-9 * OPERATIONS[name] * n**3})
    return rows


def _scale(records: Records, device: str, n: int, methods: list[str], seconds: float) -> None:
    """Beyond one factor: by conjugate gradients, and on redrawn subsets; in single precision."""

    def rows() -> list[Row]:
        torch.manual_seed(0)  # of GPyTorch's random vectors
        problem = Problem(n, torch.float32, device)
        steps = {name: gradient_step(name, problem) for name in methods}
        found = timed(steps, device, seconds, base=BASE, memory=True)
        return [{"method": name, **row} for name, row in found.items()]

    records.measure({"study": "large n", "device": device, "dtype": "float32", "n": n}, rows)


def _fits(records: Records, device: str, n: int, ways: list[str], seconds: float) -> None:
    records.measure(
        {"study": "fit", "device": device, "dtype": "float64", "n": n},
        lambda: _fit_rows(device, n, ways, seconds),
    )


def _fit_rows(device: str, n: int, ways: list[str], seconds: float) -> list[Row]:
    data = searches.search_data(n, _INPUTS, 0, device)
    ends: dict[str, searches.End] = {}

    def fit(name: str, prepare: Callable[[], Callable[[], searches.End]]) -> None:
        with warnings.catch_warnings(), gpytorch.settings.max_cholesky_size(n + 1):
            warnings.simplefilter("ignore", FitWarning)
            ends[name] = prepare()()

    steps = {name: partial(fit, name, searches.SEARCHES[name](data)) for name in ways}
    found = timed(steps, device, seconds, base=searches.BASE)
    rows = []
    for name, row in found.items():
        value = float(ends[name]()[0]) if name in ends else float("nan")
        more = {"LML a point": value} if value == value else {}
        rows.append({"method": name, **row, **more})
    return rows


def _graphs(records: Records, device: str, sizes: list[int]) -> None:
    for dtype in ("float64", "float32"):
        for n in sizes:
            key = {"study": "CUDA graph", "device": device, "dtype": dtype, "n": n}
            _on_a_gpu(records, key, partial(graph_rows, device, dtype, n))


def _profiles(records: Records, device: str, sizes: list[int]) -> None:
    for n in sizes:
        key = {"study": "profile", "device": device, "dtype": "float64", "n": n}
        _on_a_gpu(records, key, partial(profile_rows, device, "float64", n, _FEW))


def _on_a_gpu(records: Records, key: Row, function: Callable[[], list[Row]]) -> None:
    if torch.device(key["device"]).type == "cuda":
        records.measure(key, function)
    else:
        records.skip(key, "needs a CUDA device")
