"""Monotone transforms of skewed targets, chosen by the likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gpclml.inference import training_observations
from gpclml.models import GPRegression

__all__ = ["Warp", "choose_warp"]

_MOST_LOG = 500.0  # whose exponential is a number
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

    def forward(self, y: Tensor) -> Tensor:
        """The transformed targets, of any shape."""
        end = self._curved(y)
        return self._curve(end) + (y - end) * self.log_slope(end).exp()

    def inverse(self, z: Tensor) -> Tensor:
        """The targets of transformed ones."""
        lowest, highest = map(float, self._curve(z.new_tensor([self.lowest, self.highest])))
        end = z.clamp(lowest, highest)
        upper = _inverse_box_cox(end.clamp_min(0.0), self.power)
        lower = _inverse_box_cox((-end).clamp_min(0.0), 2 - self.power)
        y = self.offset + self.unit * torch.where(end >= 0, upper, -lower)
        return y + (z - end) / self.log_slope(y).exp()

    def log_slope(self, y: Tensor) -> Tensor:
        r""":math:`\log g'(y)`, which is added to the log density of a transformed target."""
        v = (self._curved(y) - self.offset) / self.unit
        # (lambda - 1) log(1 + v) above, (1 - lambda) log(1 - v) below
        return (self.power - 1) * v.sign() * v.abs().log1p() - math.log(self.unit)

    def _curved(self, y: Tensor) -> Tensor:
        return y.clamp(self.lowest, self.highest)

    def _curve(self, y: Tensor) -> Tensor:
        v = (y - self.offset) / self.unit
        upper = _box_cox(v.clamp_min(0.0), self.power)
        return torch.where(v >= 0, upper, -_box_cox((-v).clamp_min(0.0), 2 - self.power))

    def moments(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of a target whose transform is normal, by Gauss-Hermite quadrature."""
        nodes, shares = _hermite(mean)
        values = self.inverse(mean.unsqueeze(-1) + deviation.unsqueeze(-1) * nodes)
        first = values @ shares
        return first, (values - first.unsqueeze(-1)).square() @ shares


def _hermite(like: Tensor) -> tuple[Tensor, Tensor]:
    import numpy as np

    nodes, shares = np.polynomial.hermite_e.hermegauss(64)
    return torch.as_tensor(nodes).to(like), torch.as_tensor(shares / shares.sum()).to(like)


def _box_cox(v: Tensor, power: float) -> Tensor:
    log = v.log1p()
    return log if power == 0 else (power * log).expm1() / power


def _inverse_box_cox(z: Tensor, power: float) -> Tensor:
    log = z if power == 0 else (power * z).log1p() / power
    return log.clamp_max(_MOST_LOG).expm1()


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

    def likelihood(values: Tensor, log_slopes: Tensor) -> float:
        spread = values.std()
        residual = ((values - values.mean()) / spread - shift).unsqueeze(-1)
        squares = torch.linalg.solve_triangular(factor, residual, upper=False).square().mean()
        return float(log_slopes.sum() - len(y) * (spread.log() + 0.5 * squares.log()))

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
    values = [likelihood(warp.forward(y), warp.log_slope(y)) for warp in warps]
    best = max(range(len(warps)), key=lambda place: values[place])
    gain = values[best] - likelihood(y, torch.zeros_like(y))
    return warps[best] if gain > _LEAST_GAIN else None
