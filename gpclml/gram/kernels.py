r"""Kernels in closed form: the matrix at points, and its vector-Jacobian product.

A kernel is a tree: functions of distance, linear kernels, mixtures, covariances of tasks, which are
scaled, added, multiplied, and given some columns of the points or features of them. With
:math:`G = \partial L / \partial K` of a loss L, a kernel within a scaled one gets :math:`s G`, each
term of a sum G itself, and each factor of a product G times the other factors, entry by entry.

For functions of distance, :math:`K_{ij} = k(e_{ij})` with :math:`e_{ij} = -|z_i - z_j|^2 / 2` and
points z in units of the lengthscales,

.. math:: \frac{\partial L}{\partial z} = 2 (M z - \operatorname{diag}(M 1)\, z), \quad
    M = G \circ k', \qquad \frac{\partial L}{\partial \ell_d}
    = -\frac{1}{\ell_d} \sum_i z_{id} \frac{\partial L}{\partial z_{id}}.

The two terms cancel where neighbours are much closer to each other than to the origin, as on a
line: in one dimension, where it takes no longer, differences of points are summed instead. No n x n
array is made for each hyperparameter or for each dimension of the inputs, where differentiating a
kernel step by step makes several.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from gpytorch import kernels
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.kernels import Kernel
from torch import Tensor

from gpclml.errors import ArgumentError, ShapeError
from gpclml.gram.autograd import Evaluated, Gradients, fitted

DOUBLE_UP_TO = 512
"""Largest n at which the covariance of float32 points is computed in float64."""

# Entries of a matrix that are multiplied at a time: they stay in a processor's cache.
_AT_A_TIME = {"cpu": 1 << 16, "other": 1 << 22}


_KNOWN_CONSTRAINTS = (GreaterThan, Interval, LessThan, Positive)
_LINEAR = 20.0  # above which PyTorch's softplus is the identity


class Transform(NamedTuple):
    """How a constraint makes a hyperparameter of a raw parameter, elementwise.

    Attributes:
        is_softplus: By a softplus; if not, the two are equal.
        lower_bound: Added to the softplus, ``()`` or ``(1,)``; None for zero.
    """

    is_softplus: bool
    lower_bound: Tensor | None = None

    def value(self, raw: Tensor) -> Tensor:
        """The hyperparameter, in the type of the raw parameter."""
        if not self.is_softplus:
            return raw
        value = torch.nn.functional.softplus(raw)
        return value if self.lower_bound is None else value + self.lower_bound.to(raw)

    def slope(self, raw: Tensor) -> Tensor | float:
        """The derivative of the hyperparameter with respect to the raw parameter."""
        return torch.sigmoid(raw) if self.is_softplus else 1.0

    def inverse(self, value: Tensor) -> Tensor:
        """The raw parameter."""
        if not self.is_softplus:
            return value
        if self.lower_bound is not None:
            value = value - self.lower_bound.to(value)
        # log(exp(v) - 1), of which exp(v) would overflow.
        return torch.where(value > _LINEAR, value, value + (-torch.expm1(-value)).log())


_IDENTITY = Transform(is_softplus=False)


def transform_of(constraint: Interval | None) -> Transform | None:
    """The transform of a constraint of GPyTorch; None if it is none of those known here."""
    if constraint is None:
        return _IDENTITY
    kind = type(constraint)
    if kind not in _KNOWN_CONSTRAINTS or "transform" in vars(constraint):
        return None
    function = constraint._transform
    if function is None:
        return _IDENTITY
    if type(function) is not torch.nn.Softplus:
        return None
    if function.beta != 1.0 or function.threshold != _LINEAR:
        return None
    if kind is Positive:
        return Transform(is_softplus=True)
    if kind is not GreaterThan or constraint.lower_bound.numel() != 1:
        return None
    return Transform(is_softplus=True, lower_bound=constraint.lower_bound)


class Hyperparameter:
    """A hyperparameter of a module, and the tensor that its gradient is taken with respect to.

    That is the raw parameter where the constraint is one whose derivative is known. Elsewhere it is
    the value as the module computes it, from which autograd goes on.

    Args:
        source: A kernel, mean, or noise model of GPyTorch; or a tensor that is the hyperparameter.
        name: Of the hyperparameter, such as ``"lengthscale"``.
        dtype: Type of the value.

    Attributes:
        value: The hyperparameter, without a gradient.
        tensor: The raw parameter, or the value with its gradient.
    """

    __slots__ = ("_transform", "tensor", "value")

    def __init__(self, source: torch.nn.Module | Tensor, name: str, dtype: torch.dtype) -> None:
        transform: Transform | None = _IDENTITY
        tensor: Any = source
        if not isinstance(source, Tensor):
            tensor = getattr(source, f"raw_{name}", None)
            constraint = cast(Interval | None, getattr(source, f"raw_{name}_constraint", None))
            transform = None if tensor is None else transform_of(constraint)
        if transform is None:
            value: Any = getattr(source, name)
            tensor, transform = value() if callable(value) else value, _IDENTITY
        self.tensor = cast(Tensor, tensor)
        self._transform = transform
        self.value: Tensor = transform.value(self.tensor.detach().to(dtype))

    def gradients(self, grad: Tensor) -> Gradients:
        """By the chain rule, from a gradient with respect to the value; none where none is needed.

        Args:
            grad: Of the shape of the value, or of one that the value was broadcast to.
        """
        tensor = self.tensor
        if not tensor.requires_grad:
            return []
        grad = grad.sum_to_size(tensor.shape)
        if self._transform.is_softplus:
            grad = grad * torch.sigmoid(tensor.detach())
        return [(tensor, grad.to(tensor.dtype))]


class Profile(NamedTuple):
    """A function k of e, minus half a squared distance.

    Attributes:
        factor: Points are multiplied by it before distances are taken.
        value: ``(e, power) -> (k, *kept)``, with what the derivatives need; may overwrite e.
        slope: ``(k, *kept) -> k'``, the derivative with respect to e.
        power_slope: ``(k, *kept) -> dk / d power``, where there is a power.
    """

    factor: float
    value: Callable[[Tensor, Any], tuple[Tensor, ...]]
    slope: Callable[..., Tensor]
    power_slope: Callable[..., Tensor] | None = None


def _distance(e: Tensor) -> Tensor:
    return e.mul_(-2.0).sqrt_()


def _matern_12(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    return (-r).exp_(), r


def _slope_of_matern_12(k: Tensor, r: Tensor) -> Tensor:
    # Infinite where points are equal: GPyTorch's gradient there, and ours, is zero.
    return (k / r).masked_fill_(r == 0.0, 0.0)


def _matern_32(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    decay = (-r).exp_()
    return r.add_(1.0).mul_(decay), decay


def _matern_52(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    slope = (-r).exp_()
    # (1 + r + r²/3) exp(-r), of which k' needs (1 + r) exp(-r) / 3.
    third = (r * r).mul_(slope).div_(3.0)
    slope.mul_(r.add_(1.0))  # (1 + r) exp(-r)
    return third.add_(slope), slope.div_(3.0)


def _rational_quadratic(e: Tensor, power: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    share = e / -power  # t = r^2 / 2 alpha, of which 1 + t would keep no digits as alpha grows
    log = share.log1p()
    return (log * -power).exp_(), share, log


def _power_slope(k: Tensor, share: Tensor, log: Tensor) -> Tensor:
    r"""The derivative with respect to :math:`\alpha`, :math:`-k\, (\log(1 + t) - t / (1 + t))`.

    The difference is :math:`t^2 / 2` for small t and would cancel. With :math:`s = t / (2 + t)` it
    is :math:`2 s^2 / (1 + s) + (\log(1 + t) - 2 s)`, terms of one sign, and the second of them,
    :math:`2 s^3 (1/3 + s^2/5 + s^4/7 + \ldots)`, is the smaller by a factor of s.
    """
    # The series of the inverse hyperbolic tangent: log(1 + t) = 2 artanh(s).
    s = share / (share + 2.0)
    square = s * s
    series = (2.0 * s * square) * (1 / 3 + square * (1 / 5 + square / 7))
    remainder = torch.where(s < 0.02, series, log - 2.0 * s)  # the one with more digits
    return -k * (2.0 * square / (s + 1.0) + remainder)


def _cosine(e: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    r = _distance(e)
    return r.cos(), r


PROFILES = {
    "rbf": Profile(1.0, lambda e, _: (e.exp_(),), lambda k: k),
    "matern_12": Profile(1.0, _matern_12, _slope_of_matern_12),
    "matern_32": Profile(math.sqrt(3.0), _matern_32, lambda k, decay: decay),
    "matern_52": Profile(math.sqrt(5.0), _matern_52, lambda k, slope: slope),
    "rational_quadratic": Profile(
        1.0, _rational_quadratic, lambda k, share, _: k / (share + 1.0), _power_slope
    ),
    "cosine": Profile(math.pi, _cosine, lambda k, r: torch.sinc(r / math.pi)),
}
"""The functions of distance by name, each of unit variance at distance zero.

