"""The posterior of an exact GP by any covariance, and predictive densities of new observations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils import environment
from gpclml._utils.arguments import check_finite
from gpclml._utils.arrays import points_as_tensor
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.inference.observations import (
    Observations,
    Solver,
    conjugate_gradients,
    evaluate_block,
    observations,
)
from gpclml.inference.units import PosteriorNormal, above_rounding, to_training_units
from gpclml.linalg import ConditionedBlock, ConjugateGradients, Predictor

if TYPE_CHECKING:
    from gpclml._utils.arrays import ArrayLike

__all__ = ["evaluating", "exact_posterior", "marginal_predictive", "predictive_observations"]

PREDICTED_IN_DOUBLE_UP_TO = 10_000
"""Largest number of training points at which a float32 model predicts in float64."""
VECTORS_AT_PEAK = 16
"""Arrays of n times points at the peak of a solve: conjugate gradients', kernel's, the result."""
_CHUNK = 4096  # points whose covariance with the training points is held at a time
# Arrays n x n at the peak of a dense posterior; under autograd; more with targets missing.
_MATRICES, _WITH_GRADIENT, _WITH_MISSING = 5, 11, 2
_NUMBERS_AT_ONCE = 2**23  # in one array of n times points: 64 MiB in float64


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within the block the model is in eval mode; after it every module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    training = model.training
    try:
        model.eval()
        yield
    finally:
        if training:
            model.train()  # also clears what was cached in eval mode
        for module, mode in modes:
            module.training = mode


@contextmanager
def _posterior_settings() -> Iterator[None]:
    """GPyTorch's settings that every posterior needs."""
    with (
        settings.lazily_evaluate_kernels(True),
        settings.debug(False),
        settings.observation_nan_policy("mask"),
    ):
        yield


@contextmanager
def reading(model: ExactGP) -> Iterator[None]:
    """Within the block the model is in eval mode, with the settings that a posterior needs."""
    with evaluating(model), torch.no_grad(), _posterior_settings():
        yield


@_posterior_settings()
def exact_posterior(
    model: ExactGP, x: Tensor, marginal: bool, progress: bool | None = None
) -> PosteriorNormal:
    r"""The latent posterior at x by one dense factorization.

    With :math:`L L^\top = K_{XX} + \Sigma`, :math:`V = L^{-1} K_{X*}` and
    :math:`z = L^{-1} (y - m)`, the mean is :math:`m_* + V^\top z` and the covariance
    :math:`K_{**} - V^\top V` (Rasmussen and Williams 2006, Algorithm 2.1).

    GPyTorch's own prediction counts a NaN target as observed in the covariance; here its row is
    replaced by that of the identity, in each batch element on its own, and so has no effect. A
    variance is at least the rounding error of the prior's. The cost is O(n^3 + n^2 m) operations
    and O(n^2 + n m) memory, with ``marginal`` O(n^2 + m) and a chunk.

    A float32 model of up to 10,000 training points is evaluated in float64, where its objectives
    are computed too, and only the result is rounded: a fit may end at an outputscale a million
    times its noise, of which entries of a float32 covariance keep no digit. If it cannot be
    evaluated so, because of memory or of tensors in it that are neither parameters nor buffers, and
    beyond 10,000 points, it predicts in float32.

    Args:
        model: A model in eval mode, with training data.
        x: Points. Shape ``(*batch, m, d)``.
        marginal: Give the variances only.
        progress: Show a bar of the points on standard error, where variances of more than one chunk
            of them are asked for.

    Returns:
        Mean ``(*batch, m)`` and covariance ``(*batch, m, m)``, diagonal with ``marginal``.
    """
    posterior = _DensePosterior(model)
    small = _training_inputs(model).shape[-2] <= PREDICTED_IN_DOUBLE_UP_TO
    if x.dtype == torch.float32 and small:
        tensors = [*posterior.named_parameters(), *posterior.named_buffers()]
        double = {name: t.double() for name, t in tensors if t.dtype == torch.float32}
        try:
            posterior.clear_caches()
            return torch.func.functional_call(
                posterior, double, (x.double(), marginal, x, progress)
            )
        except RuntimeError:  # tensors of mixed types, memory: what remains is raised below
            pass
        finally:
            posterior.clear_caches()
    return posterior(x, marginal, x, progress)


