"""Line searches of an objective: SciPy's L-BFGS-B on one vector of its trainable parameters.

Positive hyperparameters enter the vector by their logarithms. :func:`line_search` is one search,
:func:`search` starts others from elsewhere where one failed.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, cast, get_args

import numpy
import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.kernels import Kernel, RQKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from gpytorch.mlls.added_loss_term import AddedLossTerm
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from numpy import ndarray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from gpclml._utils.environment import load_botorch
from gpclml._utils.resuming import copied_state
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit.diagnosis import (
    FAILED,
    explanation,
    numbers,
    predicts_in_its_type,
    problem_of_predictions,
    ran_away,
)
from gpclml.fit.result import MLLFitResult, Problem
from gpclml.fit.train import non_finite, trainable
from gpclml.gram import Transform, transform_of
from gpclml.inference import Road, training_observations
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss, scores_first_points
from gpclml.models import GPRegression

Record = Callable[[float], None]
Bounds = dict[str, tuple[Any, Any]]
Reason = Literal["converged", "limit", "abnormal"]

MARGIN = 0.01  # of a bound: no value comes closer to it than by this share
# Of a rational quadratic kernel. Beyond it differs from the RBF kernel, by r^4 / 8 alpha, too
# little to learn from, and as GPyTorch computes it, (1 + r^2 / 2 alpha)^-alpha, it is off by alpha
# epsilons.
_LARGEST_SHAPE = 1e5
_FARTHEST = 35.0  # from the start that a logarithm goes: a factor of 1e15
_RESUMES = 3  # from the best point, without what the search remembers of the curvature
_WINDOW, _LEAST_GAIN = 20, 0.002  # a search ends where so many steps gain less, nats in all
_REMEMBERED = 30  # steps from which a search learns of the curvature
_ROUNDING = 2 * torch.finfo(torch.float32).eps  # of a parameter that was moved to its bound
_LEAST_SLOPE = 0.1  # nats by a unit of a parameter, below which there is nothing left to gain
# Ratios of rounding to noise, in epsilons, that a float32 search is kept below, one after another.
_ROUNDING_LIMITS = (1e5, 1e4, 1e3)
# Of the start lengthscales: far shorter ones tell all points apart, where nothing can be learned.
_SHORTER, _LONGER = (0.25,), (8.0, 64.0)
_LESS_NOISE = 0.1  # of the start noise: what it takes for noise it need not explain
# One call for all parameters: with a call for each a step of few points would take a tenth longer.
_FOREACH: Any = torch


# ------------------------------------------------------------------ what a fit changes


@contextmanager
def frozen(mll: MarginalLogLikelihood, names: Iterable[str]) -> Iterator[None]:
    """Within the block the parameters of these names or prefixes are not trained."""
    named = dict(mll.named_parameters())
    held: dict[str, Tensor] = {}
    for name in names:
        matches = {key for key in named if key == name or key.startswith(f"{name}.")}
        if not matches:
            raise UnknownNameError("freeze", name, named)
        held |= {key: p for key, p in trainable(mll).items() if key in matches}
    try:
        for parameter in held.values():
            parameter.requires_grad_(False)
        if not trainable(mll):
            suggestion = "Unfreeze some, or evaluate the objective without a fit."
            raise ArgumentError(
                "mll", "only frozen parameters", "at least one to train", suggestion
            )
        yield
    finally:
        for parameter in held.values():
            parameter.requires_grad_(True)


@contextmanager
def detached_data(mll: MarginalLogLikelihood) -> Iterator[None]:
    """Within the block training data that require a gradient do not: a fit takes none by them."""
    members = cast(Any, mll.mlls if isinstance(mll, SumMarginalLogLikelihood) else [mll])
    exact = [m.model for m in members if isinstance(m.model, ExactGP) and m.model.train_inputs]
    kept: Any = [(model, model.train_inputs, model.train_targets) for model in exact]
    for model, inputs, targets in kept:
        if any(tensor.requires_grad for tensor in (*inputs, targets)):
            model.train_inputs = tuple(x.detach() for x in inputs)
            model.train_targets = targets.detach()
    try:
        yield
    finally:
        for model, inputs, targets in kept:
            model.train_inputs, model.train_targets = inputs, targets


@torch.no_grad()
def objective(mll: MarginalLogLikelihood) -> float:
    """The objective with fixed held-out points, in train mode; NaN where it does not exist."""
    try:
        return -float(fixed_loss(mll))
    except (NanError, NotPSDError):
        return math.nan


def bounds_of(mll: MarginalLogLikelihood) -> Bounds:
    """Bounds of the raw parameters, where a constraint has any.

    A parameter with a positive lower bound, such as the noise, keeps a distance of a hundredth of
    the bound.
    """
    from botorch.optim.utils import get_parameters_and_bounds

    _, upstream = get_parameters_and_bounds(cast(Any, mll), requires_grad=True)
    bounds = cast(Bounds, upstream)
    for name, parameter, constraint in cast(Any, mll).named_parameters_and_constraints():
        if name not in bounds:
            continue
        # A softplus is flat near its bound, from where a search could not return.
        lower = constraint.lower_bound
        if lower.numel() == 1 and constraint.enforced and 0 < float(lower) < math.inf:
            nearest = float(constraint.inverse_transform(lower * (1 + MARGIN)))
            bounds[name] = min(nearest, float(parameter.detach().min())), math.inf
        module, _, attribute = name.rpartition(".")
        if attribute == "raw_alpha" and isinstance(mll.get_submodule(module), RQKernel):
            most = constraint.inverse_transform(parameter.new_tensor(_LARGEST_SHAPE))
            most = parameter.detach().max().maximum(most)
            bounds[name] = bounds[name][0], torch.minimum(torch.as_tensor(bounds[name][1]), most)
    return bounds


def positive_hyperparameters(mll: MarginalLogLikelihood) -> dict[str, Transform]:
    """Trainable hyperparameters that have a lower bound of zero or more, by the parameter's name.

    By GPyTorch's softplus or directly; those of other transforms are left out.
    """
    positive, named = {}, trainable(mll)
    for name, parameter, constraint in cast(Any, mll).named_parameters_and_constraints():
        transform = transform_of(constraint)
        if transform is None or name not in named:
            continue
        if type(constraint) not in (GreaterThan, Positive) or (constraint.lower_bound < 0).any():
            continue
        if bool((transform.value(parameter.detach().double()) > 0).all()):
            positive[name] = transform
    return positive


# ------------------------------------------------------------------ the vector


class Vector:
    """The trainable parameters, of which a loss is a function, as the vector that a search moves.

    Its coordinates are the raw parameters, and from :meth:`take_logarithms` on the logarithms of
    positive hyperparameters in place of those. Scales of a kernel and variances of the noise act by
    their ratios, so that a step of one length in their logarithms changes an objective about as
    much wherever it is taken, and searches need less than half of the steps. The loss adds its
    gradient to that of the parameters; of a batch the numbers of one member may move alone. Where
    the block ends the parameters are those of the lowest loss.

    Attributes:
        best, lowest: The coordinates of the lowest loss, ``(size,)``, and that loss.
        box: Bounds of the coordinates, ``(2, size)``.
        failures: Number of points that could not be evaluated.
    """

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        bounds: Bounds,
        loss: Callable[[], float],
        member: int | None = None,
    ) -> None:
        self._mll, self._loss, self._member = mll, loss, ... if member is None else member
        self._named = trainable(mll)
        for parameter in self._named.values():
            parameter.grad = torch.zeros_like(parameter)
        self._values = [p.data[self._member] for p in self._named.values()]
        self._gradients = [cast(Tensor, p.grad)[self._member] for p in self._named.values()]
        self._sizes = [values.numel() for values in self._values]
        # Raw numbers and their gradients as vectors beside the parameters: one transfer to a GPU.
        self._raw, self._raw_slope = torch.zeros(
            2, sum(self._sizes), dtype=torch.float64, device=self._values[0].device
        )
        self._pieces, self._slope_pieces = (
            [piece.view(values.shape) for piece, values in zip(pieces, self._values, strict=True)]
            for pieces in (self._raw.split(self._sizes), self._raw_slope.split(self._sizes))
        )
        stops = zip(self._named, self._sizes, itertools.accumulate(self._sizes), strict=True)
        self._slices = {name: slice(stop - size, stop) for name, size, stop in stops}
        self._raw_box = numpy.array([[-math.inf], [math.inf]]).repeat(sum(self._sizes), axis=1)
        for name, index in self._slices.items():
            for row, bound in zip(self._raw_box, bounds.get(name, ()), strict=False):
                if bound is not None:
                    whole = torch.as_tensor(bound, dtype=torch.float64)
                    whole = whole.expand(self._named[name].shape)
                    row[index] = numbers(whole[self._member]).ravel()
        self._transforms: list[tuple[ndarray, Transform]] = []
        self.lowest, self.failures = math.inf, 0
        self.best = numpy.concatenate([numbers(values).ravel() for values in self._values])
        self.box = self._raw_box

    def __enter__(self) -> Vector:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(self.best)

    def take_logarithms(self) -> None:
        """Goes on from the best point in the logarithms of positive hyperparameters."""
        raw, raw_slope = self._to_raw(self.best), self._slope
        self._transforms = self._logarithms()
        self.best, self._slope = self._from_raw(raw), self._chain(raw_slope, raw)
        self.box = numpy.stack([self._from_raw(bound) for bound in self._raw_box])
        for index, _ in self._transforms:
            # Near the start: where an objective is flat, a search takes steps of any length.
            self.box[0, index] = numpy.fmax(self.box[0, index], self.best[index] - _FARTHEST)
            self.box[1, index] = numpy.fmin(self.box[1, index], self.best[index] + _FARTHEST)
        self._last = self.best.copy(), (self.lowest, self._slope)

    def evaluate(self, point: ndarray) -> tuple[float, ndarray]:
        """Loss and gradient; a NanError or NotPSDError if there are none."""
        raw = self._set(point)
        _FOREACH._foreach_zero_(self._gradients)
        value = self._loss()
        _FOREACH._foreach_copy_(self._slope_pieces, self._gradients)
        slope = self._chain(numbers(self._raw_slope), raw)
        if not (math.isfinite(value) and numpy.isfinite(slope).all()):
            bad = [key for key, at in self._slices.items() if not numpy.isfinite(slope[at]).all()]
            raise non_finite(value, bad)
        if value < self.lowest:
            self.lowest, self.best, self._slope = value, point.copy(), slope
        self._last = point.copy(), (value, slope)
        return value, slope

    def __call__(self, point: ndarray) -> tuple[float, ndarray]:
        """Loss and gradient; NaN where they do not exist, from which a search steps back."""
        last, answer = self._last
        if numpy.array_equal(point, last):  # a search begins where the one before has ended
            return answer
        # SciPy's search may ask at NaN after a loss of NaN.
        if numpy.isfinite(point).all():
            with suppress(NanError, NotPSDError):
                return self.evaluate(point)
        self.failures += 1
        return math.nan, numpy.full(len(point), math.nan)

    def minimize(self, options: dict[str, Any], callback: Callable | None = None) -> Any:
        """SciPy's L-BFGS-B from the best point; its result."""
        from scipy.optimize import minimize

        return minimize(
            self, self.best, jac=True, bounds=self.box.T, method="L-BFGS-B", options=options,
            callback=callback,
        )  # fmt: skip

    def steepest(self) -> float:
        """The largest derivative at the best point by a coordinate that no bound holds."""
        lower, upper = self.box
        # At a bound a slope that leads out of the box says nothing.
        held = (self.best <= lower) & (self._slope > 0) | (self.best >= upper) & (self._slope < 0)
        return float(numpy.abs(numpy.where(held, 0.0, self._slope)).max(initial=0.0))

    def _set(self, point: ndarray) -> ndarray:
        """Sets the parameters, and returns the raw ones, ``(size,)``."""
        raw = self._to_raw(point)
        self._raw.copy_(torch.from_numpy(raw))
        _FOREACH._foreach_copy_(self._values, self._pieces)
        return raw

    def _from_raw(self, raw: ndarray) -> ndarray:
        point = raw.copy()
        for index, transform in self._transforms:
            point[index] = transform.value(torch.from_numpy(raw[index])).log().numpy()
        return point

    def _to_raw(self, point: ndarray) -> ndarray:
        raw = point.copy()
        for index, transform in self._transforms:
            raw[index] = transform.inverse(torch.from_numpy(point[index]).exp()).numpy()
        # An exponential of a bound's logarithm may be beyond the bound by rounding.
        return numpy.minimum(numpy.maximum(raw, self._raw_box[0]), self._raw_box[1])

    def _chain(self, raw_slope: ndarray, raw: ndarray) -> ndarray:
        """The gradient with respect to the coordinates."""
        slope = raw_slope.copy()
        for index, transform in self._transforms:
            values = torch.from_numpy(raw[index])
            slope[index] *= (transform.value(values) / transform.slope(values)).numpy()
        return slope

    def _logarithms(self) -> list[tuple[ndarray, Transform]]:
        """Indices of positive hyperparameters, by GPyTorch's softplus or directly."""
        lower, kinds = numpy.zeros(len(self.best)), numpy.full(len(self.best), "raw parameter")
        for name, transform in positive_hyperparameters(self._mll).items():
            index = self._slices[name]
            kinds[index] = "softplus" if transform.is_softplus else "direct"
            if transform.lower_bound is not None:
                lower[index] = numbers(transform.lower_bound)
        softplus, direct = ((kinds == kind).nonzero()[0] for kind in ("softplus", "direct"))
        bounded = Transform(is_softplus=True, lower_bound=torch.from_numpy(lower[softplus]))
        pairs = (softplus, bounded), (direct, Transform(is_softplus=False))
        return [(index, transform) for index, transform in pairs if len(index)]


