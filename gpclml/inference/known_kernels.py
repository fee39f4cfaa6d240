"""Kernels and constraints of GPyTorch that are computed with derivatives in closed form.

A kernel of ours on the features of a network is known if the kernel on these features is. Its class
says so by a method ``_base_at_features``, which gives that kernel and the features of points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    CosineKernel,
    IndexKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.lazy import LazyEvaluatedKernelTensor
from numpy import ndarray
from scipy.special import expit
from torch import Tensor

from gpclml._utils.arguments import reads_are_free
from gpclml.errors import ArgumentError, ShapeError
from gpclml.linalg import DenseCovariance, RadialCovariance, radial_covariance
from gpclml.linalg.array_kernels import (
    ArrayKernel,
    ConstantArrayKernel,
    FixedPoints,
    LinearArrayKernel,
    Number,
    PeriodicArrayKernel,
    PolynomialArrayKernel,
    ProductArrayKernel,
    RadialArrayKernel,
    ScaledArrayKernel,
    SumArrayKernel,
    TaskArrayKernel,
)
from gpclml.linalg.covariance_products import row_of
from gpclml.linalg.profiles import PROFILES

__all__ = [
    "Noise",
    "Transform",
    "UnknownPartError",
    "array_kernel",
    "covariance_at",
    "fixed_points",
    "has_arrays",
    "has_features",
    "is_known",
    "known_parts",
    "known_row",
    "transform_of",
    "variances",
    "with_noise",
]

Noise = Tensor | torch.nn.Module | None
"""Variances of independent noise, ``(*batch, n)`` or ``(*batch, 1)``, or GPyTorch's module that has
one for all observations."""

_ARRAYS = "_array_kernel"  # method of a kernel without hyperparameters
_FEATURES = "_base_at_features"
_MATERN = {0.5: "matern_12", 1.5: "matern_32", 2.5: "matern_52"}
_PROFILES: dict[type[Kernel], str] = {
    RBFKernel: "rbf", RQKernel: "rational_quadratic", CosineKernel: "cosine",
}  # fmt: skip
_RADIAL = {*_PROFILES, MaternKernel, PeriodicKernel}


class UnknownPartError(Exception):
    """A part whose gradient is left to PyTorch."""


def known_parts(kernel: LazyEvaluatedKernelTensor) -> tuple[Kernel, Tensor] | None:
    """A kernel and its inputs, if every part of it is known; else None.

    A subclass of a kernel is another kernel, as is one with hooks or with a ``forward`` of its own.

    Args:
        kernel: Not yet evaluated, the inputs of its rows being those of its columns.
    """
    if kernel.last_dim_is_batch or kernel.params:
        return None
    parts, x = cast(Kernel, kernel.kernel), cast(Tensor, kernel.x1)
    return (parts, x) if is_known(parts, x.shape[-1]) else None


def known_row(kernel: LazyEvaluatedKernelTensor) -> Callable[[int], Tensor] | None:
    """What computes a row by its index, of one function of distance, scaled or not; else None."""
    known = known_parts(kernel)
    if known is None:
        return None
    with torch.set_grad_enabled(kernel._is_grad_enabled):  # the matrix is not formed
        base, x, scale = _inside(*known)
        if type(base) not in _RADIAL:
            return None
        return row_of(RadialCovariance(**_radial(base, x), scale=scale, noise=None))


def variances(noise: Noise) -> Tensor | None:
    """The noise as a tensor, ``(*batch, n)`` or ``(*batch, 1)``."""
    return cast(Tensor, noise.noise) if isinstance(noise, torch.nn.Module) else noise


def is_known(kernel: Kernel, num_dims: int) -> bool:
    """Whether :func:`covariance_at` knows all parts of a kernel, and it is a dense matrix."""
    return _is_known(kernel, num_dims, top=True) and _is_radial(kernel)


def has_arrays(kernel: Kernel, num_dims: int) -> bool:
    """Whether :func:`array_kernel` knows all parts of a kernel, which has no batch shape.

    These are the parts that :func:`is_known` asks for, polynomial kernels, and kernels without
    hyperparameters whose own class has a method ``_array_kernel(points)``.
    """
    return _is_known(kernel, num_dims, arrays=True, top=True)


def has_features(kernel: Kernel) -> bool:
    """Whether part of it is a kernel on what a network computes of the points."""
    return any(_FEATURES in vars(type(part)) for part in kernel.modules())


def covariance_at(kernel: Kernel, x: Tensor, noise: Tensor | None) -> DenseCovariance:
    """The covariance of a known kernel, in the grad mode of the call.

    ``x`` is what its own ``active_dims`` have selected, ``(*batch, n, d)``; ``noise`` is added on
    the diagonal.
    """
    base, x, scale = _inside(kernel, x)
    if type(base) in _RADIAL:
        return RadialCovariance(**_radial(base, x), scale=scale, noise=noise)
    return DenseCovariance(_covariance(base, x, scale, noise))


def _inside(
    kernel: Kernel, x: Tensor, scale: Tensor | None = None
) -> tuple[Kernel, Tensor, Tensor | None]:
    """The kernel inside of scale kernels and kernels on features, its points, and its variance.

    That is the product of the scales and the given one; ``x`` are the points of the given kernel.
    """
    while True:
        if type(kernel) is ScaleKernel:
            own = cast(Tensor, kernel.outputscale)
            scale, kernel = own if scale is None else scale * own, cast(Kernel, kernel.base_kernel)
        elif _FEATURES in vars(type(kernel)):
            kernel, features = cast(Any, kernel)._base_at_features(x)
            x = _selected(kernel, features)
        else:
            return kernel, x, scale


def _check_columns(kernel: Kernel, count: int) -> None:
    """Of features, whose number is known only now."""
    if kernel.ard_num_dims not in (None, count):
        suggestion = "Give the kernel on features as many lengthscales as there are features."
        expected = f"{kernel.ard_num_dims} columns (ard_num_dims of {type(kernel).__name__})"
        raise ShapeError("features", f"{count} columns", expected, suggestion)


def _is_known(
    kernel: Kernel, num_dims: int | None, arrays: bool = False, *, top: bool = False
) -> bool:
    """Whether all parts are known, to arrays or to tensors, and fit the number of dimensions.

    That is None for features, which are counted when they are computed.
    """
    if kernel._forward_hooks or kernel._forward_pre_hooks or "forward" in kernel.__dict__:
        return False
    if arrays and kernel.batch_shape:
        return False
    if kernel.active_dims is not None and not top:
        num_dims = len(cast(Tensor, kernel.active_dims))
    kind = type(kernel)
    if kind is ScaleKernel:  # which selects dimensions for its base, and calls its forward
        return _is_known(cast(Kernel, kernel.base_kernel), num_dims, arrays, top=True)
    if kind is AdditiveKernel or kind is ProductKernel:
        return all(_is_known(part, num_dims, arrays) for part in cast(Any, kernel.kernels))
    if _FEATURES in vars(kind):
        return not arrays and _is_known(cast(Kernel, kernel.base_kernel), None)
    if num_dims is not None and kernel.ard_num_dims not in (None, num_dims):
        return False  # GPyTorch says so
    if arrays and (kind is PolynomialKernel or _ARRAYS in vars(kind)):
        return True
    if kind.forward is IndexKernel.forward:
        return num_dims == 1
    return kind in _RADIAL or kind in (LinearKernel, ConstantKernel)


def _is_radial(kernel: Kernel) -> bool:
    """Whether its covariance is a dense matrix; else it may be of low rank."""
    if type(kernel) is ScaleKernel or _FEATURES in vars(type(kernel)):
        return _is_radial(cast(Kernel, kernel.base_kernel))
    if type(kernel) in (AdditiveKernel, ProductKernel):
        return any(_is_radial(cast(Kernel, part)) for part in cast(Any, kernel.kernels))
    return type(kernel) in _RADIAL


def _covariance(kernel: Kernel, x: Tensor, scale: Tensor | None, noise: Tensor | None) -> Tensor:
    kernel, x, scale = _inside(kernel, x, scale)
    if type(kernel) is AdditiveKernel:
        parts = sorted(cast(Any, kernel.kernels), key=_leaves_noise_out)
        total = _covariance(parts[0], _selected(parts[0], x), scale, noise)
        for part in parts[1:]:
            total = total + _covariance(part, _selected(part, x), scale, None)
        return total
    if type(kernel) is ProductKernel:
        parts = list(cast(Any, kernel.kernels))
        total = _covariance(parts[0], _selected(parts[0], x), scale, None)
        for part in parts[1:]:
            total = total * _covariance(part, _selected(part, x), None, None)
        return with_noise(total, noise)
    if type(kernel) in _RADIAL:
        return radial_covariance(**_radial(kernel, x), scale=scale, noise=noise)
    if type(kernel).forward is IndexKernel.forward:
        of_one = _of_tasks
    else:
        of_one = _linear if type(kernel) is LinearKernel else _constant
    return with_noise(of_one(kernel, x, scale), noise)


def _leaves_noise_out(kernel: Kernel) -> bool:
    """Whether adding noise to its covariance takes a step of its own."""
    if type(kernel) is ScaleKernel or _FEATURES in vars(type(kernel)):
        return _leaves_noise_out(cast(Kernel, kernel.base_kernel))
    return type(kernel) not in _RADIAL and type(kernel) is not AdditiveKernel


def _selected(kernel: Kernel, x: Tensor) -> Tensor:
    return x if kernel.active_dims is None else x.index_select(-1, cast(Tensor, kernel.active_dims))


def with_noise(covariance: Tensor, noise: Tensor | None) -> Tensor:
    """The covariance with noise variances, ``(*batch, n)`` or ``(*batch, 1)``, on its diagonal."""
    if noise is None:
        return covariance
    return covariance + torch.diag_embed(noise.expand(*noise.shape[:-1], covariance.shape[-1]))


Numbers = Callable[[torch.nn.Module, str], Number]


def fixed_points(x: Tensor) -> Number:
    """Inputs that no gradient is wanted for."""
    return FixedPoints(x.detach().double().numpy())


class _Columns:
    """Some columns of points.

    Args:
        points: ``(n, d)``.
        dims: Indices of the columns, ``(k,)``.
    """

    def __init__(self, points: Number, dims: Tensor) -> None:
        self._points, self._dims = points, dims.numpy()
        self.needed: bool = points.needed

    def value(self) -> ndarray:
        """The columns."""
        points = self._points.value()
        self._shape = points.shape
        return points[:, self._dims]

    def add(self, gradient: ndarray) -> None:
        """By the points, of which other columns do not matter."""
        whole = numpy.zeros(self._shape)
        whole[:, self._dims] = gradient
        self._points.add(whole)


def array_kernel(
    kernel: Kernel, x: Tensor, numbers: Numbers, points_of: Callable[[Tensor], Number]
) -> ArrayKernel:
    """A kernel that :func:`has_arrays`, or that is known and has no batch shape, by NumPy.

    ``numbers`` gives the hyperparameter of a module that has this name, ``points_of`` the inputs of
    a part as numbers, such as :func:`fixed_points`. ``x`` is what ``active_dims`` have selected.
    """
    return _array_kernel(kernel, x, None, numbers, points_of)


def _array_kernel(
    kernel: Kernel,
    x: Tensor,
    dims: Tensor | None,
    numbers: Numbers,
    points_of: Callable[[Tensor], Number],
) -> ArrayKernel:
    """The same at some columns of points, or all of them."""
    kind = type(kernel)

    def part(of: Kernel) -> ArrayKernel:
        own = cast(Tensor | None, of.active_dims)
        if dims is not None:
            own = dims if own is None else dims[own]
        return _array_kernel(of, x, own, numbers, points_of)

    if kind is ScaleKernel:  # whose base has no columns of its own
        base = _array_kernel(cast(Kernel, kernel.base_kernel), x, dims, numbers, points_of)
        return ScaledArrayKernel(base, numbers(kernel, "outputscale"))
    if kind is AdditiveKernel:
        return SumArrayKernel([part(one) for one in cast(Any, kernel.kernels)])
    if kind is ProductKernel:
        return ProductArrayKernel([part(one) for one in cast(Any, kernel.kernels)])
    if kind is ConstantKernel:
        return ConstantArrayKernel(numbers(kernel, "constant"))
    own = x if dims is None else x.index_select(-1, dims)
    if _FEATURES in vars(kind):
        base, features = cast(Any, kernel)._base_at_features(own)
        return _array_kernel(base, features, base.active_dims, numbers, points_of)
    if kind.forward is IndexKernel.forward:
        _check_tasks(cast(IndexKernel, kernel), own)
        return TaskArrayKernel(points_of(own.detach()), numbers(kernel, "_eval_covar_matrix"))
    _check_columns(kernel, own.shape[-1])
    points = (
        _Columns(points_of(x), dims) if dims is not None and x.requires_grad else points_of(own)
    )
    if _ARRAYS in vars(kind):
        return cast(Any, kernel)._array_kernel(points)
    if kind is LinearKernel:
        return LinearArrayKernel(points, numbers(kernel, "variance"))
    if kind is PolynomialKernel:
        return PolynomialArrayKernel(points, numbers(kernel, "offset"), cast(Any, kernel).power)
    if kind is PeriodicKernel:
        period, lengthscale = numbers(kernel, "period_length"), numbers(kernel, "lengthscale")
        return PeriodicArrayKernel(points, period, lengthscale)
    name = "period_length" if kind is CosineKernel else "lengthscale"
    power = numbers(kernel, "alpha") if kind is RQKernel else None
    return RadialArrayKernel(points, PROFILES[_profile(kernel)], numbers(kernel, name), power)


def _profile(kernel: Kernel) -> str:
    return _MATERN[kernel.nu] if isinstance(kernel, MaternKernel) else _PROFILES[type(kernel)]


_CONSTRAINTS = (GreaterThan, Interval, LessThan, Positive)
_LINEAR = 20.0  # above which PyTorch's softplus is the identity


class Transform(NamedTuple):
    """How a constraint makes a hyperparameter of a raw parameter, of NumPy's arrays.

    By a softplus and an offset; if not ``soft`` they are equal.
    """

    soft: bool
    offset: float

    def value(self, raw: ndarray) -> ndarray:
        """The hyperparameter."""
        if not self.soft:
            return raw
        return numpy.where(raw > _LINEAR, raw, numpy.logaddexp(raw, 0.0)) + self.offset

    def slope(self, raw: ndarray) -> ndarray | float:
        """Its derivative."""
        return expit(raw) if self.soft else 1.0

    def inverse(self, value: ndarray) -> ndarray:
        """The raw parameter."""
        if not self.soft:
            return value
        value = value - self.offset
        with numpy.errstate(all="ignore"):
            return numpy.where(value > _LINEAR, value, value + numpy.log(-numpy.expm1(-value)))


def transform_of(constraint: Interval | None) -> Transform | None:
    """Of a constraint of GPyTorch; None if it is none of those known here."""
    if constraint is None:
        return Transform(False, 0.0)
    if type(constraint) not in _CONSTRAINTS or "transform" in vars(constraint):
        return None
    soft = constraint._transform
    if soft is None:
        return Transform(False, 0.0)
    known = type(constraint) in (GreaterThan, Positive) and constraint.lower_bound.numel() == 1
    if not known or type(soft) is not torch.nn.Softplus:
        return None
    if soft.beta != 1.0 or soft.threshold != _LINEAR:
        return None
    return Transform(True, float(constraint.lower_bound))


def _radial(kernel: Any, x: Tensor) -> dict[str, Any]:
    """What makes a function of distance of a kernel."""
    _check_columns(kernel, x.shape[-1])
    if type(kernel) is PeriodicKernel:
        # exp(-2 sin²(pi (x - x') / p) / l) is an RBF kernel of the points on circles of radius
        # 1 / sqrt(l), whose squared distance is 4 sin²(pi (x - x') / p) / l.
        angle = x * (2.0 * math.pi / kernel.period_length)
        radius = kernel.lengthscale.rsqrt()
        points = torch.cat([angle.cos() * radius, angle.sin() * radius], -1)
        return {"points": points, "profile": "rbf"}
    scale = kernel.period_length if type(kernel) is CosineKernel else kernel.lengthscale
    power = {"power": kernel.alpha.squeeze(-1)} if type(kernel) is RQKernel else {}
    return {"points": x, "profile": _profile(kernel), "lengthscale": scale, **power}


def _linear(kernel: Any, x: Tensor, scale: Tensor | None) -> Tensor:
    _check_columns(kernel, x.shape[-1])
    variance = kernel.variance if scale is None else kernel.variance * scale[..., None, None]
    return (x * variance) @ x.mT


def _of_tasks(kernel: Any, x: Tensor, scale: Tensor | None) -> Tensor:
    _check_tasks(kernel, x)
    covariance = kernel._eval_covar_matrix()
    covariance = covariance if scale is None else covariance * scale[..., None, None]
    member = torch.nn.functional.one_hot(x[..., 0].long(), covariance.shape[-1]).to(covariance)
    return member @ covariance @ member.mT


def _check_tasks(kernel: IndexKernel, x: Tensor) -> None:
    if not reads_are_free(x.device):  # a GPU would finish all that is queued at each step
        return
    most = cast(Tensor, kernel.raw_var).shape[-1] - 1
    low, high = (int(one) for one in x.aminmax())
    if low < 0 or high > most:
        suggestion = "Number the tasks from 0, or make the kernel with more num_tasks."
        got = f"indices from {low} to {high}"
        raise ArgumentError("task indices", got, f"integers from 0 to {most}", suggestion)


def _constant(kernel: Any, x: Tensor, scale: Tensor | None) -> Tensor:
    constant = kernel.constant if scale is None else kernel.constant * scale.unsqueeze(-1)
    n = x.shape[-2]
    batch = torch.broadcast_shapes(constant.shape[:-1], x.shape[:-2])
    return constant.to(x).unsqueeze(-1).expand(*batch, n, n)
