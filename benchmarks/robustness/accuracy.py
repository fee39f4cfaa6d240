"""Objectives against Gaussian densities in extended precision, 64 bits of mantissa.

NumPy's ``longdouble`` has no LAPACK behind it, so the factorization is written out by columns.
Where ``longdouble`` is ``float64`` (Windows, some ARM) the
reference is no better than what it judges.
"""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.robustness.objectives import OURS
from benchmarks.robustness.problems import HardProblem

_PARAMETERS = (
    "covar_module.base_kernel.raw_lengthscale", "covar_module.raw_outputscale",
    "likelihood.noise_covar.raw_noise", "mean_module.raw_constant",
)  # fmt: skip
_OBJECTIVES = {"gpclml": OURS["LastPoints(m=0)"], "gpytorch": ExactMarginalLogLikelihood}
Array = NDArray[np.longdouble]


def extended(values: Tensor) -> Array:
    """The same numbers in extended precision."""
    return values.detach().double().cpu().numpy().astype(np.longdouble)


def cholesky(matrix: Array) -> Array:
    """The lower factor of a symmetric matrix; NaN from a pivot on that is not positive."""
    factor = np.zeros_like(matrix)
    for j in range(len(matrix)):
        column = matrix[j:, j] - factor[j:, :j] @ factor[j, :j]
        factor[j:, j] = column / np.sqrt(column[0])
    return factor


def forward(factor: Array, right: Array) -> Array:
    """What the inverse of a lower factor makes of columns ``(n, k)``."""
    solved = right.copy()
    for j in range(len(factor)):
        solved[j] = (solved[j] - factor[j, :j] @ solved[:j]) / factor[j, j]
    return solved


def run_accuracy(problems: int = 200, seed: int = 0) -> pd.DataFrame:
    """Log marginal likelihood and gradient, ours and GPyTorch's, against extended precision.

    An RBF kernel on 20 to 150 points in 1 to 3 dimensions, lengthscale 0.1 to 10, outputscale 0.1
    to 100 and noise 2e-4 to 1, all log-uniform. The gradient is by lengthscale, outputscale,
    noise and mean. Errors are relative.
    """
    rows = []
    for index in range(problems):
        problem, noise = _draw_regular(seed, index)
        reference = _reference(problem, noise)
        for dtype in (torch.float32, torch.float64):
            for method in _OBJECTIVES:
                value, gradient = _evaluated(method, problem, noise, dtype)
                error = np.linalg.norm(gradient - reference[1]) / np.linalg.norm(reference[1])
                rows.append({
                    "index": index, "method": method, "dtype": str(dtype).removeprefix("torch."),
                    "value_error": abs(value - reference[0]) / abs(reference[0]),
                    "gradient_error": float(error),
                })  # fmt: skip
    return pd.DataFrame(rows)


def summarize_accuracy(results: pd.DataFrame) -> pd.DataFrame:
    """Median and largest relative errors, a row a type and method."""
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
    """The value, and its gradient by raw parameters, one for the lengthscales of all features."""
    model = problem.model(dtype, noise)
    mll = _OBJECTIVES[method](model.likelihood, model)
    with warnings.catch_warnings(action="error", category=NumericalWarning):
        value = mll(model(*model.train_inputs), model.train_targets)
    value.backward()
    gradients = [model.get_parameter(name).grad for name in _PARAMETERS]
    return value.item(), np.array([float(g.double().sum()) for g in gradients if g is not None])


def _reference(problem: HardProblem, noise: float) -> tuple[float, np.ndarray]:
    """Value and gradient by raw parameters, whose values are those of the float32 model."""
    named = dict(problem.model(torch.float32, noise).named_parameters())
    d, n = problem.x.shape[-1], len(problem.x)
    raw_scale, raw_output, raw_noise, mean = (extended(named[p]).sum() for p in _PARAMETERS)
    # All features share one lengthscale here; the sum over them is d times it.
    raw_scale /= d
    # softplus, as GPyTorch transforms raw parameters, in extended precision.
    scale, outputscale = np.logaddexp(0, raw_scale), np.logaddexp(0, raw_output)
    variance = np.logaddexp(0, raw_noise) + np.longdouble(np.float32(1e-4))
    x = extended(problem.x)
    squares = ((x[:, None] - x) ** 2).sum(-1)
    kernel = outputscale * np.exp(-squares / (2 * scale**2))
    factor = cholesky(kernel + variance * np.eye(n))
    residual = extended(problem.y) - mean
    inverse = forward(factor, np.eye(n).astype(np.longdouble))
    inverse = inverse.T @ inverse
    a = inverse @ residual
    log_det = 2 * np.log(np.diag(factor)).sum()
    value = -(residual @ a + log_det + n * np.log(2 * np.longdouble(np.pi))) / 2 / n
    # Gradient with respect to K of twice the log density (Rasmussen and Williams, Eq. 5.9).
    middle = np.outer(a, a) - inverse
    slope = [1 / (1 + np.exp(-r)) for r in (raw_scale, raw_output, raw_noise)]
    gradient = [
        (middle * kernel * squares).sum() / scale**3 / 2 * slope[0],
        (middle * kernel).sum() / outputscale / 2 * slope[1],
        np.trace(middle) / 2 * slope[2],
        a.sum(),
    ]
    return float(value), np.array(gradient, dtype=np.float64) / n
