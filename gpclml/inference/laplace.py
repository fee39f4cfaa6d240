r"""Laplace's approximation of Gaussian processes whose targets are not Gaussian given the latents.

With the prior :math:`f \sim \mathcal N(m, K)` and independent targets, the posterior of the latent
values is approximated by a normal at its mode (Rasmussen and Williams 2006, Section 3.4). There,
with :math:`a = K^{-1}(f - m) = \nabla \log p(y \mid f)` and
:math:`W = -\nabla\nabla \log p(y \mid f)`,

.. math:: \log Z = \log p(y \mid f) - \tfrac12 a^\top (f - m) - \tfrac12 \log |I + K W|,

and new latent values have the mean :math:`m_* + K_*^\top a` and lose the variance
:math:`K_*^\top R K_*` with :math:`R = (K + W^{-1})^{-1}`. The density of held-out targets given the
others is the difference of two such evidences, that of all and that of the others, each at a mode
of its own: with the mode of all, scales of the prior run away.

All of it is computed in float64, whose digits the search for a mode and its third derivatives need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils import environment
from gpclml._utils.arguments import check_placement
from gpclml.errors import ShapeError, UnsupportedError
from gpclml.gram import Evaluated, Gradients, Reason, precomputed
from gpclml.gram.autograd import fitted
from gpclml.inference.observations import (
    MISSING_TERM,
    SMALL,
    Observations,
    Road,
    closed_form_of,
    missing_targets,
)
from gpclml.inference.posterior import JointPrior, posterior_given
from gpclml.inference.units import PosteriorNormal
from gpclml.likelihoods import Derivatives, TargetDensity, target_density
from gpclml.linalg import ConditionedBlock, safe_cholesky, take

__all__ = [
    "LatentObservations",
    "Mode",
    "Starts",
    "find_mode",
    "held_out_evidence",
    "latent_observations",
    "latent_posterior",
]

_MOST_STEPS = 100  # of Newton's method, which takes about five
# Twice the gain that Newton's method expects of a step, in nats, after which it ends: the error of
# the mode is then squared once more. Other steps gain a constant share of what is left.
_LAST_GAIN, _LAST_SLOW_GAIN = 1e-12, 1e-20
_MATRICES = 9  # n x n at the peak of an evaluation with its gradient
_SHORTEST = 1e-8  # share of a step that is tried before a mode is given up

Starts = dict[int, Tensor]
"""Weights a of modes that were found before, by the number of points, to start from."""


class _Curvature:
    """Factors of the precision K⁻¹ + W of latent values, where W may be negative.

    Where it is, for targets far in a heavy tail, the precision may not be positive definite. It
    is then that with zero in place of negative W, which still is a direction of ascent.

    Attributes:
        curvature: The W of the precision, ``(*batch, n)``.
        is_definite: Whether the precision has W as given, ``(*batch,)``; True for all.
    """

    def __init__(self, K: Tensor, W: Tensor, is_positive: bool) -> None:
        self._matrix = K
        self.root = W.clamp_min(0.0).sqrt()
        B = (self.root.unsqueeze(-1) * K).mul_(self.root.unsqueeze(-2))
        B.diagonal(dim1=-2, dim2=-1).add_(1.0)
        self.factor, info = torch.linalg.cholesky_ex(B)
        if bool(info.any()):
            self.factor = safe_cholesky(B)  # with jitter, or an error that says what is wrong
        self.curvature, self._covariance = W, None
        self.is_definite: Tensor | bool = True
        self._log_det: Tensor | float = 0.0
        if not is_positive and bool((W < 0).any()):
            self._subtract(W)

    @property
    def log_det(self) -> Tensor:
        """Logarithm of the determinant of I + K W, ``(*batch,)``."""
        return self._log_det + 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _subtract(self, W: Tensor) -> None:
        """Takes negative W into account: a correction by a second factor."""
        V = self.whitened(self._matrix)
        covariance = self._matrix - V.mT @ V  # with zero in place of negative W
        root = (-W).clamp_min(0.0).sqrt()
        C = -root.unsqueeze(-1) * covariance * root.unsqueeze(-2)
        C.diagonal(dim1=-2, dim2=-1).add_(1.0)
        factor, info = torch.linalg.cholesky_ex(C)
        is_definite = info == 0
        self.is_definite, keep = is_definite, is_definite.unsqueeze(-1)
        self.curvature = torch.where(keep, W, W.clamp_min(0.0))
        eye = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
        factor = torch.where(keep.unsqueeze(-1), factor, eye)
        self._log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        root = torch.where(keep, root, 0.0)
        U = torch.linalg.solve_triangular(factor, root.unsqueeze(-1) * covariance, upper=False)
        self._covariance = covariance + U.mT @ U

    def whitened(self, columns: Tensor) -> Tensor:
        """Columns as L⁻¹ √W of them, whose products are those with R where W is not negative."""
        scaled = self.root.unsqueeze(-1) * columns
        return torch.linalg.solve_triangular(self.factor, scaled, upper=False)

    @property
    def has_covariance(self) -> bool:
        """Whether some W is negative, and the covariance of latent values was formed."""
        return self._covariance is not None

    def times_r(self, columns: Tensor) -> Tensor:
        """R = (K + W⁻¹)⁻¹ times columns, ``(*batch, n, k)``."""
        if self._covariance is None:
            root = self.root.unsqueeze(-1)
            return root * torch.cholesky_solve(root * columns, self.factor)
        W = self.curvature.unsqueeze(-1)
        return W * (columns - self._covariance @ (W * columns))

    def r_and_variance(self) -> tuple[Tensor, Tensor]:
        """The matrix R, ``(*batch, n, n)``, and variances of latent values, ``(*batch, n)``."""
        W = self.curvature
        if self._covariance is None:
            T = torch.cholesky_inverse(self.factor)
            # The difference keeps no digits where W is tiny, nor does a gradient there need any.
            reduced = (1 - T.diagonal(dim1=-2, dim2=-1)) / W
            prior = self._matrix.diagonal(dim1=-2, dim2=-1)
            variance = torch.where(W > 0, reduced, prior).clamp_min(0.0).minimum(prior)
            return self.root.unsqueeze(-1) * T * self.root.unsqueeze(-2), variance
        R = -W.unsqueeze(-1) * self._covariance * W.unsqueeze(-2)
        R.diagonal(dim1=-2, dim2=-1).add_(W)
        return R, self._covariance.diagonal(dim1=-2, dim2=-1)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Mode:
    """The mode of latent values given targets, and Laplace's approximation there, in float64.

    Attributes:
        latent: The mode f, ``(*batch, n)``.
        weights: a = K⁻¹ (f - m), ``(*batch, n)``.
        at: Log densities of the targets and their derivatives at the mode.
        mean: The prior mean m.
        curvature: Factors at the mode.
    """

    latent: Tensor
    weights: Tensor
    at: Derivatives
    mean: Tensor
    curvature: _Curvature

    @property
    def log_evidence(self) -> Tensor:
        """Laplace's approximation of log p(y), ``(*batch,)``; NaN at what is no maximum."""
        fit = (self.at.log_prob - 0.5 * self.weights * (self.latent - self.mean)).sum(-1)
        value = fit - 0.5 * self.curvature.log_det
        return torch.where(torch.as_tensor(self.curvature.is_definite), value, torch.nan)

    def gradients(self, K: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Of the evidence: for K, for m, and the weights of the gradient for hyperparameters.

        The mode moves with all of them, and W with it; the evidence feels this by log |I + K W|.

        Returns:
            ``(*batch, n, n)`` (symmetric), ``(*batch, n)``, and what log density, first and second
            derivative of each target are weighted by, ``(*batch, n)`` each.
        """
        R, variance = self.curvature.r_and_variance()
        slope = 0.5 * variance * self.at.third  # of -log |I + K W| / 2 by the mode
        implicit = slope - _times(R, _times(K, slope))  # (I + W K)⁻¹ times it
        a = self.weights
        left = 0.5 * a + implicit
        outer = left.unsqueeze(-1) * a.unsqueeze(-2)
        grad_matrix = 0.5 * (outer + outer.mT - R)
        of_targets = torch.ones_like(a), _times(K, implicit), 0.5 * variance
        return grad_matrix, a + implicit, of_targets


def find_mode(
    K: Tensor,
    mean: Tensor,
    density: TargetDensity,
    targets: Tensor,
    observed: Tensor | None = None,
    start: Tensor | None = None,
) -> Mode:
    """The mode by Newton's method, with steps halved until the log density rises.

    Args:
        K: Prior covariance of latent values, ``(*batch, n, n)``, float64 without a graph.
        mean: Their prior mean, ``(*batch, n)``.
        density: Of the targets.
        targets: ``(*batch, n)``.
        observed: Which targets count, ``(*batch, n)``; all if None.
        start: Weights a to start from, where that is better than the prior mean.

    Raises:
        NonFiniteError, NotPSDError: The covariance cannot be factored.
    """
    batch = torch.broadcast_shapes(K.shape[:-2], mean.shape[:-1], targets.shape[:-1])
    mean = mean.expand(*batch, mean.shape[-1])

    def log_joint(a: Tensor, f: Tensor) -> tuple[Tensor, Derivatives]:
        at = density.derivatives(f, targets)
        if observed is not None:
            at = Derivatives(*(torch.where(observed, term, 0.0) for term in at))
        return (at.log_prob - 0.5 * a * (f - mean)).sum(-1), at

    a, f = torch.zeros_like(mean), mean
    value, at = log_joint(a, f)
    if start is not None and start.shape == a.shape:
        started = mean + _times(K, start)
        other, at_start = log_joint(start, started)
        if bool((other > value).all()):
            a, f, value, at = start, started, other, at_start
    curvature = _Curvature(K, -at.second, density.is_log_concave)
    for _ in range(_MOST_STEPS):
        b = curvature.curvature * (f - mean) + at.first
        ahead = b - curvature.times_r(K @ b.unsqueeze(-1)).squeeze(-1)
        moved = _times(K, ahead - a)  # of the latent values
        gain = ((at.first - a) * moved).sum(-1)  # to first order
        step = torch.ones_like(value).unsqueeze(-1)
        while True:
            new_a = a + step * (ahead - a)
            new_f = f + step * moved
            new_value, new_at = log_joint(new_a, new_f)
            rises = new_value >= value - 1e-10 * value.abs()
            if bool(rises.all()):
                break
            step = torch.where(rises.unsqueeze(-1), step, 0.5 * step)
            if bool((step < _SHORTEST).any()):
                break
        if not bool(rises.all()):  # rounding: what does not rise stays
            kept = rises.unsqueeze(-1)
            new_a, new_f = torch.where(kept, new_a, a), torch.where(kept, new_f, f)
            new_value, new_at = log_joint(new_a, new_f)
        enough: Any = _LAST_GAIN
        if curvature.is_definite is not True:
            enough = torch.where(cast(Tensor, curvature.is_definite), _LAST_GAIN, _LAST_SLOW_GAIN)
        # Sums of steps would gather rounding.
        a, f, value, at = new_a, mean + _times(K, new_a), new_value, new_at
        curvature = _Curvature(K, -at.second, density.is_log_concave)
        # NaN and steps that rounding ends count as the last.
        if not bool(((gain > enough) & (step.squeeze(-1) >= _SHORTEST)).any()):
            break
    return Mode(f, a, at, mean, curvature)


@dataclass(frozen=True, kw_only=True)
class LatentObservations(Observations):
    """Targets that are not Gaussian given their latent values, with the prior of these.

    Attributes:
        density: Log density of the targets.
        targets: ``(*batch, n)``; any number where missing.
        mean: Prior mean of the latent values, ``(*batch, n)``.
    """

    density: TargetDensity = field(default=cast(Any, None))
    targets: Tensor = field(default=cast(Any, None))
    mean: Tensor = field(default=cast(Any, None))

    def _select(self, rows: Tensor) -> LatentObservations:
        data = cast(LatentObservations, super()._select(rows))
        index = rows.to(self.targets.device)
        return replace(data, targets=self.targets[..., index], mean=self.mean[..., index])

    def _drops_missing(self) -> bool:
        return False  # they have no density, and change no other

    @cached_property
    def matrix(self) -> Tensor:
        """Prior covariance of the latent values, ``(*batch, n, n)``, differentiable."""
        return replace(self, missing=None).covariance.to_dense()

    def per_held_out_target(
        self, value: Tensor, blocks: Sequence[Tensor], *, redrawn: bool = False
    ) -> Tensor:
        """See :class:`~gpclml.inference.Observations`; a missing target has no density here."""
        held_out = torch.cat([block.flatten(-2) for block in blocks], dim=-1)
        missing = None if self.missing is None else take(self.missing, held_out).sum(-1)
        constant = 0.0 if missing is None else MISSING_TERM * missing
        return super().per_held_out_target(value + constant, blocks, redrawn=redrawn)

    def latent_road(self) -> Road:
        """Which way an evaluation goes, and why not a faster one."""
        gram = closed_form_of(self.latent, dense=True)
        kernel, reason = ("GPyTorch's kernel", gram.text) if isinstance(gram, Reason) else (
            "closed form", ""
        )  # fmt: skip
        return Road(f"{kernel}, Laplace's approximation", reason)


def latent_observations(
    likelihood: Likelihood, function_dist: MultivariateNormal, target: Tensor
) -> LatentObservations:
    """The prior of latent values and the density of their targets.

    Args:
        likelihood: See :func:`gpclml.likelihoods.target_density`.
        function_dist: Prior of the latent values, event shape ``(n,)``.
        target: ``(*batch, n)``; NaN is missing under ``observation_nan_policy("mask")``.

    Raises:
        ShapeError: The target does not fit the distribution.
        UnsupportedError: The likelihood, or a distribution of several tasks.
        ArgumentError: Targets that the likelihood does not take.
        NonFiniteError: Targets that are not finite.
    """
    density = target_density(likelihood)
    if not isinstance(function_dist, MultivariateNormal) or isinstance(
        function_dist, MultitaskMultivariateNormal
    ):
        kind = type(function_dist).__name__
        suggestion = "Pass the model's output: mll(model(x), target)."
        raise UnsupportedError("function_dist", kind, "a MultivariateNormal", suggestion)
    mean = function_dist.mean
    if target.shape[-1:] != function_dist.event_shape:
        expected = f"(*batch, {mean.shape[-1]}), as the model's output"
        suggestion = "Pass the targets of the inputs that the model was called on."
        raise ShapeError("target", tuple(target.shape), expected, suggestion)
    if not target.is_floating_point():
        target = target.to(mean.dtype)
    check_placement("target", target, mean)
    missing = missing_targets(target)
    density.check_targets("target", target)
    if missing is not None:
        target = torch.where(missing, 0.0, target)
    latent = function_dist.lazy_covariance_matrix
    return LatentObservations(
        latent, None, target - mean, missing, target.shape[-1],
        density=density, targets=target, mean=mean,
    )  # fmt: skip


def held_out_evidence(
    data: LatentObservations, blocks: Sequence[Tensor], starts: Starts | None = None
) -> Tensor:
    r"""The sum over blocks of log p(y_B | y_{-B}), each the difference of two evidences.

    Of all points as one block it is the log evidence itself. The cost is that of a mode for all
    points and one for each block's others, about five factorizations each.

    Args:
        data: The targets and their prior.
        blocks: Indices, ``(k_i, b_i)``.
        starts: Modes found before, from which this one starts; replaced by what it finds.

    Returns:
        Nats, ``(*batch,)``, differentiable in the prior's mean and covariance and in
        hyperparameters of the likelihood.
    """
    size, count = data.shape.numel(), sum(len(group) for group in blocks)
    if size > SMALL:
        environment.check_memory(
            "model", f"{data.shape[-1]} points", (_MATRICES + count) * size, torch.float64,
            data.mean.device, "Use fewer points, or a variational GP of GPyTorch.",
        )  # fmt: skip
    matrix, mean, density = data.matrix, data.mean, data.density
    K, prior_mean, targets = (t.detach().double() for t in (matrix, mean, data.targets))
    observed, n = None if data.missing is None else ~data.missing, K.shape[-1]
    known = {} if starts is None else starts
    whole = find_mode(K, prior_mean, density, targets, observed, known.get(n))
    known[n] = whole.weights
    value = torch.zeros_like(whole.log_evidence)
    modes: list[tuple[float, Mode, Tensor | None]] = [(float(count), whole, None)]
    for group in blocks:
        for block in group:
            value = value + whole.log_evidence
            kept = torch.ones(n, dtype=torch.bool)
            kept[block] = False
            if not bool(kept.any()):
                continue
            others = kept.nonzero().squeeze(-1).to(K.device)
            mode = find_mode(
                K[..., others, :][..., others], prior_mean[..., others], density,
                targets[..., others], None if observed is None else observed[..., others],
                whole.weights[..., others],
            )  # fmt: skip
            value = value - mode.log_evidence
            modes.append((-1.0, mode, others))

    def vjp(grad: Tensor) -> Gradients:
        grad_matrix, grad_mean = torch.zeros_like(K), torch.zeros_like(prior_mean)
        gradients: Gradients = []
        for sign, mode, others in modes:
            weight = (sign * grad).unsqueeze(-1)
            rows = slice(None) if others is None else others
            block = K if others is None else K[..., others, :][..., others]
            matrix_term, mean_term, of_targets = mode.gradients(block)
            matrix_term = (weight.unsqueeze(-1) * matrix_term).sum_to_size(block.shape)
            mean_term = (weight * mean_term).sum_to_size(prior_mean[..., rows].shape)
            if others is None:
                grad_matrix, grad_mean = grad_matrix + matrix_term, grad_mean + mean_term
            else:
                grad_matrix[..., others.unsqueeze(-1), others] += matrix_term
                grad_mean[..., others] += mean_term
            seen = None if observed is None else observed[..., rows]
            weights = [weight * term for term in of_targets]
            if seen is not None:
                weights = [torch.where(seen, term, 0.0) for term in weights]
            gradients += density.parameter_gradients(
                mode.latent, targets[..., rows], cast(Any, tuple(weights))
            )
        pairs = [(matrix, grad_matrix), (mean, grad_mean), *gradients]
        return [(t, fitted(g, t)) for t, g in pairs if t.requires_grad]

    tensors = [t for t in (matrix, mean, *density.parameters) if t.requires_grad]
    return precomputed(Evaluated(value, tensors, vjp), mean.dtype)


class _LaplacePredictor:
    """What the mode says of other latent values."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def given(self, cross: Tensor, keep: bool = False) -> ConditionedBlock:
        """See :class:`~gpclml.linalg.Predictor`."""
        cross, curvature = cross.double(), self._mode.curvature
        shift = _times(cross.mT, self._mode.weights)
        if curvature.has_covariance:
            product = curvature.times_r(cross)
            reduction = (cross * product).sum(-2)
            return _Block(shift, reduction, (cross, product) if keep else None)
        V = curvature.whitened(cross)
        return ConditionedBlock(shift, V.square().sum(-2), V if keep else None)


class _Block(ConditionedBlock):
    """Of a mode with negative W, where R has no real root."""

    def joint_reduction(self, other: Any) -> Tensor:
        """See :class:`~gpclml.linalg.ConditionedBlock`."""
        return self.vectors[0].mT @ other.vectors[1]


def latent_posterior(
    model: ExactGP,
    x: Tensor,
    marginal: bool,
    offset: Tensor | None = None,
    progress: bool | None = None,
) -> PosteriorNormal:
    """Laplace's approximation of latent values at new points, by a model in eval mode.

    Args:
        model: With training data and a likelihood.
        x: Points, ``(*batch, m, d)``.
        marginal: Give the variances only.
        offset: Known offsets of the latent values of the training targets, ``(*batch, n)``.
        progress: Show a bar of the points where there are many.

    Returns:
        Mean ``(*batch, m)`` and covariance ``(*batch, m, m)``, diagonal with ``marginal``.
    """
    prior = JointPrior(model, x)
    seen, m = slice(0, prior.num_train), prior.mean.shape[-1]
    mean = prior.distribution.mean[..., seen]
    mean = mean if offset is None else mean + offset.to(mean)
    latent = MultivariateNormal(mean, cast(Any, prior.operator)[..., seen, seen])
    targets = cast(Tensor, model.train_targets).to(mean.dtype)
    data = latent_observations(cast(Likelihood, model.likelihood), latent, targets)
    with torch.no_grad():
        observed = None if data.missing is None else ~data.missing
        mode = find_mode(
            data.matrix.double(), data.mean.double(), data.density, data.targets.double(), observed
        )
    step = 4096 if marginal else m
    chunks = [slice(first, min(first + step, m)) for first in range(0, m, step)]
    return posterior_given(prior, _LaplacePredictor(mode), chunks, marginal, x, progress)[0]
