"""The trainable parameters of an objective as one vector, in which a line search moves."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy
import torch
from gpytorch.constraints import GreaterThan, Positive
from gpytorch.kernels import RQKernel
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from numpy import ndarray
from threadpoolctl import ThreadpoolController

from gpclml.errors import NonFiniteError
from gpclml.gram import Transform, transform_of

_MARGIN = 0.01  # of a bound: no value comes closer to it than by this share
# Of a rational quadratic kernel. Beyond it differs from the RBF kernel, by r^4 / 8 alpha, too
# little to learn from, and as GPyTorch computes it, (1 + r^2 / 2 alpha)^-alpha, it is off by alpha
# epsilons.
_LARGEST_SHAPE = 1e5
_FARTHEST = 35.0  # from the start that a logarithm goes: a factor of 1e15

Bounds = dict[str, tuple[Any, Any]]


def trainable(mll: MarginalLogLikelihood) -> dict[str, torch.Tensor]:
    """The parameters that a fit changes, by name."""
    return {name: p for name, p in mll.named_parameters() if p.requires_grad}


def numbers(values: torch.Tensor) -> ndarray:
    """A copy in double precision."""
    return values.detach().double().cpu().numpy().copy()


def bounds_of(mll: MarginalLogLikelihood) -> Bounds:
    """Of the raw parameters, where a constraint has any."""
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


def non_finite(value: float, names: list[str]) -> NonFiniteError:
    """The error of an objective that has no finite value or gradient."""
    return NonFiniteError(
        "objective",
        f"value {value}, non-finite gradients of {names[:4] or 'none'}",
        "finite values",
        "Lower the learning rate, or look for degenerate hyperparameters.",
    )


class _Coordinates:
    """The logarithms of positive hyperparameters in place of the raw parameters of GPyTorch.

    Scales of a kernel and variances of the noise act by their ratios, so that a step of one length
    in their logarithms changes an objective about as much wherever it is taken, and searches need
    less than half of the steps. Logarithms are taken of what has a lower bound of zero or more,
    with GPyTorch's softplus or with no transform; other parameters stay as they are. If not
    ``logarithmic``, all do.
    """

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        places: dict[str, slice],
        size: int,
        logarithmic: bool,
    ) -> None:
        self._logs = numpy.zeros(size, bool)
        self._parts: list[tuple[slice, Transform]] = []
        if not logarithmic:
            return
        for name, parameter, constraint in cast(Any, mll).named_parameters_and_constraints():
            transform = transform_of(constraint)
            if name not in places or constraint is None or transform is None:
                continue
            if type(constraint) not in (GreaterThan, Positive):
                continue
            positive = bool((transform.value(parameter.detach().double()) > 0).all())
            if positive and bool((constraint.lower_bound >= 0).all()):
                if transform.lower_bound is not None:  # parameters may be on a GPU
                    transform = transform._replace(lower_bound=transform.lower_bound.cpu())
                self._logs[places[name]] = True
                self._parts.append((places[name], transform))

    def of(self, raw: ndarray) -> ndarray:
        """Coordinates of raw parameters."""
        point = raw.copy()
        for part, transform in self._parts:
            point[part] = transform.value(torch.from_numpy(raw[part])).log().numpy()
        return point

    def box(self, bounds: ndarray, start: ndarray) -> ndarray:
        """Lower and upper bounds of the coordinates, ``(size, 2)``, from those of raw parameters.

        They are near the start: where the objective is flat, a search takes steps of any length.
        """
        lower, upper = (self.of(bound) for bound in bounds)
        lower[self._logs] = numpy.fmax(lower, start - _FARTHEST)[self._logs]
        upper[self._logs] = numpy.fmin(upper, start + _FARTHEST)[self._logs]
        return numpy.stack([lower, upper], -1)

    def raw(self, point: ndarray) -> ndarray:
        """Raw parameters at coordinates."""
        raw = point.copy()
        for part, transform in self._parts:
            raw[part] = transform.inverse(torch.from_numpy(point[part]).exp()).numpy()
        return raw

    def slope(self, by_raw: ndarray, raw: ndarray) -> ndarray:
        """The derivatives by the coordinates, from those by raw parameters."""
        slope = by_raw.copy()
        for part, transform in self._parts:
            values = torch.from_numpy(raw[part])
            slope[part] *= (transform.value(values) / transform.slope(values)).numpy()
        return slope


class _OneThread:
    """Keeps the libraries of NumPy and SciPy to one thread until the last of those within has left.

    SciPy's search solves with small matrices at each step. The threads of its libraries wait busily
    for a while after that, which takes the cores away from PyTorch's: on two cores fits of few
    points take ten times as long.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._several: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                counts = [(one, one.get_num_threads()) for one in _libraries()]
                self._several = [(one, count) for one, count in counts if count != 1]
                for one, _ in self._several:
                    one.set_num_threads(1)
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                for one, count in self._several:
                    one.set_num_threads(count)


_ONE_THREAD = _OneThread()


@functools.cache
def _libraries() -> list[Any]:
    return ThreadpoolController().select(user_api="blas").lib_controllers