class _DensePosterior(torch.nn.Module):
    """A model's posterior as a module, whose tensors ``torch.func.functional_call`` exchanges."""

    def __init__(self, model: ExactGP) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Tensor, marginal: bool, like: Tensor, progress: bool | None
    ) -> PosteriorNormal:
        """In the type of x, rounded to that of ``like``."""
        prior = JointPrior(self.model, x)
        data = prior.training_data(self.model)
        predictor = data.covariance.predictor(data.residual, data.missing)
        m = prior.mean.shape[-1]
        step = _CHUNK if marginal else m
        chunks = [slice(first, min(first + step, m)) for first in range(0, m, step)]
        return posterior_given(prior, predictor, chunks, marginal, like, progress)[0]

    def clear_caches(self) -> None:
        """Drops what kernels on inducing points or grids keep between calls in eval mode."""
        for kernel in self.model.modules():
            if isinstance(kernel, Kernel):
                kernel._clear_cache()


def posterior_given(
    prior: JointPrior,
    predictor: Predictor,
    chunks: Sequence[slice],
    marginal: bool,
    like: Tensor,
    progress: bool | None = None,
) -> tuple[PosteriorNormal, list[Any]]:
    """The latent posterior at new points by any solver, and what it says of each chunk."""
    bar = environment.progress_bar(
        chunks, progress=progress if len(chunks) > 1 else False, desc="predict",
        unit=f" chunks of {_CHUNK} points", leave=False,
    )  # fmt: skip
    blocks = [
        predictor.given(evaluate_block(prior.cross(rows)).mT, keep=not marginal) for rows in bar
    ]
    mean = (prior.mean + torch.cat([block.shift for block in blocks], dim=-1)).to(like)
    if not marginal:
        covariance = prior.conditional_covariance(chunks, blocks).to(like)
        return PosteriorNormal(mean, covariance), blocks
    variance = torch.cat([prior.variance(rows) for rows in chunks], dim=-1)
    reduction = torch.cat([block.reduction for block in blocks], dim=-1)
    variance = above_rounding(variance - reduction, variance).to(like)
    return PosteriorNormal(mean, DiagLinearOperator(variance.expand_as(mean))), blocks


