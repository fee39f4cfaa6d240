"""One run of an optimizer on an objective's own training data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

from gpclml._utils.environment import load_botorch
from gpclml._utils.resuming import copied_state
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit._single import ROUNDING_LIMITS, limited_rounding, predicts_in_its_type
from gpclml.fit._vector import Bounds, Vector, bounds_of, non_finite, numbers, trainable
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss, fresh_loss, has_shared_parameters

_RESUMES = 3  # from the best point, without what the search remembers of the curvature
_WINDOW, _LEAST_GAIN = 20, 0.002  # a search ends where so many steps gain less, nats in all
_REMEMBERED = 30  # steps from which a search learns of the curvature
_ROUNDING = 2 * torch.finfo(torch.float32).eps  # of a parameter that was moved to its bound
_LEAST_SLOPE = 0.1  # nats by a unit of a parameter, below which there is nothing left to gain

T = TypeVar("T")
OptimizerFactory = Callable[..., torch.optim.Optimizer]
Record = Callable[[float], None]
Reason = Literal["converged", "limit", "abnormal"]

_REASONS: dict[int, Reason] = {0: "converged", 1: "limit"}  # by SciPy's status


@dataclass(frozen=True)
class LineSearchEnd:
    """Where a line search ended: the lowest loss, which is that of the parameters, and why.

    The reason is "converged", "limit" if its steps were spent, or "abnormal" if it found no better
    point though the slope says that there are some. ``at_bounds`` has the names of parameters that
    ended at a bound.
    """

    loss: float
    reason: Reason
    message: str = ""
    at_bounds: tuple[str, ...] = ()


def line_search(mll: MarginalLogLikelihood, steps: int | None, record: Record) -> LineSearchEnd:
    """Minimizes the fixed loss by SciPy's L-BFGS-B, in place; the objective is in train mode.

    Where a float32 model then predicts something else than its hyperparameters say, the search
    is repeated with a limit of the prior variance. A StoppedError is raised if the start cannot be
    evaluated.
    """
    start = copied_state(mll)
    end = _line_search(mll, steps, record)
    for limit in ROUNDING_LIMITS:
        if predicts_in_its_type(mll):
            break
        mll.load_state_dict(start)
        with limited_rounding(mll, limit):
            end = _line_search(mll, steps, record)
        end = replace(end, loss=-objective(mll))
    return end


def _line_search(mll: MarginalLogLikelihood, steps: int | None, record: Record) -> LineSearchEnd:
    """Minimizes the fixed loss by SciPy's L-BFGS-B, in place; the objective is in train mode.

    It searches the logarithms of positive hyperparameters, and ends when twenty steps gain less
    than 0.002 nats in all. A step to a covariance that cannot be factored counts as too long. A
    parameter with a positive lower bound, such as the noise, keeps a distance of a hundredth of the
    bound, because the transform is flat nearer to it and the search could not return. A
    StoppedError is raised if the start cannot be evaluated.
    """
    load_botorch()
    bounds = bounds_of(mll)
    with warnings.catch_warnings():
        # Points on the way may take jitter. That the end does is told by its predictions, later.
        warnings.simplefilter("ignore", NumericalWarning)
        fixed = _started(lambda: FixedLoss(mll))
        if _has_independent_members(mll.model) and not fixed.by_arrays:
            loss, reason, message = _search_of_members(mll, steps, bounds, record)
        else:
            loss, reason, message = _search_from_best(mll, fixed, steps, bounds, record)
        if reason == "abnormal" and _slope(mll, bounds) * _num_points(mll) < _LEAST_SLOPE:
            reason = "converged"
        return LineSearchEnd(
            loss, reason, "" if reason == "converged" else message, _at_bounds(mll, bounds)
        )


def _has_independent_members(model: torch.nn.Module) -> bool:
    """Whether it is a batch of BoTorch's in which no member shares a parameter with another."""
    from botorch.models.gpytorch import BatchedMultiOutputGPyTorchModel

    if not isinstance(model, BatchedMultiOutputGPyTorchModel):
        return False
    batch_shape = model._aug_batch_shape
    return batch_shape.numel() > 1 and not has_shared_parameters(model, batch_shape)


def _started(begin: Callable[[], T]) -> T:
    try:
        return begin()
    except (NanError, NotPSDError) as error:
        raise StoppedError(error, nothing_done=True) from error


def _search_of_members(
    mll: MarginalLogLikelihood, steps: int | None, bounds: Bounds, record: Record
) -> tuple[float, Reason, str]:
    """A search of each member of a batch, evaluated together."""
    from botorch.exceptions.warnings import OptimizationWarning
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    with warnings.catch_warnings():
        # A line search that cannot improve further keeps its point, which the result says.
        warnings.simplefilter("ignore", OptimizationWarning)
        options = {} if steps is None else {"maxiter": steps}
        result = fit_gpytorch_mll_scipy(mll, bounds=cast(Any, bounds), options=options)
    record(float(result.fval))
    reasons: dict[str, Reason] = {"SUCCESS": "converged", "STOPPED": "limit"}
    reason = reasons.get(result.status.name, "abnormal")
    return float(result.fval), reason, str(result.message).strip().rstrip(":")


