"""Covariances of known kernels, whose densities NumPy computes from GPyTorch's parameters.

Of few points a density and its gradient take less time than the calls of PyTorch that make
hyperparameters of parameters, and a covariance of these. Where all parts of a kernel are known, the
parameters go to NumPy and LAPACK at once, and gradients come back as one node of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self, cast

import numpy
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from numpy import ndarray
from torch import Size, Tensor

from gpclml.inference.known_kernels import (
    Noise,
    Transform,
    array_kernel,
    covariance_at,
    transform_of,
    variances,
    with_noise,
)
from gpclml.linalg import DenseCovariance
from gpclml.linalg.array_kernels import ArrayKernel
from gpclml.linalg.covariance import ClosedForm, Pairs
from gpclml.linalg.lapack import (
    applies,
    kernel_density,
    least_pivot,
    leave_one_out,
    one_thread,
)
from gpclml.linalg.matrices import refuse_double_backward

__all__ = [
    "Hyperparameter",
    "Hyperparameters",
    "KernelCovariance",
    "covariance_of",
    "kernel_covariance",
]

_UNCHANGED = Transform(soft=False, offset=0.0)


def kernel_covariance(
    lazy: LazyEvaluatedKernelTensor, kernel: Kernel, x: Tensor, noise: Noise
) -> DenseCovariance:
    """The covariance of a known kernel, ``(*batch, n, n)``.

    Args:
        lazy: The kernel as GPyTorch returned it, not yet evaluated.
        kernel: As :func:`~gpclml.inference.known_kernels.known_parts` gives it.
        x: The inputs that it gives, ``(*batch, n, d)``.
        noise: Added on the diagonal.
    """
    if lazy._is_grad_enabled or not torch.is_grad_enabled():
        return covariance_of(kernel, x, noise, batch=len(lazy.shape) > 2)
    with torch.no_grad():
        matrix = covariance_at(kernel, x, None).matrix
    return DenseCovariance(with_noise(matrix, variances(noise)))


def covariance_of(kernel: Kernel, x: Tensor, noise: Noise, *, batch: bool) -> DenseCovariance:
    """The same in the grad mode of the call; ``batch`` says whether kernel or inputs have one."""
    own = cast(Tensor, noise.raw_noise) if isinstance(noise, torch.nn.Module) else noise
    if batch or x.device.type != "cpu" or (own is not None and cast(Tensor, own).ndim > 1):
        return covariance_at(kernel, x, variances(noise))
    return KernelCovariance(kernel, x, noise)


class Hyperparameter:
    """A hyperparameter as numbers, and its gradient by the raw parameter that GPyTorch keeps.

    Args:
        raw: The raw parameter, or any tensor that is the hyperparameter itself.
        transform: How the hyperparameter is made of the raw parameter; None if it is not one.
    """

    gradient: Any = 0.0
    index: Any = ...  # of the part of the raw parameter that it is

    def __init__(self, raw: Tensor, transform: Transform | None = None) -> None:
        self.raw: Tensor = raw
        self.is_raw: bool = transform is not None
        self._transform = _UNCHANGED if transform is None else transform
        self.needed: bool = raw.requires_grad

    @classmethod
    def of(cls, module: torch.nn.Module, name: str) -> Self:
        """That of a module; of the value where that has no raw parameter or another constraint."""
        raw = getattr(module, f"raw_{name}", None)
        constraint = getattr(module, f"raw_{name}_constraint", None)
        transform = None if raw is None else transform_of(cast(Interval | None, constraint))
        if transform is None:
            value = cast(Any, getattr(module, name))
            return cls(cast(Tensor, value() if callable(value) else value))
        return cls(cast(Tensor, raw), transform)

    def value(self) -> ndarray:
        """In double precision."""
        self._numbers = self.raw.detach().double().numpy()[self.index]
        return self._transform.value(self._numbers)

    def by_raw(self, gradient: Any) -> ndarray:
        """What a gradient by the value is by the raw parameter."""
        gradient = numpy.asarray(gradient)
        if gradient.size > self._numbers.size:
            gradient = gradient.sum()
        return gradient.reshape(self._numbers.shape) * self._transform.slope(self._numbers)

    def add(self, gradient: Any) -> None:
        """Adds a gradient by the value to ``gradient``, which is by the raw parameter."""
        if self.needed:
            self.gradient = self.gradient + self.by_raw(gradient)

    def is_value(self, value: Tensor) -> bool:
        """Whether a tensor is this hyperparameter, computed from the raw parameter."""
        if value is self.raw:
            return True
        if not value.requires_grad or value.shape != self.raw.shape or not self.needed:
            return False
        (slope,) = torch.autograd.grad(value.sum(), self.raw, allow_unused=True, retain_graph=True)
        if slope is None:
            return False
        own = torch.as_tensor(self.value()).to(value)
        own_slope = torch.as_tensor(self._transform.slope(self._numbers)).to(value)
        return torch.allclose(value, own, 1e-5, 0.0) and torch.allclose(
            slope, own_slope.expand_as(slope), 1e-5, 0.0
        )


class Hyperparameters:
    """Gives the hyperparameters of modules, each made once: a module may stand in several places.

    Attributes:
        made: Those that were asked for, by the module's identity and the name.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, str], Hyperparameter] = {}

    def __call__(self, module: torch.nn.Module, name: str) -> Hyperparameter:
        """That of a module, by its name there."""
        key = id(module), name
        if key not in self.made:
            self.made[key] = Hyperparameter.of(module, name)
        return self.made[key]


