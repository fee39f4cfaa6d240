"""The prior Gaussian of a model's observed targets: covariance, residuals, what is missing.

A covariance is read off a model without being evaluated. What is known of it then decides once, in
:meth:`Observations.covariance_by`, how it is computed: in closed form, by its structure, by
GPyTorch's kernel, or by conjugate gradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import MultitaskKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import GaussianLikelihood, HadamardGaussianLikelihood, Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.models import ExactGP
from linear_operator import operators, to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpclml import linalg
from gpclml._utils import environment
from gpclml._utils.arguments import all_finite, callers_level, check_placement
from gpclml.conditioning import Conditioning, Split
from gpclml.conditioning.strategies import stack_by_size
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.gram import Gram, Reason, closed_form, has_hooks, matrix_node
from gpclml.linalg import ConjugateGradients
from gpclml.linalg.dense import Noise

__all__ = [
    "MISSING_TERM",
    "Observations",
    "Road",
    "Solver",
    "SolverWarning",
    "likelihood_parameters",
    "observations",
    "training_observations",
]

MISSING_TERM = -0.5 * math.log(2 * math.pi)
"""What a missing target adds to a log density: it enters as a standard normal at its mean."""

Solver = Literal["auto", "cholesky", "cg"] | ConjugateGradients
"""A name, or the settings of conjugate gradients."""

SMALL = 2**20
"""Entries of covariances for which nobody asks how much memory there is."""

MATRICES_AT_PEAK = 7  # of a step: those of the kernel, of the factor and of the gradient
_VECTORS = 12  # arrays of n times the size of a block at the peak of a step of conjugate gradients

_ENTRY_BY_ENTRY = (
    operators.ConstantMulLinearOperator, operators.SumLinearOperator, operators.MulLinearOperator,
)  # fmt: skip

_WAYS = {
    linalg.GramCovariance: "closed form, Cholesky",
    linalg.DenseCovariance: "GPyTorch's kernel, Cholesky",
    linalg.LowRankPlusDiagonal: "low rank plus a diagonal",
    linalg.KroneckerCovariance: "a Cholesky factor for each task",
    linalg.IterativeCovariance: "conjugate gradients",
}


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


def conjugate_gradients(
    solver: Solver, numbers: int, like: Tensor, size: str, suggestion: str, loss: str = ""
) -> ConjugateGradients:
    """Settings of conjugate gradients, where they were asked for or a Cholesky factor does not fit.

    Of a solver "auto" warns, and "cholesky" is an error: ``numbers`` is how many a factor needs
    with all that is computed from it, of the type and on the device of ``like``; ``size`` and
    ``loss``, what conjugate gradients do without, are for messages.
    """
    settings = solver if isinstance(solver, ConjugateGradients) else ConjugateGradients()
    dtype, device = like.dtype, like.device
    if solver == "cholesky":
        got = f"'cholesky' at {size}"
        environment.check_memory("solver", got, numbers, dtype, device, suggestion)
    if solver == "auto":
        needed, there = numbers * dtype.itemsize, environment.available_memory(device)
        warnings.warn(
            f"{size}: a Cholesky factor needs {needed / 2**30:.1f} GiB, the {device.type} has "
            f"{there / 2**30:.1f}, so conjugate gradients are used, with relative residuals of at "
            f"most {settings.tolerance:g}{loss}. Pass solver='cg', or ConjugateGradients(...), to "
            "choose them.",
            SolverWarning,
            stacklevel=callers_level(),
        )
    return settings


@dataclass(frozen=True)
class Observations:
    """Targets and their prior Gaussian, N = n t numbers for each batch member.

    Attributes:
        latent: Covariance of the latent values, ``(*batch, N, N)``, often a kernel that is yet to
            be evaluated; with all noise in it where that is not independent.
        independent_noise: Variances of independent noise, ``(*batch, N)``, or the module that has
            one for all; None where the noise is in ``latent``.
        residual: Targets minus prior mean, ``(*batch, N)``; zero where missing.
        missing: Which targets are missing, ``(*batch, N)``: each has variance one and no
            correlation, so that it changes no other density. None where none is.
        num_rows: Number n of data rows.
        num_tasks: Number t of targets of each row.
        interleaved: Whether the tasks of one row are neighbours (else the rows of one task).
        params: Arguments of the likelihood besides the distribution.
        places: Indices of these targets among all of the model, ``(N,)``; None for all of them.
        is_gaussian: Whether targets are Gaussian given the latent values.
    """

    is_gaussian: ClassVar[bool] = True

    latent: LinearOperator
    independent_noise: Noise
    residual: Tensor
    missing: Tensor | None
    num_rows: int
    num_tasks: int = 1
    interleaved: bool = True
    params: tuple[Any, ...] = ()
    places: Tensor | None = None

    @cached_property
    def noise(self) -> Tensor | None:
        """Variances of the independent noise, ``(*batch, N)``."""
        noise = self.independent_noise
        if isinstance(noise, torch.nn.Module):
            noise = cast(Tensor, noise.noise)
        return None if noise is None else noise.expand(*noise.shape[:-1], self.latent.shape[-1])

    @cached_property
    def shape(self) -> torch.Size:
        """Shape of the covariance, ``(*batch, N, N)``."""
        noise = self.independent_noise
        if isinstance(noise, torch.nn.Module):
            noise = cast(Tensor, noise.raw_noise)
        shape = self.latent.shape
        batch = shape[:-2]
        for variances in (noise, self.missing):
            if variances is not None and variances.shape[:-1] != batch:
                batch = torch.broadcast_shapes(batch, variances.shape[:-1])
        return torch.Size((*batch, *shape[-2:]))

    @cached_property
    def covariance(self) -> linalg.ExactCovariance:
        """By its structure where it has one, else dense; where that fits into memory."""
        missing, shape, numbers = self.missing, self.shape, 2 * self.shape.numel()
        if numbers > 2 * SMALL and lazy_kernels(self.latent) and not self._fits(numbers):
            got, residual = f"a dense covariance of shape {tuple(shape)}", self.residual
            suggestion = "Use fewer points, or solver='cg' if the function takes a solver."
            environment.check_memory(
                "model", got, numbers, residual.dtype, residual.device, suggestion
            )
        gram = closed_form_of(self.latent)
        if isinstance(gram, Gram):
            x = cast(Any, self.latent).x1
            covariance = linalg.GramCovariance(gram, x, self.independent_noise, shape)
            if missing is None:
                return covariance
            matrix = covariance.matrix
        else:
            kronecker = kronecker_covariance(self.latent) if missing is None else None
            if kronecker is not None:
                return kronecker
            latent, noise = self.latent.evaluate_kernel(), self.noise
            if noise is not None and isinstance(latent, operators.LowRankRootLinearOperator):
                low_rank = linalg.LowRankPlusDiagonal(latent.root.to_dense(), noise)
                return low_rank if missing is None else low_rank.masked(missing)
            matrix = latent.to_dense()
            if noise is not None:
                identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
                matrix = torch.addcmul(matrix, noise.unsqueeze(-1), identity)
        if missing is not None:
            # Identity rows: a missing target is a standard normal, independent of all others.
            matrix = matrix.masked_fill(missing.unsqueeze(-1) | missing.unsqueeze(-2), 0.0)
            matrix = matrix + torch.diag_embed(missing.to(matrix))
        return linalg.DenseCovariance(matrix)

    def _fits(self, numbers: int) -> bool:
        """Whether so many numbers fit into memory, or the covariance is of low rank."""
        dtype, device = self.residual.dtype, self.residual.device
        if environment.fits(numbers * dtype.itemsize, device):
            return True
        if self.independent_noise is None or not has_structure(self.latent):
            return False
        return isinstance(self.latent.evaluate_kernel(), operators.LowRankRootLinearOperator)

    def covariance_by(
        self, solver: Solver, blocks: Sequence[Tensor], *, checked: bool = True
    ) -> linalg.Covariance:
        """The covariance in the form that densities of held-out blocks are computed in.

        Args:
            solver: "cholesky", "cg", settings of conjugate gradients, or "auto": a Cholesky factor
                where it fits into memory, else conjugate gradients with a warning. Covariances of
                low rank have exact algebra of their own, which "auto" and "cholesky" take.
            blocks: Held-out blocks, ``(k_i, b_i)`` a size.
            checked: See :func:`gpclml.linalg.safe_cholesky`.
        """
        size = self.shape.numel()
        numbers = MATRICES_AT_PEAK * size
        if solver in ("auto", "cholesky") and (size <= SMALL or self._fits(numbers)):
            covariance = self.covariance
            if checked or not isinstance(covariance, linalg.DenseCovariance):
                return covariance
            return covariance.unchecked()
        residual, block = self.residual, max(group.shape[-1] for group in blocks)
        n, dtype, device = residual.shape[-1], residual.dtype, residual.device
        if solver != "cholesky":
            needed = _VECTORS * residual.numel() * (block + 1)
            environment.check_memory(
                "conditioning", f"a block of {block} held-out points", needed, dtype, device,
                "Hold out a smaller share of the points.",
            )  # fmt: skip
        fewer = "condition on fewer points: RandomHoldout(fraction, condition_on=m)"
        suggestion = f"Use solver='cg', or {fewer}."
        settings = conjugate_gradients(solver, numbers, residual, f"n = {n}", suggestion)
        return self.iterative(settings)

    def road(self, solver: Solver, blocks: Sequence[Tensor]) -> Road:
        """Which form :meth:`covariance_by` gives the covariance, and why not a faster one."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", SolverWarning)
            kind = type(self.covariance_by(solver, blocks))
            gram = closed_form_of(self.latent)
        if kind is linalg.IterativeCovariance:
            automatic = "a Cholesky factor does not fit into memory"
            reason = automatic if solver == "auto" else "the objective was given this solver"
            return Road(_WAYS[kind], reason)
        if kind is not linalg.DenseCovariance:
            return Road(_WAYS[kind])
        if isinstance(gram, Reason):
            return Road(_WAYS[kind], gram)
        return Road("closed form of the matrix, Cholesky", "members of the batch miss targets")

    def iterative(self, settings: ConjugateGradients) -> linalg.IterativeCovariance:
        """The covariance by its products, formed whole only if there is room to keep it."""
        # Toeplitz, interpolated, KeOps: their operators multiply faster than rows would.
        latent, kernels = self.latent, lazy_kernels(self.latent)
        if not kernels or has_structure(latent):
            whole = latent.evaluate_kernel()
            return linalg.IterativeCovariance(whole, self.noise, settings, self.missing)
        row, gram = None, closed_form_of(latent)
        if isinstance(gram, Gram):  # a preconditioner asks for hundreds, one after the other
            with torch.no_grad():
                gram, x = gram.on_features(cast(Any, latent).x1)
            if not gram.has_features:  # in a sum or product, all of them are computed for each row
                row = lambda i: gram(x[..., i : i + 1, :], x).value.squeeze(-2)  # noqa: E731
        diagonal = latent.diagonal(dim1=-1, dim2=-2)
        rows = linalg.RowProducts(
            self._rows, diagonal, settings.room(diagonal.device), targets_a_point(kernels), row
        )
        return linalg.IterativeCovariance(rows, self.noise, settings, self.missing)

    def _rows(self, start: int, stop: int, columns: int) -> Tensor:
        block = cast(Any, self.latent)[..., start:stop, :columns]
        for kernel in lazy_kernels(block):
            # GPyTorch evaluates a kernel in the grad mode in which it was called.
            kernel._is_grad_enabled = torch.is_grad_enabled()
        return evaluate_block(block)

    @torch.no_grad()
    def metric(self) -> Tensor:
        """Points whose distances say how near the kernel finds them, ``(*batch, n, q)``."""
        kernels = lazy_kernels(self.latent)
        if not kernels:
            got, expected = "a strategy that needs points", "a covariance by a kernel of points"
            raise UnsupportedError("conditioning", got, expected)
        return torch.cat([metric_points(kernel) for kernel in kernels], -1)

    def split(self, conditioning: Conditioning, generator: torch.Generator | None) -> Split:
        """A split in flat target indices, ``(k_i, b_i t)``: a held-out row takes all its tasks."""
        observed = None
        # All members hold out the same rows, so one that any of them observes counts.
        if self.missing is not None:  # rows with a target in any task of any batch member
            every = self.flat_indices(torch.arange(self.num_rows).unsqueeze(-1))
            observed = ~self.missing.cpu()[..., every]  # (*batch, n, t)
            observed = observed.any(-1).reshape(-1, self.num_rows).any(0)
        points = self.metric() if conditioning.needs_points else None
        rows = conditioning.split(self.num_rows, generator, observed, points)
        if self.num_tasks == 1:
            return rows
        given = rows.conditioned_on
        return Split(
            [self.flat_indices(group) for group in rows.held_out],
            None if given is None else self.flat_indices(given.unsqueeze(0)).squeeze(0),
        )

    def flat_indices(self, rows: Tensor) -> Tensor:
        """Indices of all targets of the rows, ``(k, b)`` to ``(k, b t)``."""
        tasks, rows = torch.arange(self.num_tasks), rows.unsqueeze(-1)
        flat = rows * self.num_tasks + tasks if self.interleaved else tasks * self.num_rows + rows
        return flat.flatten(-2)

    def at(self, split: Split, *, drop_missing: bool = True) -> tuple[Observations, list[Tensor]]:
        """Only the targets that take part in a split of flat indices, and its blocks among them.

        Missing targets are dropped from both, if so wanted, where the covariance can do without.
        """
        data, blocks = self, split.held_out
        if split.conditioned_on is not None:
            rows = torch.cat([*(group.flatten() for group in blocks), split.conditioned_on])
            index = torch.full((self.residual.shape[-1],), -1)
            index[rows] = torch.arange(len(rows))
            data, blocks = self._select(rows), [index[group] for group in blocks]
        if not drop_missing or data.missing is None or not data._drops_missing():
            return data, blocks
        kept = ~data.missing.cpu()
        # Places among the kept ones, to renumber the blocks.
        index = kept.cumsum(0) - 1
        if all(bool(kept[group].all()) for group in blocks):
            blocks = [index[group] for group in blocks]
        else:
            blocks = stack_by_size([index[row[kept[row]]] for group in blocks for row in group])
        return replace(data, missing=None)._select(kept.nonzero().squeeze(-1)), blocks

    def _drops_missing(self) -> bool:
        """Whether missing ones are left out: not of a batch, nor of kernels that need a grid."""
        if len(self.shape) > 2:
            return False
        if self.shape.numel() <= SMALL or kronecker_factors(self.latent) is not None:
            return True
        return isinstance(closed_form_of(self.latent), Gram)

    def _select(self, rows: Tensor) -> Observations:
        """The targets at these flat indices, ``(k,)``, on the CPU; kernels are not evaluated."""
        rows = rows.to(self.residual.device, non_blocking=True)
        latent, noise = self.latent, self.independent_noise
        factors = kronecker_factors(latent)
        if factors is not None:  # tasks differ from point to point
            points, tasks, noise = factors
            point, task = rows // tasks.shape[-1], rows % tasks.shape[-1]
            product = linalg.permute(points.to_dense(), point)
            product = product * linalg.permute(tasks.to_dense(), task)
            latent, noise = operators.DenseLinearOperator(product), noise[..., task]
        elif (
            isinstance(latent, LazyEvaluatedKernelTensor)
            and not latent.last_dim_is_batch
            and latent.shape[-1] == latent.x1.shape[-2]  # one target a point
        ):
            x = cast(Tensor, latent.x1).index_select(-2, rows)
            with torch.set_grad_enabled(latent._is_grad_enabled):
                latent = LazyEvaluatedKernelTensor(x, x, kernel=latent.kernel, **latent.params)
        else:
            latent = cast(Any, latent)[..., rows, :][..., :, rows]
        if factors is None and isinstance(noise, Tensor):
            noise = noise[..., rows]
        missing = None if self.missing is None else self.missing[..., rows]
        selected = {"latent": latent, "independent_noise": noise, "missing": missing}
        places = rows if self.places is None else self.places[rows]
        return replace(self, residual=self.residual[..., rows], places=places, **selected)

    def member(self, index: int | slice) -> Observations:
        """One member of a batch, or a run of consecutive members, along the first dimension."""
        covariance, noise = self.covariance[index], None
        if isinstance(covariance, linalg.LowRankPlusDiagonal):
            features, noise = to_linear_operator(covariance.features), covariance.noise
            latent: LinearOperator = operators.LowRankRootLinearOperator(features)
        else:
            latent = to_linear_operator(covariance.to_dense())
        missing = None if self.missing is None else self.missing[index]
        selected = {"latent": latent, "independent_noise": noise, "missing": missing}
        return replace(self, residual=self.residual[index], **selected)

    def flatten(self, values: Tensor) -> Tensor:
        """Values with an event shape, ``(*batch, n)`` or ``(*batch, n, t)``, as ``(*batch, N)``."""
        return values if self.num_tasks == 1 else _flatten(values, self.interleaved)

    def num_observed(self) -> Tensor | int:
        """Number of observed targets, ``(*batch,)`` or one for all."""
        if self.missing is None:
            return self.residual.shape[-1]
        return (~self.missing).sum(-1)

    def check_density(self, value: Tensor) -> None:
        """Refuses a log density that is not finite, where no covariance was at fault."""
        if not all_finite(value):
            bad = int((~torch.isfinite(self.residual)).sum())
            got = f"{bad} non-finite of {self.residual.numel()}"
            suggestion = "Check the targets and the parameters of the mean for NaN and huge values."
            raise NonFiniteError("target minus prior mean", got, "finite values", suggestion)

    def per_held_out_target(
        self, value: Tensor, blocks: Sequence[Tensor], *, redrawn: bool = False
    ) -> Tensor:
        """The summed log density of the blocks, divided by the observed targets in them.

        Args:
            value: The log density, ``(*batch,)``.
            blocks: Flat target indices, ``(k_i, b_i)``, or ``(*batch, 1, b)`` for one block of
                its own in each batch member.
            redrawn: Whether the next call has other blocks. If so, a batch member that has no
                observed target in these scores 0, without a gradient; else it is an error.
        """
        count = 0
        for block in blocks:
            count += block.shape[-2:].numel()
        if self.missing is None:
            return value / count
        held_out = torch.cat([block.flatten(-2) for block in blocks], dim=-1)
        held_out = held_out.to(self.missing.device, non_blocking=True)
        # As a floating-point count: an integer one times a number is rounded to single precision.
        missing = linalg.take(self.missing, held_out).sum(-1, dtype=value.dtype)
        nothing_to_score = self.missing.all(-1) if redrawn else missing == count
        if bool(nothing_to_score.any()):
            raise ArgumentError(
                "conditioning", "held-out points whose targets are all missing in a batch member",
                "at least one observed held-out target in each",
                "Hold out more points, or drop batch members without targets.",
            )  # fmt: skip
        # Missing targets entered the density by their constant alone.
        return (value - MISSING_TERM * missing) / (count - missing).clamp_min(1)


