"""The prior Gaussian of a model's observed targets: covariance, residuals, what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import HadamardGaussianLikelihood, Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import all_finite, check_placement, checked
from gpclml.conditioning import Conditioning, Split
from gpclml.conditioning.strategies import stack_by_size
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.inference.covariances import ObservedCovariance, Solver, observed_covariance
from gpclml.linalg import Covariance, take

__all__ = [
    "MISSING_TERM",
    "Observations",
    "check_targets",
    "likelihood_parameters",
    "missing_targets",
    "observations",
    "training_observations",
]

MISSING_TERM = -0.5 * math.log(2 * math.pi)
"""What a missing target adds to a log density: it enters as a standard normal at its mean."""


@dataclass(frozen=True)
class Observations:
    """Targets and their prior Gaussian, N = n t numbers for each batch member.

    Attributes:
        lazy_covariance: Covariance of the observations, ``(*batch, N, N)``, not yet evaluated.
        residual: Targets minus prior mean, ``(*batch, N)``; zero where missing.
        missing: Which targets are missing, ``(*batch, N)``; None where none is.
        num_rows: Number n of data rows.
        num_tasks: Number t of targets of each row.
        interleaved: Whether the tasks of one row are neighbours (else the rows of one task).
        params: Arguments of the likelihood besides the distribution.
        places: Indices of these targets among all of the model, ``(N,)``; None for all of them.
    """

    lazy_covariance: ObservedCovariance
    residual: Tensor
    missing: Tensor | None
    num_rows: int
    num_tasks: int = 1
    interleaved: bool = True
    params: tuple[Any, ...] = ()
    places: Tensor | None = None

    @property
    def covariance(self) -> Covariance:
        """The covariance, evaluated: dense, or of low rank plus a diagonal."""
        return self.lazy_covariance.evaluated

    @checked(late=True, blocks="index (k, b) | (*batch, k, b)")
    def covariance_by(
        self,
        solver: Solver,
        blocks: Sequence[Tensor],
        factor_dtype: torch.dtype | None = None,
        *,
        checked: bool = True,
    ) -> Covariance:
        """The covariance in the form that densities of held-out blocks are computed in.

        Args:
            solver: "cholesky", "cg", settings of conjugate gradients, or "auto": a Cholesky factor
                where it fits into memory, else conjugate gradients with a warning.
            blocks: Held-out blocks, ``(k_i, b_i)`` a size.
            factor_dtype: See :func:`gpclml.linalg.factorization_dtype`.
            checked: See :func:`gpclml.linalg.safe_cholesky`.

        Raises:
            ArgumentError: If there is no block, or memory does not suffice; the error gives both
                figures.
        """
        if len(blocks) == 0:
            raise ArgumentError("blocks", "none", "at least one group of blocks, each (k, b)")
        largest = max(group.shape[-1] for group in blocks)
        covariance = self.lazy_covariance.by(solver, self.residual, largest)
        return covariance.factored_in(factor_dtype, checked=checked)

    def split(self, conditioning: Conditioning, generator: torch.Generator | None) -> Split:
        """A split in flat target indices, ``(k_i, b_i t)``: a held-out row takes all its tasks."""
        rows = conditioning.split(self.num_rows, generator, self._observed_rows())
        given = rows.conditioned_on
        return Split(
            [self.flat_indices(group) for group in rows.held_out],
            None if given is None else self.flat_indices(given.unsqueeze(0)).squeeze(0),
        )

    def at(self, split: Split) -> tuple[Observations, list[Tensor]]:
        """Only the targets that take part in a split, and its blocks among those.

        ``split`` is in flat target indices. Where every target takes part nothing is copied.
        """
        if split.conditioned_on is None:
            return self, split.held_out
        blocks = [group.flatten() for group in split.held_out]
        rows = torch.cat([*blocks, split.conditioned_on])
        place = torch.full((self.residual.shape[-1],), -1).scatter(0, rows, torch.arange(len(rows)))
        return self._part(rows), [place[group] for group in split.held_out]

    def observed_at(self, split: Split) -> tuple[Observations, list[Tensor]]:
        """As :meth:`at`, without missing targets where the covariance can do without them."""
        part, blocks = self.at(split)
        covariance = part.lazy_covariance
        if part.missing is None or not covariance.drops_missing():
            return part, blocks
        kept = ~part.missing.cpu()
        place = kept.cumsum(0) - 1
        if all(bool(kept[group].all()) for group in blocks):
            found = [place[group] for group in blocks]
        else:
            found = stack_by_size([place[one[kept[one]]] for group in blocks for one in group])
        part = replace(part, lazy_covariance=replace(covariance, missing=None), missing=None)
        return part._part(kept.nonzero().squeeze(-1)), found

    def _part(self, rows: Tensor) -> Observations:
        """The targets at these flat indices, ``(k,)``, on the CPU."""
        rows = rows.to(self.residual.device, non_blocking=True)
        return replace(
            self,
            lazy_covariance=self.lazy_covariance.at(rows),
            residual=self.residual[..., rows],
            missing=None if self.missing is None else self.missing[..., rows],
            places=rows if self.places is None else self.places[rows],
        )

    def flat_indices(self, rows: Tensor) -> Tensor:
        """Indices of all targets of the rows, ``(k, b)`` to ``(k, b t)``."""
        if self.num_tasks == 1:
            return rows
        tasks = torch.arange(self.num_tasks)
        rows = rows.unsqueeze(-1)
        flat = rows * self.num_tasks + tasks if self.interleaved else tasks * self.num_rows + rows
        return flat.flatten(-2)

    def _observed_rows(self) -> Tensor | None:
        """Rows with a target in any task of any batch member, ``(n,)``; None where all have."""
        if self.missing is None:
            return None
        every = self.flat_indices(torch.arange(self.num_rows).unsqueeze(-1))
        observed = ~self.missing.cpu()[..., every]  # (*batch, n, t)
        return observed.any(-1).reshape(-1, self.num_rows).any(0)

    def member(self, index: int | slice) -> Observations:
        """One member of a batch, or a run of consecutive members, along the first dimension."""
        return replace(
            self,
            lazy_covariance=ObservedCovariance.of(self.covariance[index]),
            residual=self.residual[index],
            missing=None if self.missing is None else self.missing[index],
        )

    def flatten(self, values: Tensor) -> Tensor:
        """Values with an event shape, ``(*batch, n)`` or ``(*batch, n, t)``, as ``(*batch, N)``."""
        return values if self.num_tasks == 1 else _flatten(values, self.interleaved)

    def num_observed(self) -> Tensor | int:
        """Number of observed targets, ``(*batch,)`` or one for all."""
        if self.missing is None:
            return self.residual.shape[-1]
        return (~self.missing).sum(-1)

    def check_density(self, value: Tensor) -> None:
        """Refuses a log density that is not finite, where no covariance was at fault.

        Args:
            value: Any shape.

        Raises:
            NonFiniteError: It is not finite; the message says how many residuals are not.
        """
        if not all_finite(value):
            bad = int((~torch.isfinite(self.residual)).sum())
            raise NonFiniteError(
                "target minus prior mean",
                f"{bad} non-finite of {self.residual.numel()}",
                "finite values",
                "Check the targets and the parameters of the mean for NaN and huge values.",
            )

    def per_held_out_target(
        self, value: Tensor, blocks: Sequence[Tensor], *, redrawn: bool = False
    ) -> Tensor:
        """The summed log density of the blocks, divided by the observed targets in them.

        Args:
            value: The log density, ``(*batch,)``.
            blocks: Flat target indices, ``(k_i, b_i)``, or ``(*batch, 1, b)`` for one block of
                its own in each batch member.
            redrawn: Whether the next call has other blocks. If so, a batch member that has no
                observed target in these scores 0, without a gradient.

        Returns:
            Nats per observed held-out target, ``(*batch,)``.

        Raises:
            ArgumentError: If a batch member has no observed target in any block although the blocks
                stay the same, or none at all.
        """
        count = sum(block.shape[-2:].numel() for block in blocks)
        if self.missing is None:
            return value / count
        held_out = torch.cat([block.flatten(-2) for block in blocks], dim=-1)
        held_out = held_out.to(self.missing.device, non_blocking=True)
        # As a floating-point count: an integer one times a number is rounded to single precision.
        missing = take(self.missing, held_out).sum(-1, dtype=value.dtype)
        nothing_to_score = self.missing.all(-1) if redrawn else missing == count
        if bool(nothing_to_score.any()):
            raise ArgumentError(
                "conditioning",
                "held-out points whose targets are all missing in a batch member",
                "at least one observed held-out target in each",
                "Hold out more points, or drop batch members without targets.",
            )
        return (value - MISSING_TERM * missing) / (count - missing).clamp_min(1)


@checked(late=True)
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
        likelihood: Adds the noise.
        function_dist: Prior of the latent function, event shape ``(n,)`` or ``(n, t)``.
        target: Observations, ``(*batch, n)`` or ``(*batch, n, t)``; NaN is missing under
            ``observation_nan_policy("mask")``.
        *params: Passed on to the likelihood.
        checked: Refuse targets that are not finite here; else they make the density NaN.
        **kwargs: Passed on to the likelihood.

    Returns:
        Covariance, not yet evaluated, and residuals, flattened over tasks.

    Raises:
        UnsupportedError: If the distribution is not Gaussian, or under the "fill" policy.
        ShapeError: If the target does not fit the distribution.
        NonFiniteError: If targets are not finite, outside the mask policy.
        ArgumentError: If all targets are missing; if dtypes or devices are mixed.
    """
    if not isinstance(function_dist, MultivariateNormal):
        raise UnsupportedError(
            "function_dist", type(function_dist).__name__, "a MultivariateNormal",
            "Pass the model's output: mll(model(x), target).",
        )  # fmt: skip
    event = function_dist.event_shape
    if target.shape[-len(event) :] != event:
        raise ShapeError(
            "target",
            tuple(target.shape),
            f"(*batch, {', '.join(map(str, event))}), as the model's output",
            "Pass the targets of the inputs that the model was called on.",
        )
    _check_placement(likelihood, function_dist, target)
    missing = missing_targets(target, checked)
    output, covariance = observed_covariance(likelihood, function_dist, *params, **kwargs)
    interleaved = getattr(output, "_interleaved", True)
    residual = target - output.mean
    if isinstance(output, MultitaskMultivariateNormal):
        residual = _flatten(residual, interleaved)
        missing = None if missing is None else _flatten(missing, interleaved)
    if missing is not None:
        covariance = replace(covariance, missing=missing)
        residual = residual.masked_fill(missing, 0.0)
    return Observations(
        covariance,
        residual,
        missing,
        num_rows=event[0],
        num_tasks=event[1] if len(event) > 1 else 1,
        interleaved=interleaved,
        params=params,
    )


