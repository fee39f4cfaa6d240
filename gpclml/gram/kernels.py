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
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpclml.errors import ArgumentError, ShapeError
from gpclml.gram.autograd import Evaluated, Gradients, fitted
from gpclml.gram.hyperparameters import Hyperparameter
from gpclml.gram.profiles import PROFILES, Profile

__all__ = [
    "DOUBLE_UP_TO",
    "ColumnsGram",
    "ConstantGram",
    "CosineSimilarityGram",
    "FeaturesGram",
    "Gram",
    "LinearGram",
    "PeriodicGram",
    "PolynomialGram",
    "ProductGram",
    "RadialGram",
    "ScaledGram",
    "SpectralMixtureGram",
    "SumGram",
    "TasksGram",
    "inner_product",
]

DOUBLE_UP_TO = 512
"""Largest n at which the covariance of float32 points is computed in float64."""

# Entries of a matrix that are multiplied at a time: they stay in a processor's cache.
_AT_A_TIME = {"cpu": 1 << 16, "other": 1 << 22}


class Gram(ABC):
    """A kernel in closed form.

    Args:
        kernel: The kernel of GPyTorch, whose hyperparameters are read at each call.
        children: The kernels that it is made of.

    Attributes:
        has_features: Whether part of it is a kernel on features of the points.
    """

    def __init__(self, kernel: Any = None, children: Sequence[Gram] = ()) -> None:
        self._kernel, self._children = kernel, children
        self.has_features = any(child.has_features for child in children)

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


def _gradients(x: Tensor, grad: Tensor, weight: Tensor | None = None) -> Gradients:
    """The gradient with respect to points, if it is wanted."""
    return [(x, fitted(_weighted(grad, weight, 2), x))] if x.requires_grad else []


def _weighted(grad: Tensor, weight: Tensor | None, dims: int) -> Tensor:
    """A gradient times a number of each batch member; ``dims`` are those of one member."""
    if weight is None:
        return grad
    return grad * (weight[(..., *(None,) * dims)] if weight.ndim else weight)


class _Distances:
    """A function of the distances of points z, which are in units of the lengthscales.

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
        wholes: list[Tensor] = []
        for rows in _blocks_of_rows(z, right):
            left = _rows(z, rows)
            if z.shape[-1] == 1:  # on a line differences of points cost no more than products
                e = (left - right.mT).square_().mul_(-0.5)
            else:
                half_left = _rows(half, rows)
                e = (left @ right.mT).add_(half_left).add_(half_right.mT)
                diagonal = None
                if other is None:
                    diagonal = e.diagonal(rows.start if rows else 0, dim1=-2, dim2=-1)
                _set_equal_points(e, half_left * _EQUAL, diagonal)
            values = profile.value(e if e.dtype == dtype else e.to(dtype), power)
            if rows is None:
                wholes = list(values)
                break
            if not wholes:
                n, m = z.shape[-2], right.shape[-2]
                wholes = [value.new_empty(*value.shape[:-2], n, m) for value in values]
            for whole, value in zip(wholes, values, strict=True):
                whole[..., rows, :] = value
        self.matrix, *self._kept = wholes

    def grad_points(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients with respect to z, and to the points of the columns where these are others."""
        z, other = self.z, self.other
        right = z if other is None else other
        grad_z: list[Tensor] = []
        # A product of the points with rows of M takes less time than one of M with the points.
        products: Any = 0.0
        sums: Any = 0.0
        for rows in _blocks_of_rows(G, right):
            left = _rows(z, rows)
            kept = [_rows(whole, rows) for whole in (self.matrix, *self._kept)]
            M = _rows(G, rows) * self._profile.slope(*kept)
            if z.shape[-1] == 1:
                M = M.mul_(right.mT - left)
                products = products - M.sum(-2).unsqueeze(-2)
                if other is not None:
                    grad_z.append(M.sum(-1, keepdim=True))
                continue
            if other is None:
                # A point has no distance to itself; far from the origin its two terms would cancel.
                M.diagonal(rows.start if rows else 0, dim1=-2, dim2=-1).zero_()
            else:
                grad_z.append((M @ other).sub_(M.sum(-1, keepdim=True) * left))
            product, total = left.mT @ M, M.sum(-2, dtype=torch.float64)
            products, sums = (
                (product, total) if rows is None else (products + product, sums + total)
            )
        grad_right = products.mT
        if z.shape[-1] > 1:
            grad_right = grad_right - sums.unsqueeze(-1) * right
        if other is None:
            return 2.0 * grad_right, None
        return torch.cat(grad_z, -2), grad_right

    def grad_power(self, G: Tensor) -> Tensor:
        """The gradient with respect to the exponent, ``(*batch,)``."""
        slope = cast(Callable[..., Tensor], self._profile.power_slope)
        total: Any = 0.0
        for rows in _blocks_of_rows(G, G.mT):
            kept = [_rows(whole, rows) for whole in (self.matrix, *self._kept)]
            total = total + slope(*kept).mul_(_rows(G, rows)).sum((-2, -1))
        return total