def observations(
    likelihood: Likelihood,
    function_dist: MultivariateNormal,
    target: Tensor,
    *params: Any,
    checked: bool = True,
    **kwargs: Any,
) -> Observations:
    """The prior Gaussian of the observations and their residuals.

    Args:
        likelihood: Adds the noise; if it is not Gaussian, the targets' density is approximated by
            Laplace's method.
        function_dist: Prior of the latent function, event shape ``(n,)`` or ``(n, t)``.
        target: Observations, ``(*batch, n)`` or ``(*batch, n, t)``; NaN is missing under
            ``observation_nan_policy("mask")``.
        *params: Passed on to the likelihood.
        checked: Refuse targets that are not finite here; else they make the density NaN.
        **kwargs: Passed on to the likelihood.
    """
    if not isinstance(function_dist, MultivariateNormal):
        kind = type(function_dist).__name__
        suggestion = "Pass the model's output: mll(model(x), target)."
        raise UnsupportedError("function_dist", kind, "a MultivariateNormal", suggestion)
    event, mean = function_dist.event_shape, function_dist.mean
    if target.shape[-len(event) :] != event:
        expected = f"(*batch, {', '.join(map(str, event))}), as the model's output"
        suggestion = "Pass the targets of the inputs that the model was called on."
        raise ShapeError("target", tuple(target.shape), expected, suggestion)
    if not isinstance(likelihood, _GaussianLikelihoodBase):
        from gpclml.inference.laplace import latent_observations

        return latent_observations(likelihood, function_dist, target)
    latent = function_dist.lazy_covariance_matrix
    check_placement("target", target, mean)
    _check_parameters("likelihood", likelihood, mean, any_dtype=False)
    if isinstance(latent, LazyEvaluatedKernelTensor):  # networks in it may be of another type
        _check_parameters("kernel", cast(Any, latent.kernel), mean, any_dtype=True)
    missing = missing_targets(target, checked)
    noise: Noise = None
    if has_one_noise(likelihood) and type(function_dist) is MultivariateNormal:
        # The likelihood would only add its noise, which the covariance takes as it is.
        output, noise = function_dist, cast(Any, likelihood).noise_covar
    else:
        output = cast(Any, likelihood(evaluate_points(function_dist), *params, **kwargs))
        latent = output.lazy_covariance_matrix
        is_sum = isinstance(latent, operators.AddedDiagLinearOperator)
        if is_sum and type(output) is MultivariateNormal:
            noise = latent._diag_tensor.diagonal(dim1=-1, dim2=-2)
            latent = cast(LinearOperator, latent._linear_op)
    interleaved = getattr(output, "_interleaved", True)
    residual = target - output.mean
    if isinstance(output, MultitaskMultivariateNormal):
        residual = _flatten(residual, interleaved)
        missing = None if missing is None else _flatten(missing, interleaved)
    if missing is not None:
        residual = residual.masked_fill(missing, 0.0)
    num_tasks = event[1] if len(event) > 1 else 1
    data = Observations(latent, noise, residual, None, event[0], num_tasks, interleaved, params)
    return data if missing is None else replace(data, missing=_shared(missing, data.shape[:-2]))