class Vector:
    """The trainable parameters as one vector, of which the fixed loss is a function.

    Its coordinates are the raw parameters, or the logarithms of positive hyperparameters and the
    other parameters themselves, as :meth:`begin` and :meth:`take_logarithms` say, within ``box``,
    ``(size, 2)``. Those at ``places`` move, and the others stay. Within the block the parameters
    are parts of one array, and so are their gradients. Where it ends they are those of the lowest
    loss, in the memory in which they were before.
    """

    def __init__(self, mll: MarginalLogLikelihood, bounds: Bounds) -> None:
        self._mll = mll
        self._bounds = bounds
        self.parameters = trainable(mll)
        self.failures = 0
        self.lowest = math.inf

    def __enter__(self) -> Vector:
        self._own = [(p, p.data, p.grad) for p in self.parameters.values()]
        flat = [data.flatten() for _, data, _ in self._own]
        first = flat[0] if flat else torch.zeros(0)
        # Numbers of another type, or on another device, are converted as they are copied.
        self._point = torch.cat([one.to(first) for one in flat]) if flat else first.clone()
        self._gradient = torch.zeros_like(self._point)
        self._places, start = [], 0
        for parameter, data, _ in self._own:
            part = slice(start, start + data.numel())
            start = part.stop
            shares = data.dtype == first.dtype and data.device == first.device
            self._places.append((parameter, part, shares))
            if shares:
                parameter.data = self._point[part].view(data.shape)
                parameter.grad = self._gradient[part].view(data.shape)
        parts = dict(zip(self.parameters, (part for _, part, _ in self._places), strict=True))
        self._raw_box = numpy.array([[-math.inf] * start, [math.inf] * start])
        for name, part in parts.items():
            shape = self.parameters[name].shape
            for row, bound in zip(self._raw_box, self._bounds.get(name, ()), strict=False):
                if bound is not None:
                    of_all = numbers(bound) if isinstance(bound, torch.Tensor) else bound
                    row[part] = numpy.broadcast_to(of_all, shape).ravel()
        self._named = parts
        self.places = numpy.arange(start)
        self._move_to(numbers(self._point), logarithmic=False)
        _ONE_THREAD.__enter__()
        return self

    def _move_to(self, raw: ndarray, logarithmic: bool) -> None:
        self._coordinates = _Coordinates(self._mll, self._named, len(raw), logarithmic)
        self.best = self._coordinates.of(raw)
        self.box = self._coordinates.box(self._raw_box, self.best)
        of_bounds = numpy.stack([self._coordinates.of(row) for row in self._raw_box])
        self._is_own = numpy.isfinite(self._raw_box) & (of_bounds == self.box.T)

    def take_logarithms(self) -> None:
        """Goes on from the best point in the logarithms of positive hyperparameters."""
        raw, by_raw = self._set(self.best), self._slope
        self._move_to(raw, logarithmic=True)
        self._slope = self._coordinates.slope(by_raw, raw)
        self._last = self.best.copy(), (self.lowest, self._slope[self.places])

    def places_of_members(self, members: int) -> ndarray:
        """Where the numbers of each member of a batch are, ``(members, numbers)``."""
        every = numpy.arange(len(self.best))
        return numpy.hstack([every[at].reshape(members, -1) for at in self._named.values()])

    def begin(self, loss: Callable[[], float], places: ndarray | None = None) -> None:
        """Evaluates a loss at the best point; a NanError or NotPSDError if that cannot be done.

        Args:
            loss: Adds its gradient to that of the parameters.
            places: Of the coordinates that move, the raw parameters; all of them if None.
        """
        self._loss, self.lowest = loss, math.inf
        self.places = numpy.arange(len(self.best)) if places is None else places
        self._move_to(self._set(self.best), logarithmic=False)
        self._evaluate(self.best)

    def __call__(self, moved: ndarray) -> tuple[float, ndarray]:
        """Loss and gradient; NaN where they do not exist, from which a search steps back."""
        point = self.best.copy()
        point[self.places] = moved
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
            self, self.best[self.places], jac=True, bounds=self.box[self.places],
            method="L-BFGS-B", options=options, callback=callback,
        )  # fmt: skip

    def steepest(self) -> float:
        """The largest derivative at the best point by a coordinate that no bound holds."""
        lower, upper = self.box.T
        held = (self.best <= lower) & (self._slope > 0) | (self.best >= upper) & (self._slope < 0)
        return float(numpy.abs(numpy.where(held, 0.0, self._slope)[self.places]).max(initial=0.0))

    def __exit__(self, *_: object) -> None:
        _ONE_THREAD.__exit__()
        self._set(self.best)
        for parameter, data, gradient in self._own:
            parameter.data = data.copy_(parameter.data)
            parameter.grad = gradient

    def _evaluate(self, point: ndarray) -> tuple[float, ndarray]:
        """Loss and gradient by the coordinates that move."""
        raw = self._set(point)
        self._gradient.zero_()
        value = self._loss()
        for parameter, part, shares in self._places:
            if not shares and parameter.grad is not None:
                self._gradient[part] = parameter.grad.flatten().to(self._gradient)
        slope = self._coordinates.slope(numbers(self._gradient), raw)
        if not (math.isfinite(value) and numpy.isfinite(slope[self.places]).all()):
            bad = zip(self.parameters, self._places, strict=True)
            raise non_finite(
                value, [name for name, (_, at, _) in bad if not numpy.isfinite(slope[at]).all()]
            )
        if value < self.lowest:
            self.lowest, self.best, self._slope = value, point.copy(), slope
        self._last = point.copy(), (value, slope[self.places])
        return self._last[1]

    def _set(self, point: ndarray) -> ndarray:
        """Sets the parameters, and returns the raw ones."""
        raw = self._coordinates.raw(point)
        lower, upper = self.box.T
        for bound, own, held in zip(
            self._raw_box, self._is_own, (point <= lower, point >= upper), strict=True
        ):
            numpy.copyto(raw, bound, where=own & held)  # exactly, not the rounding of a logarithm
        self._point.copy_(torch.from_numpy(raw))
        for parameter, part, shares in self._places:
            if not shares:
                parameter.data.copy_(self._point[part].view(parameter.shape))
                parameter.grad = None
        return raw