_EQUAL = 4.0 * torch.finfo(torch.float64).eps
_FEW = 10_000  # entries of which all are looked at without asking first


def _set_equal_points(e: Tensor, floor: Tensor, diagonal: Tensor | None) -> None:
    """Sets exactly zero what is a few roundings below it.

    Equal points have one norm, of which roundings are left as their distance.

    Args:
        e: Minus half the squared distances, ``(*batch, n, m)``.
        floor: The roundings of each row, negative, ``(*batch, n, 1)``.
        diagonal: View of the entries of points with themselves; None for other points.
    """
    if diagonal is not None and e.is_cpu and e.numel() > _FEW:  # else a GPU would have to wait
        diagonal.fill_(-math.inf)
        if not bool((e.amax(-1, keepdim=True) > floor).any()):
            diagonal.zero_()
            return
    e.masked_fill_(e > floor, 0.0)
    if diagonal is not None:
        diagonal.zero_()


def _blocks_of_rows(left: Tensor, right: Tensor) -> Sequence[slice | None]:
    """Rows of a matrix ``(*batch, n, m)`` of points that stay in a processor's cache together.

    None is all of them.
    """
    n, m = left.shape[-2], right.shape[-2]
    most = _AT_A_TIME.get(left.device.type, _AT_A_TIME["other"])
    batch = max(left.shape[:-2].numel(), right.shape[:-2].numel())
    if batch * n * m <= most:
        return _ALL
    count = max(1, most // (batch * m))
    return [slice(start, min(start + count, n)) for start in range(0, n, count)]


_ALL = (None,)


def _rows(matrix: Tensor, rows: slice | None) -> Tensor:
    return matrix if rows is None else matrix[..., rows, :]


class RadialGram(Gram):
    """A kernel of GPyTorch that is a function of distance.

    Args:
        kernel: Whose hyperparameters they are.
        profile: Name of the function.
        lengthscale: Name of the hyperparameter that points are divided by.
        power: Name of the exponent's; None where there is none.
    """

    def __init__(
        self, kernel: Kernel, profile: str, lengthscale: str = "lengthscale", power: str = ""
    ) -> None:
        super().__init__(kernel)
        self._profile = PROFILES[profile]
        self._lengthscale, self._power = lengthscale, power

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        profile = self._profile
        _check_columns(self._kernel, x)
        length = Hyperparameter(self._kernel, self._lengthscale, torch.float64)
        power = Hyperparameter(self._kernel, self._power, torch.float64) if self._power else None
        with torch.no_grad():
            z = x.double() / length.value
            w = None if other is None else other.double() / length.value
            exponent = None if power is None else power.value.unsqueeze(-1)
            distances = _Distances(z, w, profile, exponent, _dtype(x, other))
        needs_points = x.requires_grad or (other is not None and other.requires_grad)

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            gradients: Gradients = []
            if power is not None and power.needed:
                grad = _weighted(distances.grad_power(G), weight, 0)
                gradients += power.gradients(grad.unsqueeze(-1))
            if not needs_points and not length.needed:
                return gradients
            grad_z, grad_w = distances.grad_points(G)
            grad_z = _weighted(grad_z, weight, 2)
            grad_w = None if grad_w is None else _weighted(grad_w, weight, 2)
            if length.needed:
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
    """

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        _check_columns(self._kernel, x)
        period = Hyperparameter(self._kernel, "period_length", torch.float64)
        length = Hyperparameter(self._kernel, "lengthscale", torch.float64)
        with torch.no_grad():
            rate = 2.0 * math.pi / period.value
            radius = length.value.rsqrt()
            angles = [points.double() * rate for points in (x, other) if points is not None]
            circles = [(angle.cos(), angle.sin()) for angle in angles]
            z = [torch.cat([c * radius, s * radius], -1) for c, s in circles]
            distances = _Distances(
                z[0], None if other is None else z[1], PROFILES["rbf"], None, _dtype(x, other)
            )

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            grad_radius: Any = 0.0
            grad_rate: Any = 0.0
            gradients: Gradients = []
            for grad_z, (c, s), angle, points in zip(
                distances.grad_points(G), circles, angles, [x, other], strict=False
            ):
                assert grad_z is not None
                assert points is not None
                grad_cos, grad_sin = _weighted(grad_z, weight, 2).double().chunk(2, -1)
                grad_radius = grad_radius + (grad_cos * c + grad_sin * s).sum(-2, keepdim=True)
                grad_angle = (grad_sin * c - grad_cos * s) * radius
                grad_rate = grad_rate + (grad_angle * angle).sum(-2, keepdim=True)
                gradients += _gradients(points, grad_angle * rate)
            gradients += length.gradients(grad_radius * (-0.5 * radius / length.value))
            return gradients + period.gradients(-grad_rate / period.value)

        return Evaluated(distances.matrix, _needing(period, length, x, other), vjp)


class LinearGram(Gram):
    """Inner products of points, with a variance for each column or one for all."""

    def rank(self, num_columns: int | None) -> float:
        """The number of columns; zero if not known."""
        return num_columns or 0

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        _check_columns(self._kernel, x)
        dtype = _dtype(x, other)
        variance = Hyperparameter(self._kernel, "variance", dtype)
        with torch.no_grad():
            left = x.to(dtype)
            right = left if other is None else other.to(dtype)
            matrix = (left * variance.value) @ right.mT

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            product = _weighted(G @ right, weight, 2)
            gradients = variance.gradients((left * product).sum(-2, keepdim=True))
            twice = 2.0 if other is None else 1.0
            gradients += _gradients(x, product * variance.value * twice)
            if other is not None:
                gradients += _gradients(other, (G.mT @ left) * variance.value, weight)
            return gradients

        return Evaluated(matrix, _needing(variance, x, other), vjp, is_free=True)


class PolynomialGram(Gram):
    """A power of inner products of points plus an offset."""

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        dtype, power = _dtype(x, other), int(cast(Any, self._kernel).power)
        offset = Hyperparameter(self._kernel, "offset", dtype)
        with torch.no_grad():
            left = x.to(dtype)
            right = left if other is None else other.to(dtype)
            base = left @ right.mT + offset.value.unsqueeze(-1)
            matrix = base if power == 1 else base.pow(power)

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            H = G if power == 1 else G * base.pow(power - 1).mul_(power)
            gradients = offset.gradients(_weighted(H.sum((-2, -1)), weight, 0).unsqueeze(-1))
            twice = 2.0 if other is None else 1.0
            if x.requires_grad:
                gradients += _gradients(x, (H @ right) * twice, weight)
            if other is not None and other.requires_grad:
                gradients += _gradients(other, H.mT @ left, weight)
            return gradients

        return Evaluated(matrix, _needing(offset, x, other), vjp)


class CosineSimilarityGram(Gram):
    """Cosines of the angles between points: inner products of points on the unit sphere."""

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        dtype = _dtype(x, other)
        with torch.no_grad():
            sides = [_on_sphere(points.to(dtype)) for points in (x, other) if points is not None]
            matrix = sides[0][0] @ sides[-1][0].mT

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            grad_left = G @ sides[-1][0]
            if other is None:
                return _gradients(x, _along_sphere(2.0 * grad_left, *sides[0]), weight)
            grad_right = _along_sphere(G.mT @ sides[0][0], *sides[1])
            grad_left = _along_sphere(grad_left, *sides[0])
            return _gradients(x, grad_left, weight) + _gradients(other, grad_right, weight)

        return Evaluated(matrix, _needing(x, other), vjp)


_SHORTEST = 1e-12  # a point that is shorter is divided by this, as PyTorch's normalize does


def _on_sphere(points: Tensor) -> tuple[Tensor, Tensor]:
    """Points divided by their lengths, and the lengths."""
    length = points.norm(dim=-1, keepdim=True)
    return points / length.clamp_min(_SHORTEST), length


def _along_sphere(grad: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """The gradient with respect to points, of which only the part along the sphere counts."""
    radial_part = (grad * unit).sum(-1, keepdim=True) * unit
    return (grad - radial_part * (length >= _SHORTEST)) / length.clamp_min(_SHORTEST)


class ConstantGram(Gram):
    """One number for all pairs of points."""

    def rank(self, num_columns: int | None) -> float:
        """One."""
        return 1

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        constant = Hyperparameter(self._kernel, "constant", _dtype(x, other))
        rows, columns = x.shape[-2], x.shape[-2] if other is None else other.shape[-2]
        batch = torch.broadcast_shapes(constant.value.shape[:-1], x.shape[:-2])
        matrix = constant.value.unsqueeze(-1).expand(*batch, rows, columns)

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            return constant.gradients(_weighted(G.sum((-2, -1)), weight, 0).unsqueeze(-1))

        return Evaluated(matrix, _needing(constant), vjp)


class TasksGram(Gram):
    """The covariance of the tasks that points belong to: GPyTorch's index kernel."""

    def rank(self, num_columns: int | None) -> float:
        """The number of tasks."""
        return cast(Tensor, self._kernel.raw_var).shape[-1]

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        covariance = self._kernel._eval_covar_matrix()
        for points in (x, other):
            if points is not None:
                _check_tasks(points, covariance.shape[-1])
        with torch.no_grad():
            C = covariance.to(_dtype(x, other))
            left = _members(x, C)
            right = left if other is None else _members(other, C)
            matrix = left @ C @ right.mT

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            if not covariance.requires_grad:
                return []
            return [(covariance, fitted(_weighted(left.mT @ G @ right, weight, 2), covariance))]

        return Evaluated(matrix, _needing(covariance), vjp)


def _members(tasks: Tensor, like: Tensor) -> Tensor:
    """Ones where a point belongs to a task, ``(*batch, n, t)``."""
    return torch.nn.functional.one_hot(tasks[..., 0].long(), like.shape[-1]).to(like)


def _check_tasks(x: Tensor, count: int) -> None:
    if x.shape[-1] != 1:
        raise ShapeError("task indices", tuple(x.shape), "(*batch, n, 1)")
    if x.device.type != "cpu":  # a GPU would finish all that is queued at each step
        return
    low, high = (int(index) for index in x.aminmax())
    if low < 0 or high >= count:
        suggestion = "Number the tasks from 0, or make the kernel with more num_tasks."
        got = f"indices from {low} to {high}"
        raise ArgumentError("task indices", got, f"integers from 0 to {count - 1}", suggestion)


class SpectralMixtureGram(Gram):
    r"""GPyTorch's spectral mixture kernel, a product over columns of sums of damped cosines.

    .. math:: k(x, x') = \prod_d \sum_q w_q \exp(-2 \pi^2 \sigma_{qd}^2 \tau_d^2)
        \cos(2 \pi \mu_{qd} \tau_d), \qquad \tau = x - x'

    GPyTorch keeps several arrays ``(Q, n, n, d)``; here one column and component is computed at a
    time, and again for the gradient.
    """

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
        with torch.no_grad():
            left = x.to(dtype)
            right = left if other is None else other.to(dtype)
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

            def total(d: int) -> Tensor:
                tau, result = differences(d), None
                for q in components:
                    damping, phase = term(tau, q, d)
                    wave = damping.mul_(phase.cos_()) * shares[..., q, :, :]
                    result = wave if result is None else result.add_(wave)
                return cast(Tensor, result)

            sums = [total(d) for d in columns]
            matrix = _product(sums)

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
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
                    if x.requires_grad or (other is not None and other.requires_grad):
                        slope = (wave * tau).mul_(-width.square()).sub_(sine * rate)
                        grad_x[..., d] += slope.sum(-1)
                        grad_other[..., d] -= slope.sum(-2)
            gradients = means.gradients(_weighted(grad_means, weight, 3))
            gradients += scales.gradients(_weighted(grad_scales, weight, 3))
            gradients += weights.gradients(_weighted(grad_weights, weight, 1))
            gradients += _gradients(x, grad_x, weight)
            if other is not None:
                gradients += _gradients(other, grad_other, weight)
            return gradients

        return Evaluated(matrix, _needing(means, scales, weights, x, other), vjp)


def _product(factors: Sequence[Tensor]) -> Tensor:
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return product


class ScaledGram(Gram):
    """A kernel times the ``outputscale`` of a ``ScaleKernel``."""

    def rank(self, num_columns: int | None) -> float:
        """The rank of the base kernel."""
        return self._children[0].rank(num_columns)

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """See :class:`Gram`."""
        base, x = self._children[0].on_features(x)
        return ScaledGram(self._kernel, [base]), x

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        k, tensors, base_vjp, _ = self._children[0](x, other)
        scale = Hyperparameter(self._kernel, "outputscale", k.dtype)
        with torch.no_grad():
            matrix = k * scale.value[..., None, None]

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            gradients = base_vjp(G, scale.value if weight is None else scale.value * weight)
            if scale.needed:
                gradients += scale.gradients(_weighted(inner_product(G, k), weight, 0))
            return gradients

        return Evaluated(matrix, tensors + _needing(scale), vjp, is_free=True)


class SumGram(Gram):
    """A sum of kernels."""

    def rank(self, num_columns: int | None) -> float:
        """The sum of the ranks."""
        return sum(term.rank(num_columns) for term in self._children)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        evaluated = [term(x, other) for term in self._children]
        with torch.no_grad():
            matrix = evaluated[0].value
            for term in evaluated[1:]:
                matrix = matrix + term.value

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            return [pair for term in evaluated for pair in term.vjp(G, weight)]

        return Evaluated(matrix, [tensor for term in evaluated for tensor in term.tensors], vjp)


class ProductGram(Gram):
    """A product of kernels, entry by entry."""

    def rank(self, num_columns: int | None) -> float:
        """The product of the ranks, infinite if one is."""
        ranks = [factor.rank(num_columns) for factor in self._children]
        return math.inf if math.inf in ranks else math.prod(ranks)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        evaluated = [factor(x, other) for factor in self._children]
        with torch.no_grad():
            values = [factor.value for factor in evaluated]
            matrix = _product(values)

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            gradients: Gradients = []
            for i, factor in enumerate(evaluated):
                if factor.tensors:
                    others = values[:i] + values[i + 1 :]
                    gradients += factor.vjp(_product([G, *others]), weight)
            return gradients

        return Evaluated(matrix, [tensor for factor in evaluated for tensor in factor.tensors], vjp)


class ColumnsGram(Gram):
    """A kernel on some columns of the points.

    Args:
        base: The kernel on these columns.
        dims: Their indices, its ``active_dims``, ``(k,)``.
    """

    def __init__(self, base: Gram, dims: Tensor) -> None:
        super().__init__(None, [base])
        self._base, self._dims = base, dims

    def rank(self, num_columns: int | None) -> float:
        """The rank of the kernel on these columns."""
        return self._base.rank(len(self._dims))

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """See :class:`Gram`."""
        return self._base.on_features(x.index_select(-1, self._dims))

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`; autograd takes gradients from the columns to the points."""
        other = None if other is None else other.index_select(-1, self._dims)
        return self._base(x.index_select(-1, self._dims), other)


class FeaturesGram(Gram):
    """A kernel on features of the points, such as the outputs of a network.

    Args:
        base: The kernel on the features.
        features: Maps points ``(*batch, n, d)`` to features ``(*batch, n, q)``; autograd takes
            gradients from these to its parameters and the points.
    """

    def __init__(self, base: Gram, features: Callable[[Tensor], Tensor]) -> None:
        super().__init__(None, [base])
        self._base, self._features = base, features
        self.has_features = True

    def rank(self, num_columns: int | None) -> float:
        """The rank of the kernel on the features, which are counted when they are computed."""
        return self._base.rank(None)

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """See :class:`Gram`."""
        return self._base.on_features(self._features(x))

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        return self._base(self._features(x), None if other is None else self._features(other))


def _check_columns(kernel: Kernel, x: Tensor) -> None:
    if kernel.ard_num_dims not in (None, x.shape[-1]):
        expected = f"{kernel.ard_num_dims} columns (ard_num_dims of {type(kernel).__name__})"
        suggestion = "Give the kernel as many lengthscales as there are columns."
        raise ShapeError("features", f"{x.shape[-1]} columns", expected, suggestion)


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the products of two matrices' entries, ``(*batch,)``.

    Args:
        a: ``(*batch, n, m)``.
        b: The same, or with a batch shape that is broadcast to that of ``a``.
    """
    # BLAS adds them one after another, which loses digits; torch.sum adds sums of sums.
    blocks = _blocks_of_rows(a, a.mT)
    if blocks is _ALL:
        return (a * b).sum((-2, -1))
    total: Any = 0.0
    for rows in blocks:
        total = total + (_rows(a, rows) * _rows(b, rows)).sum((-2, -1))
    return total
