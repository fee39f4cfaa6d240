"""The models that a stack is made of: how each is made, fitted and calibrated."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import LogNormalPrior
from scipy.optimize import minimize, minimize_scalar
from scipy.special import boxcox1p, inv_boxcox1p, logsumexp, psi
from scipy.stats import t
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, checked, seeded
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml._utils.environment import progress_bar
from gpclml.conditioning import LastPoints, NearestNeighbors
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.evaluation import stacking_weights
from gpclml.fit import FitWarning, fit_mll, fit_networks
from gpclml.inference import training_observations
from gpclml.inference.neighbours import count_neighbors
from gpclml.kernels import MLP, DeepKernel, FeatureKernel, PolynomialFeatures
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression, find_networks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_POWERS = (0.0, 0.25, 0.5, 0.75, 1.25, 1.5, 1.75, 2.0)
# Of the mean of targets that are not negative: with a small one the transform is nearly a power or
# the logarithm of the target itself. Those of which some are zero have no logarithm.
_UNITS, _UNITS_WITH_ZERO = (0.01, 0.1, 1.0), (0.1, 0.3, 1.0)
_REACH = 10.0  # ranges of the targets beyond them, to where the transform is curved
_LEAST_GAIN = 1.0  # nats


@dataclass(frozen=True)
class Warp:
    r"""The transform of Yeo and Johnson (2000) of :math:`v = (y - \text{offset}) / \text{unit}`.

    .. math:: g(y) = \frac{(1 + v)^\lambda - 1}{\lambda} \;\; (v \ge 0), \qquad
        g(y) = -\frac{(1 - v)^{2 - \lambda} - 1}{2 - \lambda} \;\; (v < 0)

    with logarithms where a power is zero. With :math:`\lambda` from 0 to 2 it maps the real line
    onto itself. Of a positive target, with offset 0, it is that of Box and Cox (1964) of
    :math:`1 + v`.

    Attributes:
        offset: Where the two branches meet.
        unit: The unit of v.
        power: :math:`\lambda`, from 0 to 2; 1 transforms nothing.
        lowest: Below this target the transform goes on as a straight line.
        highest: Above this target it does so too.
    """

    offset: float
    unit: float
    power: float
    lowest: float = -math.inf
    highest: float = math.inf

    def forward(self, y: Array) -> Array:
        """The transformed targets, of any shape."""
        end = y.clip(self.lowest, self.highest)
        return self._curve(end) + (y - end) * np.exp(self.log_slope(end))

    def inverse(self, z: Array) -> Array:
        """The targets of transformed ones."""
        # The curve up to its ends, and straight lines of its slope there beyond them.
        end = z.clip(*self._curve(np.array([self.lowest, self.highest])))
        with np.errstate(over="ignore"):  # without a highest target an exponential may be infinite
            upper = inv_boxcox1p(end.clip(min=0.0), self.power)
            lower = inv_boxcox1p((-end).clip(min=0.0), 2 - self.power)
        y = self.offset + self.unit * np.where(end >= 0, upper, -lower)
        return y + (z - end) / np.exp(self.log_slope(y))

    def log_slope(self, y: Array) -> Array:
        r""":math:`\log g'(y)`, which is added to the log density of a transformed target."""
        v = (y.clip(self.lowest, self.highest) - self.offset) / self.unit
        # (lambda - 1) log(1 + v) above, (1 - lambda) log(1 - v) below
        return (self.power - 1) * np.sign(v) * np.log1p(np.abs(v)) - math.log(self.unit)

    def _curve(self, y: Array) -> Array:
        """The transform without its lines."""
        v = (y - self.offset) / self.unit
        upper = boxcox1p(v.clip(min=0.0), self.power)
        return np.where(v >= 0, upper, -boxcox1p((-v).clip(min=0.0), 2 - self.power))

    def moments(self, mean: Array, deviation: Array) -> tuple[Array, Array]:
        """Mean and variance of a target whose transform is normal, by Gauss-Hermite quadrature."""
        nodes, shares = np.polynomial.hermite_e.hermegauss(64)
        shares = shares / shares.sum()
        values = self.inverse(mean[..., None] + deviation[..., None] * nodes)
        first = values @ shares
        return first, (values - first[..., None]) ** 2 @ shares


@torch.no_grad()
def choose_warp(model: GPRegression, y: Tensor) -> Warp | None:
    r"""The transform under which the targets are most likely, if it is more likely than none.

    .. math:: \log p(g(y)) + \sum_i \log g'(y_i)

    with the correlations of a model that was fitted to the targets themselves, and the best scale
    and shift of each transform. Powers are 0, 1/4, ..., 2. Of targets that are not negative the
    offset is 0 and the unit a share of the mean; of others they are median and standard deviation.
    Ten ranges of the targets beyond them the transform becomes a straight line; under a power above
    1 and for targets that are not negative, below the least of them.

    Args:
        model: A model that was fitted to the targets.
        y: The targets, ``(n,)``.

    Returns:
        The transform; None if none gains a nat.

    Note:
        One factorization, and n² operations a transform.
    """
    data = training_observations(model, model.likelihood)
    factor = torch.linalg.cholesky(data.covariance.to_dense().double())
    # Shift and scale are those of each transform; the mean of the standardized targets stays.
    shift = cast(Tensor, model.train_targets).double() - data.residual.double()

    def likelihood(values: Tensor, log_slopes: float) -> float:
        spread = values.std()
        residual = ((values - values.mean()) / spread - shift).unsqueeze(-1)
        squares = torch.linalg.solve_triangular(factor, residual, upper=False).square().mean()
        return log_slopes - float(len(y) * (spread.log() + 0.5 * squares.log()))

    y = y.double()
    median, spread = float(y.median()), float(y.std())
    if not spread > 0:
        return None
    offset, units = median, [spread]
    least, most = float(y.min()), float(y.max())
    if least >= 0:
        shares = _UNITS if least > 0 else _UNITS_WITH_ZERO
        offset, units = 0.0, [share * float(y.mean()) for share in shares]
    # Far from all targets the transform is a line: an exponential has moments beyond all of them.
    # For values near an upper end (powers above 1) zero is already far, if none is negative.
    reach = _REACH * (most - least)
    lowest = [least if least >= 0 and power > 1 else least - reach for power in _POWERS]
    warps = [
        Warp(offset, unit, power, lower, most + reach)
        for unit in units
        for power, lower in zip(_POWERS, lowest, strict=True)
    ]
    numbers = y.cpu().numpy()
    # Densities of the targets themselves: those of the transform times its slope.
    values = [
        likelihood(torch.from_numpy(warp.forward(numbers)).to(y), warp.log_slope(numbers).sum())
        for warp in warps
    ]
    best = int(np.argmax(values))
    return warps[best] if values[best] - likelihood(y, 0.0) > _LEAST_GAIN else None


LEAST_DEGREES = 3.0
"""Below 2 there is no variance; near it that of a prediction is more than its rows can tell."""

_SCALE_PENALTY, _SLOPE_PENALTY = 5.0, 10.0
_TAIL_DEVIATION = 0.1
_LEAST_TAIL = 0.05
_MOST_LOG_SCALE, _MOST_SLOPE = 5.0, 1.0
_FARTHEST = 2.0  # deviations of predictions from their mean, beyond which the scale stays
_STARTS = (0.02, 0.2)
_FACTORS = (1 / 3, 1.0, 3.0)  # of the scale, in a mixture
# Rows that the prior of the weights gives to each component: where hyperparameters were fitted to
# all rows, and where some were held out.
_PSEUDO_COUNTS, _HELD_OUT_PSEUDO_COUNTS = 3.0, 1.0
_MOST_LOG_SPREAD = 1.0
_SHARES = (0.0, 1.0, 0.0)  # of these factors, where errors have one scale
_OPTIONS = {"ftol": 1e-14, "gtol": 1e-9}
_NORMAL = 1e-4  # of 1 / nu, below which the tails are taken for those of a normal


@dataclass(frozen=True)
class Calibration:
    r"""The correction of a model's predictions that was fitted to its residuals.

    A prediction of location m has the scale

    .. math:: s(m) = s \, e^{b z}, \qquad z = (m - c) / w \text{, from -2 to 2.}

    Attributes:
        scale: s, by which predictive standard deviations are multiplied.
        degrees: Degrees of freedom of the Student-t distribution; infinite for a normal.
        slope: b, by which the scale grows with the prediction.
        center: c, the mean of the predictions of training rows.
        width: w, their standard deviation.
        shares: Shares of a third of the scale, of itself, and of three times it.
    """

    scale: float = 1.0
    degrees: float = math.inf
    slope: float = 0.0
    center: float = 0.0
    width: float = 1.0
    shares: tuple[float, ...] = _SHARES

    def scales(self, locations: Tensor) -> Tensor:
        """s(m) at each location: locations in units of the targets, scales of the same shape."""
        z = ((locations - self.center) / self.width).clamp(-_FARTHEST, _FARTHEST)
        return self.scale * (self.slope * z).exp()

    @property
    def mixture(self) -> list[tuple[float, float]]:
        """Shares of the mixture and their factors of the scale, without those of no share."""
        return [pair for pair in zip(self.shares, _FACTORS, strict=True) if pair[0] > 0]

    @property
    def tail_variance(self) -> float:
        """The variance of the mixture at scale one; of one Student's t nu / (nu - 2)."""
        single = 1.0 if math.isinf(self.degrees) else self.degrees / (self.degrees - 2)
        return single * sum(share * factor**2 for share, factor in self.mixture)

    def log_density(self, residuals: Tensor, locations: Tensor) -> Tensor:
        """The log density, in nats, of errors in units of predicted deviations, ``(n,)``.

        ``locations`` are the predictions, in units of the targets, ``(n,)``.
        """
        scales = self.scales(locations)
        logs = _log_densities_by_factor((residuals / scales).numpy(), self.degrees)
        values = logsumexp(logs, axis=0, b=np.array(self.shares)[:, None])
        return torch.from_numpy(values) - scales.log()


