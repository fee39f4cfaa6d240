r"""Kernels of NumPy's arrays, with gradients by their hyperparameters in closed form.

A kernel is a tree: functions of distance, linear and constant kernels, scaled, added and
multiplied. Each gives its covariance as a number times a matrix, and passes the gradient of a loss
on: with :math:`G = \partial L / \partial K` of the whole, a kernel within a scaled one gets
:math:`s G`, each term of a sum G itself, and each factor of a product G times the other factors,
entry by entry. For functions of distance, with :math:`H = s\, G \circ k'` and points z in units of
the lengthscales,

.. math:: \frac{\partial L}{\partial z} = 2 (H z - \operatorname{diag}(H 1)\, z), \qquad
    \frac{\partial L}{\partial \ell_d}
    = -\frac{1}{\ell_d} \sum_i z_{id} \frac{\partial L}{\partial z_{id}}.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy
from numpy import ndarray
from scipy.linalg import blas as _blas

from gpclml.linalg.profiles import PROFILES, Profile, half_squared_distances

__all__ = [
    "ArrayKernel",
    "ConstantArrayKernel",
    "FixedPoints",
    "LinearArrayKernel",
    "Number",
    "PeriodicArrayKernel",
    "PolynomialArrayKernel",
    "ProductArrayKernel",
    "RadialArrayKernel",
    "ScaledArrayKernel",
    "SumArrayKernel",
    "TaskArrayKernel",
    "panels",
    "set_diagonal",
]

blas: Any = _blas  # whose functions are known at run time alone

# Points up to which whole matrices take no longer; PyTorch's factor needs both halves of its own.
_WHOLE_UP_TO = 512
_PANEL = 128  # rows


class Number(Protocol):
    """A hyperparameter, or anything else that a gradient is wanted for.

    Attributes:
        needed: Whether it is.
    """

    needed: bool

    def value(self) -> ndarray:
        """What it is now."""
        ...

    def add(self, gradient: Any) -> None:
        """Takes note of a gradient, of its shape or of one that is summed to it."""
        ...


class FixedPoints:
    """Points that no gradient is wanted for.

    Args:
        points: ``(n, d)``.
    """

    needed = False

    def __init__(self, points: ndarray) -> None:
        self._points = points

    def value(self) -> ndarray:
        """The points."""
        return self._points

    def add(self, gradient: Any) -> None:
        """Nothing."""


class ArrayKernel(ABC):
    """A kernel at fixed inputs, ``(n, n)``."""

    @abstractmethod
    def value(self) -> tuple[ndarray, float]:
        """A matrix and a number, whose product the covariance is; the matrix may be ``(1, 1)``."""

    @abstractmethod
    def add_gradient(self, G: ndarray, weight: float) -> None:
        """Adds the gradients by the hyperparameters; once after each :meth:`value`.

        Args:
            G: Gradient by the covariance, whose lower half holds that by a symmetric matrix and
                whose upper half is zero, by columns. It stays as it is.
            weight: Of all gradients.
        """


class RadialArrayKernel(ArrayKernel):
    """A function of distance.

    Args:
        points: ``(n, d)``.
        profile: The function.
        lengthscale: ``(1, d)`` or ``(1, 1)``; None for ones.
        power: The exponent of ``"rational_quadratic"``.
    """

    def __init__(
        self,
        points: Number,
        profile: Profile,
        lengthscale: Number | None,
        power: Number | None,
    ) -> None:
        self._points, self._profile = points, profile
        self._lengthscale, self._power = lengthscale, power
        self._kept: Sequence[ndarray] = ()
        self._work: ndarray | None = None

    def value(self) -> tuple[ndarray, float]:
        """The function, in memory that is kept from one call to the next."""
        points, profile = self._points.value(), self._profile
        n = len(points)
        work = self._work
        if work is None:
            # Memory of this size that is asked for anew has to be cleared by the system first.
            work = self._work = numpy.empty(n * next(panels(n))[0].stop)
        self._scale = None if self._lengthscale is None else self._lengthscale.value()
        z = points if self._scale is None else points / self._scale
        z = z - numpy.add.reduce(z, 0) / n
        if profile.factor != 1.0:
            z *= profile.factor
        power = None if self._power is None else self._power.value().reshape(())
        self._z = z
        for rows, rest in panels(n):
            parts = profile.value(half_squared_distances(z[rows], z[rest], work), power)
            if n <= _WHOLE_UP_TO:
                self._kept = parts
                break
            if not self._kept:
                self._kept = [numpy.zeros((n, n)) for _ in parts]
            for whole, part in zip(self._kept, parts, strict=True):
                whole[rows, rest] = part
        return self._kept[0], 1.0

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By power, lengthscale and points."""
        profile, z = self._profile, self._z
        power = self._power if self._power is not None and self._power.needed else None
        of_scale = self._lengthscale is not None and self._lengthscale.needed
        of_power, of_points = 0.0, of_scale or self._points.needed
        for panel in panels(len(z)):
            part, kept = G.T[panel], [one[panel] for one in self._kept]
            if power is not None:
                assert profile.power_slope is not None
                of_power += _inner_product_of_panel(part, profile.power_slope(*kept))
            if of_points:  # in the memory of values that are not asked for again
                numpy.multiply(part, profile.slope(*kept), out=kept[0])
        if power is not None:
            power.add(weight * of_power)
        if not of_points:
            return
        M = self._kept[0].T
        set_diagonal(M, 0.0)
        if z.shape[1] == 1:  # without a difference of two sums, which cancels
            M += M.T
            gradient = numpy.add.reduce(M * (z.T - z), 1)[:, None]
        else:
            columns = numpy.concatenate([z, numpy.ones((len(z), 1))], 1)
            products = blas.dsymm(1.0, M, columns, lower=1)
            gradient = products[:, :-1] - products[:, -1:] * z
        gradient *= 2.0 * weight
        if of_scale:
            assert self._lengthscale is not None
            self._lengthscale.add(-numpy.add.reduce(gradient * z, 0)[None] / self._scale)
        if self._points.needed:
            factor = profile.factor if self._scale is None else profile.factor / self._scale
            self._points.add(gradient * factor)


