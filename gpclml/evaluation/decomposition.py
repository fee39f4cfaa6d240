"""Sums of kernels, read component by component."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, cast

import numpy as np
import torch
from gpytorch.kernels import AdditiveKernel, ProductKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.arrays import ArrayLike
from gpclml._utils.environment import check_memory
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evaluation.plots import panels_for, style_of
from gpclml.gram import Gram, closed_form, has_hooks
from gpclml.inference import posterior
from gpclml.inference.units import above_rounding, units_of_targets

Term = tuple[str, Callable[[Tensor, Tensor], Tensor]]  # its name, and its matrix at points


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The joint posterior of the C components of a function at m points, in the targets' units.

    Attributes:
        names: Of the components. The last is ``"mean function"``: that of the model, and what
            ``center=True`` takes off the others.
        mean: ``(*batch, C, m)``; the sum over components is the posterior mean of the function.
        covariance: Of all pairs of components and of points, ``(*batch, C, C, m, m)``; the sum over
            pairs of components is the posterior covariance of the function, without noise.

    Examples:
        >>> import torch
        >>> from gpytorch.kernels import LinearKernel, RBFKernel
        >>> from gpclml import GPRegression, decompose
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64)
        >>> model = GPRegression(x, (9 * x).sin() + x, RBFKernel() + LinearKernel())
        >>> result = decompose(model, x)
        >>> result.mean.shape, result.covariance.shape
        (torch.Size([3, 20]), torch.Size([3, 3, 20, 20]))
        >>> panels = result.plot(x)
    """

    names: tuple[str, ...]
    mean: Tensor
    covariance: Tensor

    @property
    def stddev(self) -> Tensor:
        """Posterior standard deviations of the components, ``(*batch, C, m)``."""
        return self.covariance.diagonal(dim1=-4, dim2=-3).diagonal(dim1=-3, dim2=-2).sqrt()

    def plot(self, at: Any, *, ax: Any = None) -> np.ndarray:
        """Plots means and two standard deviations, in a panel for each component that varies.

        Args:
            at: Where the points are on the horizontal axis, ``(m,)``: a column of them, or dates.
            ax: Axes to draw in; None for those of a new figure of pyplot.

        Returns:
            The axes.

        Raises:
            ShapeError: There are other than m numbers, or there is a batch.
        """
        at, mean, band = np.asarray(at), self.mean.cpu().numpy(), 2 * self.stddev.cpu().numpy()
        if mean.ndim != 2 or at.shape != mean.shape[1:]:
            raise ShapeError("at", at.shape, f"(m,) for one model's means, here {mean.shape}")
        drawn = [k for k, values in enumerate(mean) if np.ptp(values) > 1e-9 * abs(mean).max()]
        panels, order = panels_for(ax, len(drawn), 1.6 * len(drawn), sharex=True), at.argsort()
        for k, panel in zip(drawn, panels, strict=True):
            ends = [(mean[k] + sign * band[k])[order] for sign in (-1, 1)]
            panel.fill_between(at[order], *ends, alpha=0.2, lw=0, color=style_of(k)["color"])
            panel.plot(at[order], mean[k][order], color=style_of(k)["color"])
            panel.set_title(self.names[k])
        return panels


