"""The posterior of an exact GP, by a Cholesky factor or conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator, LinearOperator, to_linear_operator
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils import environment
from gpclml._utils.arguments import check_counts, check_finite, checked
from gpclml._utils.arrays import points_as_tensor
from gpclml._utils.resuming import content_digest
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.inference.observations import (
    Observations,
    Solver,
    approximated_as,
    conjugate_gradients,
    evaluate_block,
    observations,
    training_observations,
)
from gpclml.inference.units import (
    PosteriorNormal,
    above_rounding,
    to_training_units,
    units_of_targets,
)
from gpclml.linalg import (
    ConditionedBlock,
    ConjugateGradients,
    IterativeCovariance,
    Predictor,
    RowProducts,
    safe_cholesky,
)

if TYPE_CHECKING:
    from gpclml._utils.arrays import ArrayLike

T = TypeVar("T")

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
def posterior_settings() -> Iterator[None]:
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
    with evaluating(model), torch.no_grad(), posterior_settings():
        yield


@posterior_settings()
def exact_posterior(
    model: ExactGP,
    x: Tensor,
    marginal: bool,
    progress: bool | None = None,
    *,
    constant: bool = False,
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

    The factor has the batch of the training data, whatever that of the points is. Where no gradient
    goes through it, it is kept until anything of the model changes, and a point costs n² operations
    from the second call on; of all models together half a GiB is kept.

    Args:
        model: A model in eval mode, with training data.
        x: Points. Shape ``(*batch, m, d)``.
        marginal: Give the variances only.
        progress: Show a bar of the points on standard error, where variances of more than one chunk
            of them are asked for.
        constant: Let gradients flow to x alone, not to parameters and training data.

    Returns:
        Mean ``(*batch, m)`` and covariance ``(*batch, m, m)``, diagonal with ``marginal``.
    """

    def compute(points: Tensor) -> PosteriorNormal:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not constant):
            predictor = _training_predictor(model, points)
        members = _training_inputs(model).shape[:-2]
        further = points.ndim - 2 - len(members)  # dimensions in front of those of the members
        is_grouped = further > 0 and (
            torch.broadcast_shapes(points.shape[further:-2], members) == members
        )
        prior = GroupedPrior(model, points) if is_grouped else JointPrior(model, points)
        if is_grouped and prior.batch_shape != members:  # hyperparameters have a batch of their own
            prior = JointPrior(model, points)
        m = prior.mean.shape[-1]
        step = _CHUNK if marginal else m
        chunks = [slice(first, min(first + step, m)) for first in range(0, m, step)]
        return posterior_given(prior, predictor, chunks, marginal, x, progress)[0]

    return computed_in_double(model, compute, x, constant)


def has_constant_caches(model: ExactGP) -> bool:
    """Whether GPyTorch would keep what it computes of the training data, without a gradient.

    It does by default (``gpytorch.settings.detach_test_caches``); here training data that require a
    gradient, as those of fantasies may, have theirs.
    """
    data = *cast(Any, model.train_inputs), cast(Tensor, model.train_targets)
    detached = bool(settings.detach_test_caches.on())
    return detached and not any(values.requires_grad for values in data)


_KEPT_BYTES = 2**29  # of factors of all models together
_KEPT: WeakKeyDictionary[ExactGP, tuple[str, int, Predictor]] = WeakKeyDictionary()


def _training_predictor(model: ExactGP, x: Tensor) -> Predictor:
    """What the training targets say of other values, in the type of x.

    Without a gradient it is kept; of those that were kept the oldest are dropped.
    """
    state = None if torch.is_grad_enabled() else content_digest(model)
    kept = _KEPT.get(model)
    if kept is not None and kept[0] == state:
        return kept[2]
    # What is kept may be used outside of an inference mode that it is computed in.
    with torch.inference_mode(False), torch.set_grad_enabled(state is None):
        data = JointPrior(model, x.new_empty(0, x.shape[-1])).training_data(model)
        predictor = data.covariance.predictor(data.residual, data.missing)
    # Approximations of targets that are not Gaussian have the covariance and a factor beside it.
    size = data.residual.numel() * data.residual.shape[-1] * x.itemsize
    size *= 1 if data.is_gaussian else 3
    if state is not None and size <= _KEPT_BYTES:
        _KEPT.pop(model, None)
        others = list(_KEPT.items())
        free = _KEPT_BYTES - size - sum(entry[1] for _, entry in others)
        for other, entry in others:
            if free < 0:
                _KEPT.pop(other, None)
                free += entry[1]
        _KEPT[model] = state, size, predictor
    return predictor