@takes_arrays()
@checked(residuals="float (n,)", locations="float (n,)")
def fit_calibration(
    residuals: ArrayLike,
    locations: ArrayLike | None = None,
    *,
    hyperparameters: int = 0,
    tails: bool = True,
    mixed: bool = False,
) -> Calibration:
    r"""Fits scale s, its slope b and degrees of freedom nu to residuals, by penalized likelihood.

    .. math:: \max_{s, b, \nu} \sum_i \log \tfrac{1}{s_i} t_\nu(r_i / s_i) - \tfrac{a}{2} (\log s)^2
        - a b^2 - \tfrac12 \left(\frac{1 / \nu - u}{d}\right)^2, \qquad u = 0.05 + \frac{p}{n}

    The residuals :math:`r_i` are leave-one-out errors in units of their predicted deviations, and
    :math:`s_i = s e^{b z_i}` with the standardized predictions :math:`z_i`, as :class:`Calibration`
    has them: where targets are large, noise often is. The first penalty, with a = 5, is worth two
    or three rows that say s = 1, the second five rows that say b = 0. The third expects tails
    that are the heavier the fewer rows there are for each of the p hyperparameters: these were
    fitted to the row that is left out, so that its residual is too small. On 23 public tables the
    root mean square of new rows was 1.2 times as large where p / n is about 0.1, and 1.9 times
    where it is 0.2 to 0.5. d is 0.1; at n = 400 the penalties hardly count.
    nu is at least 3, so that there is a variance, and u at most 1 / 3.

    Args:
        residuals: Errors in units of predicted deviations, ``(n,)``.
        locations: Predictions of the rows, ``(n,)``; without them b is zero.
        hyperparameters: p, the number that were fitted to the same rows.
        tails: Whether to fit nu; else it is infinite.
        mixed: Whether errors may be of several scales. Shares of a third of s, of s and of three
            times s are then fitted, as the weights of a stack are. For hundreds of residuals.

    Raises:
        NonFiniteError: A residual or a location is not finite.
        ShapeError: There is not one location a residual.
        ArgumentError: The number of hyperparameters is negative.
    """
    check_finite("residuals", residuals)
    check_counts(0, hyperparameters=hyperparameters)
    # u, the weight of the tails that so few rows for each hyperparameter let expect
    expected = min(1 / LEAST_DEGREES, _LEAST_TAIL + hyperparameters / len(residuals))
    r = residuals.detach().cpu().double().numpy()
    center, width, z = 0.0, 1.0, np.zeros(len(r))
    if locations is not None:
        check_finite("locations", locations)
        m = locations.detach().cpu().double().numpy()
        if float(m.std()) > 0:
            center, width = float(m.mean()), float(m.std())
            z = ((m - center) / width).clip(-_FARTHEST, _FARTHEST)

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        log_scale, inverse, slope = parameters
        logs = log_scale + slope * z
        values, grad_logs, grad_inverse = _log_densities(r * np.exp(-logs), inverse)
        grad_logs = grad_logs - 1  # of the factor 1 / s
        excess = (inverse - expected) / _TAIL_DEVIATION
        penalty = _SCALE_PENALTY * log_scale**2 + _SLOPE_PENALTY * slope**2 + excess**2
        gradient = [
            grad_logs.sum() - _SCALE_PENALTY * log_scale,
            grad_inverse.sum() - excess / _TAIL_DEVIATION,
            grad_logs @ z - _SLOPE_PENALTY * slope,
        ]
        total = (values - logs).sum() - 0.5 * penalty
        return -float(total) / len(r), -np.array(gradient) / len(r)

    bounds = [
        (-_MOST_LOG_SCALE, _MOST_LOG_SCALE),
        (0.0, 1 / LEAST_DEGREES if tails else 0.0),
        (-_MOST_SLOPE, _MOST_SLOPE),
    ]
    # From light and from heavy tails: the likelihood may have a maximum at either.
    ends = [
        minimize(
            loss, [0.0, start, 0.0], jac=True, method="L-BFGS-B", bounds=bounds, options=_OPTIONS
        )
        for start in (_STARTS if tails else (0.0,))
    ]
    log_scale, inverse, slope = map(float, min(ends, key=lambda end: end.fun).x)
    degrees = 1 / inverse if inverse > _NORMAL else math.inf
    shares = _SHARES
    if mixed:
        logs = torch.from_numpy(
            _log_densities_by_factor(r * np.exp(-log_scale - slope * z), degrees)
        )
        shares = tuple(stacking_weights(logs, pseudo_counts=1.0).tolist())
    return Calibration(math.exp(log_scale), degrees, slope, center, width, shares)