def _check_parameters(name: str, module: torch.nn.Module, mean: Tensor, any_dtype: bool) -> None:
    """Refuses parameters on another device than the mean, or of another type."""
    device, dtype, modules = mean.device, mean.dtype, [module]
    # PyTorch's generator finds their names as well, which takes several times as long.
    for child in modules:
        if child._modules:
            modules.extend(filter(None, child._modules.values()))
        for parameter in filter(torch.is_tensor, child._parameters.values()):
            if parameter.device != device or not (any_dtype or parameter.dtype == dtype):
                names = {id(tensor): key for key, tensor in module.named_parameters()}
                check_placement(f"{name}.{names[id(parameter)]}", parameter, mean)


def training_observations(
    model: ExactGP, likelihood: Likelihood | None = None, **kwargs: Any
) -> Observations:
    """The prior Gaussian of a model's own training data, in train or eval mode.

    Args:
        model: An exact GP with training data; its mode and caches stay as they are.
        likelihood: The model's own if None.
        **kwargs: Passed on to the likelihood.
    """
    if model.train_inputs is None:
        got, expected = "a model without training data", "one with training data"
        raise ArgumentError("model", got, expected, "Set them first.")
    likelihood = cast(Likelihood, model.likelihood if likelihood is None else likelihood)
    params = likelihood_parameters(model, likelihood)
    with settings.prior_mode(not model.training):
        prior = model(*model.train_inputs)
    targets = cast(Tensor, model.train_targets)
    return approximated_as(model, observations(likelihood, prior, targets, *params, **kwargs))


