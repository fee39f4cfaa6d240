"""The posterior of a GP given all its points, by solves in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils import environment
from gpclml._utils.arguments import check_counts, check_finite, checked
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.inference.observations import training_observations
from gpclml.inference.posterior import (
    VECTORS_AT_PEAK,
    JointPrior,
    new_points,
    num_points_at_once,
    observed_posterior,
    posterior_given,
    reading,
    refuse_gradient,
)
from gpclml.inference.units import PosteriorNormal, Units, units_of_targets
from gpclml.linalg import ConjugateGradients, IterativeCovariance, RowProducts, safe_cholesky

if TYPE_CHECKING:
    from gpclml._utils.arrays import ArrayLike

__all__ = ["IterativePosterior", "IterativePrediction", "SolveReport"]


@dataclass(frozen=True)
class SolveReport:
    """How well the training targets were solved for.

    Attributes:
        iterations: Products with the covariance.
        residual: Norm of the residual, as a share of the norm of the right-hand side.
        mean_error: Upper bound of the error of :meth:`IterativePosterior.mean`, in prior standard
            deviations of the function at the point. Like all bounds here it does not include
            rounding, and is infinite if noise is not independent or below the rounding of the
            covariance.
    """

    iterations: int
    residual: float
    mean_error: float


@dataclass(frozen=True)
class IterativePrediction:
    """A posterior at points, and how exact it is.

    Attributes:
        distribution: Mean ``(*batch, m)`` and covariance ``(*batch, m, m)``.
        mean_error: Upper bound of the distance of the mean from the exact one, ``(*batch, m)``, in
            the units of the targets.
        variance_excess: Upper bound of how far a variance is above the exact one, ``(*batch, m)``,
            in those units squared; it is never below the exact one but by rounding.
        residual: Largest norm of a residual, as a share of the norm of its right-hand side.
        iterations: Number of products with the covariance.
    """

    distribution: PosteriorNormal
    mean_error: Tensor
    variance_excess: Tensor
    residual: float
    iterations: int


class IterativePosterior:
    r"""The posterior of an exact GP by conjugate gradients, given all its observed targets.

    One solve at the start is kept with its preconditioner and is used for every mean. Each variance
    takes a solve of its own, many at once; its error, and that of the mean computed with it, is of
    second order in the residuals. The covariance of the observations is evaluated once if it fits
    into ``solver.kept_bytes``, else in each iteration.

    Variances, covariances and draws include the noise of new observations unless
    ``observation_noise=False``, as everywhere in gpclml; the mean is the same for both. BoTorch's
    ``model.posterior`` leaves it out by default.

    Missing targets (NaN) are left out, in each batch member on its own. The modes of the model's
    modules are not changed. Every method raises an error if a parameter or the data of the model
    have changed since. Nothing is differentiable. New points may be numpy arrays and data frames.

    Args:
        model: An exact GP with training data, of one task.
        solver: Tolerance and other settings; ``ConjugateGradients()`` if None. Every residual has
            to reach the tolerance, and that of the training targets a tenth of it if rounding
            permits. ``max_error`` is for densities and has no effect here.
        units: Units of the targets: "original", or "training" for those that the model standardizes
            to.
        points_at_once: Number of new points that are solved for together, with memory for 16 arrays
            of n times this number. If None, one such array has 2²³ numbers, or fewer if memory is
            short.

    Attributes:
        report: How well the training targets were solved for.

    Raises:
        ArgumentError: The model has no training data, or memory does not suffice; the error gives
            both figures.
        UnsupportedError: The model is not an exact GP, or has several tasks.
        NonFiniteError: A target is infinite, or the covariance not finite.
        NotConvergedError: The tolerance is not reached, unless the solver only warns.

    Note:
        The solve takes 2 n² floating-point operations per iteration, and the evaluation of the
        covariance if it is not kept; the preconditioner of rank k takes n k² operations and k rows
        of the covariance. Memory: 3 n k numbers in double precision, the kept part of the
        covariance, and a chunk of its rows.

    Examples:
        >>> from gpclml.inference import IterativePosterior
        >>> posterior = IterativePosterior(model)
        >>> posterior.report.mean_error
        >>> posterior.mean(x_new), posterior.variance(x_new)
    """

    @checked
    def __init__(
        self,
        model: ExactGP,
        solver: ConjugateGradients | None = None,
        *,
        units: Units = "original",
        points_at_once: int | None = None,
    ) -> None:
        check_counts(points_at_once=points_at_once)
        self._model, self._points_at_once = model, points_at_once
        solver = solver or ConjugateGradients()
        with reading(model):
            data = training_observations(model)
            if data.num_tasks > 1:
                raise UnsupportedError(
                    "model", f"one of {data.num_tasks} tasks", "one of a single task",
                    "Use the model's own posterior, by a dense factorization.",
                )  # fmt: skip
            self._scale, self._shift = units_of_targets(model, units)
            covariance = data.iterative(solver)
            self._held = _check_memory(covariance, data.residual)
            self._given = covariance.predictor(data.residual, data.missing)
            # In eval mode BoTorch's models hold transformed inputs.
            self._copies = {name: value.detach().clone() for name, value in _tensors(model).items()}
        solution = self._given.solution
        self.report: SolveReport = SolveReport(
            solution.iterations, solution.relative, float(self._given.error.max())
        )

    @checked
    def mean(self, x: ArrayLike) -> Tensor:
        """The posterior mean, from the solve at the start.

        Args:
            x: Points as the model takes them, ``(*batch, m, d)``, or ``(m,)`` for one column.

        Returns:
            ``(*batch, m)``; off by at most ``report.mean_error`` prior standard deviations of the
            function at the point, in first order. The mean of :meth:`predict` is closer.

        Raises:
            ShapeError: The points do not fit the training inputs.
            NonFiniteError: A point is not finite, or the kernel is not at one.
            ArgumentError: Another dtype or device, or a model that has changed.
            UnsupportedError: x asks for a gradient.

        Note:
            n m evaluations of the kernel and 2 n m floating-point operations.
        """
        with self._at(x) as (_, prior, chunks):
            weights = self._given.solution.values
            shifts = [cast(Tensor, prior.cross(rows) @ weights).squeeze(-1) for rows in chunks]
            mean = prior.mean + torch.cat(shifts, dim=-1)
            check_finite("covariance with x", mean, "Check the magnitudes of all inputs.")
            return (mean * self._scale + self._shift).to(mean)

    def variance(self, x: ArrayLike, observation_noise: bool | Tensor = True) -> Tensor:
        """The posterior variances, ``(*batch, m)``, of the arguments of :meth:`predict`."""
        return self.predict(x, observation_noise, marginal=True).distribution.variance

    def covariance(self, x: ArrayLike, observation_noise: bool | Tensor = True) -> Tensor:
        """The posterior covariance, ``(*batch, m, m)``, of the arguments of :meth:`predict`."""
        return self.predict(x, observation_noise).distribution.covariance_matrix

    @checked
    def sample(
        self,
        x: ArrayLike,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        observation_noise: bool | Tensor = True,
    ) -> Tensor:
        """Joint draws from the normal that :meth:`predict` gives, and so as exact as that.

        Args:
            x: Points as the model takes them, ``(*batch, m, d)``, or ``(m,)`` for one column.
            num_samples: Number S.
            generator: On the CPU, so that a seed means the same draws on every device; PyTorch's
                own if None.
            observation_noise: As for :meth:`predict`.

        Returns:
            ``(S, *batch, m)``.

        Raises:
            ArgumentError: Fewer than one draw, or as for :meth:`predict`.
            NotPSDError: The covariance is not positive definite even with jitter.

        Note:
            As :meth:`predict`, and m³/3 + m² S floating-point operations.
        """
        check_counts(num_samples=num_samples)
        posterior = self.predict(x, observation_noise).distribution
        mean, factor = posterior.mean, safe_cholesky(posterior.covariance_matrix)
        size = *mean.shape, num_samples
        normal = torch.randn(size, generator=generator, dtype=torch.float64).to(mean)
        return mean + (factor.to(mean) @ normal).movedim(-1, 0)

    def predict(
        self, x: ArrayLike, observation_noise: bool | Tensor = True, marginal: bool = False
    ) -> IterativePrediction:
        """The posterior at points, with bounds of its error.

        Args:
            x: Points as the model takes them, ``(*batch, m, d)``, or ``(m,)`` for one column.
            observation_noise: Predict new observations, the default, or the noise-free function; or
                noise variances of the points in the units of training, ``(*batch, m)``, which a
                likelihood with fixed noise needs.
            marginal: Give a diagonal covariance.

        Raises:
            ShapeError, NonFiniteError: The points do not fit the training inputs.
            ArgumentError: x has another dtype or device, the model has changed, or memory does not
                suffice for so many points; the error gives both figures.
            UnsupportedError: x asks for a gradient.
            NotConvergedError: The tolerance is not reached, unless the solver only warns.

        Note:
            2 n² m floating-point operations per iteration, the evaluation of the covariance if it
            is not kept, and 4 n m² operations for the joint covariance. Memory: 16 arrays of n
            times ``points_at_once`` numbers, and 3 n m + 4 m² more for the joint covariance.
        """
        with self._at(x, joint=not marginal) as (x, prior, chunks):
            posterior, blocks = posterior_given(prior, self._given, chunks, marginal, x)
            likelihood = cast(Likelihood, self._model.likelihood)
            posterior = observed_posterior(likelihood, posterior, x, observation_noise)
            errors = torch.cat([block.errors for block in blocks], dim=-1)
            return IterativePrediction(
                posterior.in_units(self._scale, self._shift, marginal),
                (errors * self._given.error * self._scale).to(x),
                (errors * self._scale).square().to(x),
                max(block.residual for block in blocks),
                sum(block.iterations for block in blocks),
            )

    @contextmanager
    def _at(
        self, x: ArrayLike, joint: bool = False
    ) -> Iterator[tuple[Tensor, JointPrior, list[slice]]]:
        """The points as the kernel takes them, their prior, and chunks of them."""
        refuse_gradient(x)
        with reading(self._model):
            _check_unchanged(self._model, self._copies)
            x = new_points(self._model, x)
            prior = JointPrior(self._model, x)
            batch, m = prior.batch_shape.numel(), x.shape[-2]
            size = batch * prior.num_train
            step = num_points_at_once(x, size, batch, joint, self._held, self._points_at_once)
            yield x, prior, [slice(i, min(i + step, m)) for i in range(0, m, step)]
            # The points may have moved the grid of an interpolated kernel.
            _check_unchanged(self._model, self._copies)


def _check_memory(covariance: IterativeCovariance, residual: Tensor) -> int:
    """How many numbers covariance and preconditioner will hold, if there is memory for them."""
    latent, size, n = covariance.latent, residual.numel(), residual.shape[-1]
    features = 3 * size * min(covariance.settings.preconditioner_rank, n)
    held = features * torch.float64.itemsize // residual.dtype.itemsize
    if isinstance(latent, RowProducts):
        held += latent.kept_numbers
    environment.check_memory(
        "model", f"{n} training points", held + VECTORS_AT_PEAK * size, residual.dtype,
        residual.device, "Lower the solver's kept_bytes or preconditioner_rank.",
    )  # fmt: skip
    return held


def _check_unchanged(model: ExactGP, copies: dict[str, Tensor]) -> None:
    """Refuses a model of which a parameter, buffer or number of its data differs from its copy.

    Values are compared, not versions of tensors: GPyTorch's setters write through ``.data``, which
    leaves no trace in a version.
    """
    tensors = _tensors(model)
    for name in {**copies, **tensors}:
        old, new = copies.get(name), tensors.get(name)
        if (
            old is None
            or new is None
            or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device)
            or not torch.allclose(old, new, rtol=0.0, atol=0.0, equal_nan=True)  # NaN: missing
        ):
            raise ArgumentError(
                "model", f"a changed {name}",
                "the parameters and data that the posterior was computed with",
                "Make a new IterativePosterior of the model.",
            )  # fmt: skip


def _tensors(model: ExactGP) -> dict[str, Tensor]:
    """Parameters, buffers and training data by their names."""
    inputs = {f"train_inputs[{i}]": x for i, x in enumerate(model.train_inputs or ())}
    targets = {"train_targets": cast(Tensor, model.train_targets)}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **inputs, **targets}
