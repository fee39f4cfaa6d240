"""The models of a stack, calibrated to their leave-one-out residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import psi
from scipy.stats import t
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, checked
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml.inference import training_observations
from gpclml.models import GPRegression, find_networks
from gpclml.tables.warps import Warp

if TYPE_CHECKING:
    from numpy.typing import NDArray


LEAST_DEGREES = 3.0
"""Below 2 there is no variance; near it that of a prediction is more than its rows can tell."""

_SCALE_PENALTY, _SLOPE_PENALTY = 5.0, 10.0
_TAIL_DEVIATION = 0.1
_LEAST_TAIL = 0.05
_MOST_LOG_SCALE, _MOST_SLOPE = 5.0, 1.0
_FARTHEST = 2.0  # deviations of predictions from their mean, beyond which the scale stays
_STARTS = (0.02, 0.2)
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
    """

    scale: float = 1.0
    degrees: float = math.inf
    slope: float = 0.0
    center: float = 0.0
    width: float = 1.0

    def scales(self, locations: Tensor) -> Tensor:
        """s(m) at each location: locations in units of the targets, scales of the same shape."""
        z = ((locations - self.center) / self.width).clamp(-_FARTHEST, _FARTHEST)
        return self.scale * (self.slope * z).exp()

    @property
    def tail_variance(self) -> float:
        """The variance of the Student-t distribution of scale one, nu / (nu - 2)."""
        return 1.0 if math.isinf(self.degrees) else self.degrees / (self.degrees - 2)

    def log_density(self, residuals: Tensor, locations: Tensor) -> Tensor:
        """The log density, in nats, of errors in units of predicted deviations, ``(n,)``.

        ``locations`` are the predictions, in units of the targets, ``(n,)``.
        """
        scales = self.scales(locations)
        return torch.from_numpy(t.logpdf((residuals / scales).numpy(), self.degrees)) - scales.log()


@takes_arrays()
@checked(residuals="float (n,)", locations="float (n,)")
def fit_calibration(
    residuals: ArrayLike,
    locations: ArrayLike | None = None,
    *,
    hyperparameters: int = 0,
    tails: bool = True,
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
    return Calibration(math.exp(log_scale), degrees, slope, center, width)


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
class Component:
    """A fitted model of a stack, with its weight and its calibration.

    Attributes:
        name: Name of the candidate.
        model: The fitted model of all rows.
        weight: Its share of the mixture.
        calibration: How its predictions are widened.
        log_densities: Log density of each row given all others, or of each row held out, after
            calibration, in nats, original units, in float64 on the CPU.
        loo_uncalibrated: Their mean before calibration.
        note: A sentence on a problem of the fit; empty if there is none.
        seconds: Wall time of the fit.
        warp: The transform of its targets, if they have one; its model and calibration are of the
            transformed targets.
        neighbors: Number of training rows that a prediction is conditioned on; all if None.
    """

    name: str
    model: GPRegression
    weight: float
    calibration: Calibration
    log_densities: Tensor
    loo_uncalibrated: float
    note: str = ""
    seconds: float = 0.0
    warp: Warp | None = None
    neighbors: int | None = None

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Locations and scales of new observations, ``(m,)`` each, in units of the targets."""
        inputs = x.to(cast(Any, self.model.train_inputs)[0])
        normal = self.model.predict(inputs, marginal=True, neighbors=self.neighbors)
        location, deviation = normal.mean.to(x), normal.stddev.to(x)
        return location, deviation * self.calibration.scales(location)

    @property
    def loo(self) -> float:
        """Mean log density of a row given all others after calibration, in nats."""
        return float(self.log_densities.mean())


def calibrate(
    predicted: tuple[Tensor, Tensor],
    y: Tensor,
    warp: Warp | None = None,
    *,
    hyperparameters: int = 0,
    fitted: bool = True,
) -> tuple[Calibration, Tensor, float]:
    """Calibrates predictions of rows that they are not conditioned on.

    Args:
        predicted: Means and deviations of the rows, ``(n,)`` each, in units of the targets, which
            are transformed if there is a warp.
        y: The targets in original units, ``(n,)``.
        warp: The transform of the targets.
        hyperparameters: The number that were fitted to these rows.
        fitted: Whether to fit the calibration; else it corrects nothing.

    Returns:
        The calibration; the log densities of the rows in original units, ``(n,)``; and their mean
        before calibration.
    """
    locations, deviation = (values.double().cpu() for values in predicted)
    y = y.double().cpu()
    # Residuals have no unit; densities are of the targets, and lose the log of their unit.
    targets, unit = y, deviation.log()
    if warp is not None:
        targets = torch.from_numpy(warp.forward(y.numpy()))
        unit = unit - torch.from_numpy(warp.log_slope(y.numpy()))
    residuals = (targets - locations) / deviation
    plain = calibration = Calibration()
    if fitted:
        # Heavy tails of the logarithm of a target would have no mean.
        calibration = fit_calibration(
            residuals, locations, hyperparameters=hyperparameters, tails=warp is None
        )
    logs, uncalibrated = (
        each.log_density(residuals, locations) - unit for each in (calibration, plain)
    )
    return calibration, logs, float(uncalibrated.mean())


def num_hyperparameters(model: GPRegression) -> int:
    """Number of parameters but the weights of networks, which are trained on held-out rows."""
    weights = {id(w) for network in find_networks(model) for w in network.parameters()}
    return sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in weights)


@torch.no_grad()
def leave_one_out_predictions(model: GPRegression) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each row given all others, in units of the targets, ``(n,)`` each.

    The hyperparameters are those fitted to all rows; deviations are with noise. (Rasmussen and
    Williams 2006, Eq. 5.12.) About n³ floating-point operations.
    """
    data, units = training_observations(model, model.likelihood), model.target_standardizer
    every = torch.arange(data.residual.shape[-1])
    mean, variance = data.covariance.leave_one_out(data.residual, every)
    # The residual is a target less the prior's mean.
    mean = cast(Tensor, model.train_targets) - data.residual + mean
    return units.inverse(mean), variance.sqrt() * model.target_scale
