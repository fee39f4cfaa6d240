"""The density of a known model, with its gradient by the raw parameters, in NumPy alone.

Of few points a density and its gradient take less time than the calls of PyTorch that pass
hyperparameters to it and gradients back. A model whose inputs stay the same, with a constant mean,
a kernel of distance, one noise and priors in closed form, needs none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import ConstantMean, ZeroMean
from numpy import ndarray
from torch import Tensor

from gpclml.inference.known_kernels import Transform, radial_parts, transform_of
from gpclml.linalg.closed_forms import ClosedForm
from gpclml.linalg.lapack import applies, least_pivot, of_distances
from gpclml.linalg.profiles import PROFILES
from gpclml.mlls._terms import FixedTerms, Formula

__all__ = ["ArrayDensity"]


class _Hyperparameter:
    """A hyperparameter and the raw parameter that GPyTorch keeps for it.

    Args:
        raw: The parameter, on the CPU.
        transform: Its constraint.
    """

    def __init__(self, raw: Tensor, transform: Transform) -> None:
        self.raw = raw
        self.needed = raw.requires_grad
        self._transform = transform

    @staticmethod
    def of(module: Any, name: str) -> _Hyperparameter | None:
        """None if its constraint is not known."""
        raw = getattr(module, f"raw_{name}")
        constraint = getattr(module, f"raw_{name}_constraint", None)
        transform = transform_of(cast(Interval | None, constraint))
        return None if transform is None else _Hyperparameter(raw, transform)

    def value(self) -> ndarray:
        """In double precision."""
        self._numbers = self.raw.detach().double().numpy()
        return self._transform.value(self._numbers)

    def add(self, gradient: Any) -> None:
        """Adds what a gradient by the value is by the raw parameter to its ``grad``."""
        if not self.needed:
            return
        gradient = gradient * self._transform.slope(self._numbers)
        if self.raw.grad is None:
            self.raw.grad = torch.zeros_like(self.raw)
        self.raw.grad.numpy()[...] += gradient

    def is_value(self, value: Tensor) -> bool:
        """Whether a tensor is this hyperparameter, computed from the raw parameter."""
        if value is self.raw:
            return True
        if not value.requires_grad or value.shape != self.raw.shape or not self.needed:
            return False
        (slope,) = torch.autograd.grad(value.sum(), self.raw, allow_unused=True)
        if slope is None:
            return False
        own = torch.as_tensor(self.value()).to(value)
        own_slope = torch.as_tensor(self._transform.slope(self._numbers)).to(value)
        return torch.allclose(value, own, 1e-5, 0.0) and torch.allclose(
            slope, own_slope.expand_as(slope), 1e-5, 0.0
        )


class ArrayDensity:
    """Log density and priors of a model, as a function of its raw parameters.

    Args:
        hyperparameters: Constant of the mean, lengthscale, noise, power, and any number of scales;
            None for a constant or a power that there is not.
        points: ``(n, d)``, in the order of the density.
        targets: ``(n,)``.
        profile: Name of the function of distance.
        blocks: The held-out points, as :mod:`gpclml.linalg.lapack` takes them.
        least: See :func:`gpclml.linalg.lapack.of_distances`.
        priors: Hyperparameters and the closed forms of their priors.
    """

    def __init__(
        self,
        hyperparameters: Sequence[_Hyperparameter | None],
        points: ndarray,
        targets: ndarray,
        profile: str,
        blocks: Any,
        least: float,
        priors: Sequence[tuple[_Hyperparameter, Formula]],
    ) -> None:
        self._constant, self._lengthscale, self._noise, self._power, *scales = hyperparameters
        self._scales = cast(list[_Hyperparameter], scales)
        self._points, self._targets = points, targets
        self._profile, self._blocks, self._least = PROFILES[profile], blocks, least
        self._priors = priors
        n = len(targets)
        self._work = numpy.empty((n, n)), numpy.empty((n, n))
        of_scale = any(one.needed for one in self._scales)
        others = (self._lengthscale, self._noise, self._power, self._constant)
        lengthscale, noise, power, constant = (one is not None and one.needed for one in others)
        self._needed = (False, lengthscale, of_scale, noise, power, constant)

    def __call__(self, weight: float, prior_weight: float) -> float | None:
        """The weighted sum of density and log priors, whose gradient is added to ``grad``.

        Returns:
            The sum; None, and no gradient, where it is not finite or there is no Cholesky factor.
        """
        assert self._lengthscale is not None
        assert self._noise is not None
        residual = self._targets
        if self._constant is not None:
            residual = residual - self._constant.value()
        scales = [one.value() for one in self._scales]
        arrays = [
            self._points, self._lengthscale.value().reshape(1, -1),
            math.prod(scales) if scales else None, self._noise.value(),
            None if self._power is None else self._power.value().reshape(()),
        ]  # fmt: skip
        found = of_distances(
            arrays, residual, self._profile, self._blocks, self._needed, self._least, self._work
        )
        if found is None or not math.isfinite(found[0]):
            return None
        density, (_, of_lengthscale, of_scale, of_noise, of_power, of_residual) = found
        total = weight * density
        for one, formula in self._priors:
            log_prior, slope = formula(one.value())
            total += prior_weight * log_prior
            one.add(prior_weight * slope)
        if of_lengthscale is not None:
            raw = self._lengthscale.raw
            summed = cast(ndarray, of_lengthscale)
            if raw.numel() < summed.size:
                summed = summed.sum()
            self._lengthscale.add(weight * summed)
        if of_noise is not None:
            self._noise.add(weight * cast(ndarray, of_noise).sum())
        if self._power is not None and of_power is not None:
            self._power.add(weight * of_power)
        if self._constant is not None and of_residual is not None:
            self._constant.add(-weight * cast(ndarray, of_residual).sum())
        for place, one in enumerate(self._scales):
            if one.needed:
                others = math.prod(scales[:place] + scales[place + 1 :])
                one.add(weight * cast(float, of_scale) * others)
        return float(total)

    @staticmethod
    def of(
        kernel: Kernel,
        mean: torch.nn.Module,
        likelihood: Any,
        x: Tensor,
        targets: Tensor,
        density: ClosedForm,
        terms: FixedTerms,
    ) -> ArrayDensity | None:
        """None where a part is not known, or is left to PyTorch.

        Args:
            kernel: One for which :func:`gpclml.inference.known_kernels.is_known` is true.
            mean: Of the model.
            likelihood: A ``GaussianLikelihood`` with one noise.
            x: Inputs ``(n, d)``, which stay the same.
            targets: ``(n,)``.
            density: The held-out points.
            terms: Priors of the model.
        """
        order = density.order
        blocks = density.for_lapack if order is None else density.of_ordered().for_lapack
        parts = radial_parts(kernel)
        known_mean = type(mean) in (ConstantMean, ZeroMean) and not getattr(mean, "batch_shape", ())
        if blocks is None or parts is None or not known_mean or not terms.plain or x.ndim > 2:
            return None
        if x.requires_grad or not applies(targets, blocks):
            return None
        base, profile, names = parts
        dims = cast(Tensor | None, kernel.active_dims)  # that of the outermost selects for all
        own: list[_Hyperparameter | None] = [
            _Hyperparameter.of(mean, "constant") if type(mean) is ConstantMean else None,
            _Hyperparameter.of(base, names["lengthscale"]),
            _Hyperparameter.of(likelihood.noise_covar, "noise"),
            _Hyperparameter.of(base, names["power"]) if "power" in names else None,
        ]
        expected = [type(mean) is ConstantMean, True, True, "power" in names]
        while kernel is not base:
            own.append(_Hyperparameter.of(cast(ScaleKernel, kernel), "outputscale"))
            expected.append(True)
            kernel = cast(Kernel, kernel.base_kernel)
        if any(there and one is None for there, one in zip(expected, own, strict=True)):
            return None
        priors = _with_formulas(terms, [one for one in own if one is not None])
        if priors is None:
            return None
        points = x if dims is None else x.index_select(-1, dims)
        if order is not None:
            points, targets = points[order], targets[order]
        return ArrayDensity(
            own, points.double().numpy(), targets.double().numpy(), profile, blocks,
            least_pivot(targets), priors,
        )  # fmt: skip


def _with_formulas(
    terms: FixedTerms, hyperparameters: Sequence[_Hyperparameter]
) -> list[tuple[_Hyperparameter, Formula]] | None:
    """Hyperparameters and closed forms of their priors; None if there is any other prior."""
    pairs = []
    for module, _, closure, formula in terms.priors:
        value = cast(Tensor, closure(module))
        own = next((one for one in hyperparameters if one.is_value(value)), None)
        if own is None or formula is None:
            return None
        pairs.append((own, formula))
    return pairs