class JointPrior:
    """The prior of a model in eval mode at its n training and m new points.

    Args:
        model: The model, under ``lazily_evaluate_kernels``.
        x: New points, ``(*batch, m, d)``.
    """

    def __init__(self, model: ExactGP, x: Tensor) -> None:
        train_x = _training_inputs(model)
        self.points: Tensor = _cat(train_x, x, -2)
        self.num_train: int = train_x.shape[-2]
        self.distribution: MultivariateNormal = cast(Any, model.forward(self.points))
        self._operator = cast(LinearOperator, self.distribution.lazy_covariance_matrix)

    @property
    def mean(self) -> Tensor:
        """Means of new points, ``(*batch, m)``."""
        return self.distribution.mean[..., self.num_train :]

    @property
    def batch_shape(self) -> torch.Size:
        """That of model and points together."""
        return self._operator.shape[:-2]

    def training_data(self, model: ExactGP) -> Observations:
        """The prior Gaussian of the model's training targets."""
        seen = slice(0, self.num_train)
        mean = self.distribution.mean[..., seen]
        prior = MultivariateNormal(mean, cast(Any, self._operator)[..., seen, seen])
        targets = cast(Tensor, model.train_targets).to(mean.dtype)
        likelihood = cast(Likelihood, model.likelihood)
        return observations(likelihood, prior, targets, [_training_inputs(model)])

    def cross(self, rows: slice) -> LinearOperator:
        """Covariance of new points with the training points, ``(*batch, rows, n)``."""
        return cast(Any, self._operator)[..., self._new(rows), : self.num_train]

    def variance(self, rows: slice) -> Tensor:
        """Variances of new points, ``(*batch, rows)``."""
        return self._block(rows, rows).diagonal(dim1=-1, dim2=-2)

    def conditional_covariance(
        self, chunks: Sequence[slice], blocks: Sequence[ConditionedBlock]
    ) -> Tensor:
        """Covariance of all new points given the training points, ``(*batch, m, m)``."""
        pairs, variances, stripes = list(zip(chunks, blocks, strict=True)), [], []
        for rows, left in pairs:
            stripe = []
            for columns, right in pairs:
                prior = evaluate_block(self._block(rows, columns))
                if left is right:
                    variances.append(prior.diagonal(dim1=-1, dim2=-2))
                stripe.append(prior - left.joint_reduction(right))
            stripes.append(torch.cat(stripe, dim=-1))
        covariance = torch.cat(stripes, dim=-2)
        covariance = 0.5 * (covariance + covariance.mT)
        variance = covariance.diagonal(dim1=-1, dim2=-2)
        raised = above_rounding(variance, torch.cat(variances, dim=-1))
        return covariance + torch.diag_embed(raised - variance)

    def _block(self, rows: slice, columns: slice) -> LinearOperator:
        return cast(Any, self._operator)[..., self._new(rows), self._new(columns)]

    def _new(self, rows: slice) -> slice:
        return slice(self.num_train + rows.start, self.num_train + rows.stop)


def checked_points(x: ArrayLike, train_x: Tensor, column_names: list[str] | None = None) -> Tensor:
    """New points as ``(*batch, m, d)`` that fit the training inputs, or a typed error.

    Arrays, data frames and integers become what the training inputs are.
    """
    x = points_as_tensor(x, train_x, column_names)
    columns = train_x.shape[-1]
    x = x.unsqueeze(-1) if x.ndim == 1 else x
    if x.ndim < 2 or x.shape[-1] != columns or 0 in x.shape:
        raise ShapeError(
            "x", tuple(x.shape), f"(*batch, m, {columns}) with m >= 1, as trained on",
            "Give one row for each point, with the columns of the training inputs.",
        )  # fmt: skip
    if (x.dtype, x.device) != (train_x.dtype, train_x.device):
        raise ArgumentError(
            "x", f"{x.dtype} on {x.device}", f"{train_x.dtype} on {train_x.device}, as trained on",
            f"Use x.to({train_x.dtype}), on the device of the model.",
        )  # fmt: skip
    try:
        torch.broadcast_shapes(x.shape[:-2], train_x.shape[:-2])
    except RuntimeError:
        expected = f"a batch that broadcasts with {tuple(train_x.shape[:-2])}"
        suggestion = "Give one set of points, or one for each batch element."
        raise ShapeError("x", tuple(x.shape), expected, suggestion) from None
    check_finite("x", x, "Drop or impute the rows with missing inputs.")
    return x


def new_points(model: ExactGP, x: ArrayLike) -> Tensor:
    """New points as the ``forward`` of a model in eval mode takes them, or a typed error."""
    if model.train_inputs is None:
        raise ArgumentError("model", "no training data", "a model with training data")
    transform = getattr(model, "transform_inputs", None)
    # In eval mode BoTorch's models keep the training inputs before their transform here.
    original = getattr(model, "_original_train_inputs", None)
    train_x = _training_inputs(model) if original is None else original
    x = checked_points(x, train_x, getattr(model, "column_names", None))
    return x if transform is None else transform(X=x)


def _training_inputs(model: ExactGP) -> Tensor:
    return cast(Any, model.train_inputs)[0]