def approximated_as(
    model: torch.nn.Module, data: Observations, approximation: str | None = None
) -> Observations:
    """Observations that are not Gaussian, approximated as their model has it or as is asked."""
    if data.is_gaussian:
        return data
    approximation = approximation or getattr(model, "approximation", "laplace")
    return replace(cast(Any, data), approximation=approximation)


def likelihood_parameters(model: ExactGP, likelihood: Likelihood) -> tuple[Tensor, ...]:
    """The arguments that a likelihood takes besides the model's output at its training inputs.

    These are the inputs, transformed where a BoTorch model transforms them. For a model that is
    called as ``model(x, i)``, a ``HadamardGaussianLikelihood`` takes only the task indices i.
    """
    inputs = cast(tuple[Tensor, ...], tuple(model.train_inputs or ()))
    transform = getattr(model, "transform_inputs", None)
    if transform is not None and model.training:
        # BoTorch's models transform inputs inside (in eval mode they hold them transformed);
        # the likelihood is to see what the kernel sees.
        inputs = tuple(transform(X=x) for x in inputs)
    # GPyTorch finds the tasks in a column of the inputs, or is given them by themselves.
    takes_tasks = isinstance(likelihood, HadamardGaussianLikelihood)
    if not takes_tasks or likelihood.task_feature_index is not None:
        return inputs
    tasks = [x for x in inputs if x.shape[-1] == 1 and not x.is_floating_point()]
    if len(tasks) != 1:
        kinds = ", ".join(f"{x.dtype} of shape {tuple(x.shape)}" for x in inputs)
        raise ArgumentError(
            "model.train_inputs", kinds,
            "one integer tensor of shape (n, 1), the task indices of HadamardGaussianLikelihood",
            "Pass the task indices as an integer input, or make the likelihood with "
            "task_feature_index=..., the column of the inputs that holds them.",
        )  # fmt: skip
    return tuple(tasks)