class _Rows(Hyperparameter):
    """Numbers of which each point has its own, in an order of the points."""

    def __init__(self, rows: Tensor, order: ndarray | None) -> None:
        super().__init__(rows)
        self._order = order

    def value(self) -> ndarray:
        numbers = super().value()
        return numbers if self._order is None else numbers[self._order]

    def by_raw(self, gradient: Any) -> ndarray:
        if self._order is None:
            return gradient
        in_data_order = numpy.empty_like(gradient)
        in_data_order[self._order] = gradient
        return in_data_order


class KernelCovariance(DenseCovariance):
    """The covariance of observations by a known kernel at points of no batch, on a CPU.

    Densities of held-out points of one residual are computed together with their gradients, by the
    formulas of :mod:`gpclml.linalg.lapack`. Whatever else is asked for is computed from tensors.

    Args:
        kernel: One for which :func:`~gpclml.inference.known_kernels.is_known` is true.
        points: Inputs that its own ``active_dims`` have selected, ``(n, d)``.
        noise: Of the observations.
        factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
        checked: See :func:`gpclml.linalg.safe_cholesky`.
    """

    def __init__(
        self,
        kernel: Kernel,
        points: Tensor,
        noise: Noise,
        factor_dtype: torch.dtype | None = None,
        checked: bool = True,
    ) -> None:
        own = {"kernel": kernel, "points": points, "noise": noise}
        vars(self).update(own, factor_dtype=factor_dtype, checked=checked)  # it is frozen

    kernel: Kernel
    points: Tensor
    noise: Noise

    @cached_property
    def _by_tensors(self) -> DenseCovariance:
        covariance = covariance_at(self.kernel, self.points, variances(self.noise))
        return covariance.factored_in(self.factor_dtype, checked=self.checked)

    @property
    def matrix(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The covariance as a matrix, differentiable."""
        return self._by_tensors.matrix

    @property
    def shape(self) -> Size:
        """``(n, n)``."""
        n = self.points.shape[-2]
        return Size((n, n))

    @property
    def dtype(self) -> torch.dtype:
        """Of the points."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """Of the points."""
        return self.points.device

    def factored_in(self, dtype: torch.dtype | None, *, checked: bool = True) -> KernelCovariance:
        """With these settings of the Cholesky factors."""
        return KernelCovariance(self.kernel, self.points, self.noise, dtype, checked)

    def value_and_gradients(self, residual: Tensor, density: ClosedForm) -> tuple[Tensor, Pairs]:
        """By parameters, points and residual."""
        found = self._computed(residual, density, gradients=True)
        if found is None:
            return self._by_tensors.value_and_gradients(residual, density)
        value, tensors, gradients = found
        pairs = zip(tensors, gradients, strict=True)
        as_tensors = [(one, torch.as_tensor(gradient).to(one)) for one, gradient in pairs]
        return torch.tensor(value, dtype=residual.dtype), as_tensors

    def _conditional_log_density(self, residual: Tensor, held_out: Tensor) -> Tensor:
        value = None
        if held_out.ndim == 1:
            value = self._at_once(residual, self.density([held_out.unsqueeze(0)]))
        if value is None:
            value = self._by_tensors._conditional_log_density(residual, held_out)
        return value

    def _block_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        value = self._at_once(residual, self._of_blocks(blocks))
        return self._by_tensors._block_log_density(residual, blocks) if value is None else value

    def _at_once(self, residual: Tensor, density: ClosedForm) -> Tensor | None:
        """The sum of the densities, whose gradients are computed with it; None if not here."""
        found = self._computed(residual, density, gradients=torch.is_grad_enabled())
        if found is None:
            return None
        value, tensors, gradients = found
        if not tensors:
            return torch.tensor(value, dtype=residual.dtype)
        return cast(Tensor, _LogDensity.apply(value, gradients, residual.dtype, *tensors))

    def _leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled() and applies(residual, 1):
            kernel, noise, _, _ = self._arrays(residual, None)
            variances = None if noise is None else noise.value()
            moments = leave_one_out(
                kernel, variances, residual.detach().double().numpy(), least_pivot(residual)
            )
            if moments is not None:
                mean, variance = torch.as_tensor(moments).to(residual)[:, rows]
                return mean, variance
        return self._by_tensors._leave_one_out(residual, rows)

    def _computed(
        self, residual: Tensor, density: ClosedForm, *, gradients: bool
    ) -> tuple[float, list[Tensor], list[ndarray]] | None:
        """The sum of the densities, what it depends on, and its gradients by these.

        None where there are too many points or several residuals, or no Cholesky factor.
        """
        order = density.order
        blocks = density.for_lapack if order is None else density.of_ordered().for_lapack
        if blocks is None or not applies(residual, blocks):
            return None
        kernel, noise, targets, numbers = self._arrays(residual, order)
        with one_thread(len(residual)):
            found = kernel_density(
                kernel, None if noise is None else noise.value(), targets.value(), blocks,
                least_pivot(residual),
            )  # fmt: skip
            if found is None:
                return None
            value, G, of_residual = found
            if not gradients:
                return value, [], []
            if noise is not None and noise.needed:
                noise.add(G.diagonal().copy())
            targets.add(of_residual)
            with numpy.errstate(all="ignore"):
                kernel.add_gradient(G, 1.0)
        used = {id(one): one for one in numbers if one.needed}.values()
        return value, [one.raw for one in used], [one.gradient for one in used]

    def _arrays(
        self, residual: Tensor, order: Tensor | None
    ) -> tuple[ArrayKernel, Hyperparameter | None, Hyperparameter, list[Hyperparameter]]:
        """Kernel, noise and residual as arrays in an order of the points, and all their numbers."""
        rows = None if order is None else order.numpy()
        number, points = Hyperparameters(), dict[int, _Rows]()

        def points_of(x: Tensor) -> _Rows:
            return points.setdefault(id(x), _Rows(x, rows))  # which keeps x, so that ids differ

        targets = _Rows(residual, rows)
        kernel = array_kernel(self.kernel, self.points, number, points_of)
        noise: Hyperparameter | None = None
        if isinstance(self.noise, torch.nn.Module):
            noise = number(self.noise, "noise")
        elif self.noise is not None:
            one = self.noise.numel() == 1
            noise = Hyperparameter(self.noise) if one else _Rows(self.noise, rows)
        numbers = [*number.made.values(), *points.values(), targets]
        numbers += [] if noise is None else [noise]
        return kernel, noise, targets, numbers


class _LogDensity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, gradients, dtype, *tensors):
        ctx.gradients, ctx.dtypes = gradients, [one.dtype for one in tensors]
        return torch.tensor(value, dtype=dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("log densities")
        weight = grads[0].item()
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        return None, None, None, *[
            torch.as_tensor(gradient * weight, dtype=dtype) for gradient, dtype in pairs
        ]  # fmt: skip