def choose_posterior_solver(
    solver: Solver, train_x: Tensor, train_y: Tensor, x: Tensor, marginal: bool
) -> ConjugateGradients | None:
    """The settings of conjugate gradients, or None for a dense factorization.

    A posterior at points x needs about 5 n² numbers without a gradient and 11 n² with one, 2 n²
    more where targets are missing, and n m + 3 m² for a joint covariance.
    """
    n, m = train_x.shape[-2], x.shape[-2]
    batch = torch.broadcast_shapes(train_x.shape[:-2], x.shape[:-2]).numel()
    matrices = _WITH_GRADIENT if torch.is_grad_enabled() else _MATRICES
    matrices += _WITH_MISSING * bool(train_y.isnan().any())
    numbers = batch * (matrices * n * n + (not marginal) * (n + 3 * m) * m)
    if solver in ("auto", "cholesky") and environment.fits(numbers * x.itemsize, x.device):
        return None
    suggestion = "Use solver='cg', torch.no_grad(), or fewer points."
    size, loss = f"n = {n}, m = {m}", " and without a gradient"
    if solver != "cholesky":
        refuse_gradient(x)
        num_points_at_once(x, batch * n, batch, not marginal)
    return conjugate_gradients(solver, numbers, x, size, suggestion, loss)


