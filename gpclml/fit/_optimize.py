"""One run of an optimizer on an objective's own training data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

from gpclml._utils.upstream_settings import load_botorch
from gpclml.errors import NonFiniteError, UnknownNameError
from gpclml.mlls.losses import fixed_loss, fresh_loss, has_shared_parameters

__all__ = ["LineSearchEnd", "StoppedError", "frozen", "line_search", "stochastic"]

_RESUMES = 3  # from the best point, without what the search remembers of the curvature
_WINDOW, _LEAST_GAIN = 20, 0.002  # a search ends where so many steps gain less, nats in all
_LEAST_SLOPE = 0.1  # nats by a unit of a parameter, below which there is nothing left to gain
_MARGIN = 0.01  # of a bound: no value comes closer to it than by this share

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Record = Callable[[Any, Any], None]
Bounds = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class LineSearchEnd:
    """Where a line search ended.

    Attributes:
        reason: "converged", "limit" if its steps were spent, "abnormal" if it found no better
            point though the slope says that there are some.
        message: The optimizer's own words where it did not converge.
        at_bounds: Names of parameters that ended at a bound of theirs.
    """

    reason: Literal["converged", "limit", "abnormal"]
    message: str = ""
    at_bounds: tuple[str, ...] = ()


def line_search(mll: MarginalLogLikelihood, steps: int | None, record: Record) -> LineSearchEnd:
    """Minimizes the fixed loss by L-BFGS-B, in place.

    It ends where twenty steps have gained less than 0.002 nats in all. Steps that lead
    where a covariance cannot be factored count as too long. A parameter whose constraint has a
    positive lower bound, as the noise has, stays a hundredth of the bound above it: nearer to it
    the transform is flat, and a step that went too far could not be taken back.

    Args:
        mll: Any objective but a sum, in train mode.
        steps: Most iterations, those of resumed searches included; SciPy's limit, 15000, if None.
        record: Called with BoTorch's parameters and ``OptimizationResult`` at each iteration.

    Raises:
        StoppedError: If the start cannot be evaluated.
    """
    load_botorch()
    from botorch.exceptions.warnings import OptimizationWarning
    from botorch.models.gpytorch import BatchedMultiOutputGPyTorchModel
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    model = mll.model
    batch_shape = getattr(model, "_aug_batch_shape", torch.Size())
    independent = (
        isinstance(model, BatchedMultiOutputGPyTorchModel)
        and batch_shape.numel() > 1
        and not has_shared_parameters(model, batch_shape)
    )
    bounds = _bounds(mll)
    with warnings.catch_warnings():
        # A line search that cannot improve further keeps its point, which the result says. And what
        # points on the way need to be factored is no matter: the end is evaluated again.
        warnings.simplefilter("ignore", OptimizationWarning)
        warnings.simplefilter("ignore", NumericalWarning)
        if independent:
            options = {} if steps is None else {"maxiter": steps}
            result = fit_gpytorch_mll_scipy(mll, bounds=cast(Any, bounds), options=options)
            record(None, result)
        else:
            closure = _Tracked(mll, fixed_loss, _trainable(mll), keep_best=True)
            result = _line_search_from_best(mll, closure, steps, bounds, record)
    if result is None:
        return LineSearchEnd("converged", at_bounds=_at_bounds(mll, bounds))
    return _end(mll, result, bounds)


def _line_search_from_best(
    mll: MarginalLogLikelihood,
    closure: _Tracked,
    steps: int | None,
    bounds: Bounds,
    record: Record,
) -> Any:
    """BoTorch's result; None where steps had come to gain nothing."""
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    watch = _Watch(record, _LEAST_GAIN / _num_points(mll))
    with closure.stopping():
        closure()  # BoTorch takes an error for a step too far: the start must raise
        resumes = 0
        while True:
            failures, lowest = closure.failures, closure.lowest
            options = {} if steps is None else {"maxiter": steps - watch.steps}
            try:
                result = fit_gpytorch_mll_scipy(
                    mll, closure.parameters, bounds=cast(Any, bounds), closure=closure,
                    options=options, callback=watch,
                )  # fmt: skip
            except _GainsNothingError:
                closure.restore()
                return None
            # SciPy may end at a point it could not evaluate: go on from the best one, and without
            # what it remembers of the curvature.
            closure.restore()
            spent = result.status.name == "STOPPED" or watch.steps == steps
            if spent or resumes == _RESUMES or (resumes and closure.lowest == lowest):
                return result
            if closure.failures == failures and _end(mll, result, bounds).reason == "converged":
                return result
            resumes += 1


