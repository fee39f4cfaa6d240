"""Every objective on every problem, in float32 and float64, and the table of what went wrong."""

from __future__ import annotations

import math

import pandas as pd
import torch

from benchmarks.robustness.methods import METHODS, Evaluation, evaluate, value_of_rounded_kernel
from benchmarks.robustness.problems import HardProblem, draw_problem
from gpclml.errors import ArgumentError

__all__ = ["run", "summarize"]


def run(problems: int = 500, seed: int = 0) -> pd.DataFrame:
    """Value and gradient of every objective on hard problems, float32 against float64.

    Args:
        problems: Number of problems, at least 1.
        seed: Seed of the family of problems.

    Returns:
        A row a problem and method. What the problem is: ``index``, ``kernel``, ``n``, ``d``,
        ``num_duplicates``, ``lengthscale_min``, ``lengthscale_max``, ``outputscale``. In
        float32: ``value``, ``error`` (empty if nothing was raised), ``raised``,
        ``nonfinite_value``, ``nonfinite_gradient`` (both of what was not raised) and
        ``jittered``. In float64: ``value64``, ``error64``, ``succeeded64`` and ``jittered64``.
        ``value_error`` and ``gradient_error``: difference of float32 from float64 over the
        float64 value or gradient norm, or over one where that is smaller; NaN unless both
        succeeded, in float64 without jitter. ``own_error``: as ``value_error``, but from
        float64 on the same float32 kernel matrix, so without the kernel's own rounding; NaN
        also where that matrix with noise is not positive definite.

    Raises:
        ArgumentError: If ``problems`` is below 1.
    """
    if problems < 1:
        raise ArgumentError("problems", problems, "an integer of at least 1")
    rows = []
    for index in range(problems):
        problem = draw_problem(seed, index)
        for method in METHODS:
            rows.append(_description(problem) | {"method": method} | _outcome(method, problem))
    return pd.DataFrame(rows)


def _description(problem: HardProblem) -> dict:
    return {
        "index": problem.index,
        "kernel": problem.kernel,
        "n": problem.x.shape[0],
        "d": problem.x.shape[1],
        "num_duplicates": problem.num_duplicates,
        "lengthscale_min": float(problem.lengthscale.min()),
        "lengthscale_max": float(problem.lengthscale.max()),
        "outputscale": problem.outputscale,
    }


def _outcome(method: str, problem: HardProblem) -> dict:
    single = evaluate(method, problem, torch.float32)
    double = evaluate(method, problem, torch.float64)
    raised = bool(single.error)
    value_error, gradient_error = _relative_errors(single, double)
    rounded = value_of_rounded_kernel(method, problem)
    own_error = math.nan if single.value is None else _relative(single.value, rounded)
    return {
        "value": single.value,
        "error": single.error,
        "raised": raised,
        "nonfinite_value": not raised and not single.finite_value,
        "nonfinite_gradient": not raised and not single.finite_gradient,
        "jittered": single.jittered,
        "value64": double.value,
        "error64": double.error,
        "succeeded64": double.succeeded,
        "jittered64": double.jittered,
        "value_error": value_error,
        "own_error": own_error,
        "gradient_error": gradient_error,
    }


def _relative_errors(single: Evaluation, double: Evaluation) -> tuple[float, float]:
    if not (single.succeeded and double.succeeded) or double.jittered:
        return math.nan, math.nan
    assert single.value is not None
    assert double.value is not None
    assert single.gradient is not None
    assert double.gradient is not None
    difference = float((single.gradient - double.gradient).norm())
    of_gradient = difference / max(float(double.gradient.norm()), 1.0)
    return _relative(single.value, double.value), of_gradient


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1.0)


def summarize(results: pd.DataFrame) -> pd.DataFrame:
    """Counts of failures and quantiles of relative errors of every method.

    Args:
        results: From :func:`run`.

    Returns:
        A row a method, in the order tested. ``failed``: raised, or not finite, in float32 where
        float64 succeeded. ``raised``, ``nonfinite_value``, ``nonfinite_gradient``,
        ``jittered``: counts in float32; ``failed64``, ``jittered64``: in float64. Then the
        median, 99% quantile and maximum of the value, own and gradient errors, over the
        problems that have one.
    """
    ok = ~(results["raised"] | results["nonfinite_value"] | results["nonfinite_gradient"])
    results = results.assign(
        failed=results["succeeded64"] & ~ok,
        failed64=~results["succeeded64"],
    )
    groups = results.groupby("method", sort=False)
    counts = ["failed", "raised", "nonfinite_value", "nonfinite_gradient", "jittered"]
    table = groups[[*counts, "failed64", "jittered64"]].sum()
    table.insert(0, "problems", groups.size())
    for kind in ("value", "own", "gradient"):
        errors = groups[f"{kind}_error"]
        table[f"{kind}_median"] = errors.median()
        table[f"{kind}_p99"] = errors.quantile(0.99)
        table[f"{kind}_max"] = errors.max()
    return table.reset_index()
