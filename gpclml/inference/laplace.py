r"""Laplace's approximation, and expectation propagation, where targets are not Gaussian.

With the prior :math:`f \sim \mathcal N(m, K)` and independent targets, the posterior of the latent
values is approximated by a normal at its mode (Rasmussen and Williams 2006, Section 3.4). There,
with :math:`a = K^{-1}(f - m) = \nabla \log p(y \mid f)` and
:math:`W = -\nabla\nabla \log p(y \mid f)`,

.. math:: \log Z = \log p(y \mid f) - \tfrac12 a^\top (f - m) - \tfrac12 \log |I + K W|,

and new latent values have the mean :math:`m_* + K_*^\top a` and lose the variance
:math:`K_*^\top R K_*` with :math:`R = (K + W^{-1})^{-1}`. The density of held-out targets given the
others is the difference of two such evidences, that of all and that of the others, each at a mode
of its own: with the mode of all, scales of the prior run away.

For classes posteriors and evidences are better by expectation propagation (:func:`find_sites`),
which starts from the mode and replaces each target's density by a normal one. All of it is computed
in float64, whose digits the search for a mode and its third derivatives need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpclml._utils import environment
from gpclml._utils.arguments import check_placement
from gpclml.errors import NotConvergedError, UnsupportedError
from gpclml.gram import Evaluated, Gradients, precomputed
from gpclml.gram.autograd import fitted
from gpclml.inference.observations import (
    MISSING_TERM,
    SMALL,
    Observations,
    Road,
    Solver,
    kernel_road,
    missing_targets,
)
from gpclml.likelihoods import (
    Derivatives,
    TargetDensity,
    TargetPrediction,
    target_density,
    tilted_moments,
    tilted_parameter_gradients,
)
from gpclml.linalg import (
    ConditionedBlock,
    ConjugateGradients,
    DenseCovariance,
    ExactCovariance,
    Predictor,
    safe_cholesky,
    take,
)
from gpclml.linalg.matrices import HALF_LOG_2PI, solve_lower

_MOST_STEPS = 100  # of Newton's method, which takes about five
# Twice the gain that Newton's method expects of a step, in nats, after which it ends: the error of
# the mode is then squared once more. Other steps gain a constant share of what is left.
_LAST_GAIN, _LAST_SLOW_GAIN = 1e-12, 1e-20
_LOST_GAIN = 1e-3  # after the last step: rounding leaves less
_MOST_ABOVE = 0.01  # nats a target that a log probability of classes may be above 0
_MATRICES = 9  # n x n at the peak of an evaluation with its gradient
_MOST_SWEEPS, _LEAST_CHANGE, _ROUNDED_CHANGE = 500, 1e-8, 1e-6  # of expectation propagation
_LAST_SITES, _RIDGE = 5, 1e-12
_GROWS = 2.0  # by which a change that is worse than the last is greater
_LEAST_VARIANCE = 1e-300
_LEAST_CURVATURE = 1e-13  # where it divides
_SHORTEST = 1e-8  # share of a step that is tried before a mode is given up

Approximation = Literal["laplace", "ep"]
"""Laplace's approximation, or expectation propagation."""

Start = tuple[Tensor, Tensor]
"""Precisions and shifts of :class:`Sites`, ``(*batch, n)``, that a search starts from."""

Starts = dict[tuple[str | int, ...], Start]
"""Those that were found before, by approximation and shape of targets."""


