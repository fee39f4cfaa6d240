"""The covariance of a model's observations before it is evaluated, and the choice of a solver."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel, MultitaskKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from linear_operator import to_linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    KroneckerProductAddedDiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    LowRankRootLinearOperator,
    MulLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpclml._utils import environment
from gpclml._utils.arguments import all_finite, callers_level, checked
from gpclml.gram import Gram, Reason, as_matrix, closed_form
from gpclml.gram.closed_form import has_hooks
from gpclml.linalg import (
    ConjugateGradients,
    Covariance,
    DenseCovariance,
    GramCovariance,
    IterativeCovariance,
    KroneckerCovariance,
    LowRankPlusDiagonal,
    RowProducts,
    permute,
)
from gpclml.linalg.covariance import common_batch
from gpclml.linalg.dense import Noise

__all__ = [
    "ObservedCovariance",
    "Road",
    "Solver",
    "SolverWarning",
    "choose_solver",
    "observed_covariance",
]

_SMALL = 2**20  # entries of covariances for which nobody asks how much memory there is

_WAYS = {
    GramCovariance: "closed form, Cholesky",
    DenseCovariance: "GPyTorch's kernel, Cholesky",
    LowRankPlusDiagonal: "low rank plus a diagonal",
    KroneckerCovariance: "a Cholesky factor for each task",
    IterativeCovariance: "conjugate gradients",
}

Solver = Literal["auto", "cholesky", "cg"] | ConjugateGradients
"""A name, or the settings of conjugate gradients."""


@dataclass(frozen=True)
class Road:
    """Which way a step of an objective goes.

    Attributes:
        way: How covariance and density are computed, such as "closed form, Cholesky".
        reason: Why not by a faster way, such as "MyKernel is a subclass of RBFKernel"; empty where
            there is none.
    """

    way: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.way}: {self.reason}" if self.reason else self.way


class SolverWarning(UserWarning):
    """``solver="auto"`` chose conjugate gradients, since Cholesky factors do not fit."""


def closed_form_of(kernel: LazyEvaluatedKernelTensor) -> Gram | Reason:
    """A kernel that was called in closed form, or why its covariance is left to GPyTorch.

    Args:
        kernel: Not yet evaluated, the inputs of its rows being those of its columns.
    """
    if kernel.last_dim_is_batch or kernel.params:
        return Reason("the kernel was called with arguments of its own")
    gram = closed_form(cast(Kernel, kernel.kernel))
    rows, columns = cast(Tensor, kernel.x1).shape[-2:]
    return gram if isinstance(gram, Reason) else unless_low_rank(gram, rows, columns)


def unless_low_rank(gram: Gram, num_points: int, num_columns: int) -> Gram | Reason:
    """A kernel whose matrix is worth forming, or that its rank is less than the number of points.

    Args:
        gram: The kernel.
        num_points: Number of its points.
        num_columns: Number of their columns.
    """
    if gram.rank(num_columns) < num_points:
        return Reason("the kernel is of low rank, and its matrix is not formed")
    return gram


def block_of(kernel: LinearOperator) -> Tensor:
    """A block of a kernel that was called, as a matrix.

    In closed form where no gradient is recorded. Else by GPyTorch, whose evaluation can be
    differentiated twice.

    Args:
        kernel: Not yet evaluated, at any points of rows and columns.
    """
    if torch.is_grad_enabled() or not isinstance(kernel, LazyEvaluatedKernelTensor):
        return kernel.to_dense()
    gram = Reason("") if kernel.last_dim_is_batch or kernel.params else closed_form(kernel.kernel)
    if isinstance(gram, Reason):
        return kernel.to_dense()
    rows, columns = cast(Tensor, kernel.x1), cast(Tensor, kernel.x2)
    return gram(rows, None if columns is rows else columns).value.to(rows.dtype)


def row_of(kernel: LazyEvaluatedKernelTensor) -> Callable[[int], Tensor] | None:
    """What computes a row by its index, ``(*batch, n)``; None of kernels that are not known.

    A preconditioner asks for hundreds, one after the other.
    """
    gram = closed_form_of(kernel)
    if isinstance(gram, Reason):
        return None
    with torch.no_grad():
        inner, x = gram.on_features(cast(Tensor, kernel.x1))
    if inner.has_features:  # in a sum or product: all of them would be computed for each row
        return None
    return lambda index: inner(x[..., index : index + 1, :], x).value.squeeze(-2)


def variances(noise: Noise) -> Tensor | None:
    """The noise as a tensor, ``(*batch, n)`` or ``(*batch, 1)``."""
    return cast(Tensor, noise.noise) if isinstance(noise, torch.nn.Module) else noise


def with_noise(covariance: Tensor, noise: Tensor | None) -> Tensor:
    """The covariance with noise variances, ``(*batch, n)`` or ``(*batch, 1)``, on its diagonal."""
    if noise is None:
        return covariance
    return covariance + torch.diag_embed(noise.expand(*noise.shape[:-1], covariance.shape[-1]))


@dataclass(frozen=True)
class ObservedCovariance:
    """Covariance of N observations a batch member, as the parts that kernel and likelihood gave.

    Attributes:
        latent: Covariance of the latent values, ``(*batch, N, N)``, often a kernel that is yet to
            be evaluated; with all noise in it where that is not independent.
        independent: Noise variances, ``(*batch, N)``, or the module that has one for all; None
            where the noise is in ``latent``.
        missing: Which observations are missing, ``(*batch, N)``: each has variance one and no
            correlation, so that it changes no other density. None where none is.
    """

    latent: LinearOperator
    independent: Noise = None
    missing: Tensor | None = None

    @cached_property
    def noise(self) -> Tensor | None:
        """Variances of the independent noise, ``(*batch, N)``."""
        noise = variances(self.independent)
        return None if noise is None else noise.expand(*noise.shape[:-1], self.latent.shape[-1])

    @staticmethod
    def of(evaluated: Covariance) -> ObservedCovariance:
        """A covariance that has been evaluated, in this form."""
        return ObservedCovariance(*evaluated.operators())

    @cached_property
    def shape(self) -> torch.Size:
        """``(*batch, N, N)``."""
        latent, noise = self.latent.shape, self.independent
        parts = [] if self.missing is None else [self.missing.shape[:-1]]
        if noise is not None:
            own = isinstance(noise, torch.nn.Module)
            numbers = cast(Tensor, noise.raw_noise if own else noise)
            parts.append(numbers.shape[:-1])
        batch = common_batch(latent[:-2], *parts)
        return latent if batch == latent[:-2] else torch.Size((*batch, *latent[-2:]))

    def at(self, rows: Tensor) -> ObservedCovariance:
        """Of some of the observations.

        Args:
            rows: Indices, ``(k,)``.
        """
        noise, missing = self.independent, self.missing
        if missing is not None:
            missing = missing[..., rows]
        tasks = _kronecker_parts(self.latent)
        if tasks is not None:
            return replace(_of_some_tasks(tasks, rows), missing=missing)
        if isinstance(noise, Tensor):
            noise = noise[..., rows]
        return ObservedCovariance(_rows_and_columns(self.latent, rows), noise, missing)

    @cached_property
    def evaluated(self) -> Covariance:
        """The covariance: of low rank plus a diagonal where the kernel gives it so, else dense.

        Raises:
            ArgumentError: Not even the matrix and its factor fit into memory; with both figures.
        """
        self._check_room()
        if isinstance(self.latent, LazyEvaluatedKernelTensor):
            gram = closed_form_of(self.latent)
            if not isinstance(gram, Reason):
                covariance = self._in_closed_form(gram, self.latent)
                if self.missing is None:
                    return covariance
                return DenseCovariance(self._masked(covariance.matrix))
        if self.missing is None and (kronecker := _of_tasks(self.latent)) is not None:
            return kronecker
        latent = _evaluated(self.latent)
        if self.noise is not None and isinstance(latent, LowRankRootLinearOperator):
            low_rank = LowRankPlusDiagonal(latent.root.to_dense(), self.noise)
            return low_rank if self.missing is None else low_rank.masked(self.missing)
        matrix = latent.to_dense()
        if self.noise is not None:
            one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
            matrix = torch.addcmul(matrix, self.noise.unsqueeze(-1), one)
        return DenseCovariance(self._masked(matrix))

    def _in_closed_form(self, gram: Gram, kernel: LazyEvaluatedKernelTensor) -> DenseCovariance:
        x = cast(Tensor, kernel.x1)
        if kernel._is_grad_enabled or not torch.is_grad_enabled():
            return GramCovariance(gram, x, self.independent, self.shape)
        with torch.no_grad():  # as the kernel was called
            matrix = GramCovariance(gram, x, None, kernel.shape).matrix
        return DenseCovariance(with_noise(matrix, variances(self.independent)))

    def _check_room(self) -> None:
        shape = self.shape
        if shape.numel() <= _SMALL or not self._kernels():
            return
        latent, numbers = cast(Any, self.latent), 2 * shape.numel()
        dtype, device = latent.dtype, latent.device  # which walk the kernel's parameters
        if not environment.fits(numbers * dtype.itemsize, device) and not self.is_low_rank():
            environment.check_memory(
                "model", f"a dense covariance of shape {tuple(shape)}", numbers, dtype, device,
                "Use fewer points, or solver='cg' if the function takes a solver.",
            )  # fmt: skip

    def _masked(self, matrix: Tensor) -> Tensor:
        """The matrix with variance one and no correlation where observations are missing."""
        if self.missing is None:
            return matrix
        gone = self.missing.unsqueeze(-1) | self.missing.unsqueeze(-2)
        return matrix.masked_fill(gone, 0.0) + torch.diag_embed(self.missing.to(matrix))

    def by(self, solver: Solver, like: Tensor, block: int) -> Covariance:
        """The covariance in the form that a solver asks for.

        Args:
            solver: See :func:`choose_solver`. Covariances of low rank have exact algebra of their
                own, which "auto" and "cholesky" take.
            like: Residuals, ``(*batch, N)``.
            block: Size of the largest held-out block.

        Raises:
            ArgumentError: What was asked for needs more memory than the device has; with both
                figures.

        Warns:
            SolverWarning: "auto" takes conjugate gradients.
        """
        if solver in ("auto", "cholesky") and self.shape.numel() <= _SMALL:
            return self.evaluated
        numbers = DenseCovariance.memory(self.shape, block)
        if (
            solver in ("auto", "cholesky")
            and not environment.fits(numbers * like.itemsize, like.device)
            and self.is_low_rank()
        ):
            return self.evaluated

        def check_block() -> None:
            needed = IterativeCovariance.memory(torch.Size((*like.shape, like.shape[-1])), block)
            environment.check_memory(
                "conditioning", f"a block of {block} held-out points", needed, like.dtype,
                like.device, "Hold out a smaller share of the points.",
            )  # fmt: skip

        settings = choose_solver(
            solver, numbers, like, f"n = {like.shape[-1]}",
            "Use solver='cg', or condition on fewer points: RandomHoldout(fraction, "
            "condition_on=m).", check_block,
        )  # fmt: skip
        if settings is None:
            return self.evaluated
        return self.iterative(settings)

    def road(self, solver: Solver, like: Tensor, block: int) -> Road:
        """Which form :meth:`by` gives the covariance, and why not a faster one.

        The arguments are those of :meth:`by`, and so are the errors.
        """
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", SolverWarning)
            covariance = self.by(solver, like, block)
        way = _WAYS[type(covariance)]
        if isinstance(covariance, IterativeCovariance):
            if solver == "auto":
                return Road(way, "a Cholesky factor does not fit into memory")
            return Road(way, "the objective was given this solver")
        if type(covariance) is not DenseCovariance:
            return Road(way)
        if not isinstance(self.latent, LazyEvaluatedKernelTensor):
            return Road(way, "the model's covariance is not one kernel that is yet to be evaluated")
        gram = closed_form_of(self.latent)
        if isinstance(gram, Reason):
            return Road(way, gram.text)
        return Road("closed form of the matrix, Cholesky", "members of the batch miss targets")

    def drops_missing(self) -> bool:
        """Whether missing ones are left out: not of a batch, nor of kernels that need a grid."""
        if len(self.shape) > 2:
            return False
        if self.shape.numel() <= _SMALL or _kronecker_parts(self.latent) is not None:
            return True
        if not isinstance(self.latent, LazyEvaluatedKernelTensor):
            return False
        return not isinstance(closed_form_of(self.latent), Reason)

    def has_structure(self) -> bool:
        """Whether the kernel evaluates to an operator with structure; found out at two points."""
        if not self._kernels():
            return not _is_dense(self.latent)
        few = min(2 * self._targets_a_point(), self.latent.shape[-1])
        probe = cast(LinearOperator, self.latent[..., :few, :few])
        with torch.no_grad():
            return not _is_dense(probe)

    def is_low_rank(self) -> bool:
        """Whether it is of low rank plus independent noise."""
        if self.independent is None or not self.has_structure():
            return False
        return isinstance(_evaluated(self.latent), LowRankRootLinearOperator)

    def iterative(self, settings: ConjugateGradients) -> IterativeCovariance:
        """The covariance by its products, never formed whole unless there is room to keep it."""
        if self._kernels() and not self.has_structure():
            single = self.latent if isinstance(self.latent, LazyEvaluatedKernelTensor) else None
            diagonal = self.latent.diagonal(dim1=-1, dim2=-2)
            latent = RowProducts(
                self._rows, diagonal, settings.room(diagonal.device), self._targets_a_point(),
                None if single is None else row_of(single),
            )  # fmt: skip
        else:
            latent = _evaluated(self.latent)
        return IterativeCovariance(latent, self.noise, settings, self.missing)

    def _rows(self, start: int, stop: int, columns: int) -> Tensor:
        return block_of(cast(Any, _in_this_grad_mode(self.latent))[..., start:stop, :columns])

    def _targets_a_point(self) -> int:
        return max(kernel.shape[-1] // kernel.x1.shape[-2] for kernel in self._kernels())

    def _kernels(self) -> list[LazyEvaluatedKernelTensor]:
        """Kernels that are yet to be evaluated: one, or the terms of a sum that a model made."""
        return [part for part in _terms(self.latent) if isinstance(part, LazyEvaluatedKernelTensor)]


@checked
def choose_solver(
    solver: Solver,
    numbers: int,
    like: Tensor,
    size: str,
    suggestion: str,
    check: Callable[[], object],
    loss: str = "",
) -> ConjugateGradients | None:
    """Chooses a solver: settings of conjugate gradients, or None for a Cholesky factor.

    "auto" takes a Cholesky factor, which is exact, where it fits into the memory of the device,
    and warns where it does not.

    Args:
        solver: What was asked for.
        numbers: How many numbers the Cholesky factor needs, with all that is computed from it.
        like: A tensor of their type and on their device.
        size: The sizes that decide, for messages.
        suggestion: What to do where a Cholesky factor was asked for and does not fit.
        check: Called before conjugate gradients are taken; raises an error where they cannot be.
        loss: What else conjugate gradients do without, for the warning.

    Raises:
        UnknownNameError: The solver is neither a known name nor settings.
        ArgumentError: What was asked for needs more memory than the device has; with both
            figures.

    Warns:
        SolverWarning: "auto" takes conjugate gradients.
    """
    if solver == "cholesky":
        environment.check_memory(
            "solver", f"'cholesky' at {size}", numbers, like.dtype, like.device, suggestion
        )
        return None
    if solver == "auto" and environment.fits(numbers * like.dtype.itemsize, like.device):
        return None
    check()
    settings = solver if isinstance(solver, ConjugateGradients) else ConjugateGradients()
    if solver == "auto":
        there = environment.available_memory(like.device)
        warnings.warn(
            f"{size}: a Cholesky factor needs {numbers * like.dtype.itemsize / 2**30:.1f} GiB, the "
            f"{like.device.type} has {there / 2**30:.1f}, so conjugate gradients are used, with "
            f"relative residuals of at most {settings.tolerance:g}{loss}. Pass solver='cg', or "
            "ConjugateGradients(...), to choose them.",
            SolverWarning,
            stacklevel=callers_level(),
        )
    return settings


@checked(late=True)
def observed_covariance(
    likelihood: Likelihood, prior: MultivariateNormal, *params: Any, **kwargs: Any
) -> tuple[MultivariateNormal, ObservedCovariance]:
    """The distribution of the observations, with their covariance in its parts.

    Args:
        likelihood: Adds the noise.
        prior: Of the latent values.
        *params: Passed on to the likelihood.
        **kwargs: Passed on to the likelihood.

    Returns:
        A distribution with the mean of the observations, and their covariance.
    """
    if has_one_noise(likelihood) and type(prior) is MultivariateNormal:  # it is the marginal
        noise = cast(HomoskedasticNoise, cast(GaussianLikelihood, likelihood).noise_covar)
        return prior, ObservedCovariance(prior.lazy_covariance_matrix, noise)
    prior = _with_points_in_closed_form(prior)
    output = cast(MultivariateNormal, likelihood(prior, *params, **kwargs))
    covariance = output.lazy_covariance_matrix
    if isinstance(covariance, AddedDiagLinearOperator) and type(output) is MultivariateNormal:
        latent = cast(LinearOperator, covariance._linear_op)
        noise = covariance._diag_tensor.diagonal(dim1=-1, dim2=-2)
        return output, ObservedCovariance(latent, noise)
    return output, ObservedCovariance(covariance)


def _with_points_in_closed_form(prior: MultivariateNormal) -> MultivariateNormal:
    """The same prior, in which GPyTorch's multitask kernel has a known kernel of points evaluated.

    The likelihood would evaluate it otherwise, when it adds the noise of the tasks.
    """
    lazy = prior.lazy_covariance_matrix
    if type(prior) is not MultitaskMultivariateNormal or not isinstance(
        lazy, LazyEvaluatedKernelTensor
    ):
        return prior
    kernel = cast(Any, lazy.kernel)
    x = cast(Tensor, lazy.x1)
    if type(kernel) is not MultitaskKernel or has_hooks(kernel) or lazy.params:
        return prior
    if x.ndim > 2 or x is not lazy.x2 or lazy._is_grad_enabled != torch.is_grad_enabled():
        return prior
    gram = closed_form(kernel.data_covar_module)
    if isinstance(gram, Reason):
        return prior
    points = to_linear_operator(as_matrix(gram(x), x.dtype))
    product = KroneckerProductLinearOperator(points, kernel.task_covar_module.covar_matrix)
    return MultitaskMultivariateNormal(prior.mean, product, interleaved=prior._interleaved)


def has_one_noise(likelihood: Likelihood) -> bool:
    """Whether all that the likelihood does is to add one noise to all observations."""
    return (
        type(likelihood) is GaussianLikelihood
        and type(likelihood.noise_covar) is HomoskedasticNoise
        and "marginal" not in vars(likelihood)
    )


def _evaluated(covariance: LinearOperator) -> LinearOperator:
    """The covariance as the operator that the kernel returns."""
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        return cast(LinearOperator, covariance.evaluate_kernel())
    return covariance


def _rows_and_columns(covariance: LinearOperator, rows: Tensor) -> LinearOperator:
    """Of some observations; a kernel that is yet to be evaluated is so at their inputs alone."""
    if isinstance(covariance, LazyEvaluatedKernelTensor) and not covariance.last_dim_is_batch:
        left, right = cast(Tensor, covariance.x1), cast(Tensor, covariance.x2)
        if covariance.shape[-2:] == (left.shape[-2], right.shape[-2]):  # one target a point
            some = left.index_select(-2, rows)
            others = some if right is left else right.index_select(-2, rows)
            with torch.set_grad_enabled(covariance._is_grad_enabled):
                return LazyEvaluatedKernelTensor(
                    some, others, kernel=covariance.kernel, **covariance.params
                )
    return cast(LinearOperator, cast(Any, covariance)[..., rows, :][..., :, rows])


_Kronecker = tuple[LinearOperator, LinearOperator, Tensor]  # of points, of tasks, and their noise


def _kronecker_parts(covariance: LinearOperator) -> _Kronecker | None:
    """Those of GPyTorch's multitask kernel, and the noise of each task, ``(*batch, t)``."""
    if type(covariance) is not KroneckerProductAddedDiagLinearOperator:
        return None
    product, diagonal = cast(Any, covariance.linear_op), cast(Any, covariance.diag_tensor)
    if type(product) is not KroneckerProductLinearOperator or len(product.linear_ops) != 2:
        return None
    points, tasks = product.linear_ops
    if type(diagonal) is ConstantDiagLinearOperator:
        return points, tasks, diagonal.diag_values.expand(*diagonal.shape[:-2], tasks.shape[-1])
    factors = getattr(diagonal, "linear_ops", [])
    if len(factors) != 2 or type(factors[0]) is not ConstantDiagLinearOperator:
        return None
    if factors[0].shape[-1] != points.shape[-1]:
        return None
    return points, tasks, factors[0].diag_values * factors[1].diagonal(dim1=-2, dim2=-1)