@checked(late=True)
def training_observations(
    model: ExactGP, likelihood: Likelihood | None = None, **kwargs: Any
) -> Observations:
    """The prior Gaussian of a model's own training data, in train or eval mode.

    Args:
        model: An exact GP with training data; its mode and caches stay as they are.
        likelihood: The model's own if None.
        **kwargs: Passed on to the likelihood.

    Returns:
        Covariance and residuals at the training inputs.

    Raises:
        ArgumentError: If the model has no training data.
    """
    if model.train_inputs is None:
        raise ArgumentError(
            "model", "a model without training data", "one with training data", "Set them first."
        )
    likelihood = cast(Likelihood, model.likelihood if likelihood is None else likelihood)
    params = likelihood_parameters(model, likelihood)
    with settings.prior_mode(not model.training):
        prior = model(*model.train_inputs)
    return observations(likelihood, prior, cast(Tensor, model.train_targets), *params, **kwargs)


@checked(late=True)
def likelihood_parameters(model: ExactGP, likelihood: Likelihood) -> tuple[Tensor, ...]:
    """The arguments that a likelihood takes besides the model's output at its training inputs.

    These are the inputs, transformed where a BoTorch model transforms them. For a model that is
    called as ``model(x, i)``, a ``HadamardGaussianLikelihood`` takes only the task indices i.

    Args:
        model: An exact GP with training data.
        likelihood: The likelihood that will be called.

    Returns:
        The tensors to pass after the distribution.

    Raises:
        ArgumentError: If a Hadamard likelihood needs task indices, and no input of the model, or
            more than one, can be these.
    """
    inputs = cast(tuple[Tensor, ...], tuple(model.train_inputs or ()))
    transform = getattr(model, "transform_inputs", None)
    if transform is not None and model.training:
        # BoTorch's models transform inputs inside (in eval mode they hold them transformed);
        # the likelihood is to see what the kernel sees.
        inputs = tuple(transform(X=x) for x in inputs)
    takes_tasks = isinstance(likelihood, HadamardGaussianLikelihood)
    if not takes_tasks or likelihood.task_feature_index is not None:
        return inputs
    tasks = [x for x in inputs if x.shape[-1] == 1 and not x.is_floating_point()]
    if len(tasks) != 1:
        kinds = ", ".join(f"{x.dtype} of shape {tuple(x.shape)}" for x in inputs)
        raise ArgumentError(
            "model.train_inputs",
            kinds,
            "one integer tensor of shape (n, 1), the task indices of HadamardGaussianLikelihood",
            "Pass the task indices as an integer input, or make the likelihood with "
            "task_feature_index=..., the column of the inputs that holds them.",
        )
    return tuple(tasks)