_LOCK = threading.Lock()
_LIMITS: list[Any] = []  # the one limit of threads, as often as there are searches at work


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps the libraries of NumPy and SciPy to one thread until the last search has left.

    SciPy's search solves with small matrices at each step. The threads of its libraries wait busily
    for a while after that, which takes the cores away from PyTorch's: on two cores fits of few
    points take ten times as long. Threadpoolctl's own limit would not do: of searches in several
    threads, the one that leaves last puts back what it met.
    """
    with _LOCK:
        limit = _LIMITS[0] if _LIMITS else _libraries().limit(limits=1, user_api="blas")
        _LIMITS.append(limit)
    try:
        yield
    finally:
        with _LOCK:
            _LIMITS.pop()
            if not _LIMITS:
                limit.restore_original_limits()


_libraries = functools.cache(ThreadpoolController)


# ------------------------------------------------------------------ one line search


@dataclass(frozen=True)
class LineSearchEnd:
    """Where a line search ended: the lowest loss, which is that of the parameters, and why.

    Attributes:
        loss: The lowest loss.
        reason: "converged", "limit" if its steps were spent, or "abnormal" if it found no better
            point though the slope says that there are some.
        message: What SciPy says of it.
        at_bounds: Names of parameters that ended at a bound.
        ran_away: What left the range of the targets.
        road: Which way evaluations went.
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
    is repeated with a limit of the rounding. A NanError or NotPSDError says that the start cannot
    be evaluated. Further ``options`` are those of SciPy.
    """
    load_botorch()
    start = copied_state(mll)
    end = _line_search(mll, steps, record, options or {})
    for limit in _ROUNDING_LIMITS:
        if predicts_in_its_type(mll):
            break
        mll.load_state_dict(start)
        with limited_rounding(mll, limit):
            end = _line_search(mll, steps, record, options or {})
        end = replace(end, loss=-objective(mll))
    return end


def _line_search(
    mll: MarginalLogLikelihood, steps: int | None, record: Record, options: Mapping[str, Any]
) -> LineSearchEnd:
    """One search, or one for each member of a batch that can be evaluated alone.

    Where the objective leaves scale and mean of a ``GPRegression`` open, they have weak priors
    meanwhile, which the loss that is returned leaves out.
    """
    model, bounds = mll.model, bounds_of(mll)
    priors: Any = nullcontext(False)
    if isinstance(model, GPRegression) and not scores_first_points(mll):
        priors = model.weak_priors()
    gradients = [(parameter, parameter.grad) for parameter in mll.parameters()]
    targets = getattr(model, "train_targets", None)
    num_points = targets.numel() if isinstance(targets, Tensor) else 1
    ends: list[LineSearchEnd] = []
    try:
        with warnings.catch_warnings(), detached_data(mll), one_thread(), priors as has_priors:
            # Points on the way may take jitter. That the end does is told by its predictions.
            warnings.simplefilter("ignore", NumericalWarning)
            fixed = FixedLoss(mll)
            members = range(len(cast(Tensor, targets))) if fixed.has_members else [None]
            losses = [partial(fixed, member) for member in members]
            # What is recorded is the sum over members, of which one moves at a time.
            lowest = [loss() for loss in losses] if fixed.has_members else [0.0]
            for index, (member, loss) in enumerate(zip(members, losses, strict=True)):
                others = sum(lowest) - lowest[index]
                with Vector(mll, bounds, loss, member) as vector:
                    record_sum: Record = lambda value, others=others: record(value + others)  # noqa: E731
                    ends.append(_minimize(vector, steps, record_sum, options, num_points))
                    lowest[index] = vector.lowest
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    end = max(ends, key=lambda end: get_args(Reason).index(end.reason))
    return replace(
        end, loss=-objective(mll) if has_priors or len(ends) > 1 else end.loss,
        message="" if end.reason == "converged" else end.message,
        at_bounds=_bounded_names(mll, bounds), ran_away=ran_away(mll), road=fixed.road,
    )  # fmt: skip


def _minimize(
    vector: Vector, steps: int | None, record: Record, options: Mapping[str, Any], num_points: int
) -> LineSearchEnd:
    """A search that is resumed from its best point where it ended without reason.

    It ends when twenty steps gain less than 0.002 nats in all. A step to a covariance that cannot
    be factored counts as too long.
    """
    least_gain = _LEAST_GAIN / num_points
    lowest: list[float] = []  # loss by each step, over resumed searches

    def watch(intermediate_result: Any) -> None:  # SciPy goes by the name
        if math.isfinite(loss := float(intermediate_result.fun)):
            record(loss)
            lowest.append(min([loss, *lowest[-1:]]))
            if len(lowest) > _WINDOW and lowest[-1 - _WINDOW] - lowest[-1] < least_gain:
                raise _GainsNothingError

    vector.evaluate(vector.best)
    # Nearest to its start a search in logarithms often finds short lengthscales and no noise. The
    # length of a first step in raw parameters is one, which leaves that basin where the loss has a
    # steep slope by a small noise.
    vector.minimize({"maxiter": 1}, watch)
    vector.take_logarithms()
    spent = end = LineSearchEnd(vector.lowest, "limit", "The steps are spent.")
    for attempt in range(1 + _RESUMES):
        if len(lowest) == steps:
            end = spent
            break
        failures, before = vector.failures, vector.lowest
        limit = {} if steps is None else {"maxiter": steps - len(lowest)}
        try:
            result = vector.minimize({"maxcor": _REMEMBERED, **options, **limit}, watch)
        except _GainsNothingError:
            return LineSearchEnd(vector.lowest, "converged")
        if attempt and before - vector.lowest < least_gain:
            break
        flat = vector.steepest() * num_points < _LEAST_SLOPE
        reasons: dict[int, Reason] = {0: "converged", 1: "limit"}  # by SciPy's status
        reason = reasons.get(result.status, "converged" if flat else "abnormal")
        end = LineSearchEnd(vector.lowest, reason, str(result.message).strip().rstrip(":"))
        # SciPy may end at a point it could not evaluate, or after a tiny step down a slope that is
        # still steep: go on from the best one, without what it remembers of the curvature.
        if reason == "limit" or (flat and vector.failures == failures):
            break
    return replace(end, loss=vector.lowest)


class _GainsNothingError(Exception):
    """The last steps of a line search have gained next to nothing."""


def _bounded_names(mll: MarginalLogLikelihood, bounds: Bounds) -> tuple[str, ...]:
    """Names of the parameters of which an entry is at a bound, but for rounding."""
    named, names = dict(mll.named_parameters()), []
    for name, pair in bounds.items():
        values = numbers(named[name])
        lower, upper = (numbers(end) if isinstance(end, Tensor) else end for end in pair)
        rounding = _ROUNDING * abs(values)
        if ((values - rounding <= lower) | (values + rounding >= upper)).any():
            names.append(name)
    return tuple(names)


@contextmanager
def limited_rounding(mll: MarginalLogLikelihood, limit: float) -> Iterator[None]:
    """Within the block the objective falls where rounding is above so many epsilons of the noise.

    Objectives are computed in float64, and a smooth function raises the variance of its kernel to a
    million times the noise. An entry of a float32 covariance is off by about an epsilon of the
    prior variance, of GPyTorch's rational quadratic kernel by alpha epsilons, and has no digit of
    the noise left then. The objective falls by the square of the logarithm of the ratio over its
    limit, in nats a point.
    """
    model = cast(ExactGP, mll.model)

    class Rounding(AddedLossTerm):
        def loss(self, *params: Any) -> Tensor:
            data = training_observations(model, cast(Likelihood, mll.likelihood))
            rounding = data.latent.diagonal(dim1=-1, dim2=-2).mean(-1)
            for kernel in model.modules():
                if isinstance(kernel, RQKernel):
                    rounding = rounding * (1.0 + cast(Tensor, kernel.alpha).squeeze(-1))
            ratio = rounding / cast(Tensor, data.noise).mean(-1) / limit
            return -data.residual.shape[-1] * ratio.log().clamp_min(0.0).square()

    # As a term of the model it counts in every objective, with or without a closed form.
    model.register_added_loss_term("limited_rounding")
    model.update_added_loss_term("limited_rounding", Rounding())
    try:
        yield
    finally:
        del model._added_loss_terms["limited_rounding"]


# ------------------------------------------------------------------ other starts


def search(
    mll: MarginalLogLikelihood, steps: int | None, record: Record, retries: int
) -> MLLFitResult:
    """Line searches of an objective, each member of a sum on its own, in place.

    If one fails, others start from less noise with shorter and with longer lengthscales, the higher
    objective first, until one succeeds; the best result is kept. Of a sum the histories are those
    of its members, one after the other, and the objective is the mean. A NanError or NotPSDError
    says that the start cannot be evaluated.
    """
    begin = time.perf_counter()
    if isinstance(mll, SumMarginalLogLikelihood):
        return _joined([search(m, steps, record, retries) for m in cast(Any, mll.mlls)], begin)
    # What a retry starts from, whatever the first search left.
    initial, starts = copied_state(mll), 1
    end, history, problem = _search_once(mll, steps, record)
    if problem in FAILED and retries:
        state = copied_state(mll)
        try:
            for start in _other_starts(mll, initial)[:retries]:
                mll.load_state_dict(start)
                starts += 1
                with suppress(NanError, NotPSDError):
                    other = _search_once(mll, steps, record)
                    if other[0].loss < end.loss or math.isnan(end.loss):
                        (end, history, problem), state = other, copied_state(mll)
                        if problem not in FAILED:
                            break
        finally:
            mll.load_state_dict(state)
    return MLLFitResult(
        objective=-end.loss, history=history, seconds=time.perf_counter() - begin,
        message=explanation(problem, end, starts, len(history)), problem=problem,
        attempts=[-end.loss], starts=starts, road=end.road,
    )  # fmt: skip


def _search_once(
    mll: MarginalLogLikelihood, steps: int | None, record: Record
) -> tuple[LineSearchEnd, list[float], Problem]:
    """Where a line search ended, the objective at each step, and what is wrong with the end."""
    history: list[float] = []

    def record_both(loss: float) -> None:
        history.append(-loss)
        record(loss)

    end = line_search(mll, steps, record_both)
    problem = problem_of_predictions(mll, end.at_bounds)
    if problem not in FAILED:
        ending = problem if end.reason == "converged" else end.reason
        problem = "runaway" if end.ran_away else ending
    return end, history, problem


def _joined(members: list[MLLFitResult], begin: float) -> MLLFitResult:
    """The result for a sum, with the worst of its members' problems."""
    worst = max(members, key=lambda member: (member.problem in FAILED, bool(member.problem)))
    objective = sum(member.objective for member in members) / len(members)
    return replace(
        worst, objective=objective, history=[v for member in members for v in member.history],
        seconds=time.perf_counter() - begin, attempts=[objective],
        starts=sum(member.starts for member in members) - len(members) + 1,
    )  # fmt: skip