def _of_some_tasks(parts: _Kronecker, rows: Tensor) -> ObservedCovariance:
    """Of some observations, whose tasks differ from point to point."""
    points, tasks, noise = parts
    t = tasks.shape[-1]
    point, task = rows // t, rows % t
    latent = permute(points.to_dense(), point) * permute(tasks.to_dense(), task)
    return ObservedCovariance(DenseLinearOperator(latent), noise[..., task])


def _of_tasks(covariance: LinearOperator) -> KroneckerCovariance | None:
    """That of points with all their tasks, on a CPU; else None."""
    parts = _kronecker_parts(covariance)
    if parts is None:
        return None
    points, tasks, noise = parts
    tasks = tasks.to_dense()
    # Eigenvectors are for finite numbers. On a GPU a step would wait for them.
    if noise.device.type != "cpu" or not bool((noise > 0).all()):
        return None
    if not all_finite(tasks / noise.unsqueeze(-1)):
        return None
    return KroneckerCovariance(points.to_dense(), tasks, noise)


def _terms(operator: LinearOperator) -> Iterator[LinearOperator]:
    """The terms of sums and multiples."""
    if isinstance(operator, ConstantMulLinearOperator | SumLinearOperator):
        for part in operator._args:
            if isinstance(part, LinearOperator):
                yield from _terms(part)
    else:
        yield operator


def _in_this_grad_mode(operator: LinearOperator) -> LinearOperator:
    """The same kernels; GPyTorch evaluates each in the grad mode in which it was made."""
    if isinstance(operator, LazyEvaluatedKernelTensor):
        return LazyEvaluatedKernelTensor(
            operator.x1, operator.x2, kernel=operator.kernel,
            last_dim_is_batch=operator.last_dim_is_batch, **operator.params,
        )  # fmt: skip
    if isinstance(operator, ConstantMulLinearOperator | SumLinearOperator):
        parts = [
            _in_this_grad_mode(part) if isinstance(part, LinearOperator) else part
            for part in operator._args
        ]
        return type(operator)(*parts, **operator._kwargs)
    return operator


def _is_dense(operator: LinearOperator) -> bool:
    """Whether it, evaluated, is a matrix, or one made of matrices entry by entry."""
    operator = _evaluated(operator)
    if isinstance(operator, ConstantMulLinearOperator | SumLinearOperator | MulLinearOperator):
        return all(_is_dense(part) for part in operator._args if isinstance(part, LinearOperator))
    return isinstance(operator, DenseLinearOperator)