def missing_targets(target: Tensor, checked: bool = True) -> Tensor | None:
    """Which targets are missing (NaN) under GPyTorch's policy, same shape; None where none is.

    Any others that are not finite are refused; under the "ignore" policy only if ``checked``, for
    which a GPU finishes all that is queued.
    """
    policy = settings.observation_nan_policy.value()
    if policy == "fill":
        expected = "'ignore' or 'mask'"
        raise UnsupportedError("observation_nan_policy", "'fill'", expected, "Use 'mask'.")
    if (policy == "ignore" and not checked) or all_finite(target):
        return None
    finite = torch.isfinite(target)
    missing = torch.isnan(target)
    if policy == "mask" and bool((finite | missing).all()):
        return missing
    bad, shape = int((~finite).sum()), tuple(target.shape)
    raise NonFiniteError(
        "target", f"{bad} non-finite of {target.numel()} values (shape {shape})", "finite targets",
        "Mark missing targets as NaN under "
        "gpytorch.settings.observation_nan_policy('mask'), or remove those rows.",
    )  # fmt: skip


def _shared(missing: Tensor, batch: torch.Size) -> Tensor:
    """One mask for members that share a covariance, where they miss the same targets."""
    for dim in range(-1, -1 - min(missing.ndim - 1, len(batch)), -1):
        if batch[dim] == 1 < missing.shape[dim - 1]:
            first = missing.narrow(dim - 1, 0, 1)
            missing = first if torch.equal(first.expand_as(missing), missing) else missing
    return missing