@checked(late=True, target="(*batch)")
def missing_targets(target: Tensor, checked: bool = True) -> Tensor | None:
    """Which targets are missing under GPyTorch's policy, same shape; None where none is.

    Args:
        target: Any shape; NaN is missing under ``observation_nan_policy("mask")``.
        checked: Check the targets under the "ignore" policy too, which on a GPU waits for all
            that is queued.

    Raises:
        UnsupportedError: Under the "fill" policy.
        NonFiniteError: If a target is not finite, outside the mask policy.
    """
    policy = settings.observation_nan_policy.value()
    if policy == "fill":
        raise UnsupportedError(
            "observation_nan_policy", "'fill'", "'ignore' or 'mask'", "Use 'mask'."
        )
    if (policy == "ignore" and not checked) or all_finite(target):
        return None
    finite = torch.isfinite(target)
    missing = torch.isnan(target)
    if policy == "mask" and bool((finite | missing).all()):
        return missing
    raise NonFiniteError(
        "target",
        f"{int((~finite).sum())} non-finite of {target.numel()} values "
        f"(shape {tuple(target.shape)})",
        "finite targets",
        "Mark missing targets as NaN under "
        "gpytorch.settings.observation_nan_policy('mask'), or remove those rows.",
    )


def check_targets(model: torch.nn.Module, target: Tensor) -> None:
    """Lets a model refuse targets that are in other units than its output.

    A model that changes the units of its targets has a method ``check_targets(target)`` that
    raises an error; of any other model all targets are taken.

    Args:
        model: Whose output the targets are of.
        target: As they came to the objective.
    """
    check: Callable[[Tensor], None] | None = getattr(model, "check_targets", None)
    if check is not None:
        check(target)


