"""Objectives on hard problems in float32 and float64: value, gradient, and all that goes wrong."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from gpytorch import settings
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from benchmarks.robustness.problems import HardProblem, draw_problem
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.mlls import ConditionalMarginalLogLikelihood

_PAIRS = {"LastPoints(m=0)": "gpytorch LML", "LeaveOneOut()": "gpytorch LOO"}
_TENFOLD = 10.0


_clml = partial(partial, ConditionalMarginalLogLikelihood)
OURS: dict[str, Callable] = {
    "RandomHoldout(0.1)": _clml(conditioning=RandomHoldout(0.1)),
    "KFold(10)": _clml(conditioning=KFold(10)),
    "LeaveOneOut()": _clml(conditioning=LeaveOneOut()),
    "LastPoints(m=0)": _clml(conditioning=LastPoints(0)),
}
"""What makes gpclml's objectives from likelihood and model, by name."""

METHODS: dict[str, Callable] = OURS | {
    "gpytorch LML": ExactMarginalLogLikelihood,
    "gpytorch LOO": LeaveOneOutPseudoLikelihood,
}
"""All objectives by name."""


@dataclass(frozen=True)
class Evaluation:
    """Value (nats per point) and gradient (one row, float64) of an objective, or what it raised.

    ``jittered`` says whether jitter was added to a covariance, by the warning it gives.
    """

    value: float
    gradient: Tensor
    error: str
    jittered: bool

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient is finite."""
        return bool(self.gradient.isfinite().all())

    @property
    def succeeded(self) -> bool:
        """Whether value and gradient are finite."""
        return math.isfinite(self.value) and self.has_gradient


@contextlib.contextmanager
def _defaults_of_gpytorch() -> Iterator[None]:
    """GPyTorch as shipped, but for the Cholesky path: importing BoTorch changes its settings."""
    with (
        settings.max_cholesky_size(100_000),
        settings.cholesky_max_tries(3),
        settings.cholesky_jitter(float_value=1e-6, double_value=1e-8),
        settings.fast_computations(log_prob=True),
        settings.observation_nan_policy("ignore"),
    ):
        yield


def evaluate(method: str, problem: HardProblem, dtype: torch.dtype) -> Evaluation:
    """Value and gradient of one objective on one problem; whatever is raised is recorded."""
    # Built in float32 and then cast: both types have the very same numbers.
    model = problem.model(dtype)
    mll = METHODS[method](model.likelihood, model)
    value, gradient, error = math.nan, torch.tensor([math.nan]), ""
    with warnings.catch_warnings(record=True) as caught, _defaults_of_gpytorch():
        warnings.simplefilter("always")
        try:
            output = mll(model(*model.train_inputs), model.train_targets)
            output.backward()
        except Exception as raised:  # any failure at all is what is being counted
            error = f"{type(raised).__name__}: {raised}"
        else:
            parameters = list(model.parameters())
            slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            value, gradient = output.item(), torch.cat([s.flatten() for s in slopes]).double()
    jittered = any(issubclass(warning.category, NumericalWarning) for warning in caught)
    return Evaluation(value, gradient, error, jittered)


def run(
    problems: int = 500, seed: int = 0, draw: Callable[[int, int], HardProblem] = draw_problem
) -> pd.DataFrame:
    """Value and gradient of every objective on random problems, float32 against float64.

    A row a problem and method. ``raised``, ``nonfinite_value``, ``nonfinite_gradient`` (both of
    what was not raised) and ``jittered`` are of float32; ``succeeded64`` and ``jittered64`` of
    float64. ``value_error`` and ``gradient_error``: difference of float32 from float64 over the
    float64 value or gradient norm, or over one where that is smaller; NaN unless both succeeded, in
    float64 without jitter.
    """
    return pd.DataFrame(
        {
            "index": problem.index, "kernel": problem.kernel, "n": problem.x.shape[0],
            "d": problem.x.shape[1], "num_duplicates": problem.num_duplicates,
            "lengthscale_min": float(problem.lengthscale.min()),
            "lengthscale_max": float(problem.lengthscale.max()),
            "outputscale": problem.outputscale, "method": method,
        }
        | _outcome(method, problem)
        for problem in (draw(seed, index) for index in range(problems))
        for method in METHODS
    )  # fmt: skip


def _outcome(method: str, problem: HardProblem) -> dict:
    single, double = (evaluate(method, problem, kind) for kind in (torch.float32, torch.float64))
    raised, value_error, gradient_error = bool(single.error), math.nan, math.nan
    # With jitter float64 is of another matrix, and no reference.
    if single.succeeded and double.succeeded and not double.jittered:
        value_error = abs(single.value - double.value) / max(abs(double.value), 1.0)
        difference = float((single.gradient - double.gradient).norm())
        gradient_error = difference / max(float(double.gradient.norm()), 1.0)
    return {
        "value": single.value, "error": single.error, "raised": raised,
        "nonfinite_value": not raised and not math.isfinite(single.value),
        "nonfinite_gradient": not raised and not single.has_gradient,
        "jittered": single.jittered, "value64": double.value, "error64": double.error,
        "succeeded64": double.succeeded, "jittered64": double.jittered,
        "value_error": value_error, "gradient_error": gradient_error,
    }  # fmt: skip


def summarize(results: pd.DataFrame) -> pd.DataFrame:
    """Counts of failures and quantiles of relative errors of every method.

    ``failed``: raised, or not finite, in float32 where float64 succeeded.
    """
    # A failure counts where float64 shows that there is a value.
    ok = ~(results["raised"] | results["nonfinite_value"] | results["nonfinite_gradient"])
    results = results.assign(failed=results["succeeded64"] & ~ok, failed64=~results["succeeded64"])
    groups = results.groupby("method", sort=False)
    counts = ["failed", "raised", "nonfinite_value", "nonfinite_gradient", "jittered"]
    table = groups[[*counts, "failed64", "jittered64"]].sum()
    table.insert(0, "problems", groups.size())
    for kind in ("value", "gradient"):
        errors = groups[f"{kind}_error"]
        table[f"{kind}_median"] = errors.median()
        table[f"{kind}_p99"] = errors.quantile(0.99)
        table[f"{kind}_max"] = errors.max()
    return table.reset_index()


def summarize_singular(results: pd.DataFrame) -> pd.DataFrame:
    """What was said of singular covariances, a row a method.

    ``silent``: neither raised nor warned; ``tenfold``: silent and off by more than ten times the
    float64 value; ``largest``: error of the silent ones; ``failed_alone``: raised where GPyTorch's
    objective of the same kind gives a value.
    """
    scale = results["value64"].abs().clip(lower=1.0)
    results = results.assign(error=(results["value"] - results["value64"]).abs() / scale)
    raised = results.pivot(index="index", columns="method", values="raised")
    rows = []
    for method, group in results.groupby("method", sort=False):
        silent = group[~group["raised"] & ~group["jittered"]]
        peer = _PAIRS.get(str(method))
        alone = int((raised[method] & ~raised[peer]).sum()) if peer else None
        rows.append({
            "method": method, "problems": len(group), "raised": int(group["raised"].sum()),
            "warned": int((group["jittered"] & ~group["raised"]).sum()), "silent": len(silent),
            "tenfold": int((silent["error"] > _TENFOLD).sum()), "largest": silent["error"].max(),
            "failed_alone": alone,
        })  # fmt: skip
    return pd.DataFrame(rows)
