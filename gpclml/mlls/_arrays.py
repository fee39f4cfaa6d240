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

from gpclml.inference.kernel_covariances import Hyperparameter
from gpclml.inference.known_kernels import UnknownPartError, array_kernel, fixed_points
from gpclml.linalg.array_kernels import ArrayKernel
from gpclml.linalg.covariance import ClosedForm
from gpclml.linalg.lapack import applies, kernel_density, least_pivot, one_thread
from gpclml.mlls._terms import FixedTerms, Formula

__all__ = ["ArrayDensity"]


_MOST_MEMBERS = 16  # of a batch, beyond which PyTorch computes all of them at once as fast


class _Raw(Hyperparameter):
    """Whose gradients are added to the ``grad`` of the raw parameter."""

    def add(self, gradient: Any) -> None:
        if not self.needed:
            return
        gradient = self.by_raw(gradient)
        if self.raw.grad is None:
            self.raw.grad = torch.zeros_like(self.raw)
        self.raw.grad.numpy()[self.index] += gradient

    def part(self, module: torch.nn.Module, members: int, member: int) -> _Raw:
        """That of a member of a batch, of a module that may be shared by all of them."""
        batch = getattr(module, "batch_shape", self.raw.shape[:-1])  # noise has no such attribute
        if not members or not batch:
            return self
        if batch != (members,) or self.raw.shape[0] != members:
            raise UnknownPartError
        own = _Raw(self.raw, self._transform)
        own.index = member
        return own


class _Member:
    """Log density of one residual.

    Args:
        kernel: At the inputs, in the order of the density.
        noise: Variance of the noise.
        constant: Of the mean; None for a mean of zero.
        targets: ``(n,)``.
    """

    def __init__(
        self,
        kernel: ArrayKernel,
        noise: Hyperparameter,
        constant: Hyperparameter | None,
        targets: ndarray,
    ) -> None:
        self._kernel, self._noise, self._constant = kernel, noise, constant
        self._targets = targets
        # Memory of this size that is asked for anew has to be cleared by the system first.
        self._work = numpy.empty((len(targets), len(targets)))

    def value(self, blocks: Any, least: float) -> float | None:
        """The density; None where it is not finite or there is no Cholesky factor."""
        residual = self._targets
        if self._constant is not None:
            residual = residual - self._constant.value()
        found = kernel_density(
            self._kernel, self._noise.value(), residual, blocks, least, self._work
        )
        if found is None or not math.isfinite(found[0]):
            return None
        density, self._of_covariance, self._of_residual = found
        return density

    def add_gradient(self, weight: float) -> None:
        """Adds that of the weighted density to ``grad``; once after each :meth:`value`."""
        self._noise.add(weight * self._of_covariance.diagonal().sum())
        if self._constant is not None:
            self._constant.add(-weight * self._of_residual.sum())
        with numpy.errstate(all="ignore"):
            self._kernel.add_gradient(self._of_covariance, weight)


class ArrayDensity:
    """Log density and priors of a model, summed over a batch, as a function of raw parameters.

    Args:
        members: Of the batch, or one.
        blocks: The held-out points, as :mod:`gpclml.linalg.lapack` takes them.
        least: See :func:`gpclml.linalg.lapack.kernel_density`.
        priors: Hyperparameters and the closed forms of their priors.
    """

    def __init__(
        self,
        members: Sequence[_Member],
        blocks: Any,
        least: float,
        priors: Sequence[tuple[Hyperparameter, Formula]],
    ) -> None:
        self._members, self._blocks, self._least, self._priors = members, blocks, least, priors

    def __call__(
        self, weight: float, prior_weight: float, member: int | None = None
    ) -> float | None:
        """The weighted sum of density and log priors, whose gradient is added to ``grad``.

        Args:
            weight: Of the density.
            prior_weight: Of the log priors, which are those of the whole batch.
            member: The only one whose density counts; all of them if None.

        Returns:
            The sum; None, and no gradient, where it is not finite or there is no Cholesky factor.
        """
        members = self._members if member is None else [self._members[member]]
        with one_thread(len(members[0]._targets)):
            values = [one.value(self._blocks, self._least) for one in members]
            if None in values:
                return None
            total = weight * sum(cast(list[float], values))
            for one, formula in self._priors:
                log_prior, slope = formula(one.value())
                total += prior_weight * log_prior
                one.add(prior_weight * slope)
            for one in members:
                one.add_gradient(weight)
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
            x: Inputs ``(n, d)`` or ``(members, n, d)``, which stay the same.
            targets: ``(n,)``, or ``(members, n)`` for a batch.
            density: The held-out points.
            terms: Priors of the model.
        """
        order = density.order
        blocks = density.for_lapack if order is None else density.of_ordered().for_lapack
        known_mean = type(mean) in (ConstantMean, ZeroMean)
        if blocks is None or not known_mean or not terms.of_priors or x.requires_grad:
            return None
        members = len(targets) if targets.ndim == 2 else 0
        if members > _MOST_MEMBERS or targets.ndim > 2 or x.ndim > (3 if members else 2):
            return None
        if not applies(targets[0] if members else targets, blocks):
            return None
        dims = cast(Tensor | None, kernel.active_dims)  # of a sum and a product those of all parts
        points = x if dims is None else x.index_select(-1, dims)
        if order is not None:
            points, targets = points[..., order, :], targets[..., order]
        own: dict[tuple[int, str], _Raw] = {}
        numbers = targets.double().numpy()

        def member(place: int) -> _Member:
            def number(module: torch.nn.Module, name: str) -> Hyperparameter:
                whole = own.setdefault((id(module), name), _Raw.of(module, name))
                if not (whole.is_raw and whole.raw.is_leaf):
                    raise UnknownPartError
                return whole.part(module, members, place)

            of_member = points[place] if points.ndim > 2 else points
            return _Member(
                array_kernel(kernel, of_member, number, fixed_points),
                number(likelihood.noise_covar, "noise"),
                number(mean, "constant") if type(mean) is ConstantMean else None,
                numbers[place] if members else numbers,
            )

        try:
            parts = [member(place) for place in range(members or 1)]
        except UnknownPartError:
            return None
        priors = _with_formulas(terms, list(own.values()), members)
        if priors is None:
            return None
        return ArrayDensity(parts, blocks, least_pivot(targets), priors)


def _with_formulas(
    terms: FixedTerms, hyperparameters: Sequence[Hyperparameter], members: int
) -> list[tuple[Hyperparameter, Formula]] | None:
    """Hyperparameters and closed forms of their priors; None if there is any other prior."""
    pairs = []
    for module, _, closure, formula in terms.priors:
        value = cast(Tensor, closure(module))
        own = next((one for one in hyperparameters if one.is_value(value)), None)
        if own is None or formula is None:
            return None
        if members and value.shape[0] != members:
            return None  # which all members share
        pairs.append((own, formula))
    return pairs
