"""Covariances that are singular in single precision, and how exact objectives are."""

from __future__ import annotations

import math
import warnings
from functools import partial

import numpy as np
import pandas as pd
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from benchmarks.robustness.extended import cholesky, extended, forward
from benchmarks.robustness.methods import METHODS, evaluate
from benchmarks.robustness.problems import KERNELS, HardProblem
from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = [
    "draw_duplicates",
    "run_accuracy",
    "run_singular",
    "summarize_accuracy",
    "summarize_singular",
]

_PAIRS = {"LastPoints(m=0)": "gpytorch LML", "LeaveOneOut()": "gpytorch LOO"}
_TENFOLD = 10.0


def draw_duplicates(seed: int, index: int) -> HardProblem:
    """A problem with copies among its rows and a kernel far above its noise of 1e-4.

    Log-uniform: n from 4 to 200, the lengthscale from 0.05 to 10, the outputscale from 1e2 to 1e6.
    Uniform: 1 to 5 features, the kernel, and a share of up to 0.9 of the rows that copy another.

    Args:
        seed: Seed of the family.
        index: Number of the problem.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)

    def uniform() -> float:
        return float(torch.rand(1, generator=generator, dtype=torch.float64))

    n, d = int(4 * (201 / 4) ** uniform()), 1 + int(5 * uniform())
    kernel = list(KERNELS)[int(len(KERNELS) * uniform())]
    copies = max(1, min(n - 2, int(0.9 * uniform() * n)))
    x = normal(n - copies, d)
    picked = torch.randint(len(x), (copies,), generator=generator)
    x = torch.cat([x, x[picked]])[torch.randperm(n, generator=generator)]
    lengthscale, outputscale = 0.05 * 200 ** uniform(), 1e2 * 1e4 ** uniform()
    waves = normal(d, 10) * 0.1 * 30 ** uniform()
    y = (x @ waves + 2 * math.pi * normal(10)).cos().sum(-1) + 0.1 * normal(n)
    y = (y - y.mean()) / y.std()
    scales = torch.full((d,), lengthscale, dtype=torch.float32)
    return HardProblem(index, kernel, x.float(), y.float(), scales, outputscale, 0.0, copies)


def run_singular(problems: int = 300, seed: int = 0) -> pd.DataFrame:
    """Objectives in float32 on problems with duplicated rows, against float64.

    Args:
        problems: Number of problems.
        seed: Seed of the family.

    Returns:
        A row a problem and method: ``index``, ``n``, ``outputscale``, ``method``, ``value``,
        ``raised``, ``warned`` of jitter, ``value64``, and ``error``, the difference over the
        float64 value or over one where that is smaller.

    Raises:
        ArgumentError: Fewer than one problem.
    """
    if problems < 1:
        raise ArgumentError("problems", problems, "an integer of at least 1")
    rows = []
    for index in range(problems):
        problem = draw_duplicates(seed, index)
        for method in METHODS:
            single = evaluate(method, problem, torch.float32)
            double = evaluate(method, problem, torch.float64)
            value, reference = (math.nan if e.value is None else e.value for e in (single, double))
            rows.append(
                {
                    "index": index,
                    "n": len(problem.x),
                    "outputscale": problem.outputscale,
                    "method": method,
                    "value": value,
                    "raised": bool(single.error),
                    "warned": single.jittered,
                    "value64": reference,
                    "error": abs(value - reference) / max(abs(reference), 1.0),
                }
            )
    return pd.DataFrame(rows)


def summarize_singular(results: pd.DataFrame) -> pd.DataFrame:
    """What was said of singular covariances, a row a method.

    Args:
        results: From :func:`run_singular`.

    Returns:
        ``raised``, ``warned``, ``silent`` (neither), ``tenfold`` (silent and off by more than ten
        times the float64 value), ``largest`` (error of the silent ones) and ``failed_alone``
        (raised where GPyTorch's objective of the same kind gives a value).
    """
    raised = results.pivot(index="index", columns="method", values="raised")
    rows = []
    for method, group in results.groupby("method", sort=False):
        silent = group[~group["raised"] & ~group["warned"]]
        peer = _PAIRS.get(str(method))
        alone = int((raised[method] & ~raised[peer]).sum()) if peer else None
        rows.append(
            {
                "method": method,
                "problems": len(group),
                "raised": int(group["raised"].sum()),
                "warned": int((group["warned"] & ~group["raised"]).sum()),
                "silent": len(silent),
                "tenfold": int((silent["error"] > _TENFOLD).sum()),
                "largest": silent["error"].max(),
                "failed_alone": alone,
            }
        )
    return pd.DataFrame(rows)


def run_accuracy(problems: int = 200, seed: int = 0) -> pd.DataFrame:
    """Log marginal likelihood and gradient, ours and GPyTorch's, against extended precision.

    An RBF kernel on 20 to 150 points in 1 to 3 dimensions, lengthscale 0.1 to 10, outputscale 0.1
    to 100 and noise 2e-4 to 1, all log-uniform. The gradient is by lengthscale, outputscale,
    noise and mean.

    Args:
        problems: Number of problems.
        seed: Seed of the family.

    Returns:
        A row a problem, method and type: ``index``, ``method``, ``dtype``, ``value_error`` and
        ``gradient_error``, relative.
    """
    rows = []
    for index in range(problems):
        problem, noise = _draw_regular(seed, index)
        reference = _reference(problem, noise)
        for dtype in (torch.float32, torch.float64):
            for method in ("gpclml", "gpytorch"):
                value, gradient = _evaluated(method, problem, noise, dtype)
                rows.append(
                    {
                        "index": index,
                        "method": method,
                        "dtype": str(dtype).removeprefix("torch."),
                        "value_error": abs(value - reference[0]) / abs(reference[0]),
                        "gradient_error": float(
                            np.linalg.norm(gradient - reference[1]) / np.linalg.norm(reference[1])
                        ),
                    }
                )
    return pd.DataFrame(rows)


def summarize_accuracy(results: pd.DataFrame) -> pd.DataFrame:
    """Median and largest relative errors, a row a type and method.

    Args:
        results: From :func:`run_accuracy`.
    """
    groups = results.groupby(["dtype", "method"])[["value_error", "gradient_error"]]
    table = groups.agg(["median", "max"])
    table.columns = ["_".join(names) for names in table.columns]
    return table.reset_index()


def _draw_regular(seed: int, index: int) -> tuple[HardProblem, float]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    uniform = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
    n, d = 20 + int(131 * uniform[0]), 1 + int(3 * uniform[1])
    x = torch.randn(n, d, generator=generator).float()
    y = (2 * x).sin().sum(-1) + 0.3 * torch.randn(n, generator=generator)
    scales = torch.full((d,), 0.1 * 100 ** uniform[2])
    outputscale, noise = 0.1 * 1e3 ** uniform[3], 2e-4 * 5e3 ** uniform[4]
    return HardProblem(index, "RBF", x, y, scales, outputscale, uniform[5], 0), noise


def _evaluated(
    method: str, problem: HardProblem, noise: float, dtype: torch.dtype
) -> tuple[float, np.ndarray]:
    """The value, and its gradient by the hyperparameters themselves."""
    model = problem.model(torch.float32)
    model.likelihood.noise = noise
    model = model.to(dtype)
    model.set_train_data(problem.x.to(dtype), problem.y.to(dtype), strict=False)
    mll = (
        ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
        if method == "gpclml"
        else ExactMarginalLogLikelihood(model.likelihood, model)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        value = mll(model(*model.train_inputs), model.train_targets)
    value.backward()
    return value.item(), np.array([float(g) for g in _raw_gradients(model)])


def _raw_gradients(model: torch.nn.Module) -> list[Tensor]:
    """By raw lengthscale (all features together), outputscale, noise and mean."""
    named = dict(model.named_parameters())
    names = (
        "covar_module.base_kernel.raw_lengthscale", "covar_module.raw_outputscale",
        "likelihood.noise_covar.raw_noise", "mean_module.raw_constant",
    )  # fmt: skip
    found = []
    for name in names:
        gradient = named[name].grad
        assert gradient is not None
        found.append(gradient.double().sum())
    return found


def _reference(problem: HardProblem, noise: float) -> tuple[float, np.ndarray]:
    """Value and gradient by raw parameters, whose values are those of the float32 model."""
    model = problem.model(torch.float32)
    model.likelihood.noise = noise
    raw = {name: extended(p).sum() for name, p in model.named_parameters()}
    d, n = problem.x.shape[-1], len(problem.x)
    raw_scale = raw["covar_module.base_kernel.raw_lengthscale"] / d
    raw_output = raw["covar_module.raw_outputscale"]
    raw_noise, mean = raw["likelihood.noise_covar.raw_noise"], raw["mean_module.raw_constant"]
    scale, outputscale = np.logaddexp(0, raw_scale), np.logaddexp(0, raw_output)
    variance = np.logaddexp(0, raw_noise) + np.longdouble(np.float32(1e-4))
    x = extended(problem.x)
    squares = ((x[:, None] - x) ** 2).sum(-1)
    kernel = outputscale * np.exp(-squares / (2 * scale**2))
    factor = cholesky(kernel + variance * np.eye(n))
    assert factor is not None
    residual = extended(problem.y) - mean
    inverse = forward(factor, np.eye(n).astype(np.longdouble))
    inverse = inverse.T @ inverse
    a = inverse @ residual
    log_det = 2 * np.log(np.diag(factor)).sum()
    value = -(residual @ a + log_det + n * np.log(2 * np.longdouble(np.pi))) / 2 / n
    middle = np.outer(a, a) - inverse
    slope = [1 / (1 + np.exp(-r)) for r in (raw_scale, raw_output, raw_noise)]
    gradient = [
        (middle * kernel * squares).sum() / scale**3 / 2 * slope[0],
        (middle * kernel).sum() / outputscale / 2 * slope[1],
        np.trace(middle) / 2 * slope[2],
        a.sum(),
    ]
    return float(value), np.array(gradient, dtype=np.float64) / n