With r the distance of two points in units of the lengthscales:

- ``"rbf"``: :math:`\\exp(-r^2 / 2)`
- ``"matern_12"``, ``"matern_32"``, ``"matern_52"``: of smoothness 1/2, 3/2, 5/2
- ``"rational_quadratic"``: :math:`(1 + r^2 / 2\\alpha)^{-\\alpha}`
- ``"cosine"``: :math:`\\cos \\pi r`
"""


class Gram(ABC):
    """A kernel in closed form.

    Args:
        kernel: The kernel of GPyTorch, whose hyperparameters are read at each call.

    Attributes:
        has_features: Whether a kernel within it is on features of the points.
    """

    has_features = False

    def __init__(self, kernel: Any = None) -> None:
        self._kernel = kernel

    @abstractmethod
    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """The matrix of points, and its vector-Jacobian product.

        Up to 512 points it is in float64, whatever the type of the points: there the kernel takes
        less time than the calls around it.

        Args:
            x: Points, ``(*batch, n, d)``.
            other: Points of the columns, ``(*batch, m, d)``; those of the rows if None.

        Returns:
            The matrix, ``(*batch, n, m)``.
        """

    def rank(self, num_columns: int | None) -> float:
        """An upper bound of the matrix's rank for any number of points; mostly infinite.

        Args:
            num_columns: Number of columns of the points; None where that is not known.
        """
        return math.inf

    def metric(self, x: Tensor) -> Tensor:
        """Points whose squared distances are variances of differences of function values.

        They are so for near points, to second order and up to a factor of each function of
        distance: near in this metric are points that say much of each other.

        Args:
            x: Points, ``(*batch, n, d)``.

        Returns:
            ``(*batch, n, q)``.
        """
        return x

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """The kernel inside of features and columns, and what it is given of the points.

        Args:
            x: Points, ``(*batch, n, d)``.
        """
        return self, x


def _dtype(x: Tensor, other: Tensor | None) -> torch.dtype:
    most = x.shape[-2] if other is None else max(x.shape[-2], other.shape[-2])
    return torch.float64 if most <= DOUBLE_UP_TO else x.dtype


def _needing(*candidates: Hyperparameter | Tensor | None) -> list[Tensor]:
    """The tensors among these that require a gradient."""
    tensors = []
    for candidate in candidates:
        tensor = candidate.tensor if isinstance(candidate, Hyperparameter) else candidate
        if tensor is not None and tensor.requires_grad:
            tensors.append(tensor)
    return tensors


def _gradients(x: Tensor, grad: Tensor) -> Gradients:
    """The gradient with respect to points, if it is wanted."""
    return [(x, fitted(grad, x))] if x.requires_grad else []


class _Distances:
    """A function of the distances of points, which are in units of the lengthscales.

    Args:
        z: Points, ``(*batch, n, d)``, in double precision.
        other: Those of the columns; None for the same.
        profile: The function.
        power: The exponent of ``"rational_quadratic"``, ``(*batch, 1, 1)``.
        dtype: Type of the matrix.
    """

    def __init__(
        self,
        z: Tensor,
        other: Tensor | None,
        profile: Profile,
        power: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        # Distances are differences of large numbers where points are far apart for their
        # lengthscales, so they are computed in double precision.
        center = z.mean(-2, keepdim=True)
        z = z - center
        other = None if other is None else other - center
        if profile.factor != 1.0:
            z.mul_(profile.factor)
            other = None if other is None else other.mul_(profile.factor)
        self.z: Tensor = z.to(dtype)
        self.other: Tensor | None = None if other is None else other.to(dtype)
        self._profile = profile
        power = None if power is None else power.to(dtype)
        right = z if other is None else other
        half = half_right = z.square().sum(-1, keepdim=True).mul_(-0.5)
        if other is not None:
            half_right = other.square().sum(-1, keepdim=True).mul_(-0.5)
        wholes: Any = ()
        start = 0
        for left, half_left in _blocks_of_rows(right, z, half):
            if z.shape[-1] == 1:  # on a line differences of points cost no more than products
                e = (left - right.mT).square_().mul_(-0.5)
            else:
                e = (left @ right.mT).add_(half_left).add_(half_right.mT)
                # Equal points have one norm: exactly zero is what is a few roundings below it.
                floor = half_left * _EQUAL
                diagonal = e[..., :0] if other is not None else e.diagonal(start, dim1=-2, dim2=-1)
                looks_first = other is None and e.is_cpu and e.numel() > _FEW
                if looks_first:  # for which a GPU would have to wait
                    diagonal.fill_(-math.inf)
                if not looks_first or bool((e.amax(-1, keepdim=True) > floor).any()):
                    e.masked_fill_(e > floor, 0.0)
                diagonal.zero_()
            values = profile.value(e.to(dtype), power)
            if left is z:
                wholes = values
                break
            if not wholes:
                n, m = z.shape[-2], right.shape[-2]
                wholes = [value.new_empty(*value.shape[:-2], n, m) for value in values]
            stop = start + left.shape[-2]
            for whole, value in zip(wholes, values, strict=True):
                whole[..., start:stop, :] = value
            start = stop
        self.matrix, *self._kept = wholes

    def grad_points(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients with respect to z, and to the points of the columns where these are others."""
        z, other = self.z, self.other
        right = z if other is None else other
        grad_z: list[Tensor] = []
        # A product of the points with rows of M takes less time than one of M with the points.
        products: Any = 0.0
        sums: Any = 0.0
        start = 0
        for rows, left, *values in _blocks_of_rows(right, G, z, self.matrix, *self._kept):
            M = rows * self._profile.slope(*values)
            if z.shape[-1] == 1:
                M = M.mul_(right.mT - left)
                products = products - M.sum(-2).unsqueeze(-2)
                if other is not None:
                    grad_z.append(M.sum(-1, keepdim=True))
                continue
            if other is None:
                # A point has no distance to itself; far from the origin its two terms would cancel.
                M.diagonal(start, dim1=-2, dim2=-1).zero_()
                start += left.shape[-2]
            else:
                grad_z.append((M @ other).sub_(M.sum(-1, keepdim=True) * left))
            product, total = left.mT @ M, M.sum(-2, dtype=torch.float64)
            products, sums = (product, total) if left is z else (products + product, sums + total)
        # M is symmetric for one set of points: columns and rows give equal halves.
        grad_right = products.mT
        if z.shape[-1] > 1:
            grad_right = torch.addcmul(grad_right, sums.unsqueeze(-1), right, value=-1.0)
        if other is None:
            return 2.0 * grad_right, None
        return torch.cat(grad_z, -2), grad_right

    def grad_power(self, G: Tensor) -> Tensor:
        """The gradient with respect to the exponent, ``(*batch,)``."""
        slope = cast(Callable[..., Tensor], self._profile.power_slope)
        total: Any = 0.0
        for rows, *values in _blocks_of_rows(G.mT, G, self.matrix, *self._kept):
            total = total + slope(*values).mul_(rows).sum((-2, -1))
        return total


