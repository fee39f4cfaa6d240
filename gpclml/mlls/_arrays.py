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
from gpytorch.kernels import Kernel
from gpytorch.means import ConstantMean, ZeroMean
from numpy import ndarray
from torch import Tensor

from gpclml.inference.kernel_covariances import Hyperparameter, UnknownPartError
from gpclml.inference.known_kernels import array_kernel, fixed_points
from gpclml.linalg.array_kernels import ArrayKernel
from gpclml.linalg.closed_forms import ClosedForm
from gpclml.linalg.lapack import applies, kernel_density, least_pivot, one_thread
from gpclml.mlls._terms import FixedTerms, Formula

__all__ = ["ArrayDensity"]


class _Raw(Hyperparameter):
    """Whose gradients are added to the ``grad`` of the raw parameter."""

    def add(self, gradient: Any) -> None:
        if not self.needed:
            return
        gradient = self.by_raw(gradient)
        if self.raw.grad is None:
            self.raw.grad = torch.zeros_like(self.raw)
        self.raw.grad.numpy()[...] += gradient


class ArrayDensity:
    """Log density and priors of a model, as a function of its raw parameters.

    Args:
        kernel: At the inputs, in the order of the density.
        noise: Variance of the noise.
        constant: Of the mean; None for a mean of zero.
        targets: ``(n,)``.
        blocks: The held-out points, as :mod:`gpclml.linalg.lapack` takes them.
        least: See :func:`gpclml.linalg.lapack.kernel_density`.
        priors: Hyperparameters and the closed forms of their priors.
    """

    def __init__(
        self,
        kernel: ArrayKernel,
        noise: Hyperparameter,
        constant: Hyperparameter | None,
        targets: ndarray,
        blocks: Any,
        least: float,
        priors: Sequence[tuple[Hyperparameter, Formula]],
    ) -> None:
        self._kernel, self._noise, self._constant = kernel, noise, constant
        self._targets, self._blocks, self._least, self._priors = targets, blocks, least, priors
        # Memory of this size that is asked for anew has to be cleared by the system first.
        self._work = numpy.empty((len(targets), len(targets)))

    def __call__(self, weight: float, prior_weight: float) -> float | None:
        """The weighted sum of density and log priors, whose gradient is added to ``grad``.

        Returns:
            The sum; None, and no gradient, where it is not finite or there is no Cholesky factor.
        """
        with one_thread(len(self._targets)):
            return self._value(weight, prior_weight)

    def _value(self, weight: float, prior_weight: float) -> float | None:
        residual = self._targets
        if self._constant is not None:
            residual = residual - self._constant.value()
        found = kernel_density(
            self._kernel, self._noise.value(), residual, self._blocks, self._least, self._work
        )
        if found is None or not math.isfinite(found[0]):
            return None
        density, of_covariance, of_residual = found
        total = weight * density
        for one, formula in self._priors:
            log_prior, slope = formula(one.value())
            total += prior_weight * log_prior
            one.add(prior_weight * slope)
        self._noise.add(weight * of_covariance.diagonal().sum())
        if self._constant is not None:
            self._constant.add(-weight * of_residual.sum())
        with numpy.errstate(all="ignore"):
            self._kernel.add_gradient(of_covariance, weight)
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
        known_mean = type(mean) in (ConstantMean, ZeroMean) and not getattr(mean, "batch_shape", ())
        if blocks is None or not known_mean or not terms.plain or x.ndim > 2 or x.requires_grad:
            return None
        if any(part.batch_shape for part in kernel.modules() if isinstance(part, Kernel)):
            return None
        if not applies(targets, blocks):
            return None
        own: list[Hyperparameter] = []

        def number(module: torch.nn.Module, name: str) -> Hyperparameter:
            own.append(_Raw.of(module, name))
            if not own[-1].is_raw:
                raise UnknownPartError
            return own[-1]

        dims = cast(Tensor | None, kernel.active_dims)  # of a sum and a product those of all parts
        points = x if dims is None else x.index_select(-1, dims)
        if order is not None:
            points, targets = points[order], targets[order]
        try:
            whole = array_kernel(kernel, points, number, fixed_points)
            noise = number(likelihood.noise_covar, "noise")
            constant = number(mean, "constant") if type(mean) is ConstantMean else None
        except UnknownPartError:
            return None
        priors = _with_formulas(terms, own)
        if priors is None:
            return None
        numbers = targets.double().numpy()
        least = least_pivot(targets)
        return ArrayDensity(whole, noise, constant, numbers, blocks, least, priors)


def _with_formulas(
    terms: FixedTerms, hyperparameters: Sequence[Hyperparameter]
) -> list[tuple[Hyperparameter, Formula]] | None:
    """Hyperparameters and closed forms of their priors; None if there is any other prior."""
    pairs = []
    for module, _, closure, formula in terms.priors:
        value = cast(Tensor, closure(module))
        own = next((one for one in hyperparameters if one.is_value(value)), None)
        if own is None or formula is None:
            return None
        pairs.append((own, formula))
    return pairs
