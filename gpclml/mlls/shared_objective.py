"""The objective of targets that share one small covariance, as one node of autograd.

A step on a lone few-shot task has a hundred points: its arithmetic takes a fraction of the time of
the modules, distributions and nodes of autograd around it. Where all parts of a model are known,
features and raw parameters go to NumPy and LAPACK at once, and gradients come back the same way.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, cast

import numpy
import torch
from gpytorch import settings
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.mlls import MarginalLogLikelihood
from numpy import ndarray
from torch import Tensor

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.inference.kernel_covariances import Hyperparameters
from gpclml.inference.known_kernels import UnknownPartError, array_kernel, has_arrays
from gpclml.linalg.lapack import (
    applies,
    kernel_factor,
    last_densities,
    last_gradient,
    least_pivot,
    one_thread,
)
from gpclml.linalg.matrices import refuse_double_backward
from gpclml.mlls._terms import has_hooks, has_terms
from gpclml.mlls.conditional_marginal_log_likelihood import ConditionalMarginalLogLikelihood

__all__ = ["shared_objective"]


def shared_objective(
    mll: MarginalLogLikelihood, points: Tensor, targets: Tensor, ways: int
) -> Tensor | None:
    """The objective of each way of each task, for a model that is its mean and kernel at points.

    Args:
        mll: The objective, whose model's ``forward`` is ``mean_module`` and ``covar_module``.
        points: What these are called on, one task after the other, ``(tasks n, d)``.
        targets: Classes, of which each way is 1 for its own and -1 for the others, or numbers,
            ``(tasks, n)``.
        ways: Number k of classes; 0 of numbers, which are one way.

    Returns:
        Nats per held-out target, ``(tasks, k)``; None where a part is not known, there is no
        Cholesky factor or a value is not finite: then the objective itself computes it, or says
        what is wrong.
    """
    if type(mll) is not ConditionalMarginalLogLikelihood or not _is_plain(mll):
        return None
    n = targets.shape[-1]
    if not applies(points.detach()[:n, 0], n):
        return None
    rows = targets.detach().numpy()[..., None]
    columns = numpy.where(rows == numpy.arange(ways), 1.0, -1.0) if ways else rows.astype(float)
    before = mll.get_extra_state()
    held_out, order = _held_out(mll, n)
    density = values = None
    if held_out > 0:
        with contextlib.suppress(UnknownPartError):
            density = _SharedDensity(mll, points, columns, held_out, order)
            values = density.values()
    if density is None or values is None:
        mll.set_extra_state(before)  # the objective itself is to draw the same points
        return None
    mll.last_solve = ()
    return cast(Tensor, _Objective.apply(density, values, points, *density.raws))


def _is_plain(mll: ConditionalMarginalLogLikelihood) -> bool:
    """Whether it is the density of one block given all others, and the noise has one variance."""
    likelihood, model, strategy = mll.likelihood, cast(Any, mll.model), mll.drawing
    return (
        type(strategy) in (LastPoints, RandomHoldout)
        and getattr(strategy, "condition_on", None) is None
        and mll.solver in ("auto", "cholesky")
        and mll.factor_dtype != torch.float32
        and model.training
        and type(likelihood) is GaussianLikelihood
        and type(likelihood.noise_covar) is HomoskedasticNoise
        and type(model.mean_module) in (ConstantMean, ZeroMean)
        and not any(has_hooks(one) for one in (mll, model, likelihood, model.mean_module))
        and settings.observation_nan_policy.value() == "ignore"
        and not has_terms(model)
    )


def _held_out(mll: ConditionalMarginalLogLikelihood, n: int) -> tuple[int, ndarray | None]:
    """How many points are held out, and the order in which these are the last; None as they are."""
    if isinstance(mll.drawing, LastPoints):
        return n - mll.drawing.m, None
    rows = mll.draw_rows(n).held_out[0][0].numpy()
    return len(rows), numpy.concatenate([numpy.delete(numpy.arange(n), rows), rows])


class _Points:
    """Points of a task, whose gradient is added to given numbers."""

    def __init__(self, numbers: ndarray, gradient: ndarray | None) -> None:
        self._numbers, self._gradient, self.needed = numbers, gradient, gradient is not None

    def value(self) -> ndarray:
        return self._numbers

    def add(self, gradient: ndarray) -> None:
        assert self._gradient is not None
        self._gradient += gradient


class _SharedDensity:
    """The objectives and their gradients, each of which is computed when it is asked for.

    Attributes:
        raws: The parameters that they depend on.
    """

    def __init__(
        self,
        mll: ConditionalMarginalLogLikelihood,
        points: Tensor,
        targets: ndarray,
        b: int,
        order: ndarray | None,
    ) -> None:
        model = cast(Any, mll.model)
        kernel = cast(Kernel, model.covar_module)
        number = Hyperparameters()

        def points_of(x: Tensor) -> _Points:
            if x is not points:  # some columns
                raise UnknownPartError
            return of_task

        if kernel.active_dims is not None or not has_arrays(kernel, points.shape[-1]):
            raise UnknownPartError
        numbers = points.detach().double().numpy().reshape(*targets.shape[:2], -1)
        if order is not None:
            numbers, targets = numbers[:, order], targets[:, order]
        self._of_points = numpy.zeros_like(numbers) if points.requires_grad else None
        self._kernels, self._order = [], order
        for task in range(len(numbers)):
            gradient = None if self._of_points is None else self._of_points[task]
            of_task = _Points(numbers[task], gradient)
            self._kernels.append(array_kernel(kernel, points, number, points_of))
        self._noise = number(mll.likelihood.noise_covar, "noise")
        is_constant = type(model.mean_module) is ConstantMean
        self._constant = number(model.mean_module, "constant") if is_constant else None
        self._numbers = list(number.made.values())
        if any(one.raw.dtype != points.dtype or one.raw.is_cuda for one in self._numbers):
            raise UnknownPartError
        if self._noise.raw.numel() > 1 or (self._constant and self._constant.raw.numel() > 1):
            raise UnknownPartError
        self._targets, self._b, self._least = targets, b, least_pivot(points)
        self.raws = [one.raw for one in self._numbers]

    def values(self) -> ndarray | None:
        """The objectives, ``(tasks, k)``; None where one is not finite."""
        n, noise = self._targets.shape[1], self._noise.value()
        constant = 0.0 if self._constant is None else self._constant.value()
        values, self._states = [], list[tuple[ndarray, ndarray]]()
        with one_thread(n):
            for kernel, residuals in zip(self._kernels, self._targets - constant, strict=True):
                L = kernel_factor(kernel, noise, n, self._least)
                if L is None:
                    return None
                of_task, z = last_densities(L, residuals, self._b)
                values.append(of_task)
                self._states.append((L, z))
        found = numpy.stack(values) / self._b
        return found if math.isfinite(found.sum()) else None

    def gradients(self, weights: ndarray) -> tuple[ndarray | None, list[ndarray | float]]:
        """Of the weighted sum of the objectives, by the points and the raw parameters."""
        if not self._states:  # a second time, of a graph that was kept
            if self._of_points is not None:
                self._of_points.fill(0.0)
            for one in self._numbers:
                one.gradient = 0.0
            self.values()
        states, self._states = self._states, []
        with one_thread(self._targets.shape[1]), numpy.errstate(all="ignore"):
            for kernel, (L, z), weight in zip(self._kernels, states, weights, strict=True):
                G, of_residuals = last_gradient(L, z, self._b, weight / self._b, overwrite=True)
                self._noise.add(G.trace())
                if self._constant is not None:
                    self._constant.add(-of_residuals.sum())
                kernel.add_gradient(G, 1.0)
        of_points = self._of_points
        if of_points is not None:
            if self._order is not None:
                of_points = of_points[:, self._order.argsort()]
            of_points = of_points.reshape(-1, of_points.shape[-1])
        return of_points, [one.gradient for one in self._numbers]


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, density, values, *tensors):
        ctx.density = density
        ctx.save_for_backward(*tensors)  # so that changes in place are found out
        return torch.from_numpy(values).to(tensors[0].dtype)

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward("objectives")
        tensors = ctx.saved_tensors
        of_points, of_raws = ctx.density.gradients(grads[0].double().numpy())
        gradients = [
            torch.tensor(gradient, dtype=one.dtype) if needed else None
            for gradient, one, needed in zip(
                (of_points, *of_raws), tensors, ctx.needs_input_grad[2:], strict=True
            )
        ]  # fmt: skip
        return None, None, *gradients