def _end(mll: MarginalLogLikelihood, result: Any, bounds: Bounds) -> LineSearchEnd:
    at_bounds = _at_bounds(mll, bounds)
    message = str(result.message).strip().rstrip(":")
    if result.status.name == "SUCCESS":
        return LineSearchEnd("converged", at_bounds=at_bounds)
    if result.status.name == "STOPPED":
        return LineSearchEnd("limit", message, at_bounds)
    if _slope(mll, bounds) * _num_points(mll) < _LEAST_SLOPE:
        return LineSearchEnd("converged", at_bounds=at_bounds)
    return LineSearchEnd("abnormal", message, at_bounds)


class _GainsNothingError(Exception):
    """The last steps of a line search have gained next to nothing."""


class _Watch:
    """Counts steps over resumed searches, and ends one that has come to gain nothing."""

    def __init__(self, record: Record, least: float) -> None:
        self.steps = 0
        self._record = record
        self._least = least
        self._lowest: list[float] = []

    def __call__(self, parameters: Any, result: Any) -> None:
        self.steps += 1
        if not math.isfinite(result.fval):
            return
        self._record(parameters, result)
        self._lowest.append(min([result.fval, *self._lowest[-1:]]))
        if len(self._lowest) > _WINDOW:
            gain = self._lowest[-1 - _WINDOW] - self._lowest[-1]
            if gain < self._least:
                raise _GainsNothingError


def _num_points(mll: MarginalLogLikelihood) -> int:
    """Training targets, of which objectives are means."""
    targets = getattr(mll.model, "train_targets", None)
    return targets.numel() if isinstance(targets, torch.Tensor) else 1


def _bounds(mll: MarginalLogLikelihood) -> Bounds:
    """Of the raw parameters, where a constraint has any."""
    bounds: Bounds = {}
    for name, parameter, constraint in cast(Any, mll).named_parameters_and_constraints():
        if constraint is None or not parameter.requires_grad:
            continue
        lower, upper = constraint.lower_bound, constraint.upper_bound
        if lower.numel() > 1 or upper.numel() > 1:
            continue  # left to BoTorch
        if not constraint.enforced:
            bounds[name] = float(lower), float(upper)
        elif 0 < float(lower) < math.inf:
            nearest = float(constraint.inverse_transform(lower * (1 + _MARGIN)))
            bounds[name] = min(nearest, float(parameter.detach().min())), math.inf
    return bounds


@torch.no_grad()
def _at_bounds(mll: MarginalLogLikelihood, bounds: Bounds) -> tuple[str, ...]:
    named = dict(mll.named_parameters())
    return tuple(
        name
        for name, (lower, upper) in bounds.items()
        if bool(((named[name] <= lower) | (named[name] >= upper)).any())
    )


def _slope(mll: MarginalLogLikelihood, bounds: Bounds) -> float:
    """The largest derivative of the loss by a parameter that is not held by a bound."""
    parameters = _trainable(mll)
    try:
        loss = fixed_loss(mll)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except (NanError, NotPSDError):
        return math.inf
    largest = 0.0
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is not None:
            lower, upper = bounds.get(name, (-math.inf, math.inf))
            held = ((parameter <= lower) & (gradient > 0)) | ((parameter >= upper) & (gradient < 0))
            largest = max(largest, float(gradient.masked_fill(held, 0.0).abs().max()))
    return largest


