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
from gpytorch.kernels import IndexKernel, Kernel
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, ShapeError, UnknownNameError
from gpclml.gram.autograd import Evaluated, Gradients, as_matrix, fitted
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
    "radial",
    "radial_covariance",
]

DOUBLE_UP_TO = 512
"""Largest n at which the covariance of float32 points is computed in float64."""

# Entries of a matrix that are multiplied at a time: they stay in a processor's cache.
_AT_A_TIME = {"cpu": 1 << 16, "other": 1 << 22}


class Gram(ABC):
    """A kernel in closed form.

    Attributes:
        has_features: Whether part of it is a kernel on features of the points.
    """

    has_features = False

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


def _type_of(x: Tensor, other: Tensor | None) -> torch.dtype:
    most = x.shape[-2] if other is None else max(x.shape[-2], other.shape[-2])
    return torch.float64 if most <= DOUBLE_UP_TO else x.dtype


def _needing(*candidates: Hyperparameter | Tensor | None) -> list[Tensor]:
    """The tensors among these that require a gradient."""
    tensors = []
    for one in candidates:
        tensor = one.tensor if isinstance(one, Hyperparameter) else one
        if tensor is not None and tensor.requires_grad:
            tensors.append(tensor)
    return tensors


def _of_points(x: Tensor, grad: Tensor, weight: Tensor | None) -> Gradients:
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
        power = None if power is None else power.to(dtype)
        self.z: Tensor = z.to(dtype)
        self.other: Tensor | None = None if other is None else other.to(dtype)
        self._profile, self._power = profile, power
        self.matrix, *self._kept = self._evaluated(z, other, dtype)

    def _evaluated(self, z: Tensor, other: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        """The function and what its derivatives need, some rows at a time."""
        right = z if other is None else other
        on_line = z.shape[-1] == 1  # where differences of points cost no more than products
        half = half_right = z.square().sum(-1, keepdim=True).mul_(-0.5)
        if other is not None:
            half_right = other.square().sum(-1, keepdim=True).mul_(-0.5)
        wholes: list[Tensor] = []
        for rows in _blocks_of_rows(z, right):
            left = _rows(z, rows)
            if on_line:
                e = (left - right.mT).square_().mul_(-0.5)
            else:
                half_left = _rows(half, rows)
                e = (left @ right.mT).add_(half_left).add_(half_right.mT)
                diagonal = None
                if other is None:
                    diagonal = e.diagonal(rows.start if rows else 0, dim1=-2, dim2=-1)
                _set_equal_points(e, half_left * _EQUAL, diagonal)
            values = self._profile.value(e if e.dtype == dtype else e.to(dtype), self._power)
            if rows is None:
                return list(values)
            if not wholes:
                n, m = z.shape[-2], right.shape[-2]
                wholes = [value.new_empty(*value.shape[:-2], n, m) for value in values]
            for whole, value in zip(wholes, values, strict=True):
                whole[..., rows, :] = value
        return wholes

    def of_points(self, G: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients with respect to z, and to the points of the columns where these are others."""
        z, other = self.z, self.other
        right = z if other is None else other
        of_z: list[Tensor] = []
        # A product of the points with rows of M takes less time than one of M with the points.
        products: Any = 0.0
        sums: Any = 0.0
        for rows in _blocks_of_rows(G, right):
            left = _rows(z, rows)
            parts = [_rows(whole, rows) for whole in (self.matrix, *self._kept)]
            M = _rows(G, rows) * self._profile.slope(*parts)
            if z.shape[-1] == 1:
                M = M.mul_(right.mT - left)
                products = products - M.sum(-2).unsqueeze(-2)
                if other is not None:
                    of_z.append(M.sum(-1, keepdim=True))
                continue
            if other is None:
                # A point has no distance to itself; far from the origin its two terms would cancel.
                M.diagonal(rows.start if rows else 0, dim1=-2, dim2=-1).zero_()
            else:
                of_z.append((M @ other).sub_(M.sum(-1, keepdim=True) * left))
            product, total = left.mT @ M, M.sum(-2, dtype=torch.float64)
            products, sums = (
                (product, total) if rows is None else (products + product, sums + total)
            )
        of_right = products.mT
        if z.shape[-1] > 1:
            of_right = of_right - sums.unsqueeze(-1) * right
        if other is None:
            return 2.0 * of_right, None
        return torch.cat(of_z, -2), of_right

    def of_power(self, G: Tensor) -> Tensor:
        """The gradient with respect to the exponent, ``(*batch,)``."""
        slope = cast(Callable[..., Tensor], self._profile.power_slope)
        total: Any = 0.0
        for rows in _blocks_of_rows(G, G.mT):
            parts = [_rows(whole, rows) for whole in (self.matrix, *self._kept)]
            total = total + slope(*parts).mul_(_rows(G, rows)).sum((-2, -1))
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
        self._kernel, self._profile = kernel, PROFILES[profile]
        self._lengthscale, self._power = lengthscale, power

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        kernel = self._kernel
        _check_columns(kernel, x)
        length = Hyperparameter(kernel, self._lengthscale, torch.float64)
        power = Hyperparameter(kernel, self._power, torch.float64) if self._power else None
        return radial(x, other, self._profile, length, power)


def radial(
    x: Tensor,
    other: Tensor | None,
    profile: Profile,
    length: Hyperparameter | None,
    power: Hyperparameter | None,
) -> Evaluated:
    """A function of distance at points, as :class:`Gram` gives its matrix.

    Args:
        x: Points, ``(*batch, n, d)``.
        other: Of the columns; the same if None.
        profile: The function.
        length: Lengthscales, ``(*batch, 1, d)`` or ``(*batch, 1, 1)``; ones if None.
        power: The exponent, ``(*batch, 1)``.
    """
    with torch.no_grad():
        unit = 1.0 if length is None else length.value
        z = x.double() / unit
        w = None if other is None else other.double() / unit
        exponent = None if power is None else power.value.unsqueeze(-1)
        distances = _Distances(z, w, profile, exponent, _type_of(x, other))
    needs_points = x.requires_grad or (other is not None and other.requires_grad)

    def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
        gradients: Gradients = []
        if power is not None and power.needed:
            gradients += power.gradients(_weighted(distances.of_power(G), weight, 0).unsqueeze(-1))
        if not needs_points and (length is None or not length.needed):
            return gradients
        of_z, of_w = distances.of_points(G)
        of_z = _weighted(of_z, weight, 2)
        of_w = None if of_w is None else _weighted(of_w, weight, 2)
        if length is not None and length.needed:
            total = (of_z * distances.z).sum(-2, keepdim=True)
            if of_w is not None:
                total = total + (of_w * cast(Tensor, distances.other)).sum(-2, keepdim=True)
            gradients += length.gradients(total.double().neg_().div_(length.value))
        if needs_points:
            factor = profile.factor if length is None else profile.factor / length.value
            gradients += _of_points(x, of_z * factor, None)
            if other is not None and of_w is not None:
                gradients += _of_points(other, of_w * factor, None)
        return gradients

    return Evaluated(distances.matrix, _needing(power, length, x, other), vjp)


_SHAPES = {
    "points": "float (*batch, n, d)", "lengthscale": "float (*batch, 1, d) | float (*batch, 1, 1)",
    "scale": "float (*batch)", "noise": "float (*batch, n) | float (*batch, 1)",
    "power": "float (*batch)",
}  # fmt: skip


@checked(late=True, **_SHAPES)
def radial_covariance(
    points: Tensor,  # shape: (*batch, n, d)
    profile: str,
    *,
    lengthscale: Tensor | None = None,  # shape: (*batch, 1, d) or (*batch, 1, 1)
    scale: Tensor | None = None,  # shape: (*batch,)
    noise: Tensor | None = None,  # shape: (*batch, n) or (*batch, 1)
    power: Tensor | None = None,  # shape: (*batch,)
) -> Tensor:
    r"""The covariance of points by a function of their distances, differentiable in closed form.

    With r the distance of two points in units of the lengthscales:

    - ``"rbf"``: :math:`\exp(-r^2 / 2)`
    - ``"matern_12"``, ``"matern_32"``, ``"matern_52"``: of smoothness 1/2, 3/2, 5/2
    - ``"rational_quadratic"``: :math:`(1 + r^2 / 2\alpha)^{-\alpha}`
    - ``"cosine"``: :math:`\cos \pi r`

    Args:
        points: Inputs, ``(*batch, n, d)``.
        profile: Name of the function.
        lengthscale: Units of distance, ``(*batch, 1, d)`` or one for all dimensions; ones if None.
        scale: Variance that multiplies it, ``(*batch,)``; one if None.
        noise: Variances that are added on the diagonal, ``(*batch, n)`` or one for all points;
            none if None.
        power: The exponent :math:`\alpha` of ``"rational_quadratic"``, ``(*batch,)``.

    Returns:
        Covariances, ``(*batch, n, n)``, with the batch shape that all arguments broadcast to.

    Raises:
        UnknownNameError: If there is no such function.
        UnsupportedError: On a second derivative.

    Note:
        n² (2 d + 4) multiplications and n² exponentials; the gradient 4 n² d. Two n x n arrays are
        kept for the gradient (one for ``"rbf"``).

    Examples:
        >>> from gpclml.linalg import radial_covariance
        >>> x = torch.rand(5, 2, dtype=torch.float64)
        >>> lengthscale = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
        >>> radial_covariance(x, "matern_52", lengthscale=lengthscale.unsqueeze(0)).shape
        torch.Size([5, 5])
    """
    if profile not in PROFILES:
        raise UnknownNameError("profile", profile, tuple(PROFILES))
    length = None if lengthscale is None else Hyperparameter.of(lengthscale, "", torch.float64)
    exponent = None if power is None else Hyperparameter.of(power.unsqueeze(-1), "", torch.float64)
    evaluated = radial(points, None, PROFILES[profile], length, exponent)
    covariance = as_matrix(evaluated, points.dtype)
    if scale is not None:
        covariance = covariance * scale[..., None, None]
    if noise is not None:
        of_each = noise.expand(*noise.shape[:-1], points.shape[-2])
        covariance = covariance + torch.diag_embed(of_each)
    return covariance


class PeriodicGram(Gram):
    r"""GPyTorch's periodic kernel: an RBF kernel of points on circles, one for each column.

    :math:`\exp(-2 \sin^2(\pi (x - x') / p) / \ell)` is the RBF kernel of points on circles of
    radius :math:`\ell^{-1/2}`, whose squared distance is :math:`4 \sin^2(\pi (x - x') / p) / \ell`.

    Args:
        kernel: Whose hyperparameters they are.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        _check_columns(self._kernel, x)
        period = Hyperparameter(self._kernel, "period_length", torch.float64)
        length = Hyperparameter(self._kernel, "lengthscale", torch.float64)
        with torch.no_grad():
            rate = 2.0 * math.pi / period.value
            radius = length.value.rsqrt()
            angles = [one.double() * rate for one in (x, other) if one is not None]
            circles = [(angle.cos(), angle.sin()) for angle in angles]
            z = [torch.cat([c * radius, s * radius], -1) for c, s in circles]
            distances = _Distances(
                z[0], None if other is None else z[1], PROFILES["rbf"], None, _type_of(x, other)
            )

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            of_radius: Any = 0.0
            of_rate: Any = 0.0
            gradients: Gradients = []
            for of_z, (c, s), angle, points in zip(
                distances.of_points(G), circles, angles, [x, other], strict=False
            ):
                assert of_z is not None
                assert points is not None
                of_cos, of_sin = _weighted(of_z, weight, 2).double().chunk(2, -1)
                of_radius = of_radius + (of_cos * c + of_sin * s).sum(-2, keepdim=True)
                of_angle = (of_sin * c - of_cos * s) * radius
                of_rate = of_rate + (of_angle * angle).sum(-2, keepdim=True)
                gradients += _of_points(points, of_angle * rate, None)
            gradients += length.gradients(of_radius * (-0.5 * radius / length.value))
            return gradients + period.gradients(-of_rate / period.value)

        return Evaluated(distances.matrix, _needing(period, length, x, other), vjp)


class LinearGram(Gram):
    """Inner products of points, with a variance for each column or one for all.

    Args:
        kernel: A ``LinearKernel``.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def rank(self, num_columns: int | None) -> float:
        """The number of columns; zero if not known."""
        return num_columns or 0

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        _check_columns(self._kernel, x)
        dtype = _type_of(x, other)
        variance = Hyperparameter(self._kernel, "variance", dtype)
        with torch.no_grad():
            left = x.to(dtype)
            right = left if other is None else other.to(dtype)
            matrix = (left * variance.value) @ right.mT

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            product = _weighted(G @ right, weight, 2)
            gradients = variance.gradients((left * product).sum(-2, keepdim=True))
            twice = 2.0 if other is None else 1.0
            gradients += _of_points(x, product * variance.value * twice, None)
            if other is not None:
                gradients += _of_points(other, (G.mT @ left) * variance.value, weight)
            return gradients

        return Evaluated(matrix, _needing(variance, x, other), vjp, is_free=True)


class PolynomialGram(Gram):
    """A power of inner products of points plus an offset.

    Args:
        kernel: A ``PolynomialKernel``.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        dtype, power = _type_of(x, other), int(cast(Any, self._kernel).power)
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
                gradients += _of_points(x, (H @ right) * twice, weight)
            if other is not None and other.requires_grad:
                gradients += _of_points(other, H.mT @ left, weight)
            return gradients

        return Evaluated(matrix, _needing(offset, x, other), vjp)


class CosineSimilarityGram(Gram):
    """Cosines of the angles between points: inner products of points on the unit sphere."""

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        dtype = _type_of(x, other)
        with torch.no_grad():
            sides = [_on_sphere(one.to(dtype)) for one in (x, other) if one is not None]
            matrix = sides[0][0] @ sides[-1][0].mT

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            of_left = G @ sides[-1][0]
            if other is None:
                return _of_points(x, _along_sphere(2.0 * of_left, *sides[0]), weight)
            of_right = _along_sphere(G.mT @ sides[0][0], *sides[1])
            own = _of_points(x, _along_sphere(of_left, *sides[0]), weight)
            return own + _of_points(other, of_right, weight)

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
    """One number for all pairs of points.

    Args:
        kernel: A ``ConstantKernel``.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def rank(self, num_columns: int | None) -> float:
        """One."""
        return 1

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        constant = Hyperparameter(self._kernel, "constant", _type_of(x, other))
        rows, columns = x.shape[-2], x.shape[-2] if other is None else other.shape[-2]
        batch = torch.broadcast_shapes(constant.value.shape[:-1], x.shape[:-2])
        matrix = constant.value.unsqueeze(-1).expand(*batch, rows, columns)

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            return constant.gradients(_weighted(G.sum((-2, -1)), weight, 0).unsqueeze(-1))

        return Evaluated(matrix, _needing(constant), vjp)


class TasksGram(Gram):
    """The covariance of the tasks that points belong to: GPyTorch's index kernel.

    Args:
        kernel: An ``IndexKernel``.
    """

    def __init__(self, kernel: IndexKernel) -> None:
        self._kernel = kernel

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
            C = covariance.to(_type_of(x, other))
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
    low, high = (int(one) for one in x.aminmax())
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

    Args:
        kernel: A ``SpectralMixtureKernel``.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        _check_columns(self._kernel, x)
        dtype = _type_of(x, other)
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
                twice_pi * one.value[..., 0, :, None, None] for one in (means, scales)
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
            of_means, of_scales, of_weights = (
                G.new_zeros(*batch, *one.value.shape[-k:])
                for one, k in ((means, 3), (scales, 3), (weights, 1))
            )
            of_x = G.new_zeros(*batch, *x.shape[-2:])
            of_other = of_x if other is None else G.new_zeros(*batch, *other.shape[-2:])
            for d in columns:
                of_sum = G if len(sums) == 1 else G * _product(sums[:d] + sums[d + 1 :])
                tau = differences(d)
                for q in components:
                    damping, phase = term(tau, q, d)
                    rate, width = rates[..., q, d, :, :], widths[..., q, d, :, :]
                    wave = (of_sum * damping).mul_(phase.cos())
                    of_weights[..., q] += wave.sum((-2, -1))
                    wave.mul_(shares[..., q, :, :])
                    sine = (of_sum * damping).mul_(phase.sin_()).mul_(shares[..., q, :, :])
                    squares = (wave * tau.square()).sum((-2, -1))
                    of_scales[..., q, 0, d] -= twice_pi * width[..., 0, 0] * squares
                    of_means[..., q, 0, d] -= twice_pi * (sine * tau).sum((-2, -1))
                    if x.requires_grad or (other is not None and other.requires_grad):
                        slope = (wave * tau).mul_(-width.square()).sub_(sine * rate)
                        of_x[..., d] += slope.sum(-1)
                        of_other[..., d] -= slope.sum(-2)
            gradients = means.gradients(_weighted(of_means, weight, 3))
            gradients += scales.gradients(_weighted(of_scales, weight, 3))
            gradients += weights.gradients(_weighted(of_weights, weight, 1))
            gradients += _of_points(x, of_x, weight)
            if other is not None:
                gradients += _of_points(other, of_other, weight)
            return gradients

        return Evaluated(matrix, _needing(means, scales, weights, x, other), vjp)


def _product(factors: Sequence[Tensor]) -> Tensor:
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return product


class ScaledGram(Gram):
    """A kernel times its ``outputscale``.

    Args:
        kernel: A ``ScaleKernel``.
        base: Its base kernel.
    """

    def __init__(self, kernel: Kernel, base: Gram) -> None:
        self._kernel, self._base = kernel, base
        self.has_features = base.has_features

    def rank(self, num_columns: int | None) -> float:
        """That of the base kernel."""
        return self._base.rank(num_columns)

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """See :class:`Gram`."""
        base, x = self._base.on_features(x)
        return ScaledGram(self._kernel, base), x

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        k, tensors, base_vjp, _ = self._base(x, other)
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
    """A sum of kernels.

    Args:
        terms: Its terms.
    """

    def __init__(self, terms: Sequence[Gram]) -> None:
        self._terms = terms
        self.has_features = any(term.has_features for term in terms)

    def rank(self, num_columns: int | None) -> float:
        """The sum of the ranks."""
        return sum(term.rank(num_columns) for term in self._terms)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        evaluated = [term(x, other) for term in self._terms]
        with torch.no_grad():
            matrix = evaluated[0].value
            for term in evaluated[1:]:
                matrix = matrix + term.value

        def vjp(G: Tensor, weight: Tensor | None = None, /) -> Gradients:
            return [pair for term in evaluated for pair in term.vjp(G, weight)]

        return Evaluated(matrix, [one for term in evaluated for one in term.tensors], vjp)


class ProductGram(Gram):
    """A product of kernels, entry by entry.

    Args:
        factors: Its factors.
    """

    def __init__(self, factors: Sequence[Gram]) -> None:
        self._factors = factors
        self.has_features = any(factor.has_features for factor in factors)

    def rank(self, num_columns: int | None) -> float:
        """The product of the ranks, infinite if one is."""
        ranks = [factor.rank(num_columns) for factor in self._factors]
        return math.inf if math.inf in ranks else math.prod(ranks)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`."""
        evaluated = [factor(x, other) for factor in self._factors]
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

        return Evaluated(matrix, [one for factor in evaluated for one in factor.tensors], vjp)


class ColumnsGram(Gram):
    """A kernel on some columns of the points, its ``active_dims``.

    Args:
        base: The kernel on these columns.
        dims: Their indices, ``(k,)``.
    """

    def __init__(self, base: Gram, dims: Tensor) -> None:
        self._base, self._dims = base, dims
        self.has_features = base.has_features

    def rank(self, num_columns: int | None) -> float:
        """That of the kernel on these columns."""
        return self._base.rank(len(self._dims))

    def on_features(self, x: Tensor) -> tuple[Gram, Tensor]:
        """See :class:`Gram`."""
        return self._base.on_features(x.index_select(-1, self._dims))

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Evaluated:
        """See :class:`Gram`; autograd takes gradients from the columns to the points."""
        some = None if other is None else other.index_select(-1, self._dims)
        return self._base(x.index_select(-1, self._dims), some)


class FeaturesGram(Gram):
    """A kernel on features of the points, such as the outputs of a network.

    Args:
        base: The kernel on the features.
        features: Maps points ``(*batch, n, d)`` to features ``(*batch, n, q)``; autograd takes
            gradients from these to its parameters and the points.
    """

    def __init__(self, base: Gram, features: Callable[[Tensor], Tensor]) -> None:
        self._base, self._features = base, features

    def rank(self, num_columns: int | None) -> float:
        """That of the kernel on the features, which are counted when they are computed."""
        return self._base.rank(None)

    has_features = True

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