def _flatten(values: Tensor, interleaved: bool) -> Tensor:
    return (values if interleaved else values.mT).flatten(-2)


def has_one_noise(likelihood: Likelihood) -> bool:
    """Whether all that the likelihood does is to add one noise to all observations."""
    return (
        type(likelihood) is GaussianLikelihood
        and type(likelihood.noise_covar) is HomoskedasticNoise
        and "marginal" not in vars(likelihood)
    )


def closed_form_of(covariance: LinearOperator, *, dense: bool = False) -> Gram | Reason:
    """A kernel that was called, in closed form, or why its evaluation is left to GPyTorch.

    With ``dense`` its matrix is formed whatever its rank is.
    """
    if not isinstance(covariance, LazyEvaluatedKernelTensor):
        return Reason("the model's covariance is not one kernel that is yet to be evaluated")
    if covariance.last_dim_is_batch or covariance.params:
        return Reason("the kernel was called with arguments of its own")
    # GPyTorch evaluates a kernel in the mode in which it was called.
    if torch.is_grad_enabled() and not covariance._is_grad_enabled:
        return Reason("the kernel was called without gradients")
    gram = closed_form(cast(Any, covariance.kernel))
    num_points, num_columns = cast(Tensor, covariance.x1).shape[-2:]
    if not dense and isinstance(gram, Gram) and gram.rank(num_columns) < num_points:
        return Reason("the kernel is of low rank, and its matrix is not formed")
    return gram


