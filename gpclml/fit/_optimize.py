"""One run of an optimizer on an objective's own training data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

from gpclml._utils.environment import load_botorch
from gpclml._utils.resuming import copied_state
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit._scales import ran_away
from gpclml.fit._single import ROUNDING_LIMITS, limited_rounding, predicts_in_its_type
from gpclml.fit._vector import Bounds, Vector, bounds_of, non_finite, numbers, trainable
from gpclml.inference import Road
from gpclml.mlls.fixed_loss import (
    FixedLoss,
    fixed_loss,
    fresh_loss,
    has_shared_parameters,
    scores_first_points,
)
from gpclml.models import GPRegression
from gpclml.models.weak_priors import weak_priors

_RESUMES = 3  # from the best point, without what the search remembers of the curvature
_WINDOW, _LEAST_GAIN = 20, 0.002  # a search ends where so many steps gain less, nats in all
_REMEMBERED = 30  # steps from which a search learns of the curvature
_ROUNDING = 2 * torch.finfo(torch.float32).eps  # of a parameter that was moved to its bound
_LEAST_SLOPE = 0.1  # nats by a unit of a parameter, below which there is nothing left to gain

T = TypeVar("T")
OptimizerFactory = Callable[..., torch.optim.Optimizer]
Record = Callable[[float], None]
Reason = Literal["converged", "limit", "abnormal"]

_WORSE: tuple[Reason, ...] = ("converged", "limit", "abnormal")
_REASONS: dict[int, Reason] = {0: "converged", 1: "limit"}  # by SciPy's status


@dataclass(frozen=True)
class LineSearchEnd:
    """Where a line search ended: the lowest loss, which is that of the parameters, and why.

    The reason is "converged", "limit" if its steps were spent, or "abnormal" if it found no better
    point though the slope says that there are some. ``at_bounds`` has the names of parameters that
    ended at a bound, ``ran_away`` says what left the range of the targets, ``road`` which way its
    evaluations went.
    """

    loss: float
    reason: Reason
    message: str = ""
    at_bounds: tuple[str, ...] = ()
    ran_away: str = ""
    road: Road | None = None


def line_search(
    mll: MarginalLogLikelihood,
    steps: int | None,
    record: Record,
    options: Mapping[str, Any] | None = None,
) -> LineSearchEnd:
    """Minimizes the fixed loss by SciPy's L-BFGS-B, in place; the objective is in train mode.

    Where a float32 model then predicts something else than its hyperparameters say, the search
    is repeated with a limit of the rounding. A StoppedError is raised if the start cannot be
    evaluated. Further ``options`` are those of SciPy.
    """
    start, options = copied_state(mll), dict(options or {})
    end = _line_search(mll, steps, record, options)
    for limit in ROUNDING_LIMITS:
        if predicts_in_its_type(mll):
            break
        mll.load_state_dict(start)
        with limited_rounding(mll, limit):
            end = _line_search(mll, steps, record, options)
        end = replace(end, loss=-objective(mll))
    return end


def _line_search(
    mll: MarginalLogLikelihood, steps: int | None, record: Record, options: dict[str, Any]
) -> LineSearchEnd:
    """One search.

    The first step is taken in the raw parameters, the others in the logarithms of positive
    hyperparameters. It ends when twenty steps gain less than 0.002 nats in all. Where the objective
    leaves scale and mean of a ``GPRegression`` open, they have weak priors meanwhile, which the
    loss that is returned leaves out. A step to a covariance that cannot be factored counts as too
    long. A parameter with a positive lower bound, such as the noise, keeps a distance of a
    hundredth of the bound, because the transform is flat nearer to it and the search could not
    return.
    """
    load_botorch()
    bounds = bounds_of(mll)
    with warnings.catch_warnings(), _detached(mll), _weak_priors(mll) as has_priors:
        # Points on the way may take jitter. That the end does is told by its predictions, later.
        warnings.simplefilter("ignore", NumericalWarning)
        fixed = _started(lambda: FixedLoss(mll))
        members = _independent_members(mll.model)
        if members and not fixed.has_members and _is_batch_of_botorch(mll.model):
            loss, reason, message = _search_of_members(mll, steps, bounds, record, options)
        else:
            members *= fixed.has_members
            loss, reason, message = _search(mll, fixed, steps, bounds, record, members, options)
    if has_priors:
        loss = -objective(mll)
    return LineSearchEnd(
        loss, reason, "" if reason == "converged" else message, _at_bounds(mll, bounds),
        ran_away(mll), fixed.road,
    )  # fmt: skip


def _weak_priors(mll: MarginalLogLikelihood) -> AbstractContextManager[bool]:
    if isinstance(mll.model, GPRegression) and not scores_first_points(mll):
        return weak_priors(mll.model)
    return nullcontext(False)


@contextmanager
def _detached(mll: MarginalLogLikelihood) -> Iterator[None]:
    """Within the block training data that require a gradient do not: a fit takes none by them."""
    members = cast(Any, mll.mlls if isinstance(mll, SumMarginalLogLikelihood) else [mll])
    kept = []
    for model in (member.model for member in members):
        inputs, targets = (
            getattr(model, "train_inputs", None),
            getattr(model, "train_targets", None),
        )
        tensors = [*(inputs or ()), *([targets] if isinstance(targets, torch.Tensor) else [])]
        if isinstance(model, ExactGP) and any(tensor.requires_grad for tensor in tensors):
            kept.append((model, inputs, targets))
            model.train_inputs = tuple(x.detach() for x in cast(Any, inputs))
            model.train_targets = cast(Any, targets).detach()
    try:
        yield
    finally:
        for model, inputs, targets in kept:
            model.train_inputs, model.train_targets = inputs, targets


def _independent_members(model: torch.nn.Module) -> int:
    """Members of a batch in which none shares a trainable parameter with another; else 0."""
    targets = getattr(model, "train_targets", None)
    if not isinstance(model, ExactGP) or not isinstance(targets, torch.Tensor):
        return 0
    shape = targets.shape[:-1]
    return 0 if has_shared_parameters(model, shape) or shape.numel() == 1 else shape.numel()


def _is_batch_of_botorch(model: torch.nn.Module) -> bool:
    from botorch.models.gpytorch import BatchedMultiOutputGPyTorchModel

    return isinstance(model, BatchedMultiOutputGPyTorchModel)


def _started(begin: Callable[[], T]) -> T:
    try:
        return begin()
    except (NanError, NotPSDError) as error:
        raise StoppedError(error, nothing_done=True) from error


def _search_of_members(
    mll: MarginalLogLikelihood,
    steps: int | None,
    bounds: Bounds,
    record: Record,
    options: dict[str, Any],
) -> tuple[float, Reason, str]:
    """A search of each member of a batch, evaluated together."""
    from botorch.exceptions.warnings import OptimizationWarning
    from botorch.optim.fit import fit_gpytorch_mll_scipy

    with warnings.catch_warnings():
        # A line search that cannot improve further keeps its point, which the result says.
        warnings.simplefilter("ignore", OptimizationWarning)
        options = options if steps is None else {**options, "maxiter": steps}
        result = fit_gpytorch_mll_scipy(mll, bounds=cast(Any, bounds), options=options)
    record(float(result.fval))
    reasons: dict[str, Reason] = {"SUCCESS": "converged", "STOPPED": "limit"}
    reason = reasons.get(result.status.name, "abnormal")
    if reason == "abnormal" and _slope(mll, bounds) * _num_points(mll) < _LEAST_SLOPE:
        reason = "converged"
    return float(result.fval), reason, str(result.message).strip().rstrip(":")


def _search(
    mll: MarginalLogLikelihood,
    loss: FixedLoss,
    steps: int | None,
    bounds: Bounds,
    record: Record,
    members: int,
    options: dict[str, Any],
) -> tuple[float, Reason, str]:
    """One search, or one for each of so many members; the worst reason counts."""
    with Vector(mll, bounds) as vector:
        if not members:
            _started(lambda: vector.begin(loss))
            return _search_of_vector(mll, vector, steps, record, options)
        losses = [partial(loss, member) for member in range(members)]
        places = vector.places_of_members(members)
        lowest: list[float] = []
        for own, at in zip(losses, places, strict=True):
            _started(partial(vector.begin, own, at))
            lowest.append(vector.lowest)
        ends: list[tuple[Reason, str]] = []
        for member, (own, at) in enumerate(zip(losses, places, strict=True)):
            others = sum(lowest) - lowest[member]

            def of_all(value: float, others: float = others) -> None:
                record(value + others)

            vector.begin(own, at)
            lowest[member], *end = _search_of_vector(mll, vector, steps, of_all, options)
            ends.append(cast(Any, tuple(end)))
    total = -objective(mll)
    return total, *max(ends, key=lambda end: _WORSE.index(end[0]))


def _search_of_vector(
    mll: MarginalLogLikelihood,
    vector: Vector,
    steps: int | None,
    record: Record,
    options: dict[str, Any],
) -> tuple[float, Reason, str]:
    """A search that is resumed from its best point where it ended without reason.

    Nearest to its start a search in logarithms often finds short lengthscales and no noise. The
    length of a first step in raw parameters is one, which leaves that basin where the loss has a
    steep slope by a small noise.
    """
    watch = _Watch(record, _LEAST_GAIN / _num_points(mll))
    vector.minimize({"maxiter": 1}, watch)
    vector.take_logarithms()
    ends: list[tuple[Reason, str]] = []
    while watch.steps != steps:
        failures, lowest = vector.failures, vector.lowest
        further = {"maxcor": _REMEMBERED, **options}
        if steps is not None:
            further["maxiter"] = steps - watch.steps
        try:
            result = vector.minimize(further, watch)
        except _GainsNothingError:
            return vector.lowest, "converged", ""
        flat = vector.steepest() * _num_points(mll) < _LEAST_SLOPE
        reason: Reason = _REASONS.get(result.status, "abnormal")
        if reason == "abnormal" and flat:
            reason = "converged"
        if ends and lowest - vector.lowest < watch.least:
            return vector.lowest, *ends[-1]
        ends.append((reason, str(result.message).strip().rstrip(":")))
        # SciPy may end at a point it could not evaluate, or after a tiny step down a slope that is
        # still steep: go on from the best one, and without what it remembers of the curvature.
        if reason == "limit" or len(ends) > _RESUMES or (flat and vector.failures == failures):
            return vector.lowest, *ends[-1]
    return vector.lowest, "limit", "The steps are spent."


class _GainsNothingError(Exception):
    """The last steps of a line search have gained next to nothing."""


class _Watch:
    """Counts steps over resumed searches, and ends one that has come to gain nothing."""

    def __init__(self, record: Record, least: float) -> None:
        self.steps = 0
        self._record = record
        self.least = least
        self._lowest: list[float] = []

    def __call__(self, intermediate_result: Any) -> None:  # SciPy goes by the name
        loss = float(intermediate_result.fun)
        if not math.isfinite(loss):
            return
        self.steps += 1
        self._record(loss)
        self._lowest.append(min([loss, *self._lowest[-1:]]))
        if len(self._lowest) > _WINDOW:
            gain = self._lowest[-1 - _WINDOW] - self._lowest[-1]
            if gain < self.least:
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
    with _detached(mll):
        _steps_of_optimizer(mll, factory, steps, lr, record)


def _steps_of_optimizer(
    mll: MarginalLogLikelihood, factory: OptimizerFactory, steps: int, lr: float, record: Record
) -> None:
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