@checked
def decompose(
    model: ExactGP, x: ArrayLike, *, center: bool = False, names: Sequence[str] | None = None
) -> Decomposition:
    r"""The posterior of each component of a sum of kernels, and of all components jointly.

    With :math:`y = m(x) + \sum_c f_c(x) + \epsilon`, where :math:`f_c` has the kernel :math:`k_c`,
    and :math:`K_y` the covariance of the targets,

    .. math:: E[f_c(x_*)] = K_c(x_*, X)\, K_y^{-1} (y - m), \quad
        Cov[f_c(x_*), f_d(x_*)] = \delta_{cd} K_c(x_*, x_*) - K_c(x_*, X)\, K_y^{-1} K_d(X, x_*)

    (Duvenaud 2014, Section 2.4.5). Scaled and nested sums are taken apart, and so are products of
    sums: (a + b) c has the components a c and b c. Other kernels, deep ones too, are one component.

    A component may be higher by a constant where another is lower, so that their deviations are
    large. With ``center`` each is taken less its mean over the n training points,
    :math:`f_c(x_*) - \frac1n \sum_i f_c(x_i)`, and the mean function gains these means.

    Args:
        model: An exact GP of one task, of GPyTorch, BoTorch or gpclml, whose kernel is a sum.
        x: Points as the model takes them, ``(*batch, m, d)``, or ``(m,)`` for one column.
        center: Whether to take components less their means over the training points.
        names: Names of the terms in the order of the kernel; by default such as "RBF", "RBF 2" and
            "RBF * Linear(age)", of a kernel that takes the column "age", or "(0)", alone.

    Raises:
        UnsupportedError: The kernel is no sum, the model takes more than points or has several
            tasks, or its targets are transformed otherwise than by scale and shift.
        ShapeError, NonFiniteError: The points do not fit the training inputs.
        ArgumentError: The names are not one for each term, or memory does not suffice.

    Note:
        n³/3 + n² C m operations; memory for 5 (C m)² numbers beside the factor.

    Examples:
        >>> import torch
        >>> from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel
        >>> from gpclml import GPRegression, decompose
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64)
        >>> model = GPRegression(x, (9 * x).sin() + x, ScaleKernel(RBFKernel()) + LinearKernel())
        >>> decompose(model, x, center=True).names
        ('RBF', 'Linear', 'mean function')
    """
    if len(inputs := cast(Any, model.train_inputs) or (x,)) > 1:
        raise UnsupportedError("model", f"one called on {len(inputs)} tensors", "one on points")

    def compute(z: Tensor) -> tuple[Tensor, Tensor]:
        prior = posterior.JointPrior(model, z)
        mean, cross, joint = _prior_of_components(prior, _terms_of(model, prior), center)
        data = prior.training_data(model)
        block = data.covariance.predictor(data.residual, data.missing).given(cross.mT, keep=True)
        covariance = joint - block.joint_reduction(block)
        variance, before = (matrix.diagonal(dim1=-1, dim2=-2) for matrix in (covariance, joint))
        covariance = covariance + torch.diag_embed(above_rounding(variance, before) - variance)
        return mean + block.shift, covariance

    with posterior.reading(model):
        points = posterior.new_points(model, x)
        terms = [name for name, _ in _terms_of(model, posterior.JointPrior(model, points))]
        numbered = [f"{name} {terms[:k].count(name) + 1}" for k, name in enumerate(terms)]
        default = [name.removesuffix(" 1") for name in numbered]
        names = (*(default if names is None else names), "mean function")
        if len({*names}) < len(names) or len(names) != len(terms) + 1:
            expected = f"{len(terms)} distinct names, of {', '.join(default)}"
            raise ArgumentError("names", ", ".join(names[:-1]), expected)
        mean, covariance = posterior.computed_in_double(model, compute, points)
        scale, shift = units_of_targets(model)
    shape, scale = (len(names), points.shape[-2]), scale.unsqueeze(-1)
    mean = (mean.unflatten(-1, shape) * scale).to(points)
    mean[..., -1, :] += shift
    blocks = covariance.unflatten(-1, shape).unflatten(-3, shape).transpose(-3, -2)
    return Decomposition(names, mean, (blocks * scale.square()[..., None, None]).to(points))


def _terms_of(model: ExactGP, prior: posterior.JointPrior) -> list[Term]:
    """The terms of a model's kernel; an error where it is no sum."""
    operator, is_multitask = cast(Any, prior.operator), len(prior.distribution.event_shape) > 1
    if is_multitask or not isinstance(operator, LazyEvaluatedKernelTensor) or operator.params:
        got = "several tasks" if is_multitask else f"a covariance by {type(operator).__name__}"
        raise UnsupportedError("model", got, "one kernel, called on the points")
    kernel, columns = cast(Any, operator.kernel), torch.arange(operator.x1.shape[-1])
    # GPyTorch has selected the columns of the outermost kernel already.
    dims = columns if kernel.active_dims is None else kernel.active_dims
    labels = getattr(model, "column_names", None) or range(int(dims.max()) + 1)
    terms = _terms(kernel, columns.to(operator.device), [str(labels[d]) for d in dims.tolist()])
    if len(terms) < 2:
        suggestion = "Write it as a sum, such as RBFKernel() + LinearKernel()."
        raise UnsupportedError("model", f"the kernel {terms[0][0]}", "a sum", suggestion)
    return terms