def num_points_at_once(
    x: Tensor, size: int, batch: int, joint: bool, held: int = 0, asked: int | None = None
) -> int:
    """How many new points are solved for together; an ArgumentError where they do not fit.

    There are ``size`` training points in all members of a batch, and ``held`` numbers in memory
    throughout. Unless a number is asked for, as many as fit, of at most 2²³ numbers an array.
    """
    m = x.shape[-2]
    if joint:
        held += 3 * size * m + 4 * batch * m * m * 8 // x.dtype.itemsize  # those in float64
    if asked is None:
        there = environment.available_memory(x.device) // x.dtype.itemsize - held
        asked = max(1, min(_NUMBERS_AT_ONCE, there // (2 * VECTORS_AT_PEAK)) // size)
    got, suggestion = f"{min(m, asked)} points at once", "Lower points_at_once."
    if joint:
        got, suggestion = f"{m} points jointly", "Give fewer, or ask for their marginals."
    numbers = held + VECTORS_AT_PEAK * size * min(m, asked)
    environment.check_memory("x", got, numbers, x.dtype, x.device, suggestion)
    return min(m, asked)


def refuse_gradient(x: object) -> None:
    """Refuses points that ask for a gradient, which conjugate gradients do not give."""
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        raise UnsupportedError(
            "x", "points that require a gradient", "points that do not",
            "Use x.detach(), or a dense posterior (solver='cholesky').",
        )  # fmt: skip


def predictive_observations(
    model: ExactGP, x: Tensor, y: Tensor, noise: Tensor | None = None
) -> tuple[Observations, Tensor]:
    """The prior Gaussian of training and new observations together.

    The predictive density of the new ones is their density given all others.

    Args:
        model: An exact GP with training data.
        x: New inputs as the model takes them, ``(*batch, t, d)``.
        y: Their targets in original units, ``(*batch, t)`` or with a task dimension.
        noise: Noise variances of the new points, for a fixed-noise likelihood, ``(*batch, t)``.

    Returns:
        The observations, and the flat indices of the new ones, ``(t,)``.

    Raises:
        ShapeError: If ``y`` does not fit ``x`` or ``x`` the training inputs.
        ArgumentError: If the model has no training data, or noise is missing or superfluous.
    """
    with evaluating(model):
        x = new_points(model, x)
        prior, likelihood = JointPrior(model, x), cast(Any, model.likelihood)
        multitask = isinstance(prior.distribution, MultitaskMultivariateNormal)
        dim = -2 if multitask else -1
        rows = x.shape[-2]
        if y.ndim < -dim or y.shape[dim] != rows:
            raise ShapeError("y", tuple(y.shape), f"targets of the {rows} rows of x")
        _check_noise(likelihood, noise)
        y = to_training_units(model, y, multitask)
        target = _cat(cast(Tensor, model.train_targets), y, dim)
        arguments = {}
        if noise is not None:
            noise = _cat(likelihood.noise_covar.noise, noise, -1)
            if likelihood.second_noise_covar is not None:
                # GPyTorch adds what it is given twice, once in place of the noise that it learns.
                noise = 0.5 * (noise + likelihood.second_noise)
            arguments["noise"] = noise
        data = observations(likelihood, prior.distribution, target, prior.points, **arguments)
    new = torch.arange(prior.num_train, data.num_rows)
    return data, data.flat_indices(new.unsqueeze(0))[0]


def marginal_predictive(model: ExactGP, x: Tensor, noise: Tensor | None = None) -> Normal:
    """The predictive marginals of new observations in training units, ``(*batch, t)``.

    Args:
        model: An exact GP with training data and one target for each row.
        x: New inputs as the model takes them, ``(*batch, t, d)``.
        noise: Noise variances of the new points, for a fixed-noise likelihood, ``(*batch, t)``.

    Raises:
        ShapeError, ArgumentError: As for :func:`predictive_observations`.
    """
    with evaluating(model):
        x, likelihood = new_points(model, x), cast(Likelihood, model.likelihood)
        _check_noise(likelihood, noise)
        latent = exact_posterior(model, x, marginal=True)
        predictive = observed_posterior(likelihood, latent, x, True if noise is None else noise)
        mean, deviation = predictive.mean, predictive.variance.sqrt()
        for numbers in (mean, deviation):
            check_finite("predictions at x", numbers, "Check the magnitudes of all inputs.")
        return Normal(mean, deviation)


def _check_noise(likelihood: Likelihood, noise: Tensor | None) -> None:
    """Refuses noise variances of new points where there are none, and asks for them elsewhere."""
    is_fixed = isinstance(likelihood, FixedNoiseGaussianLikelihood)
    if is_fixed and noise is None:
        reason = "The likelihood has fixed noise variances, for the training points only."
        raise ArgumentError("noise", None, "noise variances of the new points", reason)
    if noise is not None and not is_fixed:
        reason = f"{type(likelihood).__name__} has one noise for all points."
        raise ArgumentError("noise", "a tensor", "None", reason)


def observed_posterior(
    likelihood: Likelihood, latent: PosteriorNormal, x: Tensor, noise: bool | Tensor
) -> PosteriorNormal:
    """The posterior of new observations: the noise added to the posterior of latent values.

    Args:
        likelihood: Whose noise it is.
        latent: Posterior at the points.
        x: Points, ``(*batch, m, d)``.
        noise: Whether to add the likelihood's; or noise variances of these points to add in place
            of its own, ``(*batch, m)``.

    Raises:
        ArgumentError: The likelihood knows the noise of the training points alone: at other points
            GPyTorch adds it in order where there are as many of them, and else none.
        ShapeError: There are other than one noise variance for each point.
    """
    if isinstance(noise, Tensor):
        points = latent.mean.shape[-1]
        if noise.shape[-1:] != (points,):
            raise ShapeError("observation_noise", tuple(noise.shape), f"(*batch, {points})")
        if isinstance(likelihood, FixedNoiseGaussianLikelihood):
            noise = noise + likelihood.second_noise
        covariance = latent.lazy_covariance_matrix + DiagLinearOperator(noise)
        return PosteriorNormal(latent.mean, covariance)
    if not noise:
        return latent
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        raise ArgumentError(
            "observation_noise", True, "noise variances of the new points",
            "The likelihood has fixed noise variances, for the training points only. Pass those of "
            "the new points, or observation_noise=False for the noise-free function.",
        )  # fmt: skip
    return cast(PosteriorNormal, likelihood(latent, [x]))


def _cat(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Both along ``dim`` (negative), their batch dimensions broadcast."""
    batch = torch.broadcast_shapes(first.shape[:dim], second.shape[:dim])
    return torch.cat(
        [values.expand(*batch, *values.shape[dim:]) for values in (first, second)], dim=dim
    )


def are_constant(spread: Any, variance: Any) -> Any:
    """Whether means of predictions vary by less than a thousandth of their variance."""
    return spread < 1e-3 * variance