class PeriodicArrayKernel(ArrayKernel):
    """GPyTorch's periodic kernel: an RBF kernel of points on circles, one for each input.

    Args:
        points: ``(n, d)``.
        period: ``(1, d)`` or ``(1, 1)``.
        lengthscale: Of squared sines, ``(1, d)`` or ``(1, 1)``.
    """

    def __init__(self, points: Number, period: Number, lengthscale: Number) -> None:
        self._points, self._period, self._lengthscale = points, period, lengthscale
        self._circles = _Circles()
        self._rbf = RadialArrayKernel(self._circles, PROFILES["rbf"], None, None)

    def value(self) -> tuple[ndarray, float]:
        """That of the RBF kernel."""
        self._rate = 2.0 * math.pi / self._period.value()
        self._angle = self._points.value() * self._rate
        self._cosine, self._sine = numpy.cos(self._angle), numpy.sin(self._angle)
        radius = self._lengthscale.value() ** -0.5
        self._circles.points = numpy.concatenate([self._cosine * radius, self._sine * radius], 1)
        return self._rbf.value()

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By the chain rule from that by the points on the circles."""
        self._rbf.add_gradient(G, weight)
        of_cosine, of_sine = numpy.hsplit(self._circles.gradient, 2)
        length = self._lengthscale.value()
        radius = length**-0.5
        by_radius = (of_cosine * self._cosine + of_sine * self._sine).sum(0, keepdims=True)
        by_angle = (of_sine * self._cosine - of_cosine * self._sine) * radius
        self._lengthscale.add(-0.5 * by_radius * radius / length)
        by_period = -(by_angle * self._angle).sum(0, keepdims=True) / self._period.value()
        self._period.add(by_period)
        if self._points.needed:
            self._points.add(by_angle * self._rate)


class _Circles:
    """Points between two kernels."""

    needed = True
    points: ndarray
    gradient: ndarray

    def value(self) -> ndarray:
        return self.points

    def add(self, gradient: ndarray) -> None:
        self.gradient = gradient


class LinearArrayKernel(ArrayKernel):
    """Inner products of points.

    Args:
        points: ``(n, d)``.
        variance: Of each dimension's slope, ``(1, d)`` or ``(1, 1)``; None for ones.
    """

    def __init__(self, points: Number, variance: Number | None) -> None:
        self._points, self._variance = points, variance

    def value(self) -> tuple[ndarray, float]:
        """The weighted inner products."""
        self._x = self._points.value()
        self._v = None if self._variance is None else self._variance.value()
        return (self._x if self._v is None else self._x * self._v) @ self._x.T, 1.0

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By the variances and the points."""
        of_variance = self._variance is not None and self._variance.needed
        if not (of_variance or self._points.needed):
            return
        product = blas.dsymm(weight, G, self._x.T, side=1, lower=1).T
        if of_variance:
            assert self._variance is not None
            self._variance.add((self._x * product).sum(0, keepdims=True))
        if self._points.needed:
            self._points.add(2.0 * product if self._v is None else 2.0 * product * self._v)