_EQUAL = 4.0 * torch.finfo(torch.float64).eps
_FEW = 4096  # entries of which all are looked at without asking first


def _blocks_of_rows(columns: Tensor, *matrices: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The same rows of matrices, as many as stay in a processor's cache with all columns.

    ``(*batch, m, …)`` are the points of the columns; the matrices are ``(*batch, n, …)``. Where all
    rows do, they come as they are.
    """
    rows = matrices[0]
    batch = max(rows.shape[:-2].numel(), columns.shape[:-2].numel())
    most = _AT_A_TIME["cpu" if rows.is_cpu else "other"]
    count = max(1, most // max(1, batch * columns.shape[-2]))
    if count >= rows.shape[-2]:
        return [matrices]
    return zip(*(matrix.split(count, -2) for matrix in matrices), strict=True)


class RadialGram(Gram):
    """A kernel of GPyTorch that is a function of distance.

    By name: the function, the hyperparameter that points are divided by, and the exponent's.
    """

    def __init__(
        self, kernel: Kernel, profile: str, lengthscale: str = "lengthscale", power: str = ""
    ) -> None:
        self._kernel, self._profile = kernel, PROFILES[profile]
        self._lengthscale, self._power = lengthscale, power

    def metric(self, x: Tensor) -> Tensor:
        """Points in units of the lengthscales."""
        return x / Hyperparameter(self._kernel, self._lengthscale, x.dtype).value

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        profile = self._profile
        _check_columns(self._kernel, x)
        length = Hyperparameter(self._kernel, self._lengthscale, torch.float64)
        power = Hyperparameter(self._kernel, self._power, torch.float64) if self._power else None
        z = x.detach().double() / length.value
        w = None if other is None else other.detach().double() / length.value
        exponent = None if power is None else power.value.unsqueeze(-1)
        distances = _Distances(z, w, profile, exponent, _dtype(x, other))
        needs_points = x.requires_grad or (other is not None and other.requires_grad)

        def vjp(G: Tensor) -> Gradients:
            gradients: Gradients = []
            if power is not None and power.tensor.requires_grad:
                gradients += power.gradients(distances.grad_power(G).unsqueeze(-1))
            if not needs_points and not length.tensor.requires_grad:
                return gradients
            grad_z, grad_w = distances.grad_points(G)
            if length.tensor.requires_grad:
                total = (grad_z * distances.z).sum(-2, keepdim=True)
                if grad_w is not None:
                    total = total + (grad_w * cast(Tensor, distances.other)).sum(-2, keepdim=True)
                gradients += length.gradients(total.double().neg_().div_(length.value))
            if needs_points:
                factor = profile.factor / length.value
                gradients += _gradients(x, grad_z * factor)
                if other is not None and grad_w is not None:
                    gradients += _gradients(other, grad_w * factor)
            return gradients

        return Evaluated(distances.matrix, _needing(power, length, x, other), vjp)


class PeriodicGram(Gram):
    r"""GPyTorch's periodic kernel: an RBF kernel of points on circles, one for each column.

    :math:`\exp(-2 \sin^2(\pi (x - x') / p) / \ell)` is the RBF kernel of points on circles of
    radius :math:`\ell^{-1/2}`, whose squared distance is :math:`4 \sin^2(\pi (x - x') / p) / \ell`.
    Autograd takes gradients from the circles to hyperparameters and points.
    """

    def metric(self, x: Tensor) -> Tensor:
        """Points on circles."""
        return self._circles(x).to(x)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        _check_columns(self._kernel, x)
        z = self._circles(x)
        w = None if other is None else self._circles(other)
        others = None if w is None else w.detach()
        distances = _Distances(z.detach(), others, PROFILES["rbf"], None, _dtype(x, other))

        def vjp(G: Tensor) -> Gradients:
            grad_z, grad_w = distances.grad_points(G)
            gradients = _gradients(z, grad_z)
            return gradients if w is None else gradients + _gradients(w, cast(Tensor, grad_w))

        return Evaluated(distances.matrix, _needing(z, w), vjp)

    def _circles(self, points: Tensor) -> Tensor:
        """Points ``(*batch, n, d)`` on circles, ``(*batch, n, 2 d)``, in double precision."""
        kernel = cast(kernels.PeriodicKernel, self._kernel)
        angle = points.double() * (2.0 * math.pi / kernel.period_length.double())
        radius = kernel.lengthscale.double().rsqrt()
        return torch.cat([angle.cos() * radius, angle.sin() * radius], -1)


class DifferentiatedGram(Gram):
    """A kernel that takes few operations, of whose matrix autograd takes the gradient."""

    @abstractmethod
    def _matrix(self, x: Tensor, other: Tensor) -> Tensor:
        """Covariances of points ``(*batch, n, d)`` and ``(*batch, m, d)``, in their type."""

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        dtype = _dtype(x, other)
        left = x.to(dtype)
        matrix = self._matrix(left, left if other is None else other.to(dtype))
        return Evaluated(matrix.detach(), _needing(matrix), lambda G: _gradients(matrix, G))


class LinearGram(DifferentiatedGram):
    """Inner products of points, with a variance for each column or one for all."""

    def rank(self, num_columns: int | None) -> float:
        """The number of columns; zero if not known."""
        return num_columns or 0

    def metric(self, x: Tensor) -> Tensor:
        """Columns times the roots of their variances."""
        return x * self._kernel.variance.to(x).sqrt()

    def _matrix(self, x: Tensor, other: Tensor) -> Tensor:
        _check_columns(self._kernel, x)
        return (x * self._kernel.variance.to(x)) @ other.mT


class PolynomialGram(DifferentiatedGram):
    """A power of inner products of points plus an offset.

    Its metric is that of the points, although variances of differences depend on where these are.
    """

    def _matrix(self, x: Tensor, other: Tensor) -> Tensor:
        base = x @ other.mT + self._kernel.offset.to(x).unsqueeze(-1)
        return base.pow(int(self._kernel.power))


class CosineSimilarityGram(DifferentiatedGram):
    """Cosines of the angles between points: inner products of points on the unit sphere."""

    def metric(self, x: Tensor) -> Tensor:
        """Points on the unit sphere."""
        return torch.nn.functional.normalize(x, dim=-1)

    def _matrix(self, x: Tensor, other: Tensor) -> Tensor:
        left = torch.nn.functional.normalize(x, dim=-1)
        right = left if other is x else torch.nn.functional.normalize(other, dim=-1)
        return left @ right.mT


class ConstantGram(DifferentiatedGram):
    """One number for all pairs of points."""

    def metric(self, x: Tensor) -> Tensor:
        """No distance between any points."""
        return torch.zeros_like(x[..., :1])

    def rank(self, num_columns: int | None) -> float:
        """One."""
        return 1

    def _matrix(self, x: Tensor, other: Tensor) -> Tensor:
        constant = self._kernel.constant.to(x).unsqueeze(-1)
        batch = torch.broadcast_shapes(constant.shape[:-2], x.shape[:-2])
        return constant.expand(*batch, x.shape[-2], other.shape[-2])


class TasksGram(DifferentiatedGram):
    """The covariance of the tasks that points belong to: GPyTorch's index kernel."""

    def metric(self, x: Tensor) -> Tensor:
        """Rows of a root of the tasks' covariance."""
        values, vectors = torch.linalg.eigh(self._kernel._eval_covar_matrix().detach())
        root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
        return _memberships(x, root) @ root

    def rank(self, num_columns: int | None) -> float:
        """The number of tasks."""
        return cast(Tensor, self._kernel.raw_var).shape[-1]

    def _matrix(self, x: Tensor, other: Tensor) -> Tensor:
        C = self._kernel._eval_covar_matrix().to(x)
        left = _memberships(x, C)
        right = left if other is x else _memberships(other, C)
        return left @ C @ right.mT


def _memberships(tasks: Tensor, C: Tensor) -> Tensor:
    """Ones where a point belongs to a task, ``(*batch, n, t)``, after a check of the indices."""
    count = C.shape[-1]
    if tasks.shape[-1] != 1:
        raise ShapeError("task indices", tuple(tasks.shape), "(*batch, n, 1)")
    if tasks.is_cpu:  # a GPU would finish all that is queued at each step
        low, high = (int(index) for index in tasks.aminmax())
        if low < 0 or high >= count:
            suggestion = "Number the tasks from 0, or make the kernel with more num_tasks."
            got = f"indices from {low} to {high}"
            raise ArgumentError("task indices", got, f"integers from 0 to {count - 1}", suggestion)
    return torch.nn.functional.one_hot(tasks[..., 0].long(), count).to(C)


class SpectralMixtureGram(Gram):
    r"""GPyTorch's spectral mixture kernel, a product over columns of sums of damped cosines.

    .. math:: k(x, x') = \prod_d \sum_q w_q \exp(-2 \pi^2 \sigma_{qd}^2 \tau_d^2)
        \cos(2 \pi \mu_{qd} \tau_d), \qquad \tau = x - x'

    One column and component is computed at a time, and again for the gradient.
    """

    def metric(self, x: Tensor) -> Tensor:
        """Columns times the root mean square of their frequencies and the root of the variance."""
        means, scales, weights = (
            Hyperparameter(self._kernel, f"mixture_{name}", x.dtype).value
            for name in ("means", "scales", "weights")
        )
        weights = weights[..., None, None]
        total = weights.sum(-3)
        mean_squares = (weights * (means.square() + scales.square())).sum(-3) / total
        # Each column has a factor of this variance; its root does not underflow as early.
        return x * mean_squares.sqrt() * total ** (x.shape[-1] / 2)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        _check_columns(self._kernel, x)
        dtype = _dtype(x, other)
        means, scales, weights = (
            Hyperparameter(self._kernel, f"mixture_{name}", dtype)
            for name in ("means", "scales", "weights")
        )
        columns, components = range(x.shape[-1]), range(weights.value.shape[-1])
        twice_pi = 2.0 * math.pi
        left = x.detach().to(dtype)
        right = left if other is None else other.detach().to(dtype)
        rates, widths = (
            twice_pi * parameter.value[..., 0, :, None, None] for parameter in (means, scales)
        )  # (*batch, Q, d, 1, 1)
        shares = weights.value[..., None, None]  # (*batch, Q, 1, 1)

        def differences(d: int) -> Tensor:
            return left[..., d, None] - right[..., None, :, d]

        def term(tau: Tensor, q: int, d: int) -> tuple[Tensor, Tensor]:
            """The damping of a component, and its phase."""
            damping = (tau * widths[..., q, d, :, :]).square_().mul_(-0.5).exp_()
            return damping, tau * rates[..., q, d, :, :]

        sums: list[Tensor] = []
        for d in columns:
            tau, total = differences(d), cast(Any, 0)
            for q in components:
                damping, phase = term(tau, q, d)
                total += damping.mul_(phase.cos_()) * shares[..., q, :, :]  # the first makes it
            sums.append(total)

        def vjp(G: Tensor) -> Gradients:
            batch = G.shape[:-2]
            grad_means, grad_scales, grad_weights = (
                G.new_zeros(*batch, *parameter.value.shape[-k:])
                for parameter, k in ((means, 3), (scales, 3), (weights, 1))
            )
            grad_x = G.new_zeros(*batch, *x.shape[-2:])
            grad_other = grad_x if other is None else G.new_zeros(*batch, *other.shape[-2:])
            for d in columns:
                grad_sum = G if len(sums) == 1 else G * _product(sums[:d] + sums[d + 1 :])
                tau = differences(d)
                for q in components:
                    damping, phase = term(tau, q, d)
                    rate, width = rates[..., q, d, :, :], widths[..., q, d, :, :]
                    wave = (grad_sum * damping).mul_(phase.cos())
                    grad_weights[..., q] += wave.sum((-2, -1))
                    wave.mul_(shares[..., q, :, :])
                    sine = (grad_sum * damping).mul_(phase.sin_()).mul_(shares[..., q, :, :])
                    squares = (wave * tau.square()).sum((-2, -1))
                    grad_scales[..., q, 0, d] -= twice_pi * width[..., 0, 0] * squares
                    grad_means[..., q, 0, d] -= twice_pi * (sine * tau).sum((-2, -1))
                    # Wanted under a deep kernel, or where inputs are optimized.
                    if x.requires_grad or (other is not None and other.requires_grad):
                        slope = (wave * tau).mul_(-width.square()).sub_(sine * rate)
                        grad_x[..., d] += slope.sum(-1)
                        grad_other[..., d] -= slope.sum(-2)
            gradients = means.gradients(grad_means)
            gradients += scales.gradients(grad_scales)
            gradients += weights.gradients(grad_weights)
            gradients += _gradients(x, grad_x)
            if other is not None:
                gradients += _gradients(other, grad_other)
            return gradients

        return Evaluated(_product(sums), _needing(means, scales, weights, x, other), vjp)


def _product(factors: Sequence[Tensor]) -> Tensor:
    return cast(Tensor, math.prod(cast(Any, factors[1:]), start=factors[0]))


class _Composite(Gram):
    """Kernels that a kernel of GPyTorch combines."""

    def __init__(self, kernel: Kernel, children: Sequence[Gram]) -> None:
        super().__init__(kernel)
        self._children = children
        self.has_features = any(child.has_features for child in children)

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """See :class:`Gram`; each kernel is on its columns of all features side by side."""
        if not self.has_features:
            return self, x
        grams, start, features = [], 0, []
        for base, points in (child.on_features(x) for child in self._children):
            columns = torch.arange(start, start := start + points.shape[-1], device=x.device)
            grams.append(_on_columns(base, columns))
            features.append(points)
        return type(self)(self._kernel, grams), torch.cat(features, -1)


class ScaledGram(_Composite):
    """A kernel times the ``outputscale`` of a ``ScaleKernel``."""

    def rank(self, num_columns: int | None) -> float:
        """The rank of the base kernel."""
        return self._children[0].rank(num_columns)

    def metric(self, x: Tensor) -> Tensor:
        """That of the base kernel, times the root of the scale."""
        scale = Hyperparameter(self._kernel, "outputscale", x.dtype).value
        return self._children[0].metric(x) * scale.sqrt()[..., None, None]

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        k, tensors, base_vjp, _ = self._children[0](x, other)
        scale = Hyperparameter(self._kernel, "outputscale", k.dtype)
        factor = scale.value.reshape(*scale.value.shape, 1, 1)
        matrix = k * factor

        def vjp(G: Tensor) -> Gradients:
            wanted = scale.tensor.requires_grad
            gradients = scale.gradients(inner_product(G, k)) if wanted else []
            if not tensors:
                return gradients
            if factor.numel() > 1:
                return gradients + base_vjp(G * factor)
            # Members of a batch are scaled before they are summed.
            # The product is linear: its results are smaller than the matrix.
            number = factor.reshape(())
            return gradients + [(x, (g * number).to(x.dtype)) for x, g in base_vjp(G)]

        return Evaluated(matrix, tensors + _needing(scale), vjp, is_free=True)


class SumGram(_Composite):
    """A sum of kernels."""

    def rank(self, num_columns: int | None) -> float:
        """The sum of the ranks."""
        return sum(term.rank(num_columns) for term in self._children)

    def metric(self, x: Tensor) -> Tensor:
        """Those of the terms side by side."""
        return torch.cat([term.metric(x) for term in self._children], -1)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        evaluated = [term(x, other) for term in self._children]
        matrix = sum((term.value for term in evaluated[1:]), evaluated[0].value)

        def vjp(G: Tensor) -> Gradients:
            return [pair for term in evaluated for pair in term.vjp(G)]

        return Evaluated(matrix, [tensor for term in evaluated for tensor in term.tensors], vjp)


class ProductGram(_Composite):
    """A product of kernels, entry by entry."""

    def rank(self, num_columns: int | None) -> float:
        """The product of the ranks, infinite if one is."""
        ranks = [factor.rank(num_columns) for factor in self._children]
        return math.inf if math.inf in ranks else math.prod(ranks)

    def metric(self, x: Tensor) -> Tensor:
        """Those of the factors side by side, times the root of the other factors' variance."""
        variances = [factor(x[..., :1, :]).value.to(x) for factor in self._children]
        metrics = [
            factor.metric(x) * _product([x.new_ones(1), *variances[:i], *variances[i + 1 :]]).sqrt()
            for i, factor in enumerate(self._children)
        ]
        return torch.cat(metrics, -1)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        evaluated = [factor(x, other) for factor in self._children]
        values = [factor.value for factor in evaluated]

        def vjp(G: Tensor) -> Gradients:
            gradients: Gradients = []
            for i, factor in enumerate(evaluated):
                if factor.tensors:
                    others = values[:i] + values[i + 1 :]
                    gradients += factor.vjp(_product([G, *others]))
            return gradients

        tensors = [tensor for factor in evaluated for tensor in factor.tensors]
        return Evaluated(_product(values), tensors, vjp)


class FeaturesGram(Gram):
    """A kernel on features of the points, such as the outputs of a network, or on some columns.

    Args:
        base: The kernel on the features.
        features: Maps points ``(*batch, n, d)`` to features ``(*batch, n, q)``; autograd takes
            gradients from these to its parameters and the points.
        num_columns: How many there are, of columns; features are counted when they are computed.
    """

    def __init__(
        self, base: Gram, features: Callable[[Tensor], Tensor], num_columns: int | None = None
    ) -> None:
        # Features are computed anew at each call: a network is trained between them.
        self._base, self._features, self._num_columns = base, features, num_columns
        self.has_features = num_columns is None or base.has_features

    def rank(self, num_columns: int | None) -> float:
        """The rank of the kernel on the features."""
        return self._base.rank(self._num_columns)

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """See :class:`Gram`."""
        return self._base.on_features(self._features(x))

    def metric(self, x: Tensor) -> Tensor:
        """That of the kernel on the features."""
        return self._base.metric(self._features(x))

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        return self._base(self._features(x), None if other is None else self._features(other))


def _on_columns(base: Gram, dims: Tensor) -> Gram:
    """A kernel on the columns of these indices, ``(k,)``."""
    return FeaturesGram(base, lambda x: x.index_select(-1, dims), len(dims))


def _check_columns(kernel: Kernel, x: Tensor) -> None:
    if kernel.ard_num_dims not in (None, x.shape[-1]):
        expected = f"{kernel.ard_num_dims} columns (ard_num_dims of {type(kernel).__name__})"
        suggestion = "Give the kernel as many lengthscales as there are columns."
        raise ShapeError("features", f"{x.shape[-1]} columns", expected, suggestion)


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the products of two matrices' entries, ``(*batch,)``; batches broadcast."""
    # BLAS adds them one after another, which loses digits; torch.sum adds sums of sums.
    terms = [(rows * others).sum((-2, -1)) for rows, others in _blocks_of_rows(b.mT, a, b)]
    return sum(terms[1:], terms[0])


_METHOD = "_closed_form"  # by which a class of kernels gives its closed form
_MATERN = {0.5: "matern_12", 1.5: "matern_32", 2.5: "matern_52"}


class Reason(str):
    """Why a kernel is evaluated by GPyTorch, such as "MyKernel is a kernel of its own"."""


def closed_form(kernel: Kernel, *, select: bool = False) -> Gram | Reason:
    """A kernel with its vector-Jacobian product, or the reason why it is left to GPyTorch.

    These are known: RBF, Matern, rational quadratic, cosine, periodic, spectral mixture, linear,
    polynomial, constant and index kernels of GPyTorch, deep kernels and cosine similarity, and
    sums, products and multiples of these on any columns. A subclass is another kernel, and so is
    one with hooks or with a ``forward`` of its own.

    Args:
        kernel: Any kernel of GPyTorch.
        select: Whether its points are to have all columns, of which it takes its ``active_dims``;
            else they are as its ``forward`` is given them.
    """
    kind = type(kernel)
    method, make = vars(kind).get(_METHOD), _KNOWN.get(kind)
    if has_hooks(kernel):
        return Reason(f"{kind.__name__} has hooks, or a forward that was exchanged")
    if kind is kernels.ScaleKernel:  # which selects the columns for its base, and calls its forward
        base = closed_form(cast(Kernel, kernel.base_kernel))
        gram = base if isinstance(base, Reason) else ScaledGram(kernel, [base])
    elif kind is kernels.AdditiveKernel or kind is kernels.ProductKernel:
        children = [closed_form(child, select=True) for child in cast(Any, kernel.kernels)]
        unknown = next((child for child in children if isinstance(child, Reason)), None)
        combined = SumGram if kind is kernels.AdditiveKernel else ProductGram
        gram = unknown or combined(kernel, cast(list[Gram], children))
    elif method is not None:
        gram = cast(Gram | Reason, method(kernel))
    elif kind is kernels.MaternKernel:
        gram = RadialGram(kernel, _MATERN[cast(kernels.MaternKernel, kernel).nu])
    # Subclasses such as PositiveIndexKernel only make the matrix of tasks in another way.
    elif kind.forward is kernels.IndexKernel.forward:
        gram = TasksGram(kernel)
    elif make is not None:
        gram = make(kernel)
    else:
        known = {*_KNOWN, kernels.MaternKernel}
        base = next((base for base in kind.__mro__ if base in known or _METHOD in vars(base)), None)
        what = f"a subclass of {base.__name__}" if base else "not known in closed form"
        return Reason(f"{kind.__name__} is {what}")
    # What a kernel is called on has all columns, what its forward is called on only its own.
    dims = cast(Tensor | None, kernel.active_dims)
    if not select or dims is None or isinstance(gram, Reason):
        return gram
    return _on_columns(gram, dims)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling a module does anything else than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


_KNOWN: dict[type[Kernel], Callable[[Kernel], Gram]] = {
    kernels.ConstantKernel: ConstantGram,
    kernels.CosineKernel: partial(RadialGram, profile="cosine", lengthscale="period_length"),
    kernels.LinearKernel: LinearGram,
    kernels.PeriodicKernel: PeriodicGram,
    kernels.PolynomialKernel: PolynomialGram,
    kernels.RBFKernel: partial(RadialGram, profile="rbf"),
    kernels.RQKernel: partial(RadialGram, profile="rational_quadratic", power="alpha"),
    kernels.SpectralMixtureKernel: SpectralMixtureGram,
}