def kernel_road(latent: LinearOperator, way: str) -> Road:
    """A way that evaluates the kernel as a matrix, and why that is left to GPyTorch if it is."""
    gram = closed_form_of(latent, dense=True)
    if isinstance(gram, Reason):
        return Road(f"GPyTorch's kernel, {way}", gram)
    return Road(f"closed form, {way}")


POINTS_AT_ONCE = 1 << 16
"""Points whose features a network computes together."""


def metric_points(covariance: LazyEvaluatedKernelTensor) -> Tensor:
    """Points of a kernel in its metric; in units of its lengthscales where it is not known."""
    gram, x = closed_form_of(covariance, dense=True), cast(Tensor, covariance.x1)
    if isinstance(gram, Gram):
        return torch.cat([gram.metric(points) for points in x.split(POINTS_AT_ONCE, -2)], -2)
    for kernel in cast(Any, covariance.kernel).modules():
        if getattr(kernel, "has_lengthscale", False):
            dims = kernel.active_dims
            return (x if dims is None else x.index_select(-1, dims)) / kernel.lengthscale
    got = type(covariance.kernel).__name__
    raise UnsupportedError("kernel", got, "a known kernel, or one with lengthscales")


def evaluate_block(covariance: LinearOperator) -> Tensor:
    """A block of a kernel that was called, at any points of rows and columns, as a matrix.

    In closed form where no gradient is recorded. Else by GPyTorch, whose evaluation can be
    differentiated twice.
    """
    gram = Reason("") if torch.is_grad_enabled() else closed_form_of(covariance)
    if isinstance(gram, Reason):
        return covariance.to_dense()
    rows, columns = cast(Any, covariance).x1, cast(Any, covariance).x2
    return gram(rows, None if columns is rows else columns).value.to(rows.dtype)