def _search_from_best(
    mll: MarginalLogLikelihood,
    loss: FixedLoss,
    steps: int | None,
    bounds: Bounds,
    record: Record,
) -> tuple[float, Reason, str]:
    """One search, resumed from its best point where it met one that it could not evaluate."""
    from scipy.optimize import minimize

    watch = _Watch(record, _LEAST_GAIN / _num_points(mll))
    with Vector(mll, bounds) as vector:
        _started(lambda: vector.start(loss))
        resumes = 0
        while True:
            failures, lowest = vector.failures, vector.lowest
            options = {"maxcor": _REMEMBERED}
            if steps is not None:
                options["maxiter"] = steps - watch.steps
            try:
                result = minimize(
                    vector, vector.best, jac=True, bounds=vector.box, method="L-BFGS-B",
                    options=options, callback=watch,
                )  # fmt: skip
            except _GainsNothingError:
                return vector.lowest, "converged", ""
            # SciPy may end at a point it could not evaluate: go on from the best one, and without
            # what it remembers of the curvature.
            reason: Reason = _REASONS.get(result.status, "abnormal")
            message = str(result.message).strip().rstrip(":")
            spent = reason == "limit" or watch.steps == steps
            if spent or resumes == _RESUMES or (resumes and vector.lowest == lowest):
                return vector.lowest, reason, message
            if vector.failures == failures:
                if reason == "converged":
                    return vector.lowest, reason, message
                if vector.steepest() * _num_points(mll) < _LEAST_SLOPE:
                    return vector.lowest, reason, message
            resumes += 1


class _GainsNothingError(Exception):
    """The last steps of a line search have gained next to nothing."""


class _Watch:
    """Counts steps over resumed searches, and ends one that has come to gain nothing."""

    def __init__(self, record: Record, least: float) -> None:
        self.steps = 0
        self._record = record
        self._least = least
        self._lowest: list[float] = []

    def __call__(self, intermediate_result: Any) -> None:  # SciPy goes by the name
        self.steps += 1
        loss = float(intermediate_result.fun)
        if not math.isfinite(loss):
            return
        self._record(loss)
        self._lowest.append(min([loss, *self._lowest[-1:]]))
        if len(self._lowest) > _WINDOW:
            gain = self._lowest[-1 - _WINDOW] - self._lowest[-1]
            if gain < self._least:
                raise _GainsNothingError


def _num_points(mll: MarginalLogLikelihood) -> int:
    """Training targets, of which objectives are means."""
    targets = getattr(mll.model, "train_targets", None)
    return targets.numel() if isinstance(targets, torch.Tensor) else 1


def _at_bounds(mll: MarginalLogLikelihood, bounds: Bounds) -> tuple[str, ...]:
    named = dict(mll.named_parameters())
    found = []
    for name, pair in bounds.items():
        values = numbers(named[name])
        lower, upper = (numbers(one) if isinstance(one, torch.Tensor) else one for one in pair)
        if ((values - _ROUNDING * abs(values) <= lower) | (values >= upper)).any():
            found.append(name)
    return tuple(found)


def _slope(mll: MarginalLogLikelihood, bounds: Bounds) -> float:
    """The largest derivative of the loss by a parameter that is not held by a bound."""
    parameters = trainable(mll)
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
    """Takes steps of a torch optimizer on the loss with fresh held-out points, in train mode.

    A StoppedError is raised where value or gradient stops being finite; the parameters are then
    those of the last step at which they were.
    """
    parameters = trainable(mll)
    limits = limits_of(mll)
    optimizer = factory(list(parameters.values()), lr=lr)
    kept: list[torch.Tensor] | None = None
    try:
        for step in range(steps + 1):  # what the last step led to must be usable too
            optimizer.zero_grad(set_to_none=False)
            loss = fresh_loss(mll)
            loss.backward()
            value = float(loss.detach())
            bad = [
                name
                for name, parameter in parameters.items()
                if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
            ]
            if bad or not math.isfinite(value):
                raise non_finite(value, bad)
            kept = [parameter.detach().clone() for parameter in parameters.values()]
            if step < steps:
                record(value)
                optimizer.step()
                with torch.no_grad():
                    for name, pair in limits.items():
                        parameters[name].clamp_(*pair)
    except (NanError, NotPSDError) as error:
        with torch.no_grad():
            for parameter, last in zip(parameters.values(), kept or (), strict=False):
                parameter.copy_(last)
        raise StoppedError(error, nothing_done=kept is None) from error


Limits = dict[str, tuple[torch.Tensor, torch.Tensor]]


def limits_of(mll: MarginalLogLikelihood) -> Limits:
    """Bounds of constraints without a transform, by the parameter's name."""
    load_botorch()
    from botorch.optim.utils import get_parameters_and_bounds

    named, bounds = get_parameters_and_bounds(cast(Any, mll), requires_grad=True)
    limits: Limits = {}
    for name, pair in cast(Bounds, bounds).items():
        lower, upper = (torch.as_tensor(bound).to(named[name]) for bound in pair)
        limits[name] = lower, upper
    return limits


@torch.no_grad()
def objective(mll: MarginalLogLikelihood) -> float:
    """The objective with fixed held-out points, in train mode; NaN where it does not exist."""
    try:
        return -float(fixed_loss(mll))
    except (NanError, NotPSDError):
        return math.nan


class StoppedError(Exception):
    """A fit met values it cannot go on from; parameters are the last good ones."""

    def __init__(self, error: Exception, nothing_done: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.nothing_done = nothing_done


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
        if not trainable(mll):
            suggestion = "Unfreeze some, or evaluate the objective without a fit."
            raise ArgumentError(
                "mll", "only frozen parameters", "at least one to train", suggestion
            )
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
