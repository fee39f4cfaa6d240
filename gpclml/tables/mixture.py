"""Predictions of a stack: at each row a mixture of Student-t distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import t
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, checked
from gpclml._utils.arrays import ArrayLike, takes_arrays
from gpclml.errors import ArgumentError, ShapeError
from gpclml.tables.candidates import Warp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


_MOST_STEPS = 200  # of a root search, of which bisection alone would take about 60
_TAIL = 1e-6  # probability on either side that is left out of the integral of the CRPS
_NODES = 64  # of each piece of that integral


class StackedPrediction:
    r"""The distribution of a new observation at each of m rows, in original units.

    .. math:: p(y) = \sum_k w_k \, \frac{1}{s_k} \,
        t_{\nu_k}\!\left(\frac{y - \mu_k}{s_k}\right)

    Rows are predicted one by one, without their correlations. Everything is computed in float64 on
    the CPU, without gradients, and returned in the type and on the device of the inputs.

    A component may be of transformed targets, :math:`g_k(y)` in place of y and with the factor
    :math:`g_k'(y)`. Locations and scales are then those of the transform.

    Args:
        weights: w, ``(K,)``, with sum one.
        locations: Centre of each component at each row, ``(K, m)``.
        scales: Scale of each component at each row, ``(K, m)``, positive.
        degrees: Degrees of freedom of each component, above 2, ``(K,)``; infinite for a normal.
            Components of transformed targets have to be normal.
        warps: The transform of each component, or None.
        counts: Whether targets are counts. Then quantiles and draws are those of the continuous
            distribution, rounded to whole numbers and not below zero.

    Raises:
        ShapeError: The shapes do not fit each other.
        ArgumentError: Degrees of freedom are 2 or less, which gives no variance, or finite for
            transformed targets.

    Examples:
        >>> import torch
        >>> from gpclml.tables import StackedPrediction
        >>> ones = torch.ones(1, 1)
        >>> normal = StackedPrediction(ones[0], ones, 2 * ones, torch.inf * ones[0])
        >>> normal.mean, normal.std
        (tensor([1.]), tensor([2.]))
    """

    @checked(
        weights="float (k,)", locations="float (k, m?)", scales="float (k, m?)", degrees="(k,)"
    )
    def __init__(
        self,
        weights: Tensor,
        locations: Tensor,
        scales: Tensor,
        degrees: Tensor,
        warps: Sequence[Warp | None] | None = None,
        *,
        counts: bool = False,
    ) -> None:
        if not bool((degrees > 2).all()):
            raise ArgumentError("degrees", float(degrees.min()), "numbers above 2")
        self.warps: tuple[Warp | None, ...] = tuple(warps or [None] * len(weights))
        if len(self.warps) != len(weights):
            expected = f"{len(weights)}, one for each component"
            raise ArgumentError("warps", f"{len(self.warps)}", expected)
        self._warped = [(k, warp) for k, warp in enumerate(self.warps) if warp is not None]
        for k, _ in self._warped:
            if math.isfinite(degrees[k]):
                expected = "infinity (normal tails) where targets are transformed"
                raise ArgumentError("degrees", float(degrees[k]), expected)
        self.counts = counts
        self.weights = weights
        self.degrees = degrees
        self.locations = locations
        self.scales = scales
        self._w, self._loc, self._scale, nu = (
            values.detach().cpu().double().numpy()
            for values in (weights, locations, scales, degrees)
        )
        self._nu = nu[:, None]

    def __len__(self) -> int:
        return self.locations.shape[-1]

    def __repr__(self) -> str:
        return f"StackedPrediction({len(self)} rows, {len(self.weights)} components)"

    @property
    def mean(self) -> Tensor:
        """The means, ``(m,)``; those of transformed targets by quadrature."""
        return self._like_inputs(self._w @ self._moments[0])

    @property
    def variance(self) -> Tensor:
        """The variances, of the components and between them, ``(m,)``."""
        means, variances = self._moments
        return self._like_inputs(self._w @ (variances + (means - self._w @ means) ** 2))

    @cached_property
    def _moments(self) -> tuple[Array, Array]:
        """Means and variances of the components, ``(K, m)``."""
        # nu / (nu - 2), which is 1 for infinite nu
        means, variances = self._loc.copy(), self._scale**2 / (1 - 2 / self._nu)
        for k, warp in self._warped:
            means[k], variances[k] = warp.moments(self._loc[k], self._scale[k])
        return means, variances

    @property
    def std(self) -> Tensor:
        """The standard deviations, ``(m,)``."""
        return self.variance.sqrt()

    @takes_arrays()
    @checked(y="(m,)")
    def log_density(self, y: ArrayLike) -> Tensor:
        """The log density of a target at each row, in nats.

        Args:
            y: Targets in original units, ``(m,)``.

        Returns:
            ``(m,)``; the negative mean of it is the usual test NLL.

        Raises:
            ShapeError: There is not one target for each row.
            NonFiniteError: A target is not finite.
        """
        return self._like_inputs(self._log_density(self._targets(y)))

    @takes_arrays()
    @checked(y="(m,)")
    def cdf(self, y: ArrayLike) -> Tensor:
        """The probability of at most y at each row, ``(m,)``.

        Args:
            y: Values in original units, ``(m,)``.

        Raises:
            ShapeError, NonFiniteError: As for :meth:`log_density`.
        """
        return self._like_inputs(self._cdf_of_targets(self._targets(y)))

    @checked
    def quantile(self, probability: float | Sequence[float] | Tensor) -> Tensor:
        """The value below which an observation falls with a probability, at each row.

        Of counts it is a whole number, the continuous value rounded.

        Args:
            probability: One between 0 and 1, or several.

        Returns:
            ``(m,)`` for one; ``(m, q)`` for q of them.

        Raises:
            ArgumentError: One is not between 0 and 1.

        Note:
            A safeguarded Newton search between the least and the largest quantile of the
            components; about ten evaluations of the distribution function.
        """
        levels = torch.as_tensor(probability, dtype=torch.float64, device="cpu")
        for p in levels.flatten().tolist():
            if not 0 < p < 1:
                raise ArgumentError("probability", p, "numbers between 0 and 1")
        rows = [self._rounded(self._quantile(p)) for p in levels.flatten().tolist()]
        return self._like_inputs(np.reshape(rows, (*levels.shape, len(self))).T)

    @checked
    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval that holds an observation with a probability.

        Args:
            level: The probability, between 0 and 1.

        Returns:
            Lower and upper ends, ``(m,)`` each.

        Raises:
            ArgumentError: The level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ArgumentError("level", level, "a number between 0 and 1")
        tail = 0.5 * (1 - level)
        return self.quantile(tail), self.quantile(1 - tail)

    @checked
    def sample(self, count: int = 1, seed: int = 0) -> Tensor:
        """Draws of new observations, each row on its own.

        Args:
            count: Number of draws a row.
            seed: Seed of the draws.

        Returns:
            ``(count, m)``.
        """
        check_counts(count=count)
        draws = np.random.default_rng(int(seed) & (2**64 - 1))
        shape = (count, len(self))
        # A component for each draw; a Student-t variable is a normal by a root of chi-square.
        chosen = draws.choice(len(self._w), size=shape, p=self._w / self._w.sum())
        normal = draws.standard_normal(shape)
        nu = self._nu[chosen, 0]
        heavy = np.isfinite(nu)
        chi_square = draws.chisquare(np.where(heavy, nu, 1.0))
        standard = normal * np.sqrt(np.where(heavy, nu, chi_square) / chi_square)
        rows = np.arange(len(self))
        drawn = self._loc[chosen, rows] + self._scale[chosen, rows] * standard
        for k, warp in self._warped:
            drawn = np.where(chosen == k, warp.inverse(drawn), drawn)
        return self._like_inputs(self._rounded(drawn))

    @takes_arrays()
    @checked(y="(m,)")
    def crps(self, y: ArrayLike) -> Tensor:
        r"""The continuous ranked probability score of a target at each row; smaller is better.

        .. math:: \int (F(z) - 1\{y \le z\})^2 \, dz

        (Gneiting and Raftery 2007), by Gauss-Legendre quadrature between quantiles of 1e-6 and
        1 - 1e-6, with pieces that end at the target. Of counts F is zero below zero.

        Args:
            y: Targets in original units, ``(m,)``.

        Returns:
            In units of the targets, ``(m,)``.

        Raises:
            ShapeError, NonFiniteError: As for :meth:`log_density`.
        """
        targets = self._targets(y)
        inner = np.stack([self._quantile(p) for p in (_TAIL, 0.01, 0.5, 0.99, 1 - _TAIL)])
        lowest, highest = np.minimum(inner[0], targets), np.maximum(inner[-1], targets)
        inside = np.vstack([inner[1:-1], np.full_like(targets, self._lowest)])
        edges = np.sort(np.vstack([lowest, inside.clip(lowest, highest), targets, highest]), 0)
        # F jumps at the target and, of counts, at zero: a smooth piece on either side.
        nodes, shares = np.polynomial.legendre.leggauss(_NODES)
        total = np.zeros_like(targets)
        for left, right in pairwise(edges):
            middle, half = 0.5 * (left + right), 0.5 * (right - left)
            for node, share in zip(nodes, shares, strict=True):
                z = middle + half * node
                total += share * half * (self._cdf_of_targets(z) - (targets <= z)) ** 2
        return self._like_inputs(total)

    @property
    def _lowest(self) -> float:
        return 0.0 if self.counts else -math.inf

    def _rounded(self, values: Array) -> Array:
        """Whole numbers from zero on, where targets are counts."""
        return np.maximum(np.ceil(values - 0.5), 0.0) if self.counts else values

    def _targets(self, y: Tensor) -> Array:
        if len(y) != len(self):
            raise ShapeError("y", tuple(y.shape), f"({len(self)},), one for each row")
        check_finite("y", y)
        return y.detach().cpu().double().numpy()

    def _like_inputs(self, values: Array) -> Tensor:
        return torch.as_tensor(values).to(self.locations)

    def _standardized(self, y: Array) -> Array:
        """Targets ``(m,)`` in units of the components, ``(K, m)``."""
        warped = np.tile(y, (len(self._w), 1))
        for k, warp in self._warped:
            warped[k] = warp.forward(y)
        return (warped - self._loc) / self._scale

    def _log_density(self, y: Array) -> Array:
        with np.errstate(over="ignore"):  # far away a density is zero
            logs = t.logpdf(self._standardized(y), self._nu) - np.log(self._scale)
        for k, warp in self._warped:
            logs[k] += warp.log_slope(y)
        return np.asarray(logsumexp(logs, axis=0, b=self._w[:, None]))

    def _cdf(self, y: Array) -> Array:
        return self._w @ t.cdf(self._standardized(y), self._nu)

    def _cdf_of_targets(self, y: Array) -> Array:
        """Of counts the probability below zero is moved to zero."""
        return np.where(y < self._lowest, 0.0, self._cdf(y))

    def _quantile(self, probability: float) -> Array:
        """The continuous quantile of each row, ``(m,)``."""
        ends = self._loc + self._scale * t.ppf(probability, self._nu)
        for k, warp in self._warped:
            ends[k] = warp.inverse(ends[k])
        # A component without weight has no say.
        ends = ends[self._w > 0]
        low, high = ends.min(0), ends.max(0)
        y = 0.5 * (low + high)
        for _ in range(_MOST_STEPS):
            # The bracket [low, high] always holds the root.
            excess = self._cdf(y) - probability
            low, high = np.where(excess < 0, y, low), np.where(excess < 0, high, y)
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                newton = y - excess / np.exp(self._log_density(y))
            # Where Newton's step leaves the bracket, bisection.
            inside = (newton > low) & (newton < high)
            moved = np.where(inside, newton, 0.5 * (low + high))
            moved = np.where(excess == 0, y, moved)
            done = np.abs(moved - y) <= 4 * np.finfo(float).eps * np.abs(y)
            y = moved
            if bool(done.all()):
                break
        return y
