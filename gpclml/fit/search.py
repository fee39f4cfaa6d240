"""Line searches of an objective: SciPy's L-BFGS-B on one vector of its trainable parameters.

Positive hyperparameters enter the vector by their logarithms. :func:`line_search` is one search,
:func:`search` starts others from elsewhere where one failed.
"""

from __future__ import annotations

import functools
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
from gpclml.mlls.fixed_loss import (
    FixedLoss,
    fixed_loss,
    has_shared_parameters,
    scores_first_points,
)
from gpclml.models import GPRegression

Record = Callable[[float], None]
Bounds = dict[str, tuple[Any, Any]]
Reason = Literal["converged", "limit", "abnormal"]

_MARGIN = 0.01  # of a bound: no value comes closer to it than by this share
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


# ------------------------------------------------------------------ what a fit changes


@contextmanager
def frozen(mll: MarginalLogLikelihood, names: Iterable[str]) -> Iterator[None]:
    """Within the block the parameters of these names or prefixes are not trained."""
    named = dict(mll.named_parameters())
    held: list[torch.nn.Parameter] = []
    for name in names:
        matches = [p for key, p in named.items() if key == name or key.startswith(f"{name}.")]
        if not matches:
            raise UnknownNameError("freeze", name, named)
        held += [p for p in matches if p.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        if not trainable(mll):
            suggestion = "Unfreeze some, or evaluate the objective without a fit."
            raise ArgumentError(
                "mll", "only frozen parameters", "at least one to train", suggestion
            )
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


@contextmanager
def detached_data(mll: MarginalLogLikelihood) -> Iterator[None]:
    """Within the block training data that require a gradient do not: a fit takes none by them."""
    members = cast(Any, mll.mlls if isinstance(mll, SumMarginalLogLikelihood) else [mll])
    kept = []
    for model in (member.model for member in members):
        if isinstance(model, ExactGP) and model.train_inputs and model.train_targets is not None:
            inputs, targets = model.train_inputs, cast(Tensor, model.train_targets)
            if any(tensor.requires_grad for tensor in (*inputs, targets)):
                kept.append((model, inputs, targets))
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
    the bound: the transform is flat nearer to it and a search could not return.
    """
    from botorch.optim.utils import get_parameters_and_bounds

    _, upstream = get_parameters_and_bounds(cast(Any, mll), requires_grad=True)
    bounds = cast(Bounds, upstream)
    for name, parameter, constraint in cast(Any, mll).named_parameters_and_constraints():
        if name not in bounds:
            continue
        lower = constraint.lower_bound
        if lower.numel() == 1 and constraint.enforced and 0 < float(lower) < math.inf:
            nearest = float(constraint.inverse_transform(lower * (1 + _MARGIN)))
            bounds[name] = min(nearest, float(parameter.detach().min())), math.inf
    for prefix, module in mll.named_modules():
        name = f"{prefix}.raw_alpha"
        if isinstance(module, RQKernel) and name in bounds:
            shape, constraint = cast(Any, module).raw_alpha.detach(), module.raw_alpha_constraint
            most = cast(Any, constraint).inverse_transform(shape.new_tensor(_LARGEST_SHAPE))
            lower, upper = bounds[name]
            bounds[name] = lower, torch.minimum(torch.as_tensor(upper), shape.max().maximum(most))
    return bounds


# ------------------------------------------------------------------ the vector


class _Coordinates:
    """The logarithms of positive hyperparameters in place of the raw parameters of GPyTorch.

    Scales of a kernel and variances of the noise act by their ratios, so that a step of one length
    in their logarithms changes an objective about as much wherever it is taken, and searches need
    less than half of the steps. Each transform gives the hyperparameters of a slice of the vector;
    the other entries are the raw parameters themselves.
    """

    def __init__(self, transforms: list[tuple[slice, Transform]]) -> None:
        self._transforms = transforms

    def from_raw(self, raw: ndarray) -> ndarray:
        """Coordinates of raw parameters."""
        point = raw.copy()
        for index, transform in self._transforms:
            point[index] = transform.value(torch.from_numpy(raw[index])).log().numpy()
        return point

    def to_raw(self, point: ndarray) -> ndarray:
        """Raw parameters at coordinates."""
        raw = point.copy()
        for index, transform in self._transforms:
            raw[index] = transform.inverse(torch.from_numpy(point[index]).exp()).numpy()
        return raw

    def box(self, raw_box: ndarray, start: ndarray) -> ndarray:
        """Bounds of the coordinates, ``(2, size)``, from those of raw parameters.

        They are near the start: where the objective is flat, a search takes steps of any length.
        """
        box = numpy.stack([self.from_raw(bound) for bound in raw_box])
        for index, _ in self._transforms:
            box[0, index] = numpy.fmax(box[0, index], start[index] - _FARTHEST)
            box[1, index] = numpy.fmin(box[1, index], start[index] + _FARTHEST)
        return box

    def gradient(self, raw_gradient: ndarray, raw: ndarray) -> ndarray:
        """The chain rule from raw parameters to coordinates."""
        gradient = raw_gradient.copy()
        for index, transform in self._transforms:
            values = torch.from_numpy(raw[index])
            gradient[index] *= (transform.value(values) / transform.slope(values)).numpy()
        return gradient


def _logarithms(mll: MarginalLogLikelihood, slices: Mapping[str, slice]) -> _Coordinates:
    """Logarithms of what has a lower bound of zero or more, by GPyTorch's softplus or directly."""
    transforms = []
    for name, parameter, constraint in cast(Any, mll).named_parameters_and_constraints():
        transform = transform_of(constraint)
        if name not in slices or type(constraint) not in (GreaterThan, Positive):
            continue
        if transform is None or not bool((constraint.lower_bound >= 0).all()):
            continue
        if bool((transform.value(parameter.detach().double()) > 0).all()):
            if transform.lower_bound is not None:  # parameters may be on a GPU
                transform = transform._replace(lower_bound=transform.lower_bound.cpu())
            transforms.append((slices[name], transform))
    return _Coordinates(transforms)


class _OneThread:
    """Keeps the libraries of NumPy and SciPy to one thread until the last of those within has left.

    SciPy's search solves with small matrices at each step. The threads of its libraries wait busily
    for a while after that, which takes the cores away from PyTorch's: on two cores fits of few
    points take ten times as long. Threadpoolctl's own limit would not do: of searches in several
    threads, the one that leaves last puts back what it met.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._limit = _libraries().limit(limits=1, user_api="blas")
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._limit.restore_original_limits()


_ONE_THREAD = _OneThread()


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


class Vector:
    """The trainable parameters as one vector, of which the fixed loss is a function.

    Its coordinates are the raw parameters, or the logarithms of positive hyperparameters and the
    other parameters themselves, as :meth:`begin` and :meth:`take_logarithms` say, within ``box``,
    ``(2, size)``. Those at ``free`` indices move, and the others stay. Within the block the
    parameters are views of one array, and so are their gradients. Where it ends they are those of
    the lowest loss, in the memory in which they were before.
    """

    def __init__(self, mll: MarginalLogLikelihood, bounds: Bounds) -> None:
        self._mll = mll
        self._bounds = bounds
        self.parameters = trainable(mll)
        self.failures = 0
        self.lowest = math.inf

    def __enter__(self) -> Vector:
        self._before = [(p, p.data, p.grad) for p in self.parameters.values()]
        flat = [data.flatten() for _, data, _ in self._before]
        first = flat[0] if flat else torch.zeros(0)
        # Numbers of another type, or on another device, are converted as they are copied.
        self._point = torch.cat([values.to(first) for values in flat]) if flat else first.clone()
        self._gradient = torch.zeros_like(self._point)
        size = len(self._point)
        self._raw_box = numpy.array([[-math.inf] * size, [math.inf] * size])
        self._slices: dict[str, slice] = {}
        self._copied: list[tuple[torch.Tensor, slice]] = []
        start = 0
        for name, parameter in self.parameters.items():
            index = slice(start, start + parameter.numel())
            start, self._slices[name] = index.stop, index
            if parameter.dtype == first.dtype and parameter.device == first.device:
                parameter.data = self._point[index].view(parameter.shape)
                parameter.grad = self._gradient[index].view(parameter.shape)
            else:
                self._copied.append((parameter, index))
            for row, bound in zip(self._raw_box, self._bounds.get(name, ()), strict=False):
                if bound is not None:
                    values = numbers(bound) if isinstance(bound, Tensor) else bound
                    row[index] = numpy.broadcast_to(values, parameter.shape).ravel()
        self.free = numpy.arange(size)
        self._change_coordinates(numbers(self._point), _Coordinates([]))
        _ONE_THREAD.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        _ONE_THREAD.__exit__()
        self._set(self.best)
        for parameter, data, gradient in self._before:
            parameter.data = data.copy_(parameter.data)
            parameter.grad = gradient

    def _change_coordinates(self, raw: ndarray, coordinates: _Coordinates) -> None:
        self._coordinates = coordinates
        self.best = coordinates.from_raw(raw)
        self.box = coordinates.box(self._raw_box, self.best)
        raw_box = numpy.stack([coordinates.from_raw(bound) for bound in self._raw_box])
        self._is_raw_bound = numpy.isfinite(self._raw_box) & (raw_box == self.box)

    def take_logarithms(self) -> None:
        """Goes on from the best point in the logarithms of positive hyperparameters."""
        raw, raw_slope = self._set(self.best), self._slope
        self._change_coordinates(raw, _logarithms(self._mll, self._slices))
        self._slope = self._coordinates.gradient(raw_slope, raw)
        self._last = self.best.copy(), (self.lowest, self._slope[self.free])

    def indices_of_members(self, members: int) -> ndarray:
        """Indices of the numbers of each member of a batch, ``(members, numbers)``."""
        every = numpy.arange(len(self.best))
        return numpy.hstack([every[at].reshape(members, -1) for at in self._slices.values()])

    def begin(self, loss: Callable[[], float], free: ndarray | None = None) -> None:
        """Evaluates a loss at the best point; a NanError or NotPSDError if that cannot be done.

        Args:
            loss: Adds its gradient to that of the parameters.
            free: Indices of the coordinates that move, the raw parameters; all of them if None.
        """
        self._loss, self.lowest = loss, math.inf
        self.free = numpy.arange(len(self.best)) if free is None else free
        self._change_coordinates(self._set(self.best), _Coordinates([]))
        self._evaluate(self.best)

    def __call__(self, moved: ndarray) -> tuple[float, ndarray]:
        """Loss and gradient; NaN where they do not exist, from which a search steps back."""
        point = self.best.copy()
        point[self.free] = moved
        last, answer = self._last
        if numpy.array_equal(point, last):  # a search begins where the one before has ended
            return answer
        finite = numpy.isfinite(point).all()  # SciPy's search may ask at NaN after a loss of NaN
        try:
            if finite:
                return self._evaluate(point)
        except (NanError, NotPSDError):
            pass
        self.failures += 1
        return math.nan, numpy.full(len(moved), math.nan)

    def minimize(self, options: dict[str, Any], callback: Callable | None = None) -> Any:
        """SciPy's L-BFGS-B from the best point; its result."""
        from scipy.optimize import minimize

        return minimize(
            self, self.best[self.free], jac=True, bounds=self.box.T[self.free],
            method="L-BFGS-B", options=options, callback=callback,
        )  # fmt: skip

    def steepest(self) -> float:
        """The largest derivative at the best point by a coordinate that no bound holds."""
        lower, upper = self.box
        held = (self.best <= lower) & (self._slope > 0) | (self.best >= upper) & (self._slope < 0)
        return float(numpy.abs(numpy.where(held, 0.0, self._slope)[self.free]).max(initial=0.0))

    def _evaluate(self, point: ndarray) -> tuple[float, ndarray]:
        """Loss and gradient with respect to the coordinates that move."""
        raw = self._set(point)
        self._gradient.zero_()
        value = self._loss()
        for parameter, index in self._copied:
            if parameter.grad is not None:
                self._gradient[index] = parameter.grad.flatten().to(self._gradient)
        slope = self._coordinates.gradient(numbers(self._gradient), raw)
        if not (math.isfinite(value) and numpy.isfinite(slope[self.free]).all()):
            named = self._slices.items()
            raise non_finite(value, [n for n, at in named if not numpy.isfinite(slope[at]).all()])
        if value < self.lowest:
            self.lowest, self.best, self._slope = value, point.copy(), slope
        self._last = point.copy(), (value, slope[self.free])
        return self._last[1]

    def _set(self, point: ndarray) -> ndarray:
        """Sets the parameters, and returns the raw ones."""
        raw = self._coordinates.to_raw(point)
        reached = point <= self.box[0], point >= self.box[1]
        for bound, is_raw, held in zip(self._raw_box, self._is_raw_bound, reached, strict=True):
            numpy.copyto(raw, bound, where=is_raw & held)  # exactly, not a logarithm's rounding
        self._point.copy_(torch.from_numpy(raw))
        for parameter, index in self._copied:
            parameter.data.copy_(self._point[index].view(parameter.shape))
            parameter.grad = None
        return raw


# ------------------------------------------------------------------ one line search


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
    is repeated with a limit of the rounding. A NanError or NotPSDError says that the start cannot
    be evaluated. Further ``options`` are those of SciPy.
    """
    load_botorch()
    start, one_search = copied_state(mll), _LineSearch(mll, steps, record, dict(options or {}))
    end = one_search.run()
    for limit in _ROUNDING_LIMITS:
        if predicts_in_its_type(mll):
            break
        mll.load_state_dict(start)
        with limited_rounding(mll, limit):
            end = one_search.run()
        end = replace(end, loss=-objective(mll))
    return end


@dataclass
class _LineSearch:
    """A search, of so many steps at most, which are recorded.

    The first step is taken in the raw parameters, the others in the logarithms of positive
    hyperparameters. It ends when twenty steps gain less than 0.002 nats in all. Where the objective
    leaves scale and mean of a ``GPRegression`` open, they have weak priors meanwhile, which the
    loss that is returned leaves out. A step to a covariance that cannot be factored counts as too
    long.
    """

    mll: MarginalLogLikelihood
    steps: int | None
    record: Record
    options: dict[str, Any]

    def run(self) -> LineSearchEnd:
        mll, model = self.mll, self.mll.model
        self._bounds = bounds_of(mll)
        self._num_points = _num_targets(model)
        is_open = isinstance(model, GPRegression) and not scores_first_points(mll)
        priors = cast(GPRegression, model).weak_priors() if is_open else nullcontext(False)
        with warnings.catch_warnings(), detached_data(mll), priors as has_priors:
            # Points on the way may take jitter. That the end does is told by its predictions.
            warnings.simplefilter("ignore", NumericalWarning)
            fixed = FixedLoss(mll)
            members = _independent_members(model)
            if members and not fixed.has_members and _is_batch_of_botorch(model):
                end = self._search_by_botorch(fixed)
            else:
                end = self._search(fixed, members * fixed.has_members)
        return replace(
            end, loss=-objective(mll) if has_priors else end.loss,
            message="" if end.reason == "converged" else end.message,
            at_bounds=_at_bounds(mll, self._bounds), ran_away=ran_away(mll), road=fixed.road,
        )  # fmt: skip

    def _search_by_botorch(self, fixed: FixedLoss) -> LineSearchEnd:
        """A search of each member of a batch, evaluated together."""
        from botorch.exceptions.warnings import OptimizationWarning
        from botorch.optim.fit import fit_gpytorch_mll_scipy

        with warnings.catch_warnings():
            # A line search that cannot improve further keeps its point, which the result says.
            warnings.simplefilter("ignore", OptimizationWarning)
            limit = {} if self.steps is None else {"maxiter": self.steps}
            result = fit_gpytorch_mll_scipy(
                self.mll, bounds=cast(Any, self._bounds), options={**self.options, **limit}
            )
        self.record(float(result.fval))
        reasons: dict[str, Reason] = {"SUCCESS": "converged", "STOPPED": "limit"}
        reason = reasons.get(result.status.name, "abnormal")
        if reason == "abnormal":
            with Vector(self.mll, self._bounds) as vector, suppress(NanError, NotPSDError):
                vector.begin(fixed)
                reason = "converged" if self._is_flat(vector) else reason
        return LineSearchEnd(float(result.fval), reason, _text(result.message))

    def _search(self, fixed: FixedLoss, members: int) -> LineSearchEnd:
        """One search, or one for each of so many members of a batch; the worst reason counts."""
        with Vector(self.mll, self._bounds) as vector:
            if not members:
                vector.begin(fixed)
                return self._minimize(vector, self.record)
            losses = [partial(fixed, member) for member in range(members)]
            indices = vector.indices_of_members(members)
            lowest: list[float] = []
            for loss, free in zip(losses, indices, strict=True):
                vector.begin(loss, free)
                lowest.append(vector.lowest)
            ends: list[LineSearchEnd] = []
            for member, (loss, free) in enumerate(zip(losses, indices, strict=True)):
                others = sum(lowest) - lowest[member]

                def record_sum(value: float, others: float = others) -> None:
                    self.record(value + others)

                vector.begin(loss, free)
                ends.append(self._minimize(vector, record_sum))
                lowest[member] = vector.lowest
        worst = max(ends, key=lambda end: get_args(Reason).index(end.reason))
        return replace(worst, loss=-objective(self.mll))

    def _minimize(self, vector: Vector, record: Record) -> LineSearchEnd:
        """A search that is resumed from its best point where it ended without reason.

        Nearest to its start a search in logarithms often finds short lengthscales and no noise. The
        length of a first step in raw parameters is one, which leaves that basin where the loss has
        a steep slope by a small noise.
        """
        least_gain = _LEAST_GAIN / self._num_points
        lowest: list[float] = []  # loss by each step, over resumed searches

        def watch(intermediate_result: Any) -> None:  # SciPy goes by the name
            loss = float(intermediate_result.fun)
            if not math.isfinite(loss):
                return
            record(loss)
            lowest.append(min([loss, *lowest[-1:]]))
            if len(lowest) > _WINDOW and lowest[-1 - _WINDOW] - lowest[-1] < least_gain:
                raise _GainsNothingError

        vector.minimize({"maxiter": 1}, watch)
        vector.take_logarithms()
        spent = end = LineSearchEnd(vector.lowest, "limit", "The steps are spent.")
        for attempt in range(1 + _RESUMES):
            if len(lowest) == self.steps:
                end = spent
                break
            failures, before = vector.failures, vector.lowest
            limit = {} if self.steps is None else {"maxiter": self.steps - len(lowest)}
            try:
                result = vector.minimize({"maxcor": _REMEMBERED, **self.options, **limit}, watch)
            except _GainsNothingError:
                return LineSearchEnd(vector.lowest, "converged")
            if attempt and before - vector.lowest < least_gain:
                break
            flat = self._is_flat(vector)
            reasons: dict[int, Reason] = {0: "converged", 1: "limit"}  # by SciPy's status
            reason = reasons.get(result.status, "converged" if flat else "abnormal")
            end = LineSearchEnd(vector.lowest, reason, _text(result.message))
            # SciPy may end at a point it could not evaluate, or after a tiny step down a slope that
            # is still steep: go on from the best one, without what it remembers of the curvature.
            if reason == "limit" or (flat and vector.failures == failures):
                break
        return replace(end, loss=vector.lowest)

    def _is_flat(self, vector: Vector) -> bool:
        return vector.steepest() * self._num_points < _LEAST_SLOPE


class _GainsNothingError(Exception):
    """The last steps of a line search have gained next to nothing."""


def _text(message: object) -> str:
    return str(message).strip().rstrip(":")


def _num_targets(model: torch.nn.Module) -> int:
    """Training targets, of which objectives are means."""
    targets = getattr(model, "train_targets", None)
    return targets.numel() if isinstance(targets, Tensor) else 1


def _independent_members(model: torch.nn.Module) -> int:
    """Members of a batch in which none shares a trainable parameter with another; else 0."""
    targets = getattr(model, "train_targets", None)
    if not isinstance(model, ExactGP) or not isinstance(targets, Tensor):
        return 0
    shape = targets.shape[:-1]
    return 0 if has_shared_parameters(model, shape) or shape.numel() == 1 else shape.numel()


def _is_batch_of_botorch(model: torch.nn.Module) -> bool:
    from botorch.models.gpytorch import BatchedMultiOutputGPyTorchModel

    return isinstance(model, BatchedMultiOutputGPyTorchModel)


def _at_bounds(mll: MarginalLogLikelihood, bounds: Bounds) -> tuple[str, ...]:
    """Names of the parameters of which an entry is at a bound."""
    named, names = dict(mll.named_parameters()), []
    for name, pair in bounds.items():
        values = numbers(named[name])
        lower, upper = (numbers(end) if isinstance(end, Tensor) else end for end in pair)
        if ((values - _ROUNDING * abs(values) <= lower) | (values >= upper)).any():
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
    name = "limited_rounding"
    model.register_added_loss_term(name)
    model.update_added_loss_term(name, _RoundingTerm(mll, limit))
    try:
        yield
    finally:
        del model._added_loss_terms[name]


class _RoundingTerm(AddedLossTerm):
    def __init__(self, mll: MarginalLogLikelihood, limit: float) -> None:
        self._mll, self._log_limit = mll, math.log(limit)

    def loss(self, *params: Any) -> Tensor:
        mll = self._mll
        data = training_observations(cast(ExactGP, mll.model), cast(Likelihood, mll.likelihood))
        rounding = data.latent.diagonal(dim1=-1, dim2=-2).mean(-1)
        for kernel in mll.model.modules():
            if isinstance(kernel, RQKernel):
                rounding = rounding * (1.0 + cast(Tensor, kernel.alpha).squeeze(-1))
        ratio = rounding / cast(Tensor, data.noise).mean(-1)
        return -data.residual.shape[-1] * (ratio.log() - self._log_limit).clamp_min(0.0).square()


# ------------------------------------------------------------------ other starts


def search(
    mll: MarginalLogLikelihood, steps: int | None, record: Record, retries: int
) -> MLLFitResult:
    """Line searches of an objective, each member of a sum on its own, in place.

    If one fails, others start from less noise with shorter and with longer lengthscales, the higher
    objective first, until one succeeds; the best result is kept. Of a sum the histories are those
    of its members, one after the other, and the objective is the mean. A NanError or NotPSDError
    says that the start cannot be evaluated. The cost beside the line search is one leave-one-out
    prediction.
    """
    begin = time.perf_counter()
    if isinstance(mll, SumMarginalLogLikelihood):
        return _joined([search(m, steps, record, retries) for m in cast(Any, mll.mlls)], begin)
    initial = copied_state(mll)
    end, history = _recorded_search(mll, steps, record)
    problem, starts = _problem(mll, end), 1
    if problem in FAILED and retries:
        state = copied_state(mll)
        try:
            for start in _other_starts(mll, initial)[:retries]:
                mll.load_state_dict(start)
                starts += 1
                try:
                    other, values = _recorded_search(mll, steps, record)
                except (NanError, NotPSDError):
                    continue
                if other.loss < end.loss or math.isnan(end.loss):
                    end, history, state = other, values, copied_state(mll)
                    problem = _problem(mll, end)
                    if problem not in FAILED:
                        break
        finally:
            mll.load_state_dict(state)
    return MLLFitResult(
        objective=-end.loss, history=history, seconds=time.perf_counter() - begin,
        message=explanation(problem, end, starts, len(history)), problem=problem,
        attempts=[-end.loss], starts=starts, road=end.road,
    )  # fmt: skip


def _joined(members: list[MLLFitResult], begin: float) -> MLLFitResult:
    """The result for a sum, with the worst of its members' problems."""
    failed = [member for member in members if member.problem in FAILED]
    worst = [*failed, *(member for member in members if member.problem), members[0]][0]
    objective = sum(member.objective for member in members) / len(members)
    return replace(
        worst, objective=objective, history=[v for member in members for v in member.history],
        seconds=time.perf_counter() - begin, attempts=[objective],
        starts=sum(member.starts for member in members) - len(members) + 1,
    )  # fmt: skip


def _recorded_search(
    mll: MarginalLogLikelihood, steps: int | None, record: Record
) -> tuple[LineSearchEnd, list[float]]:
    """A search, and the objective at each of its steps."""
    history: list[float] = []

    def record_both(loss: float) -> None:
        history.append(-loss)
        record(loss)

    return line_search(mll, steps, record_both), history


def _problem(mll: MarginalLogLikelihood, end: LineSearchEnd) -> Problem:
    problem = problem_of_predictions(mll, end.at_bounds)
    if problem in FAILED:
        return problem
    if end.ran_away:
        return "runaway"
    return problem if end.reason == "converged" else end.reason


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
    starts: list[tuple[float, Mapping[str, Any]]] = []
    for factors in (_SHORTER, _LONGER) if kernels else ((1.0,),):
        tried = []
        for factor in factors:
            mll.load_state_dict(initial)
            _rescale(mll, kernels, factor)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # it may be given up at once
                value = objective(mll)
            if math.isfinite(value):
                tried.append((value, copied_state(mll)))
        starts += [max(tried, key=itemgetter(0))] if tried else []
    return [state for _, state in sorted(starts, key=itemgetter(0), reverse=True)]


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