def _other_starts(
    mll: MarginalLogLikelihood, initial: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """A start of shorter lengthscales and one of longer, of the higher objective first."""
    kernels = [
        module
        for module in mll.model.modules()
        if isinstance(module, Kernel) and module.has_lengthscale
        and cast(Tensor, module.raw_lengthscale).requires_grad
    ]  # fmt: skip
    starts: dict[tuple[float, ...], tuple[float, Mapping[str, Any]]] = {}
    for factors in (_SHORTER, _LONGER) if kernels else ((1.0,),):
        for factor in factors:
            mll.load_state_dict(initial)
            _rescale(mll, kernels, factor)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # it may be given up at once
                value = objective(mll)
            if starts.get(factors, (-math.inf,))[0] < value < math.inf:
                starts[factors] = value, copied_state(mll)
    return [state for _, state in sorted(starts.values(), key=itemgetter(0), reverse=True)]


@torch.no_grad()
def _rescale(mll: MarginalLogLikelihood, kernels: list[Kernel], factor: float) -> None:
    """Multiplies lengthscales by a factor, and takes most of the noise away."""
    for kernel in kernels:
        constraint = cast(Interval, kernel.raw_lengthscale_constraint)
        kernel.lengthscale = _within(constraint, factor * cast(Tensor, kernel.lengthscale))
    for module in cast(torch.nn.Module, mll.likelihood).modules():
        raw = module._parameters.get("raw_noise")
        if raw is not None and raw.requires_grad:
            constraint = cast(Interval, module.raw_noise_constraint)
            value = constraint.transform(raw)
            raw.copy_(constraint.inverse_transform(_within(constraint, _LESS_NOISE * value)))


def _within(constraint: Interval, values: Tensor) -> Tensor:
    """Values moved to where the bounds leave room to move."""
    lower, upper = cast(Tensor, constraint.lower_bound), cast(Tensor, constraint.upper_bound)
    return torch.minimum(torch.maximum(values, 1.5 * lower), upper / 1.5)