def _terms(kernel: Any, dims: Tensor, labels: list[str]) -> list[Term]:
    """The terms of a kernel whose ``forward`` is given these columns of the points."""
    kind = None if has_hooks(kernel) else type(kernel)
    if kind is ScaleKernel:
        scale, terms = kernel.outputscale[..., None, None], _terms(kernel.base_kernel, dims, labels)
        return [(name, lambda a, b, k=k: k(a, b) * scale) for name, k in terms]
    if kind in (AdditiveKernel, ProductKernel):
        children = [(child, child.active_dims) for child in kernel.kernels]
        sums = [_terms(k, dims if d is None else dims[d], labels) for k, d in children]
        if kind is AdditiveKernel:
            return list(itertools.chain(*sums))
        products = [[*zip(*factors, strict=True)] for factors in itertools.product(*sums)]
        return [
            (" * ".join(names), lambda a, b, ks=ks: functools.reduce(mul, [k(a, b) for k in ks]))
            for names, ks in cast(Any, products)
        ]
    name = type(kernel).__name__.removesuffix("Kernel")
    if len(dims) < len(labels):
        name += f"({', '.join(labels[d] for d in dims.tolist())})"

    def matrix(a: Tensor, b: Tensor) -> Tensor:
        rows, gram = a[..., dims], closed_form(kernel)
        columns = rows if a is b else b[..., dims]
        if isinstance(gram, Gram):
            return gram(rows, None if a is b else columns).value.to(a)
        return LazyEvaluatedKernelTensor(rows, columns, kernel=kernel).to_dense()

    return [(name, matrix)]


def _prior_of_components(
    prior: posterior.JointPrior, terms: list[Term], center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Prior means ``(*batch, C m)`` of the components at m new points, and covariances.

    With the n training values ``(*batch, C m, n)`` and among each other ``(*batch, C m, C m)``.
    """
    seen, new = cast(Any, prior.operator).x1.tensor_split([prior.num_train], -2)
    C, n, m, batch = len(terms) + 1, prior.num_train, new.shape[-2], prior.batch_shape
    got, numbers = f"{m} points of {C} components", 5 * n * n + 2 * n * C * m + 5 * (C * m) ** 2
    suggestion = "Give fewer points at a time."
    check_memory("x", got, batch.numel() * numbers, new.dtype, new.device, suggestion)
    cross, joint = new.new_zeros(*batch, C, m, n), new.new_zeros(*batch, C, m, C, m)
    for c, (_, matrix) in enumerate(terms):
        cross[..., c, :, :], joint[..., c, :, c, :] = matrix(new, seen), matrix(new, new)
        if center:  # the last component gains the mean over training points of this one
            average = matrix(seen, seen).mean(-2, keepdim=True)
            variance = average.mean(-1, keepdim=True)
            shared = cross[..., c, :, :].mean(-1, keepdim=True) - variance
            cross[..., c, :, :] -= average
            cross[..., -1, :, :] += average
            joint[..., c, :, c, :] -= shared + shared.mT + variance
            joint[..., c, :, -1, :] = shared
            joint[..., -1, :, c, :] = shared.mT
            joint[..., -1, :, -1, :] += variance
    mean = new.new_zeros(*prior.mean.shape[:-1], C, m)
    mean[..., -1, :] = prior.mean  # that of the model is the last component's
    return mean.flatten(-2), cross.flatten(-3, -2), joint.flatten(-2).flatten(-3, -2)