def computed_in_double(
    model: ExactGP, compute: Callable[[Tensor], T], x: Tensor, constant: bool = False
) -> T:
    """What a function computes from a model at points, in float64 if :func:`exact_posterior` does.

    It takes the points ``(*batch, m, d)`` in the type that the model's tensors then have; where
    these are to be ``constant``, no gradient flows to them.
    """
    module = _Computation(model, compute)
    small = _training_inputs(model).shape[-2] <= PREDICTED_IN_DOUBLE_UP_TO
    # Buffers too: interpolated kernels hold their grids, and transforms their scales, there.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if constant:
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    if x.dtype == torch.float32 and small:
        double = {name: t.double() for name, t in tensors.items() if t.dtype == torch.float32}
        try:
            # What was kept in one type must not be used in the other, before or after.
            module.clear_caches()
            return torch.func.functional_call(module, double, (x.double(),))
        except RuntimeError:  # tensors of mixed types, memory: what remains is raised below
            pass
        finally:
            module.clear_caches()
    return torch.func.functional_call(module, tensors, (x,)) if constant else compute(x)


class _Computation(torch.nn.Module):
    """A function of a model as a module, whose tensors ``torch.func.functional_call`` exchanges."""

    def __init__(self, model: ExactGP, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model, self._compute = model, compute

    def forward(self, x: Tensor) -> Any:
        return self._compute(x)

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
        covariance = prior.conditional_covariance(blocks).to(like)
        return PosteriorNormal(mean, covariance), blocks
    variance = torch.cat([prior.variance(rows) for rows in chunks], dim=-1)
    reduction = torch.cat([block.reduction for block in blocks], dim=-1)
    # A difference of nearly equal numbers where the points are close to observed ones.
    variance = above_rounding(variance - reduction, variance).to(like)
    return PosteriorNormal(mean, DiagLinearOperator(variance.expand_as(mean))), blocks


class JointPrior:
    """The prior of a model in eval mode at its n training and m new points ``(*batch, m, d)``."""

    def __init__(self, model: ExactGP, x: Tensor) -> None:
        train_x = _training_inputs(model)
        self.points: Tensor = _cat(train_x, x, -2)
        self.num_train: int = train_x.shape[-2]
        self.distribution: MultivariateNormal = cast(Any, model.forward(self.points))
        self.operator = cast(LinearOperator, self.distribution.lazy_covariance_matrix)

    @property
    def mean(self) -> Tensor:
        """Means of new points, ``(*batch, m)``."""
        return self.distribution.mean[..., self.num_train :]

    @property
    def batch_shape(self) -> torch.Size:
        """That of model and points together."""
        return self.operator.shape[:-2]

    def training_data(self, model: ExactGP) -> Observations:
        """The prior Gaussian of the model's training targets."""
        seen = slice(0, self.num_train)
        mean = self.distribution.mean[..., seen]
        offset = getattr(model, "train_offset", None)  # of a LatentGP
        mean = mean if offset is None else mean + offset.to(mean)
        prior = MultivariateNormal(mean, cast(Any, self.operator)[..., seen, seen])
        targets = cast(Tensor, model.train_targets).to(mean.dtype)
        likelihood = cast(Likelihood, model.likelihood)
        data = observations(likelihood, prior, targets, [_training_inputs(model)])
        return approximated_as(model, data)

    def cross(self, rows: slice) -> LinearOperator:
        """Covariance of new points with the training points, ``(*batch, rows, n)``."""
        return cast(Any, self.operator)[..., self._new(rows), : self.num_train]

    def variance(self, rows: slice) -> Tensor:
        """Variances of new points, ``(*batch, rows)``."""
        return self._block(rows, rows).diagonal(dim1=-1, dim2=-2)

    def conditional_covariance(self, blocks: Sequence[ConditionedBlock]) -> Tensor:
        """Covariance of all new points given the training points, ``(*batch, m, m)``."""
        points = slice(0, self.mean.shape[-1])
        prior = evaluate_block(self._block(points, points))
        stripes = [[left.joint_reduction(right) for right in blocks] for left in blocks]
        covariance = prior - torch.cat([torch.cat(stripe, dim=-1) for stripe in stripes], dim=-2)
        # Blocks of conjugate gradients are symmetric up to their tolerance only.
        covariance = 0.5 * (covariance + covariance.mT)
        variance = covariance.diagonal(dim1=-1, dim2=-2)
        raised = above_rounding(variance, prior.diagonal(dim1=-1, dim2=-2))
        return covariance + torch.diag_embed(raised - variance)

    def _block(self, rows: slice, columns: slice) -> LinearOperator:
        return cast(Any, self.operator)[..., self._new(rows), self._new(columns)]

    def _new(self, rows: slice) -> slice:
        return slice(self.num_train + rows.start, self.num_train + rows.stop)


class GroupedPrior(JointPrior):
    """As :class:`JointPrior` at groups of points, ``(*groups, *members, m, d)``.

    ``members`` is the batch of the training data. Training points are not repeated for each group:
    a network, say, sees each once.
    """

    def __init__(self, model: ExactGP, x: Tensor) -> None:
        self._members = members = _training_inputs(model).shape[:-2]
        self._groups = x.shape[: x.ndim - 2 - len(members)]
        x = x.expand(*self._groups, *members, *x.shape[-2:])
        inner = range(len(members), len(members) + len(self._groups))
        self._outer_dims, self._inner_dims = list(range(len(self._groups))), list(inner)
        points = x.movedim(self._outer_dims, self._inner_dims)
        super().__init__(model, points.flatten(len(members), -2))
        prior = cast(MultivariateNormal, cast(Any, model.forward(x)))
        self._within = cast(LinearOperator, prior.lazy_covariance_matrix)

    @property
    def mean(self) -> Tensor:
        """Means of new points, ``(*batch, m)``."""
        return self._in_groups(super().mean.unsqueeze(-1)).squeeze(-1)

    def cross(self, rows: slice) -> LinearOperator:
        """Covariance of new points with the training points, ``(*batch, rows, n)``."""
        n, count = self.num_train, self.points.shape[-2] - self.num_train
        new = torch.arange(count).reshape(self._groups.numel(), -1)[:, rows].flatten()
        chosen = slice(n, None) if len(new) == count else n + new.to(self.points.device)
        block = evaluate_block(cast(Any, self.operator)[..., chosen, :n])
        return to_linear_operator(self._in_groups(block))

    def _in_groups(self, values: Tensor) -> Tensor:
        """``(*groups, *members, m, k)`` of values ``(*members, groups times m, k)``."""
        shape = *self._members, *self._groups, -1, values.shape[-1]
        return values.reshape(shape).movedim(self._inner_dims, self._outer_dims)

    def _block(self, rows: slice, columns: slice) -> LinearOperator:
        return cast(Any, self._within)[..., rows, columns]


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
    more where targets are missing, for each member of the training data, and n m + 3 m² for each
    joint covariance.
    """
    n, m = train_x.shape[-2], x.shape[-2]
    members = train_x.shape[:-2]
    batch = torch.broadcast_shapes(members, x.shape[:-2]).numel()
    matrices = _WITH_GRADIENT if torch.is_grad_enabled() else _MATRICES
    matrices += _WITH_MISSING * bool(train_y.isnan().any())
    numbers = members.numel() * matrices * n * n + batch * (not marginal) * (n + 3 * m) * m
    if solver in ("auto", "cholesky") and environment.fits(numbers * x.itemsize, x.device):
        return None
    suggestion = "Use solver='cg', torch.no_grad(), or fewer points."
    size, loss = f"n = {n}, m = {m}", " and without a gradient"
    if solver != "cholesky":
        refuse_gradient(x)
        num_points_at_once(x, batch * n, batch, not marginal)
    return conjugate_gradients(solver, numbers, x, size, suggestion, loss)


def num_points_at_once(x: Tensor, size: int, batch: int, joint: bool, held: int = 0) -> int:
    """How many new points are solved for together; an ArgumentError where they do not fit.

    There are ``size`` training points in all members of a batch, and ``held`` numbers in memory
    throughout. As many as fit, of at most 2²³ numbers an array.
    """
    m, got, suggestion = x.shape[-2], "one point", "Use fewer training points."
    if joint:
        held += 3 * size * m + 4 * batch * m * m * 8 // x.dtype.itemsize  # those in float64
        got, suggestion = f"{m} points jointly", "Give fewer, or ask for their marginals."
    there = environment.available_memory(x.device) // x.dtype.itemsize - held
    count = max(1, min(_NUMBERS_AT_ONCE, there // (2 * VECTORS_AT_PEAK)) // size)
    numbers = held + VECTORS_AT_PEAK * size * min(m, count)
    environment.check_memory("x", got, numbers, x.dtype, x.device, suggestion)
    return min(m, count)


def refuse_gradient(x: object) -> None:
    """Refuses points that ask for a gradient, which only predictions by a factor of all give."""
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        raise UnsupportedError(
            "x", "points that require a gradient", "points that do not",
            "Use x.detach(), or a dense posterior (solver='cholesky').",
        )  # fmt: skip


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
        >>> import torch
        >>> from gpclml import GPRegression, IterativePosterior
        >>> x = torch.rand(500, 2, dtype=torch.float64)
        >>> posterior = IterativePosterior(GPRegression(x, x.sum(-1).sin()))
        >>> error = posterior.report.mean_error
        >>> mean, variance = posterior.mean(x[:3]), posterior.variance(x[:3])
    """

    @checked
    def __init__(self, model: ExactGP, solver: ConjugateGradients | None = None) -> None:
        self._model, solver = model, solver or ConjugateGradients()
        with reading(model):
            data = training_observations(model)
            if data.num_tasks > 1:
                raise UnsupportedError(
                    "model", f"one of {data.num_tasks} tasks", "one of a single task",
                    "Use the model's own posterior, by a dense factorization.",
                )  # fmt: skip
            self._scale, self._shift = units_of_targets(model)
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
            NonFiniteError: The kernel is not finite at a point. Others as of :meth:`predict`.

        Note:
            n m evaluations of the kernel and 2 n m floating-point operations.
        """
        with self._at(x) as (_, prior, chunks):
            # One product with the solution kept from the start: nothing is solved for.
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
        # Drawn in float64 on the CPU, so that a seed means the same on every device.
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
            times the points that are solved for together, of at most 2²³ numbers each, and
            3 n m + 4 m² more for the joint covariance.
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
            step = num_points_at_once(x, batch * prior.num_train, batch, joint, self._held)
            yield x, prior, [slice(i, min(i + step, m)) for i in range(0, m, step)]
            # The points may have moved the grid of an interpolated kernel.
            _check_unchanged(self._model, self._copies)


def _check_memory(covariance: IterativeCovariance, residual: Tensor) -> int:
    """How many numbers covariance and preconditioner will hold, if there is memory for them."""
    latent, size, n = covariance.latent, residual.numel(), residual.shape[-1]
    features = 3 * size * min(covariance.settings.preconditioner_rank, n)
    # The preconditioner is float64 whatever the type of the model.
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
    leaves no trace in a version. They are compared where they are: digests would need them all on
    the host.
    """
    tensors = _tensors(model)
    for name in {**copies, **tensors}:
        old, new = (given.get(name, torch.empty(0)) for given in (copies, tensors))
        same_kind = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        if not same_kind or not torch.allclose(old, new, 0.0, 0.0, equal_nan=True):  # NaN: missing
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


def predictive_observations(
    model: ExactGP, x: Tensor, y: Tensor, noise: Tensor | None = None
) -> tuple[Observations, Tensor]:
    """The prior Gaussian of training and new observations together; flat indices of the new ones.

    The predictive density of the new ones is their density given all others. Targets y are in
    original units, ``(*batch, t)`` or with a task dimension; noise variances ``(*batch, t)`` are
    for a fixed-noise likelihood alone. Typed errors say that they do not fit points or model.
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

    Of a model with one target for each row; arguments and errors as of
    :func:`predictive_observations`.
    """
    with evaluating(model):
        x, likelihood = new_points(model, x), cast(Likelihood, model.likelihood)
        if not isinstance(likelihood, _GaussianLikelihoodBase):
            kind, suggestion = type(likelihood).__name__, "Use model.predict(x).log_prob(y)."
            raise UnsupportedError("model", kind, "a Gaussian likelihood", suggestion)
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

    The noise is whether to add the likelihood's; or noise variances of these points, to add in its
    place, ``(*batch, m)``. An ArgumentError says that the likelihood knows the noise of the
    training points alone: at other points GPyTorch adds it in order where there are as many of
    them, and else none.
    """
    if isinstance(noise, Tensor):
        points = latent.mean.shape[-1]
        if noise.shape[-1:] != (points,):
            raise ShapeError("observation_noise", tuple(noise.shape), f"(*batch, {points})")
        # A learned noise comes on top of the given ones.
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