def _check_placement(
    likelihood: Likelihood, function_dist: MultivariateNormal, target: Tensor
) -> None:
    mean = function_dist.mean
    check_placement("target", target, mean)
    for parameter in _parameters(likelihood):
        if parameter.dtype != mean.dtype or parameter.device != mean.device:
            check_placement(f"likelihood.{_name(likelihood, parameter)}", parameter, mean)
    covariance = function_dist.lazy_covariance_matrix
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        kernel = cast(Kernel, covariance.kernel)
        for parameter in _parameters(kernel):
            if parameter.device != mean.device:  # networks in it may be of another type
                check_placement(f"kernel.{_name(kernel, parameter)}", parameter, mean)


def _parameters(module: torch.nn.Module) -> list[Tensor]:
    """PyTorch's generator finds their names as well, which takes several times as long."""
    parameters: list[Tensor] = []
    modules = [module]
    for one in modules:
        parameters += [p for p in one._parameters.values() if p is not None]
        modules += [part for part in one._modules.values() if part is not None]
    return parameters


def _name(module: torch.nn.Module, parameter: Tensor) -> str:
    return next(name for name, one in module.named_parameters() if one is parameter)


def _flatten(values: Tensor, interleaved: bool) -> Tensor:
    return (values if interleaved else values.mT).flatten(-2)