def stochastic(
    mll: MarginalLogLikelihood, factory: OptimizerFactory, steps: int, lr: float, record: Record
) -> None:
    """Takes steps of a torch optimizer on the loss with fresh held-out points.

    Args:
        mll: Any objective, in train mode.
        factory: Makes the optimizer from parameters and ``lr``.
        steps: How many.
        lr: Learning rate.
        record: Called with BoTorch's parameters and ``OptimizationResult`` at each step.

    Raises:
        StoppedError: If value or gradient stops being finite; the parameters are then those of
            the last step at which they were.
    """
    load_botorch()
    from botorch.optim.fit import fit_gpytorch_mll_torch

    parameters = _trainable(mll)
    closure = _Tracked(mll, fresh_loss, parameters, keep_best=False)
    with closure.stopping():
        fit_gpytorch_mll_torch(
            mll,
            parameters,
            closure=closure,
            step_limit=steps,
            stopping_criterion=None,
            optimizer=lambda params: factory(params, lr=lr),
            callback=record,
        )


class StoppedError(Exception):
    """A fit met values it cannot go on from; parameters are the last good ones."""

    def __init__(self, error: Exception, nothing_done: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.nothing_done = nothing_done


class _Tracked:
    """A loss with gradients that remembers the parameters to go back to."""

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        loss: Callable[[MarginalLogLikelihood], torch.Tensor],
        parameters: dict[str, torch.Tensor],
        keep_best: bool,
    ) -> None:
        from botorch.optim.closures import ForwardBackwardClosure

        self._closure = ForwardBackwardClosure(lambda: loss(mll), parameters)
        self.parameters = parameters
        self.failures = 0
        self._keep_best = keep_best
        self._kept: list[torch.Tensor] | None = None
        self.lowest = float("inf")
        self._last: tuple[list[torch.Tensor], tuple[torch.Tensor, Any]] | None = None

    def __call__(self) -> tuple[torch.Tensor, Any]:
        if not self._keep_best:
            return self._evaluate()
        # BoTorch asks again for the value at each iteration's end, where it has just been.
        if self._last is not None and self._is_at(self._last[0]):
            return self._last[1]
        answer = self._evaluate()
        self._last = self._copies(), answer
        return answer

    def _evaluate(self) -> tuple[torch.Tensor, Any]:
        try:
            value, gradients = self._closure()
            value = value.detach()
            self._check(value, gradients)
        except (NanError, NotPSDError) as error:
            self.failures += 1
            if self._kept is None or not self._keep_best:
                raise
            raise NanError(str(error)) from error  # a line search steps back from it
        if not self._keep_best or float(value) < self.lowest:
            self.lowest = float(value)
            self._kept = self._copies()
        return value, gradients

    def _copies(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters.values()]

    def _is_at(self, point: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, self.parameters.values(), point))

    def _check(self, value: torch.Tensor, gradients: Any) -> None:
        names = [
            name
            for name, gradient in zip(self.parameters, gradients, strict=True)
            if gradient is not None and not bool(torch.isfinite(gradient).all())
        ]
        if names or not bool(torch.isfinite(value)):
            raise NonFiniteError(
                "objective",
                f"value {float(value)}, non-finite gradients of {names[:4] or 'none'}",
                "finite values",
                "Lower the learning rate, or look for degenerate hyperparameters.",
            )

    def restore(self) -> None:
        """Goes back to the kept parameters, if there are any."""
        if self._kept is not None:
            with torch.no_grad():
                for parameter, kept in zip(self.parameters.values(), self._kept, strict=True):
                    parameter.copy_(kept)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Within the block numerical failures go back to the kept parameters and stop."""
        try:
            yield
        except (NanError, NotPSDError) as error:
            self.restore()
            raise StoppedError(error, nothing_done=self._kept is None) from error


def _trainable(mll: MarginalLogLikelihood) -> dict[str, torch.Tensor]:
    return {name: p for name, p in mll.named_parameters() if p.requires_grad}


@contextmanager
def frozen(mll: MarginalLogLikelihood, names: Iterable[str]) -> Iterator[None]:
    """Within the block the parameters of these names or prefixes are not trained."""
    named = dict(mll.named_parameters())
    frozen = []
    for name in names:
        matches = [p for key, p in named.items() if key == name or key.startswith(f"{name}.")]
        if not matches:
            raise UnknownNameError("freeze", name, named)
        frozen += [p for p in matches if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
