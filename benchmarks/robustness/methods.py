"""Objectives under test, and one evaluation of value and gradient with all that went wrong."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from linear_operator import to_linear_operator
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from benchmarks.robustness.problems import HardProblem
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.mlls import ConditionalMarginalLogLikelihood

__all__ = ["METHODS", "OURS", "Evaluation", "evaluate", "value_of_rounded_kernel"]


def _conditional(conditioning: Callable) -> Callable:
    return lambda likelihood, model: ConditionalMarginalLogLikelihood(
        likelihood, model, conditioning()
    )


OURS: dict[str, Callable] = {
    "RandomHoldout(0.1)": _conditional(partial(RandomHoldout, 0.1)),
    "KFold(10)": _conditional(partial(KFold, 10)),
    "LeaveOneOut()": _conditional(LeaveOneOut),
    "LastPoints(m=0)": _conditional(partial(LastPoints, 0)),
}
"""What makes gpclml's objectives from likelihood and model, by name."""

METHODS: dict[str, Callable] = OURS | {
    "gpytorch LML": ExactMarginalLogLikelihood,
    "gpytorch LOO": LeaveOneOutPseudoLikelihood,
}
"""All objectives by name."""


@dataclass(frozen=True)
class Evaluation:
    """Value and gradient of an objective, or the error that it raised.

    Attributes:
        value: Nats per point; None if it raised.
        gradient: All parameters' gradients in one row, float64; None if it raised.
        error: Type and message of what it raised; empty if it did not.
        jittered: Whether jitter was added to a covariance, by the warning it gives.
    """

    value: float | None
    gradient: Tensor | None
    error: str
    jittered: bool

    @property
    def finite_value(self) -> bool:
        """Whether there is a value and it is finite."""
        return self.value is not None and math.isfinite(self.value)

    @property
    def finite_gradient(self) -> bool:
        """Whether there is a gradient and all of it is finite."""
        return self.gradient is not None and bool(torch.isfinite(self.gradient).all())

    @property
    def succeeded(self) -> bool:
        """Whether value and gradient are finite."""
        return self.finite_value and self.finite_gradient


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
    """Value and gradient of one objective on one problem.

    Args:
        method: A name in ``METHODS``.
        problem: The problem, cast to ``dtype``.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        What came out. Whatever is raised is recorded, not passed on.
    """
    model = problem.model(dtype)
    mll = METHODS[method](model.likelihood, model)
    value = gradient = None
    error = ""
    with warnings.catch_warnings(record=True) as caught, _defaults_of_gpytorch():
        warnings.simplefilter("always")
        try:
            output = mll(model(*model.train_inputs), model.train_targets)
            output.backward()
        except Exception as raised:  # any failure at all is what is being counted
            error = f"{type(raised).__name__}: {raised}"
        else:
            value, gradient = output.item(), _gradient(model)
    jittered = any(issubclass(warning.category, NumericalWarning) for warning in caught)
    return Evaluation(value, gradient, error, jittered)


def value_of_rounded_kernel(method: str, problem: HardProblem) -> float:
    """The objective of the float32 kernel matrix with everything after it in float64.

    Its difference from the float32 value is the objective's own rounding; the rest of the
    float32 error is the kernel's, which no objective can undo.

    Args:
        method: A name in ``METHODS``.
        problem: The problem.

    Returns:
        Nats per point; NaN where the rounded kernel plus noise is not positive definite.
    """
    single, double = problem.model(torch.float32), problem.model(torch.float64)
    mll = METHODS[method](double.likelihood, double)
    with warnings.catch_warnings(), _defaults_of_gpytorch():
        # Not under no_grad: GPyTorch computes distances otherwise there.
        prior = single(*single.train_inputs)
        kernel = prior.lazy_covariance_matrix.to_dense().double()
        warnings.simplefilter("error", NumericalWarning)
        try:
            rounded = MultivariateNormal(prior.mean.double(), to_linear_operator(kernel))
            return mll(rounded, double.train_targets).item()
        except (NumericalWarning, NotPSDError):
            return math.nan


def _gradient(model: torch.nn.Module) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts]).double()