class _Curvature:
    """Factors of the precision K⁻¹ + W of latent values, where W may be negative.

    Where it is, for targets far in a heavy tail, the precision may not be positive definite. It
    is then that with zero in place of negative W, which still is a direction of ascent.

    Attributes:
        curvature: The W of the precision, ``(*batch, n)``.
        is_definite: Whether the precision has W as given, ``(*batch,)`` or one for all.
        covariance: That of latent values where some W is negative; else None.
    """

    def __init__(self, K: Tensor, W: Tensor, is_positive: bool) -> None:
        self.root = W.clamp_min(0.0).sqrt()
        B = (self.root.unsqueeze(-1) * K).mul_(self.root.unsqueeze(-2))
        B.diagonal(dim1=-2, dim2=-1).add_(1.0)
        self.factor, info = torch.linalg.cholesky_ex(B)
        if bool(info.any()):
            self.factor = safe_cholesky(B)  # with jitter, or an error that says what is wrong
        self.curvature = W
        self.covariance: Tensor | None = None
        self.is_definite = torch.ones((), dtype=torch.bool, device=K.device)
        self._log_det: Tensor | float = 0.0
        if not is_positive and bool((W < 0).any()):
            self._subtract(K, W)

    @property
    def log_det(self) -> Tensor:
        """Logarithm of the determinant of I + K W, ``(*batch,)``."""
        return self._log_det + 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _subtract(self, K: Tensor, W: Tensor) -> None:
        """Takes negative W into account: a correction by a second factor."""
        V = self.whitened(K)
        covariance = K - V.mT @ V  # with zero in place of negative W
        root = (-W).clamp_min(0.0).sqrt()
        C = -root.unsqueeze(-1) * covariance * root.unsqueeze(-2)
        C.diagonal(dim1=-2, dim2=-1).add_(1.0)
        factor, info = torch.linalg.cholesky_ex(C)
        self.is_definite, keep = info == 0, (info == 0).unsqueeze(-1)
        self.curvature = torch.where(keep, W, W.clamp_min(0.0))
        eye = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
        factor = torch.where(keep.unsqueeze(-1), factor, eye)
        self._log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        root = torch.where(keep, root, 0.0)
        U = torch.linalg.solve_triangular(factor, root.unsqueeze(-1) * covariance, upper=False)
        self.covariance = covariance + U.mT @ U

    def whitened(self, columns: Tensor) -> Tensor:
        """Columns as L⁻¹ √W of them, whose products are those with R where W is not negative."""
        scaled = self.root.unsqueeze(-1) * columns
        return solve_lower(self.factor, scaled)

    def times_r(self, columns: Tensor) -> Tensor:
        """R = (K + W⁻¹)⁻¹ times columns, ``(*batch, n, k)``."""
        if self.covariance is None:
            root = self.root.unsqueeze(-1)
            return root * torch.cholesky_solve(root * columns, self.factor)
        W = self.curvature.unsqueeze(-1)
        return W * (columns - self.covariance @ (W * columns))

    def r_and_variance(self, K: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix R, ``(*batch, n, n)``, and variances of latent values, ``(*batch, n)``."""
        W = self.curvature
        if self.covariance is None:
            T = torch.cholesky_inverse(self.factor)
            # Unlike :meth:`variance` it has no digits where W is tiny, nor does a gradient there
            # need any: it is multiplied by third derivatives, which are as small.
            reduced = (1 - T.diagonal(dim1=-2, dim2=-1)) / W
            prior = K.diagonal(dim1=-2, dim2=-1)
            variance = torch.where(W > 0, reduced, prior).clamp_min(0.0).minimum(prior)
            return self.root.unsqueeze(-1) * T * self.root.unsqueeze(-2), variance
        R = -W.unsqueeze(-1) * self.covariance * W.unsqueeze(-2)
        R.diagonal(dim1=-2, dim2=-1).add_(W)
        return R, self.covariance.diagonal(dim1=-2, dim2=-1)

    def variance(self, K: Tensor) -> Tensor:
        """Variances of latent values, ``(*batch, n)``, with digits also where W is tiny."""
        if self.covariance is not None:
            return self.covariance.diagonal(dim1=-2, dim2=-1)
        prior = K.diagonal(dim1=-2, dim2=-1)
        reduced = prior - self.whitened(K).square().sum(-2)
        return reduced.maximum(prior * torch.finfo(prior.dtype).eps)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _weights(K: Tensor, curvature: _Curvature, shift: Tensor) -> Tensor:
    """K⁻¹ times the mean, less the prior's, of the normal whose sites have this curvature."""
    return shift - curvature.times_r(K @ shift.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class _Approximated:
    """A normal approximation of latent values given targets, which predicts others; in float64.

    Attributes:
        latent, weights: Means f of latent values, and a = K⁻¹ (f - m), ``(*batch, n)``.
        mean, curvature: The prior mean m, and factors.
    """

    latent: Tensor
    weights: Tensor
    mean: Tensor
    curvature: _Curvature

    def given(self, cross: Tensor, keep: bool = False) -> ConditionedBlock:
        """See :class:`~gpclml.linalg.Predictor`."""
        cross, curvature = cross.double(), self.curvature
        shift = _times(cross.mT, self.weights)
        if curvature.covariance is not None:
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


@dataclass(frozen=True, eq=False)
class Mode(_Approximated):
    """The mode of latent values, and Laplace's approximation there.

    Attributes:
        at: Log densities of the targets and their derivatives at the mode.
    """

    at: Derivatives

    @property
    def log_evidence(self) -> Tensor:
        """Laplace's approximation of log p(y), ``(*batch,)``; NaN at what is no maximum."""
        fit = (self.at.log_prob - 0.5 * self.weights * (self.latent - self.mean)).sum(-1)
        value = fit - 0.5 * self.curvature.log_det
        return torch.where(self.curvature.is_definite, value, torch.nan)

    @property
    def start(self) -> Start:
        """The sites under which the posterior is this one."""
        precision = -self.at.second
        return precision, self.at.first + precision * (self.latent - self.mean)

    def gradients(self, K: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Of the evidence: for K, for m, and the weights of :meth:`parameter_gradients`.

        The mode moves with all of them, and W with it; the evidence feels this by log |I + K W|.
        Log density, first and second derivative of each target are weighted by the last.
        """
        R, variance = self.curvature.r_and_variance(K)
        slope = 0.5 * variance * self.at.third  # of -log |I + K W| / 2 by the mode
        implicit = slope - _times(R, _times(K, slope))  # (I + W K)⁻¹ times it
        a = self.weights
        left = 0.5 * a + implicit
        outer = torch.stack([0.5 * left, 0.5 * a], -1) @ torch.stack([a, left], -2)
        grad_matrix = outer.sub_(R, alpha=0.5)
        target_weights = torch.ones_like(a), _times(K, implicit), 0.5 * variance
        return grad_matrix, a + implicit, target_weights

    def parameter_gradients(
        self, density: TargetDensity, targets: Tensor, weights: tuple[Tensor, ...]
    ) -> list[tuple[Tensor, Tensor]]:
        """For the likelihood's parameters."""
        return density.parameter_gradients(self.latent, targets, cast(Any, weights))


def find_mode(
    K: Tensor,
    mean: Tensor,
    density: TargetDensity,
    targets: Tensor,
    observed: Tensor | None = None,
    start: Start | None = None,
) -> Mode:
    """The mode by Newton's method, with steps halved until the log density rises.

    K is the prior covariance, ``(*batch, n, n)``, float64 without a graph; targets that are not
    observed do not count; the search starts from the mean under the sites of ``start`` where that
    is better than the prior mean. A NonFiniteError or NotPSDError says that K cannot be factored,
    a NotConvergedError that the mode is not found, as where scales are so large that the latent
    values lose their digits.
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
    if start is not None and start[0].shape == a.shape:
        precision, shift = start
        # The step that Newton's method takes from where the sites were found.
        ahead = _weights(K, _Curvature(K, precision, density.is_log_concave), shift)
        started = mean + _times(K, ahead)
        better = (log_joint(ahead, started)[0] > value).unsqueeze(-1)
        a, f = torch.where(better, ahead, a), torch.where(better, started, f)
        value, at = log_joint(a, f)
    curvature, gain = _Curvature(K, -at.second, density.is_log_concave), torch.zeros_like(value)
    for _ in range(_MOST_STEPS):
        b = curvature.curvature * (f - mean) + at.first
        ahead = _weights(K, curvature, b)
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
        gains = torch.where(curvature.is_definite, gain > _LAST_GAIN, gain > _LAST_SLOW_GAIN)
        # Sums of steps would gather rounding.
        a, f, value, at = new_a, mean + _times(K, new_a), new_value, new_at
        curvature = _Curvature(K, -at.second, density.is_log_concave)
        # NaN and steps that rounding ends count as the last.
        if not bool((gains & (step.squeeze(-1) >= _SHORTEST)).any()):
            break
    if bool((gain > _LOST_GAIN).any()):
        got = f"a search that could still gain {float(gain.max()):.1g} nats"
        suggestion = "Give scales a prior, or start from smaller ones."
        raise NotConvergedError("model", got, "a mode of the latent values", suggestion)
    return Mode(f, a, mean, curvature, at)


@dataclass(frozen=True, eq=False)
class Sites(_Approximated):
    """Expectation propagation: each target's density replaced by a normal one of its latent value.

    Factors have the precisions of the sites as W.

    Attributes:
        precision, shift: Of the sites: each is exp(shift f - precision f² / 2) of f less its prior
            mean.
        cavity_mean, cavity_variance: Of latent values without their own target, ``(*batch, n)``.
        log_mass: Logarithm of each target's density, averaged over that.
    """

    precision: Tensor
    shift: Tensor
    cavity_mean: Tensor
    cavity_variance: Tensor
    log_mass: Tensor

    @property
    def log_evidence(self) -> Tensor:
        """The approximation of log p(y), ``(*batch,)`` (Rasmussen and Williams 2006, Eq. 3.65)."""
        variance, away = self.cavity_variance, self.cavity_mean - self.mean
        scale = 1 + self.precision * variance
        square = self.precision * away.square() - self.shift * (2 * away + self.shift * variance)
        sites = self.log_mass + 0.5 * (scale.log() + square / scale)
        whole = self.shift * (self.latent - self.mean)
        return (sites + 0.5 * whole).sum(-1) - 0.5 * self.curvature.log_det

    @property
    def start(self) -> Start:
        """The sites."""
        return self.precision, self.shift

    def gradients(self, K: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor]]:
        """As those of a :class:`Mode`; the evidence is stationary in the sites."""
        R, _ = self.curvature.r_and_variance(K)
        a = self.weights
        return 0.5 * (a.unsqueeze(-1) * a.unsqueeze(-2) - R), a, (torch.ones_like(a),)

    def parameter_gradients(
        self, density: TargetDensity, targets: Tensor, weights: tuple[Tensor, ...]
    ) -> list[tuple[Tensor, Tensor]]:
        """For the likelihood's parameters."""
        return tilted_parameter_gradients(
            density, self.cavity_mean, self.cavity_variance, targets, *weights
        )


def _extrapolated(sites: list[Tensor], moves: list[Tensor], step: float, unit: Tensor) -> Tensor:
    """Where the moves would vanish if they were linear in the sites (Anderson 1965).

    It takes a tenth of the sweeps where points tell the same about each other.
    """
    ahead = sites[-1] + step * moves[-1]
    if len(sites) == 1:
        return ahead
    turns = torch.stack([b - a for a, b in pairwise(moves)], -2)  # (*batch, k, 2 n)
    ways = torch.stack([b - a for a, b in pairwise(sites)], -2) + step * turns
    turns = unit.unsqueeze(-2) * turns
    size = turns.square().sum(-1, keepdim=True).sqrt().clamp_min(_LEAST_VARIANCE)
    turns = turns / size
    # Sums of products: LAPACK's least squares have other last bits in each call.
    products = (turns.unsqueeze(-2) * turns.unsqueeze(-3)).sum(-1)
    products.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    along = (turns * (unit * moves[-1]).unsqueeze(-2)).sum(-1, keepdim=True)
    shares = torch.linalg.solve(products, along) / size
    return ahead - (shares * ways).sum(-2)


@torch.no_grad()
def find_sites(
    K: Tensor,
    prior_mean: Tensor,
    density: TargetDensity,
    targets: Tensor,
    observed: Tensor | None,
    start: Start,
) -> Sites:
    r"""Expectation propagation, all sites at once, from given precisions and shifts.

    A site of precision :math:`\tau_i` is such that the normal without it, times the target's
    density, has the mean and the variance of the normal with it (Minka 2001; Rasmussen and Williams
    2006, Section 3.6). At the mode of a skewed posterior probabilities are too near to 1/2, the
    more the larger the scale of the prior; these moments have no such bias. The density has to be
    log-concave. A NotConvergedError says that sites still change after 500 sweeps.
    """
    precision, shift = start
    prior_mean = prior_mean.expand_as(precision)
    step, change = 1.0, math.inf
    sites: list[Tensor] = []  # the last ones, precisions and shifts in one, ``(*batch, 2 n)``
    moves: list[Tensor] = []  # from each of them to those that match its moments
    for _ in range(_MOST_SWEEPS):
        curvature = _Curvature(K, precision, True)
        weights = _weights(K, curvature, shift)
        variance = curvature.variance(K)
        mean = prior_mean + _times(K, weights)
        cavity_variance = variance / (1 - precision * variance)
        away = mean - prior_mean
        cavity_mean = mean - cavity_variance * (shift - precision * away)
        flat = (x.reshape(-1) for x in (cavity_mean, cavity_variance, targets.expand_as(mean)))
        log_mass, tilted_mean, tilted = (
            x.reshape(mean.shape) for x in tilted_moments(density, *flat)
        )
        new_precision = (1 / tilted - 1 / cavity_variance).clamp_min(0.0)
        new_shift = (tilted_mean - prior_mean) / tilted
        new_shift = new_shift - (cavity_mean - prior_mean) / cavity_variance
        # In deviations of the latent values, whose moments the sites are to match.
        moved = ((tilted_mean - mean).square() / variance).sqrt() + (tilted / variance - 1).abs()
        if observed is not None:
            new_precision, new_shift, moved, log_mass = (
                torch.where(observed, x, 0.0) for x in (new_precision, new_shift, moved, log_mass)
            )
        last, change = change, moved.max().item()
        # Where latent values have a scale of some thousands the last digits are rounding.
        if change < _LEAST_CHANGE or last <= change < _ROUNDED_CHANGE:
            return Sites(
                mean, weights, prior_mean, curvature, precision, shift, cavity_mean,
                cavity_variance, log_mass,
            )  # fmt: skip
        # Of points that tell the same about each other all sites at once go too far. Then half of
        # the way is gone from where they were.
        if sites and not change < _GROWS * last:
            step, change = 0.5 * step, last
            del sites[:-1], moves[:-1]
        else:
            sites.append(torch.cat([precision, shift], -1))
            moves.append(torch.cat([new_precision - precision, new_shift - shift], -1))
            del sites[:-_LAST_SITES], moves[:-_LAST_SITES]
            step = min(1.0, 1.2 * step)
        ahead = _extrapolated(sites, moves, step, torch.cat([variance, variance.sqrt()], -1))
        precision, shift = ahead.chunk(2, -1)
        precision = precision.clamp_min(0.0)
    raise NotConvergedError(
        "approximation", f"a change of {change:.1g} deviations after {_MOST_SWEEPS} sweeps",
        f"at most {_LEAST_CHANGE:g}", "Use approximation='laplace', or a smaller outputscale.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LatentObservations(Observations):
    """Targets that are not Gaussian given their latent values, with the prior of these.

    Attributes:
        density: Log density of the targets.
        targets: ``(*batch, n)``; any number where missing.
        mean: Prior mean of the latent values, ``(*batch, n)``.
        starts: Modes found before, from which others start; replaced by what is found.
        approximation: Of evidences and posteriors.
    """

    is_gaussian = False

    density: TargetDensity
    targets: Tensor
    mean: Tensor
    starts: Starts | None = None
    approximation: Approximation = "laplace"

    def _select(self, rows: Tensor) -> LatentObservations:
        data = cast(LatentObservations, super()._select(rows))
        index = rows.to(self.targets.device)
        return replace(data, targets=self.targets[..., index], mean=self.mean[..., index])

    def _drops_missing(self) -> bool:
        return False  # they have no density, and change no other

    @cached_property
    def covariance(self) -> LatentCovariance:
        """By the approximation, whatever the structure of the prior covariance."""
        size = self.shape.numel()
        if size > SMALL:
            environment.check_memory(
                "model", f"{self.shape[-1]} points", _MATRICES * size, torch.float64,
                self.mean.device, "Use fewer points, or a variational GP of GPyTorch.",
            )  # fmt: skip
        given = {entry.name: getattr(self, entry.name) for entry in fields(Observations)}
        prior = Observations(**{**given, "missing": None}).covariance.to_dense()
        observed = None if self.missing is None else ~self.missing
        return LatentCovariance(
            prior, self.mean, self.density, self.targets, observed, self.starts,
            self.approximation,
        )  # fmt: skip

    def covariance_by(
        self, solver: Solver, blocks: Sequence[Tensor], *, checked: bool = True
    ) -> LatentCovariance:
        """The same by any solver but conjugate gradients, which know no mode."""
        if solver not in ("auto", "cholesky"):
            suggestion = "Use fewer points, or a variational GP of GPyTorch."
            raise UnsupportedError(
                "solver", "conjugate gradients", "a Cholesky factor of a LatentGP", suggestion
            )
        return self.covariance

    def iterative(self, settings: ConjugateGradients) -> Any:
        """Refuses what has no mode by conjugate gradients."""
        return self.covariance_by(settings, [])

    def member(self, index: int | slice) -> Observations:
        """Refuses what batches of models are fitted by."""
        raise UnsupportedError("models", "a LatentGP", "GPs of numbers", "Fit it by fit_mll.")

    def per_held_out_target(
        self, value: Tensor, blocks: Sequence[Tensor], *, redrawn: bool = False
    ) -> Tensor:
        """See :class:`~gpclml.inference.Observations`; a missing target has no density here."""
        held_out = torch.cat([block.flatten(-2) for block in blocks], dim=-1)
        missing = None if self.missing is None else take(self.missing, held_out).sum(-1)
        constant = 0.0 if missing is None else MISSING_TERM * missing
        return super().per_held_out_target(value + constant, blocks, redrawn=redrawn)

    def road(self, solver: Solver, blocks: Sequence[Tensor]) -> Road:
        """Which way an evaluation goes, and why not a faster one."""
        names = {"laplace": "Laplace's approximation", "ep": "expectation propagation"}
        return kernel_road(self.latent, names[self.approximation])


def latent_observations(
    likelihood: Likelihood, function_dist: MultivariateNormal, target: Tensor
) -> LatentObservations:
    """The prior of latent values and the density of their targets, ``(*batch, n)``, some missing.

    Typed errors say that likelihood, distribution and targets do not fit each other.
    """
    density = target_density(likelihood)
    if isinstance(function_dist, MultitaskMultivariateNormal):
        kind = type(function_dist).__name__
        suggestion = "Pass the model's output: mll(model(x), target)."
        raise UnsupportedError("function_dist", kind, "a MultivariateNormal", suggestion)
    mean = function_dist.mean
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


class LatentCovariance(ExactCovariance):
    """Densities of targets by an approximation, with the interface of a covariance.

    The residuals that its methods are given count nowhere: targets and prior mean are its own. The
    matrix is the prior covariance of the latent values, ``(*batch, n, n)``, differentiable as the
    mean is; starts and approximation are those of :class:`LatentObservations`.
    """

    def __init__(
        self,
        matrix: Tensor,
        mean: Tensor,
        density: TargetDensity,
        targets: Tensor,
        observed: Tensor | None = None,
        starts: Starts | None = None,
        approximation: Approximation = "laplace",
    ) -> None:
        self.approximation: Approximation = approximation
        self.matrix, self.mean, self.targets = matrix, mean, targets
        self._density: TargetDensity = density
        self.observed, self._starts = observed, {} if starts is None else starts
        self.shape, self.dtype, self.device = matrix.shape, matrix.dtype, matrix.device
        # What modes are searched with.
        self._prior: Tensor = matrix.detach().double()
        self._prior_mean: Tensor = mean.detach().double()

    @cached_property
    def mode(self) -> Mode:
        """That of all latent values."""
        return self._mode_of(slice(None), None)

    @cached_property
    def approximated(self) -> Mode | Sites:
        """What the approximation makes of all targets.

        Raises:
            UnsupportedError: Expectation propagation, and the log density is not concave, as of a
                Student-t.
        """
        key = self.approximation, *self.targets.shape
        approximated = self._approximated(slice(None), self._starts.get(key))
        self._starts[key] = approximated.start
        return approximated

    def _approximated(self, rows: Any, start: Start | None) -> Mode | Sites:
        """Of some of the targets, from what was found for similar ones."""
        if self.approximation == "laplace":
            return self._mode_of(rows, start)
        if start is None:
            start = self._mode_of(rows, None).start
            if bool((start[0] < 0).any()):
                kind = type(self._density.likelihood).__name__
                raise UnsupportedError("approximation", f"'ep' of {kind}", "'laplace'")
        return find_sites(*self._problem(rows), start)

    def _mode_of(self, rows: Any, start: Start | None) -> Mode:
        return find_mode(*self._problem(rows), start)

    def _problem(self, rows: Any) -> tuple[Tensor, Tensor, TargetDensity, Tensor, Tensor | None]:
        """Prior, density and targets at some points, and which of these have one."""
        observed = None if self.observed is None else self.observed[..., rows]
        targets = self.targets[..., rows].detach().double()
        return self._rows(rows), self._prior_mean[..., rows], self._density, targets, observed

    def _rows(self, rows: Any) -> Tensor:
        return self._prior[..., rows, :][..., rows]

    def _others(self, block: Tensor) -> tuple[Tensor, Mode | Sites | None]:
        """The points outside a block, and their approximation; None where there are none."""
        kept = torch.ones(self.shape[-1], dtype=torch.bool)
        kept[block] = False
        others = kept.nonzero().squeeze(-1).to(self.device)
        if not len(others):
            return others, None
        precision, shift = self.approximated.start
        return others, self._approximated(others, (precision[..., others], shift[..., others]))

    def held_out_log_density(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """The sum over blocks of log p(y_B | y_{-B}), each the difference of two evidences.

        The cost is that of an approximation for all points and one for each block's others: about
        five factorizations each for a mode, and ten and more for sites. Where classes or counts
        would have a probability above 1 it is a NotConvergedError, from which a search steps back:
        it would run away to scales that the approximation is too poor for.
        """
        flat = [block for group in blocks for block in group.reshape(-1, group.shape[-1])]
        value = self._held_out(flat)
        most = _MOST_ABOVE * sum(map(len, flat))
        if bool((value > most).any()) and self._density.is_discrete(self._prior_mean):
            got = f"a log probability of {float(value.detach().max()):.2g} of held-out targets"
            expected = "at most 0: its scales are beyond what the approximation holds for"
            suggestion = "Give scales a prior; model.approximation = 'ep' holds for larger ones."
            raise NotConvergedError("model", got, expected, suggestion)
        return value

    def _held_out(self, flat: Sequence[Tensor]) -> Tensor:
        """The sum for blocks ``(q,)``, also where probabilities would be above 1."""
        value = len(flat) * self.approximated.log_evidence
        evidences: list[tuple[float, Any, Mode | Sites]]
        evidences = [(float(len(flat)), slice(None), self.approximated)]
        for block in flat:
            others, approximated = self._others(block)
            if approximated is not None:
                value = value - approximated.log_evidence
                evidences.append((-1.0, others, approximated))
        matrix, mean = self.matrix, self.mean

        def vjp(grad: Tensor) -> Gradients:
            grad_matrix = torch.zeros_like(self._prior)
            grad_mean = torch.zeros_like(self._prior_mean)
            gradients: Gradients = []
            for sign, rows, approximated in evidences:
                weight = (sign * grad).unsqueeze(-1)
                block, _, _, targets, observed = self._problem(rows)
                matrix_term, mean_term, target_weights = approximated.gradients(block)
                matrix_term = (weight.unsqueeze(-1) * matrix_term).sum_to_size(block.shape)
                mean_term = (weight * mean_term).sum_to_size(grad_mean[..., rows].shape)
                if isinstance(rows, slice):
                    grad_matrix, grad_mean = grad_matrix + matrix_term, grad_mean + mean_term
                else:
                    grad_matrix[..., rows.unsqueeze(-1), rows] += matrix_term
                    grad_mean[..., rows] += mean_term
                weights = tuple(weight * term for term in target_weights)
                if observed is not None:
                    weights = tuple(torch.where(observed, term, 0.0) for term in weights)
                gradients += approximated.parameter_gradients(self._density, targets, weights)
            pairs = [(matrix, grad_matrix), (mean, grad_mean), *gradients]
            return [(t, fitted(g, t)) for t, g in pairs if t.requires_grad]

        tensors = [t for t in (matrix, mean, *self._density.parameters) if t.requires_grad]
        return precomputed(Evaluated(value, tensors, vjp), mean.dtype)

    def block_log_densities(self, residual: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """By an approximation for each block's others; single points by their cavities, from one.

        Gradients are those of :meth:`held_out_log_density`; single points have none. Values of
        classes may be above 0 by the approximation's error.
        """
        values = []
        for group in blocks:
            if group.shape[-1] == 1 and len(group) > 1:
                values.append(self._cavity(group.squeeze(-1))[0])
            else:
                values += [self._held_out([block]).unsqueeze(-1) for block in group]
        return torch.cat(values, -1)

    def _cavity(self, rows: Tensor) -> tuple[Tensor, TargetPrediction]:
        """Log densities of single targets given all others, and their predictions.

        The cavity of a latent value is its posterior without its own target's term: of the variance
        s / (1 - W s) and the mean f - v d log p / df, with the posterior variance s and v (Vehtari
        et al. 2016, Section 3.3); expectation propagation has it already. Targets are averaged over
        it by quadrature.
        """
        rows = rows.to(self.device)
        with torch.no_grad():
            if isinstance(mode := self.approximated, Sites):
                cavity, mean = mode.cavity_variance, mode.cavity_mean
            else:
                variance = mode.curvature.variance(self._prior)
                cavity = variance / (1 - variance * mode.curvature.curvature)
                mean = mode.latent - cavity * mode.at.first
            cavity, mean = cavity[..., rows].clamp_min(_LEAST_VARIANCE), mean[..., rows]
            prediction = TargetPrediction(self._density.likelihood, mean, cavity)
            log_densities = prediction.log_prob(self.targets[..., rows].double())
            if self.observed is not None:
                log_densities = torch.where(self.observed[..., rows], log_densities, MISSING_TERM)
        return log_densities.to(self.dtype), prediction

    def leave_one_out(self, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Means, less those of the prior's latent values, and variances of single targets."""
        _, prediction = self._cavity(rows)
        mean = prediction.mean - self._prior_mean[..., rows.to(self.device)]
        return mean.to(self.dtype), prediction.variance.to(self.dtype)

    def sequential(self, residual: Tensor, orders: Tensor | None = None) -> Tensor:
        r"""Learning curves, whose sums are the log evidence.

        Targets are replaced by :math:`z = f + W^{-1} \nabla \log p(y \mid f)` with the noise
        :math:`W^{-1}` at the mode of all: a Gaussian model that has the same posterior. Its density
        of each z given those before is then that of y up to the ratio
        :math:`p(y \mid f) / \mathcal N(z \mid f, W^{-1})` (Rasmussen and Williams 2006, Section
        3.4). Where W is negative, n evidences a curve are subtracted from each other.
        """
        mode, n = self.approximated, self.shape[-1]
        W = mode.curvature.curvature
        if bool((W >= 0).all()):
            W = W.clamp_min(_LEAST_CURVATURE)
            if isinstance(mode, Sites):
                z = mode.shift / W
                noise = mode.cavity_variance + 1 / W
                square = (z - mode.cavity_mean + self._prior_mean).square() / noise
                ratio = mode.log_mass + 0.5 * (square + noise.log()) + HALF_LOG_2PI
            else:
                away = mode.at.first / W
                ratio = mode.at.log_prob + 0.5 * (W * away.square() - W.log()) + HALF_LOG_2PI
                z = mode.latent + away - self._prior_mean
            pseudo = DenseCovariance(self._prior + torch.diag_embed(1 / W))
            order = torch.arange(n).unsqueeze(0) if orders is None else orders
            return (pseudo.sequential(z, order) + ratio[..., order.to(self.device)]).to(self.dtype)
        orders = torch.arange(n).unsqueeze(0) if orders is None else orders
        curves = []
        for order in orders.to(self.device):
            previous, start, curve = torch.zeros(()).to(self._prior_mean), None, []
            for size in range(1, n + 1):
                prefix = self._mode_of(order[:size], start)
                curve.append(prefix.log_evidence - previous)
                previous = prefix.log_evidence
                precision, shift = (torch.nn.functional.pad(s, (0, 1)) for s in prefix.start)
                start = precision, shift
            curves.append(torch.stack(curve, -1))
        return torch.stack(curves, -2).to(self.dtype)

    def predictions(self, residual: Tensor, orders: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Refuses errors of one prediction after another, which are not normal."""
        kind = type(self._density.likelihood).__name__
        raise UnsupportedError("model", kind, "a Gaussian likelihood", "Use learning_curve.")

    def predictor(self, residual: Tensor, missing: Tensor | None = None) -> Predictor:
        """What the approximation says of other latent values."""
        return self.approximated

    def take(self, rows: Tensor) -> LatentCovariance:
        """See :class:`~gpclml.linalg.ExactCovariance`."""
        rows = rows.to(self.device)
        return self._at(self.matrix[..., rows, :][..., rows], (..., rows))

    def __getitem__(self, index: Any) -> LatentCovariance:
        return self._at(self.matrix[index], index)

    def _at(self, matrix: Tensor, index: Any) -> LatentCovariance:
        observed = None if self.observed is None else self.observed[index]
        mean, targets = self.mean[index], self.targets[index]
        return LatentCovariance(
            matrix, mean, self._density, targets, observed, approximation=self.approximation
        )

    def diagonal(self) -> Tensor:
        """Prior variances of the latent values."""
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def to_dense(self) -> Tensor:
        """Prior covariance of the latent values."""
        return self.matrix

    def condition_number(self) -> float:
        """Of the matrix that is factored at the mode, I + √W K √W."""
        factor = self.approximated.curvature.factor
        return float(torch.linalg.cond(factor)) ** 2