class PolynomialArrayKernel(ArrayKernel):
    """Powers of inner products of points plus a number.

    Args:
        points: ``(n, d)``.
        offset: The number.
        power: The exponent.
    """

    def __init__(self, points: Number, offset: Number, power: float) -> None:
        self._products = LinearArrayKernel(points, None)
        self._offset, self._power = offset, power

    def value(self) -> tuple[ndarray, float]:
        """The powers."""
        self._base = self._products.value()[0]
        self._base += float(self._offset.value().reshape(()))
        return self._base if self._power == 1 else self._base**self._power, 1.0

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By the number and the points."""
        if self._power != 1:
            G = G * (self._power * self._base.T ** (self._power - 1))
        if self._offset.needed:
            self._offset.add(weight * (2.0 * G.sum() - G.trace()))
        self._products.add_gradient(G, weight)


class TaskArrayKernel(ArrayKernel):
    """The covariance of the tasks that points belong to.

    Args:
        tasks: Index of each point's task, ``(n, 1)``.
        covariance: Of the tasks, ``(t, t)``.
    """

    def __init__(self, tasks: Number, covariance: Number) -> None:
        self._tasks, self._covariance = tasks.value()[:, 0].astype(int), covariance

    def value(self) -> tuple[ndarray, float]:
        """The entries of the points' tasks."""
        self._C = self._covariance.value()
        return self._C[self._tasks[:, None], self._tasks], 1.0

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By the covariance of tasks, summed over the points of each."""
        if self._covariance.needed:
            member = numpy.eye(len(self._C))[self._tasks]
            self._covariance.add(member.T @ blas.dsymm(weight, G, member, lower=1))


class ConstantArrayKernel(ArrayKernel):
    """One number for all pairs of points.

    Args:
        constant: It.
    """

    def __init__(self, constant: Number) -> None:
        self._constant = constant

    def value(self) -> tuple[ndarray, float]:
        """A matrix of one entry."""
        return numpy.ones((1, 1)), float(self._constant.value().reshape(()))

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By the constant."""
        if self._constant.needed:
            self._constant.add(weight * _inner_product(G, numpy.ones((1, 1))))


class ScaledArrayKernel(ArrayKernel):
    """A kernel times a number.

    Args:
        kernel: The kernel.
        scale: The number.
    """

    def __init__(self, kernel: ArrayKernel, scale: Number) -> None:
        self._kernel, self._scale = kernel, scale

    def value(self) -> tuple[ndarray, float]:
        """The matrix of the kernel, and the product of both numbers."""
        self._k, self._s = self._kernel.value()
        self._own = float(self._scale.value().reshape(()))
        return self._k, self._s * self._own

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By the number, and by those of the kernel."""
        if self._scale.needed:
            self._scale.add(weight * self._s * _inner_product(G, self._k))
        self._kernel.add_gradient(G, weight * self._own)


class _Several(ArrayKernel):
    """Base class of kernels that are made of several others.

    Args:
        kernels: At least one whose matrix is ``(n, n)``.
    """

    def __init__(self, kernels: Sequence[ArrayKernel]) -> None:
        self._kernels = list(kernels)
        self._work: ndarray | None = None

    def _values(self) -> list[tuple[ndarray, float]]:
        values = [kernel.value() for kernel in self._kernels]
        if self._work is None:
            self._work = numpy.empty(numpy.broadcast_shapes(*(k.shape for k, _ in values)))
        return values


class SumArrayKernel(_Several):
    """A sum of kernels."""

    def value(self) -> tuple[ndarray, float]:
        """The sum."""
        (k, s), *others = self._values()
        total = numpy.multiply(k, s, out=self._work)
        for k, s in others:
            total += k if s == 1.0 else k * s
        return total, 1.0

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By those of each term."""
        for kernel in self._kernels:
            kernel.add_gradient(G, weight)


class ProductArrayKernel(_Several):
    """A product of kernels, entry by entry."""

    def value(self) -> tuple[ndarray, float]:
        """The product of the matrices, and that of the numbers."""
        self._factors = self._values()
        product = numpy.multiply(self._factors[0][0], 1.0, out=self._work)
        for k, _ in self._factors[1:]:
            product *= k
        return product, math.prod(s for _, s in self._factors)

    def add_gradient(self, G: ndarray, weight: float) -> None:
        """By those of each factor."""
        passed = []
        for place in range(len(self._factors)):
            others = self._factors[:place] + self._factors[place + 1 :]
            of_factor = G
            for k, _ in others:
                of_factor = of_factor * k.T
            passed.append((of_factor, weight * math.prod(s for _, s in others)))
        for kernel, (of_factor, weight_of_factor) in zip(self._kernels, passed, strict=True):
            kernel.add_gradient(of_factor, weight_of_factor)


def panels(n: int) -> Iterator[tuple[slice, slice]]:
    """Rows of a symmetric matrix, and the columns from their first on: one half is computed.

    Small matrices are one panel. The other half of larger ones stays zero. What is computed of a
    panel stays in a processor's cache meanwhile.
    """
    size = n if n <= _WHOLE_UP_TO else _PANEL
    return ((slice(start, min(start + size, n)), slice(start, n)) for start in range(0, n, size))


def _inner_product(G: ndarray, k: ndarray) -> float:
    """The sum over all pairs of points, of which G holds one half."""
    k = k if k.shape == G.shape else numpy.broadcast_to(k, G.shape)
    return sum(_inner_product_of_panel(G.T[panel], k[panel]) for panel in panels(len(G)))


def _inner_product_of_panel(G: ndarray, k: ndarray) -> float:
    both = G * k
    return float(2.0 * both.sum() - both.diagonal().sum())


def set_diagonal(matrix: ndarray, values: ndarray | float) -> None:
    """Sets the diagonal of a square matrix."""
    matrix.flat[:: len(matrix) + 1] = values