def _log_densities_by_factor(z: NDArray[np.float64], degrees: float) -> NDArray[np.float64]:
    """Log densities of errors in units of the scale under each factor of it, ``(3, n)``."""
    factors = np.array(_FACTORS)[:, None]
    return t.logpdf(z / factors, degrees) - np.log(factors)


def _log_densities(
    z: NDArray[np.float64], inverse: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Log densities of Student's t, ``(n,)``, and their slopes by minus log z and by 1 / nu."""
    square = z**2
    if inverse < _NORMAL:  # log t = log normal + (z^4 - 2 z^2 - 1) / (4 nu) + ..., without 1 / 0
        slope = 0.25 * (square**2 - 2 * square - 1)
        values = t.logpdf(z, math.inf) + inverse * slope
        return values, square - inverse * (square**2 - square), slope
    nu = 1 / inverse
    share = square / (nu + square)
    grad_nu = 0.5 * (
        psi(0.5 * (nu + 1)) - psi(0.5 * nu) - np.log1p(square / nu) + ((nu + 1) * share - 1) / nu
    )
    return t.logpdf(z, nu), (nu + 1) * share, -(nu**2) * grad_nu


@dataclass(frozen=True, eq=False)
class Residuals:
    """Errors of predictions of rows that they are not conditioned on, in float64 on the CPU.

    Attributes:
        values: In units of the predicted deviations, ``(n,)``.
        locations: Predictions, in units of the targets, ``(n,)``.
        log_units: Logarithms of the deviations, in original units, ``(n,)``.
    """

    values: Tensor
    locations: Tensor
    log_units: Tensor

    def log_densities(self, calibration: Calibration) -> Tensor:
        """Of each target under calibrated predictions, in nats, ``(n,)``."""
        return calibration.log_density(self.values, self.locations) - self.log_units


@dataclass(frozen=True, eq=False)
class Component:
    """A fitted model of a stack, with its weight and its calibration.

    Attributes:
        name: Name of the candidate.
        model: The fitted model of all rows.
        weight: Its share of the mixture.
        calibration: How its predictions are widened.
        residuals: Errors of each row given all others, of 2000 where there are more, or of each row
            held out.
        note: A sentence on a problem of the fit; empty if there is none.
        seconds: Wall time of the fit.
        warp: The transform of its targets, if they have one; its model and calibration are of the
            transformed targets.
        neighbors: Number of training rows that a prediction is conditioned on; all if None.
        held_out: Whether the rows of the residuals were held out from the fit.
    """

    name: str
    model: GPRegression
    weight: float
    calibration: Calibration
    residuals: Residuals
    note: str = ""
    seconds: float = 0.0
    warp: Warp | None = None
    neighbors: int | None = None
    held_out: bool = False

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Locations and scales of new observations, ``(m,)`` each, in units of the targets."""
        inputs = x.to(cast(Any, self.model.train_inputs)[0])
        normal = self.model.predict(inputs, marginal=True, neighbors=self.neighbors)
        location, deviation = normal.mean.to(x), normal.stddev.to(x)
        return location, deviation * self.calibration.scales(location)

    @property
    def log_densities(self) -> Tensor:
        """Log density of each of these rows after calibration, in nats, ``(n,)``."""
        return self.residuals.log_densities(self.calibration)

    @property
    def loo(self) -> float:
        """Mean log density of a row given all others after calibration, in nats."""
        return float(self.log_densities.mean())

    def widened(self, factor: float) -> Component:
        """The same with all scales multiplied by a factor."""
        scale = factor * self.calibration.scale
        return replace(self, calibration=replace(self.calibration, scale=scale))


def calibrate(
    predicted: tuple[Tensor, Tensor],
    y: Tensor,
    warp: Warp | None = None,
    *,
    hyperparameters: int = 0,
    mixed: bool = False,
) -> tuple[Calibration, Residuals]:
    """Calibrates predictions of rows that they are not conditioned on.

    Predicted are means and deviations, ``(n,)`` each, in units of the targets, which are
    transformed if there is a warp; ``y`` is in original units. ``hyperparameters`` were fitted to
    these rows. ``mixed`` is as in :func:`fit_calibration`.
    """
    locations, deviation = (values.double().cpu() for values in predicted)
    y = y.double().cpu()
    # Residuals have no unit; densities are of the targets, and lose the log of their unit.
    targets, unit = y, deviation.log()
    if warp is not None:
        targets = torch.from_numpy(warp.forward(y.numpy()))
        unit = unit - torch.from_numpy(warp.log_slope(y.numpy()))
    residuals = Residuals((targets - locations) / deviation, locations, unit)
    # Heavy tails of the logarithm of a target would have no mean.
    calibration = fit_calibration(
        residuals.values, locations, hyperparameters=hyperparameters, tails=warp is None,
        mixed=mixed,
    )  # fmt: skip
    return calibration, residuals


def weighted(components: Sequence[Component]) -> list[Component]:
    """Components with the weights of the mixture that makes these rows most likely."""
    logs = torch.stack([component.log_densities for component in components])
    pseudo = _HELD_OUT_PSEUDO_COUNTS if components[0].held_out else _PSEUDO_COUNTS
    weights = stacking_weights(logs, pseudo_counts=pseudo).tolist()
    return [
        replace(component, weight=weight)
        for component, weight in zip(components, weights, strict=True)
    ]


def with_common_spread(components: Sequence[Component]) -> list[Component]:
    r"""Weighted components whose scales are multiplied by the factor that suits their mixture.

    .. math:: \max_c \sum_i \log \sum_k w_k \, p_k(y_i; c s_k) - \tfrac{a}{2} (\log c)^2

    Of components that are calibrated one by one the mixture is too wide where they differ in their
    locations (Gneiting and Ranjan 2013). The penalty is that of :func:`fit_calibration`.
    """
    log_weights = torch.tensor([component.weight for component in components]).double().log()

    def loss(log_factor: float) -> float:
        factor = math.exp(log_factor)
        logs = torch.stack([component.widened(factor).log_densities for component in components])
        density = torch.logsumexp(log_weights[:, None] + logs, 0).sum()
        return 0.5 * _SCALE_PENALTY * log_factor**2 - float(density)

    bounds = -_MOST_LOG_SPREAD, _MOST_LOG_SPREAD
    best: Any = minimize_scalar(loss, bounds=bounds, method="bounded")
    return weighted([component.widened(math.exp(best.x)) for component in components])


def num_hyperparameters(model: GPRegression) -> int:
    """Number of parameters but the weights of networks, which are trained on held-out rows."""
    weights = {id(w) for network in find_networks(model) for w in network.parameters()}
    return sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in weights)


@torch.no_grad()
def leave_one_out_predictions(
    model: GPRegression, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each row given all others, in units of the targets, ``(n,)`` each.

    ``rows`` are those to predict, all if None. The hyperparameters are those of the model;
    deviations are with noise. (Rasmussen and Williams 2006, Eq. 5.12.) Of all n rows about n³
    floating-point operations, of few a third.
    """
    data, units = training_observations(model, model.likelihood), model.target_standardizer
    rows = torch.arange(data.residual.shape[-1]) if rows is None else rows
    mean, variance = data.covariance.leave_one_out(data.residual, rows)
    # The residual is a target less the prior's mean.
    rows = rows.to(mean.device)
    mean = (cast(Tensor, model.train_targets) - data.residual)[rows] + mean
    return units.inverse(mean), variance.sqrt() * model.target_scale


# Location and deviation of logarithms, in standardized units. A likelihood alone takes a few dozen
# rows for a function without noise, which costs 11 nats a row on 23 public tables with n = 50. Some
# of them are such functions, though, and their candidates have no priors.
_NOISE = (-1.5, 1.0)
_SCALE = (0.0, 1.0)
_BROAD = (math.sqrt(2), math.sqrt(3))  # BoTorch's (Hvarfner et al. 2024)
_LONG = (1.5, 1.0)
_CATEGORY = (0.5, 1.0)  # of a category: two of its levels are correlated by exp(-1 / lengthscale²)
_LINEAR_START = 0.1  # variance of a standardized input's slope, beside a fitted kernel
_NETWORK_STEPS = 300
# That hyperparameters are fitted to, at most: a fit to twice as many takes five times as long.
_FIT_ROWS, _DEEP_FIT_ROWS = 1000, 2000
MOST_HELD_OUT = 2000  # rows, which tell scale, tails and weights to a few percent

# Of candidates that are trained given neighbours.
_MOST_NEIGHBORS = 256  # twice as many take predictions eight times as long
_MANY_STEPS, _MANY_NETWORK_STEPS = 300, 2600
_BLOCK = 256  # near points whose joint density is a step of a network
_PASSES = 100  # of a network over the rows, where that is fewer steps
_RATE, _NETWORK_RATE, _FINAL_RATE = 0.1, 2e-3, 1e-3
# Weight decay of networks, by turns of their starts: with it some predict better (kin8nm, and most
# with few rows), others worse (kin40k), which the weights of a stack tell. Two starts have one of
# each.
_DECAYS = (1.0, None)
_WIDTHS = (256, 256)
_MOST_FEATURES = 16
# Of plain kernels, as a share of the targets' variance. Some tables have less than GPyTorch's 1e-4;
# features of a network that may explain all but so little predict worse.
_LEAST_NOISE = 1e-8
_FEATURES_START = 0.4  # variance of a function of features, where that of the inputs has one
# Of a second function of the inputs: its variance where the first has one, and its lengthscales as
# a share of those of the first.
_SECOND_START, _SHORTER = 0.3, 0.3
_PRECISION = 1e-5  # deviations of a column or the targets, up to which float32 may round values

Groups = Sequence[Sequence[int]]
"""For each category the columns that are its levels."""


@dataclass(frozen=True)
class Candidate:
    """A kind of model that a stack may contain, and how it is made.

    Attributes:
        description: What it is, for people who do not know Gaussian processes.
        make: Makes the untrained model from inputs ``(n, d)``, targets ``(n,)``, a seed, and for
            each category the columns that are its levels.
        start: Name of the candidate from whose fit it starts, if any.
        warped: Whether its targets are transformed, if that makes them more likely under the fitted
            candidate ``start``.
        needs_categories: Whether it is only for tables with categories.
        has_network: Whether networks of several starts are components of their own.
        is_local: Whether it is trained by densities of near points, on all rows but those held
            out; else by the marginal likelihood of up to 1000, or 2000 with a network.
    """

    description: str
    make: Callable[[Tensor, Tensor, int, Groups], GPRegression]
    start: str | None = None
    warped: bool = False
    needs_categories: bool = False
    has_network: bool = False
    is_local: bool = False


def _linear(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    return _add_priors(GPRegression(x, y, FeatureKernel(PolynomialFeatures(1)), "zero"))


def _matern(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    return _add_priors(GPRegression(x, y, "matern"), _LONG)


def _matern_linear(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    linear = LinearKernel()
    linear.variance = _LINEAR_START
    matern = _add_priors(GPRegression(x, y, "matern"), _BROAD)
    return _add_priors(matern.with_kernel(AdditiveKernel(cast(Any, matern.covar_module), linear)))


def _and_linear(matern: GPRegression) -> GPRegression:
    """A model of the sum of its kernel and that of a linear function, without priors of its own."""
    return matern.with_kernel(AdditiveKernel(cast(Any, matern.covar_module), LinearKernel()))


def _categories(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    grouped = {column for group in groups for column in group}
    numbers = [column for column in range(x.shape[-1]) if column not in grouped]
    kernels = [
        _add_lengthscale_prior(RBFKernel(active_dims=tuple(group)), *_CATEGORY) for group in groups
    ]
    if numbers:
        matern = MaternKernel(2.5, ard_num_dims=len(numbers), active_dims=tuple(numbers))
        location = _LONG[0] + 0.5 * math.log(len(numbers))
        kernels.append(_add_lengthscale_prior(matern, location, _LONG[1]))
    scale = ScaleKernel(ProductKernel(*kernels) if len(kernels) > 1 else kernels[0])
    scale.register_prior("outputscale_prior", LogNormalPrior(*_SCALE), "outputscale")
    model = _add_priors(GPRegression(x, y, scale))
    # The levels of a category are all as far from each other, whatever number of rows they have.
    model.input_standardizer.scale[..., sorted(grouped)] = 1.0
    return model


def _many(x: Tensor, y: Tensor, seed: int, groups: Groups, kernel: str) -> GPRegression:
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(_LEAST_NOISE))
    return GPRegression(x, y, kernel, likelihood=likelihood)


def _many_matern_rq(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    matern = _many(x, y, seed, groups, "matern")
    first, rq = cast(Any, matern.covar_module), RQKernel(ard_num_dims=x.shape[-1])
    rq.lengthscale = _SHORTER * first.base_kernel.lengthscale.detach()
    second = ScaleKernel(rq)
    second.outputscale = _SECOND_START
    return matern.with_kernel(AdditiveKernel(first, second))


def _many_joint(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    num_features = min(x.shape[-1], _MOST_FEATURES)
    return GPRegression(x, y, "deep_joint", hidden=_WIDTHS, num_features=num_features, seed=seed)


def _many_deep(x: Tensor, y: Tensor, seed: int, groups: Groups) -> GPRegression:
    # The kernel "deep" of few rows starts from a fitted plain one, with features near zero. These
    # rows are enough to learn both together: on pol a nat more, of a row held out.
    d, q = x.shape[-1], min(x.shape[-1], _MOST_FEATURES)
    network = MLP([d, *_WIDTHS, q], torch.nn.SiLU, generator=seeded(seed))
    inputs = MaternKernel(2.5, ard_num_dims=d, active_dims=tuple(range(d)))
    inputs.lengthscale = torch.tensor(math.sqrt(d))
    features = ScaleKernel(RQKernel(active_dims=tuple(range(d, d + q))))
    features.outputscale = _FEATURES_START
    kernel = DeepKernel(network, AdditiveKernel(inputs, features), residual=True)
    return GPRegression(x, y, ScaleKernel(kernel))


def _add_lengthscale_prior(kernel: Kernel, location: float, deviation: float) -> Kernel:
    """Starts lengthscales at the median of their prior."""
    prior = LogNormalPrior(location, deviation)
    kernel.register_prior("lengthscale_prior", prior, "lengthscale")
    cast(Any, kernel).lengthscale = math.exp(location)
    return kernel


def _add_priors(
    model: GPRegression, lengthscale: tuple[float, float] | None = None
) -> GPRegression:
    """Gives a model weak priors, beside which those of some hundred rows count.

    ``lengthscale`` has location and deviation of the logarithm of each lengthscale, in units of the
    root of the number of inputs; then the scale of a named kernel has a prior too.
    """
    like = cast(Any, model.train_inputs)[0]
    noise = cast(Any, model.likelihood).noise_covar
    noise.register_prior("noise_prior", LogNormalPrior(*_NOISE).to(like), "noise")
    if lengthscale is not None:
        scale = cast(Any, model.covar_module)
        location, deviation = lengthscale
        location += 0.5 * math.log(like.shape[-1])
        prior = LogNormalPrior(location, deviation).to(like)
        scale.base_kernel.register_prior("lengthscale_prior", prior, "lengthscale")
        prior = LogNormalPrior(*_SCALE).to(like)
        scale.register_prior("outputscale_prior", prior, "outputscale")
    return model


CANDIDATES: Mapping[str, Candidate] = {
    "linear": Candidate("a linear function of the inputs", _linear),
    "matern": Candidate(
        "a rough function, each input with a length scale of its own, expected to be long", _matern
    ),
    "rbf": Candidate(
        "a smooth function, each input with a length scale of its own",
        lambda x, y, seed, groups: _add_priors(GPRegression(x, y, "rbf"), _BROAD),
    ),
    "rq": Candidate(
        "as rbf, on several length scales at once, without priors",
        lambda x, y, seed, groups: GPRegression(x, y, "rq"), "rbf",
    ),
    "matern_warped": Candidate(
        "as matern, of transformed targets, where a transform makes them more likely",
        _matern, "matern", warped=True,
    ),
    "matern_linear": Candidate("a linear function and what matern adds", _matern_linear, "matern"),
    "matern_linear_free": Candidate(
        "as matern_linear without priors, for targets with hardly any noise",
        lambda x, y, seed, groups: _and_linear(GPRegression(x, y, "matern")), "matern_linear",
    ),
    "categories": Candidate(
        "as matern of the numbers, times how like two levels of each category are", _categories,
        needs_categories=True,
    ),
    "deep": Candidate(  # its training has held-out rows of its own, and no priors
        "rbf and features that a network learns, where held-out rows support them",
        lambda x, y, seed, groups: GPRegression(x, y, "deep", seed=seed),
    ),
}  # fmt: skip
"""All candidates by name, from the cheapest to the most expensive."""

DEFAULT_CANDIDATES = tuple(name for name in CANDIDATES if name != "deep")
"""Those of a stack of few rows that is not told which: all but ``"deep"``. Tables without
categories have no ``"categories"``."""

DEEP_ROWS = 1000
"""Rows from which on ``"deep"`` is one of them.

On four public tables it changed the negative log density of the mixture by at most .004 nats a row
with 500 rows, and by -.60 (kin40k), -.01, .00 and .00 with 1000.
"""


MANY_ROWS_CANDIDATES: Mapping[str, Candidate] = {
    "matern": Candidate(
        "a rough function, each input with a length scale of its own",
        partial(_many, kernel="matern"), is_local=True,
    ),
    "rq": Candidate(
        "a smooth function, on several length scales at once",
        partial(_many, kernel="rq"), is_local=True,
    ),
    "matern_linear_free": Candidate(
        "a linear function and what matern adds",
        lambda x, y, seed, groups: _and_linear(_many(x, y, seed, groups, "matern")),
        is_local=True,
    ),
    "matern_rq": Candidate(
        "matern and what changes faster, such as from value to value of one input",
        _many_matern_rq, is_local=True,
    ),
    "deep_joint": Candidate(
        "matern of the inputs and of features that a network learns, together",
        _many_joint, has_network=True, is_local=True,
    ),
    "deep": Candidate(
        "matern of the inputs, and a function of features that a network learns",
        _many_deep, has_network=True, is_local=True,
    ),
}  # fmt: skip
"""Candidates of a stack of many rows by name, trained and predicted from nearest neighbours; from
the cheapest to the most expensive."""

DEFAULT_MANY_ROWS_CANDIDATES = ("matern", "matern_rq", "deep_joint", "deep")
"""Those of a stack of many rows that is not told which."""

THOUSANDS = 2000
"""Rows from which on a stack that is not told which has the following candidates.

With 2000 rows they take .6 to .8 of the time of :data:`DEFAULT_CANDIDATES` and ``"deep"``, and the
error on kin40k is .09 in place of .13.
"""

THOUSANDS_CANDIDATES: Mapping[str, Candidate] = {
    **{name: CANDIDATES[name] for name in ("matern", "rbf", "rq", "matern_warped", "categories")},
    **{name: MANY_ROWS_CANDIDATES[name] for name in ("matern_rq", "deep_joint", "deep")},
}
"""Candidates by name where networks have enough rows to learn from, and predictions are conditioned
on all of them."""


def known_candidates(held_out: bool, exact: bool) -> Mapping[str, Candidate]:
    """Candidates by name where rows are held out or not, and all predictions exact or not."""
    if not exact:
        return MANY_ROWS_CANDIDATES
    return THOUSANDS_CANDIDATES if held_out else CANDIDATES


def expand_starts(names: Sequence[str], restarts: int, exact: bool) -> list[str]:
    """Names of candidates, those with a network several times: "deep", "deep 2".

    Of many rows networks have one start with each weight decay, where predictions are exact only
    one, and ``restarts`` further ones.
    """
    starts = restarts + (1 if exact else len(_DECAYS))
    return [
        f"{name} {start}" if start > 1 else name
        for start in range(1, 1 + starts)
        for name in names
        if start == 1 or (name in MANY_ROWS_CANDIDATES and MANY_ROWS_CANDIDATES[name].has_network)
    ]


def checked_names(argument: str, names: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """Names among those that are known, each once, in the order of these.

    Raises:
        UnknownNameError: There is no such name.
        ArgumentError: The names are not in a list, or there is none.
    """
    known = tuple(known)
    for name in (names,) if isinstance(names, str) else names:
        if name not in known:
            raise UnknownNameError(argument, name, known)
    if isinstance(names, str):
        raise ArgumentError(argument, repr(names), f"names in a list: [{names!r}]")
    if len(names) == 0:
        raise ArgumentError(argument, "none", "at least one name")
    return tuple(name for name in known if name in names)


@dataclass(frozen=True)
class FitOptions:
    """How candidates are fitted.

    Hyperparameters are fitted to ``fit_rows`` rows, the first of ``order``; None for the default.
    ``held_out``, the first of ``order``, are those by which candidates of many rows are calibrated
    and weighted; None for few rows, where each row is predicted from all others. ``exact`` says
    whether predictions are conditioned on all rows. After so many ``seconds``, at the clock time
    ``deadline``, no further candidate is begun but the ``first``.
    """

    order: Tensor
    fit_rows: int | None = None
    held_out: Tensor | None = None
    exact: bool = True
    seed: int = 0
    restarts: int = 0
    seconds: float | None = None
    deadline: float = float("inf")
    first: str = ""
    categories: tuple[tuple[int, ...], ...] = ()

    @property
    def known(self) -> Mapping[str, Candidate]:
        """The candidates that these rows can have."""
        return known_candidates(self.held_out is not None, self.exact)


def _fit_candidate(
    name: str, x: Tensor, y: Tensor, fitted: Mapping[str, GPRegression], options: FitOptions
) -> Component | None:
    """Fits a candidate by its marginal likelihood and its priors, and calibrates it; weight 0.

    It may start from one of ``fitted``, the candidates that are fitted already, to the same data.
    None for a candidate of transformed targets if no transform makes them more likely, and for one
    of categories if there are none.

    Where rows are held out, hyperparameters are fitted to others, and scale and tails to these: a
    network predicts the rows too well that it learned its features from. Predictions of new rows
    are conditioned on them too.
    """
    start, held_out, rows = time.perf_counter(), options.held_out, None
    kind, _, start_number = name.partition(" ")
    if kind not in options.known:
        got, expected = f"{name} of {len(y)} rows", f"one of {', '.join(options.known)}"
        raise ArgumentError("candidates", got, expected)
    candidate, warp = options.known[kind], None
    start_index = int(start_number or 1) - 1
    options = replace(options, seed=options.seed + start_index)
    if candidate.needs_categories and not options.categories:
        return None
    most = options.fit_rows or (_DEEP_FIT_ROWS if kind == "deep" else _FIT_ROWS)
    most = len(y) if candidate.is_local else most
    if held_out is not None or most < len(y):
        others = options.order[0 if held_out is None else len(held_out) :]
        rows = others[:most].sort().values
    targets = y
    if candidate.warped:
        assert candidate.start is not None
        if candidate.start not in fitted:
            first = _fit_candidate(candidate.start, x, y, {}, replace(options, restarts=0))
            assert first is not None
            fitted = {candidate.start: first.model}
        warp = choose_warp(fitted[candidate.start], y)
        if warp is None:
            return None
        targets = _warped(y, warp)
    # Of many rows some have the hyperparameters fitted to them, and all are predicted from.
    data = _in_single_precision(x, targets) if candidate.is_local else (x, targets)
    whole, model = _models(candidate, *data, rows, options)
    if options.exact and data[0] is not x:  # factors of all rows are in double precision
        whole = candidate.make(x, targets, options.seed, options.categories)
    if candidate.start is not None and candidate.start in fitted:
        _start_from(model, fitted[candidate.start])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # the result has the message
        note = _train(candidate, model, options, _DECAYS[start_index % len(_DECAYS)])
    if whole is not model:
        # Its units are kept: those of the trained model may be rounded to single precision.
        units = {key: value for key, value in whole.state_dict().items() if "standardizer" in key}
        whole.load_state_dict({**model.state_dict(), **units})
    seconds, neighbors, count = time.perf_counter() - start, None, 0
    if options.exact:
        judged = held_out
        if judged is None:
            judged = (
                options.order[-MOST_HELD_OUT:] if len(y) > MOST_HELD_OUT else torch.arange(len(y))
            )
            count = num_hyperparameters(whole)
        predicted = leave_one_out_predictions(whole.eval(), judged)
    else:
        assert held_out is not None
        judged = held_out
        neighbors = min(_MOST_NEIGHBORS, count_neighbors(model, "auto", options.seed))
        with torch.no_grad():
            normal = model.predict(data[0][held_out], neighbors=neighbors)
        predicted = normal.mean, normal.stddev
    calibrated = calibrate(
        predicted, y[judged.to(y.device)], warp, hyperparameters=count, mixed=held_out is not None
    )
    return Component(
        name, whole.eval(), 0.0, *calibrated, note, seconds, warp, neighbors, held_out is not None
    )


def _train(
    candidate: Candidate, model: GPRegression, options: FitOptions, decay: float | None
) -> str:
    """Fits the hyperparameters of a model; a sentence on a problem.

    ``decay`` is that of networks that are trained by near points.
    """
    seed, conditioning, has_network = options.seed, LastPoints(m=0), bool(find_networks(model))
    if candidate.is_local:
        conditioning = (
            NearestNeighbors(_BLOCK - 1, 1, "joint") if has_network else NearestNeighbors()
        )
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)
    if candidate.is_local:
        passes = math.ceil(_PASSES * len(cast(Tensor, model.train_targets)) / _BLOCK)
        steps = min(passes, _MANY_NETWORK_STEPS) if has_network else _MANY_STEPS
        return fit_mll(
            mll, "adam", steps=steps, lr=_RATE, final_lr=_FINAL_RATE, network_lr=_NETWORK_RATE,
            network_decay=decay, progress=False,
        ).message  # fmt: skip
    if has_network:
        return fit_networks(mll, steps=_NETWORK_STEPS, seed=seed, progress=False).message
    return fit_mll(mll, restarts=options.restarts, seed=seed, progress=False).message


def _models(
    candidate: Candidate, x: Tensor, y: Tensor, rows: Tensor | None, options: FitOptions
) -> tuple[GPRegression, GPRegression]:
    """A model of all rows, and one of these rows in the same units, or the same one."""
    whole = candidate.make(x, y, options.seed, options.categories)
    if rows is None:
        return whole, whole
    model = candidate.make(x[rows], y[rows], options.seed, options.categories)
    for units in ("input_standardizer", "target_standardizer"):
        model.get_submodule(units).load_state_dict(whole.get_submodule(units).state_dict())
    model.set_train_data(targets=cast(Tensor, whole.train_targets)[rows], strict=False)
    return whole, model


def _in_single_precision(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Data in float32, in which networks take half the time, where it tells their values apart."""
    rounded = x.float(), y.float()
    pairs = zip((x, y), rounded, strict=True)
    errors = [((a - b).abs().amax(0), _PRECISION * a.std(0)) for a, b in pairs]
    return rounded if all(bool((error <= most).all()) for error, most in errors) else (x, y)


def _warped(y: Tensor, warp: Warp) -> Tensor:
    return torch.from_numpy(warp.forward(y.cpu().double().numpy())).to(y)


def _start_from(model: GPRegression, fitted: GPRegression) -> None:
    """Starts a model where a fitted one ended that it contains."""
    state, prefix = fitted.state_dict(), "covar_module."
    if isinstance(model.covar_module, AdditiveKernel) and not isinstance(
        fitted.covar_module, AdditiveKernel
    ):
        first = f"{prefix}kernels.0."
        state = {
            first + key.removeprefix(prefix) if key.startswith(prefix) else key: value
            for key, value in state.items()
        }
    # Priors and units are those of the model itself.
    known = model.state_dict()
    shared = {  # of transformed targets the units are others
        key: value for key, value in state.items()
        if key in known and "prior" not in key and "standardizer" not in key
    }  # fmt: skip
    model.load_state_dict(shared, strict=False)


_Fits = tuple[dict[str, Component], dict[str, str]]


def fit_candidates(
    names: Sequence[str],
    x: Tensor,
    y: Tensor,
    options: FitOptions,
    *,
    n_jobs: int | None = None,
    progress: bool | None = None,
) -> _Fits:
    """Fits candidates in the order of their names; ``n_jobs`` is as joblib takes it.

    Returns:
        The fitted candidates by name, and why others failed. In neither is a candidate of
        transformed targets if no transform makes them more likely, nor one of categories if there
        are none.
    """
    if options.seconds is not None:
        deadline = time.time() + options.seconds
        options = replace(options, deadline=deadline, first=names[0])
    if n_jobs in (None, 1):
        return _fit_in_turn(names, x, y, options, progress)
    from joblib import Parallel, delayed, effective_n_jobs

    # Each comes into the list of the one that it starts from.
    chains: list[list[str]] = []
    for name in names:
        start = options.known[name].start if name in options.known else None
        chain = next((chain for chain in chains if start in chain), [])
        chains += [] if chain else [chain]
        chain.append(name)
    if options.held_out is not None and options.seconds is None:
        chains.reverse()  # the most expensive first, so that no process waits for another's last
    # Threads of several processes on the same cores would wait for each other.
    threads = max(1, torch.get_num_threads() // min(effective_n_jobs(n_jobs), len(chains)))
    runs: Any = Parallel(n_jobs=n_jobs)(
        delayed(_fit_in_turn)(chain, x, y, options, False, threads) for chain in chains
    )
    components = {name: component for fits, _ in runs for name, component in fits.items()}
    failures = {name: reason for _, failed in runs for name, reason in failed.items()}
    in_order = {name: components[name] for name in names if name in components}
    return in_order, {name: failures[name] for name in names if name in failures}


def _fit_in_turn(
    names: Sequence[str],
    x: Tensor,
    y: Tensor,
    options: FitOptions,
    progress: bool | None,
    threads: int | None = None,
) -> _Fits:
    """Fits candidates one after the other, in another process with so many ``threads``."""
    if threads is not None:
        torch.set_num_threads(threads)
    components: dict[str, Component] = {}
    failures: dict[str, str] = {}
    with progress_bar(names, progress=progress, desc="stack") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            if time.time() >= options.deadline and name != options.first:
                failures[name] = f"the time budget of {options.seconds:g} seconds was spent"
                continue
            models = {other: component.model for other, component in components.items()}
            try:
                component = _fit_candidate(name, x, y, models, options)
            except Exception as error:  # whatever it is, the others are worth having
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            if component is not None:
                components[name] = component
    return components, failures


def stored_component(component: Component) -> dict[str, Any]:
    """A component in tensors and primitives, without its training data."""
    warp = component.warp
    # Its residuals are stored too, so that its scores are what they were.
    return {
        **vars(component), "model": dict(component.model.state_dict()),
        "calibration": list(astuple(component.calibration)),
        "residuals": dict(vars(component.residuals)),
        "warp": None if warp is None else list(astuple(warp)),
    }  # fmt: skip


def restored_component(
    stored: Mapping[str, Any], x: Tensor, y: Tensor, seed: int, groups: Groups
) -> Component:
    """The component that :func:`stored_component` stored, with its training data."""
    warp = None if stored["warp"] is None else Warp(*stored["warp"])
    targets = y if warp is None else _warped(y, warp)
    exact = stored["neighbors"] is None
    candidates = known_candidates(stored["held_out"], exact)
    if not exact:
        x, targets = _in_single_precision(x, targets)
    # A model with the structure of the candidate, in which all that was trained is replaced.
    model = candidates[stored["name"].partition(" ")[0]].make(x, targets, seed, groups)
    model.load_state_dict(stored["model"])
    model.set_train_data(targets=model.target_standardizer.transform(targets), strict=False)
    calibration, residuals = Calibration(*stored["calibration"]), Residuals(**stored["residuals"])
    fitted = {"model": model.eval(), "calibration": calibration, "residuals": residuals}
    return Component(**{**stored, **fitted, "warp": warp})