def evaluate_points(prior: MultivariateNormal) -> MultivariateNormal:
    """The same prior, in which GPyTorch's multitask kernel has a known kernel of points evaluated.

    The likelihood would evaluate it otherwise, when it adds the noise of the tasks.
    """
    lazy = cast(Any, prior.lazy_covariance_matrix)
    kernel = getattr(lazy, "kernel", None)
    if type(prior) is not MultitaskMultivariateNormal or type(kernel) is not MultitaskKernel:
        return prior
    x, is_plain = lazy.x1, lazy.x1.ndim == 2 and lazy.x1 is lazy.x2 and not lazy.params
    is_plain = is_plain and lazy._is_grad_enabled == torch.is_grad_enabled()
    gram = closed_form(cast(Any, kernel.data_covar_module))
    if not is_plain or has_hooks(kernel) or isinstance(gram, Reason):
        return prior
    points, tasks = matrix_node(gram(x), x.dtype), cast(Any, kernel.task_covar_module).covar_matrix
    product = operators.KroneckerProductLinearOperator(to_linear_operator(points), tasks)
    return MultitaskMultivariateNormal(prior.mean, product, interleaved=prior._interleaved)


def _terms(covariance: LinearOperator) -> list[LinearOperator]:
    """The terms of a sum, a multiple or a product entry by entry; none of other operators."""
    if not isinstance(covariance, _ENTRY_BY_ENTRY):
        return []
    return [term for term in covariance._args if isinstance(term, LinearOperator)]


def lazy_kernels(covariance: LinearOperator) -> list[LazyEvaluatedKernelTensor]:
    """Kernels that are yet to be evaluated: one, or the terms of a sum that a model made."""
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        return [covariance]
    return [kernel for term in _terms(covariance) for kernel in lazy_kernels(term)]


def targets_a_point(kernels: Sequence[LazyEvaluatedKernelTensor]) -> int:
    """Number of rows of the covariance for each point."""
    return max(kernel.shape[-1] // kernel.x1.shape[-2] for kernel in kernels)


def has_structure(covariance: LinearOperator) -> bool:
    """Whether it evaluates to other than matrices, entry by entry; kernels do at two points."""
    kernels = lazy_kernels(covariance)
    if kernels:
        # The kind of an operator does not depend on the number of points.
        few = min(2 * targets_a_point(kernels), covariance.shape[-1])
        with torch.no_grad():
            covariance = cast(Any, covariance)[..., :few, :few].evaluate_kernel()
    terms = _terms(covariance)
    if terms:
        return any(has_structure(term) for term in terms)
    return not isinstance(covariance, operators.DenseLinearOperator)


def kronecker_factors(
    covariance: LinearOperator,
) -> tuple[LinearOperator, LinearOperator, Tensor] | None:
    """Covariances of points and tasks by GPyTorch's multitask kernel, and noise ``(*batch, t)``."""
    if type(covariance) is not operators.KroneckerProductAddedDiagLinearOperator:
        return None
    product, diagonal = cast(Any, covariance.linear_op), cast(Any, covariance.diag_tensor)
    kind = operators.KroneckerProductLinearOperator
    # GPyTorch nests products of more than two factors, for which nothing is known.
    if type(product) is not kind or len(product.linear_ops) != 2:
        return None
    points, tasks = product.linear_ops
    if type(diagonal) is operators.ConstantDiagLinearOperator:
        return points, tasks, diagonal.diag_values.expand(*diagonal.shape[:-2], tasks.shape[-1])
    factors = getattr(diagonal, "linear_ops", [])
    if len(factors) != 2 or type(factors[0]) is not operators.ConstantDiagLinearOperator:
        return None
    if factors[0].shape[-1] != points.shape[-1]:
        return None
    return points, tasks, factors[0].diag_values * factors[1].diagonal(dim1=-2, dim2=-1)


def kronecker_covariance(covariance: LinearOperator) -> linalg.KroneckerCovariance | None:
    """That of points with all their tasks, on a CPU; else None."""
    factors = kronecker_factors(covariance)
    if factors is None:
        return None
    points, tasks, noise = factors[0], factors[1].to_dense(), factors[2]
    # Eigenvectors are for finite numbers. On a GPU a step would wait for them.
    is_positive = noise.is_cpu and bool((noise > 0).all())
    if not is_positive or not all_finite(tasks / noise.unsqueeze(-1)):
        return None
    return linalg.KroneckerCovariance(points.to_dense(), tasks, noise)
