"""Monotone transforms of skewed targets, chosen by the likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from scipy.special import boxcox1p, inv_boxcox1p
from torch import Tensor

from gpclml.inference import training_observations
from gpclml.models import GPRegression

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
