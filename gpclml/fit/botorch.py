"""The line search of :func:`~gpclml.fit.fit_mll` as an optimizer for BoTorch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood

from gpclml._utils.arguments import callers_level, check_counts, checked
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit.diagnosis import explanation
from gpclml.fit.result import FitWarning
from gpclml.fit.search import line_search
from gpclml.fit.train import trainable

if TYPE_CHECKING:
    from botorch.optim.core import OptimizationResult

_OPTIONS = ("ftol", "gtol", "maxfun", "maxls", "maxcor")  # of SciPy's L-BFGS-B


class _TimeoutError(Exception):
    """The time for a search is spent."""


@checked
def fit_gpytorch_mll_fused(
    mll: MarginalLogLikelihood,
    *,
    closure: Callable | None = None,
    options: Mapping[str, Any] | None = None,
    callback: Callable[[dict[str, torch.Tensor], OptimizationResult], None] | None = None,
    timeout_sec: float | None = None,
    **others: Any,
) -> OptimizationResult:
    """The ``optimizer`` of ``fit_gpytorch_mll`` that fits a ``SingleTaskGP`` in milliseconds.

    It replaces BoTorch's ``fit_gpytorch_mll_scipy``, for GPyTorch's log marginal likelihood and for
    any objective of this package. L-BFGS-B takes its first step in the raw parameters, which are
    those of BoTorch's own search, and goes on in the logarithms of positive hyperparameters. Value
    and gradient of models with a known kernel are computed in closed form; see :func:`fit_mll`.
    BoTorch's retries, from draws of the priors, are not changed.

    Args:
        mll: The objective, in train mode.
        closure: Has to be None: another loss than the objective has no closed form.
        options: ``{"maxiter": n}`` for at most n steps, of each member of a batch;
            SciPy's ``ftol``, ``gtol``, ``maxfun``, ``maxls`` and ``maxcor``, in logarithms.
        callback: Called after each step with the parameters and an ``OptimizationResult``.
        timeout_sec: Seconds after which the search ends with the best parameters so far.
        **others: ``parameters``, ``bounds`` and ``method`` of BoTorch's optimizer have to be None.

    Returns:
        Steps taken, loss, status and seconds.

    Raises:
        UnsupportedError: If there is a ``closure`` or one of the ``others``, or the objective is a
            sum.
        ArgumentError: If there are other ``options``, or ``maxiter`` is no positive number.
        NonFiniteError, NotPSDError: If the start cannot be evaluated.

    Warns:
        OptimizationWarning: If the search ended though its slope says that better points are near.
            BoTorch then tries again.
        FitWarning: If scale or mean left the range of the targets under an objective that does not
            score first points.

    Examples:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from botorch.models import SingleTaskGP
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from gpclml.fit import fit_gpytorch_mll_fused
        >>> x = torch.rand(20, 2, dtype=torch.float64)
        >>> model = SingleTaskGP(x, x.sum(-1, keepdim=True).sin())
        >>> mll = ExactMarginalLogLikelihood(model.likelihood, model)
        >>> _ = fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_fused)
    """
    from botorch.exceptions.warnings import OptimizationWarning
    from botorch.optim.core import OptimizationResult, OptimizationStatus

    if closure is not None:
        suggestion = "Use fit_gpytorch_mll_scipy, or give the objective a compute_custom_loss."
        raise UnsupportedError("closure", type(closure).__name__, "None", suggestion)
    for name, value in others.items():
        if value is not None or name not in ("parameters", "bounds", "method"):
            suggestion = "Freeze parameters or register constraints, or use fit_gpytorch_mll_scipy."
            raise UnsupportedError(name, type(value).__name__, "None", suggestion)
    if isinstance(mll, SumMarginalLogLikelihood):
        suggestion = "fit_gpytorch_mll calls it for each member of a sum over a ModelListGP."
        raise UnsupportedError("mll", type(mll).__name__, "one objective", suggestion)
    given = dict(options or {})
    steps = given.pop("maxiter", None)
    if unknown := sorted(set(given) - set(_OPTIONS)):
        raise ArgumentError("options", unknown, f"of maxiter, {', '.join(_OPTIONS)}")
    check_counts(maxiter=steps)
    start, taken, last = time.perf_counter(), 0, float("nan")
    parameters = trainable(mll)

    def result(status: OptimizationStatus, message: str = "") -> OptimizationResult:
        return OptimizationResult(taken, last, status, time.perf_counter() - start, message)

    def record(loss: float) -> None:
        nonlocal taken, last
        taken, last = taken + 1, loss
        if callback is not None:
            callback(parameters, result(OptimizationStatus.RUNNING))
        if timeout_sec is not None and time.perf_counter() - start > timeout_sec:
            raise _TimeoutError

    try:
        end = line_search(mll, steps, record, given)
    except _TimeoutError:
        return result(OptimizationStatus.STOPPED, f"Ended after {timeout_sec} seconds.")
    last = end.loss
    if end.ran_away:
        # Other starts would run away too, so that BoTorch is not asked to try again.
        warnings.warn(explanation("runaway", end, 1, taken), FitWarning, stacklevel=callers_level())
    elif end.reason == "abnormal":
        message = f"The line search ended before an optimum: {end.message}"
        warnings.warn(message, OptimizationWarning, stacklevel=callers_level())
    # BoTorch tries again after a failure alone.
    statuses = {"converged": "SUCCESS", "limit": "STOPPED", "abnormal": "FAILURE"}
    return result(OptimizationStatus[statuses[end.reason]], end.message)
