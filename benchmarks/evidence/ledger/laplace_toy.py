"""A uniform prior that is too wide: the evidence and its Laplace approximation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.evidence.ledger.claims import Claim, Experiment, graded, with_error
from gpclml.evidence.sampling import log_mean

_TRUE_WEIGHT = -1.0
Values = NDArray[np.float64]

_WIDTHS = (0.05, 1e8)
_BEYOND = 100.0  # widths from here on hold more than thirty of the modes
_POINTS = 20001
_claim = partial(Claim, "Lotfi et al. 2022, Figure 3")


def run_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    r"""The evidence of :math:`x_i \sim N(\sin w, 1)`, :math:`w \sim U[-\alpha, \alpha]`.

    The posterior has modes at w, at :math:`\pi - w` and a period further: the wider the prior the
    more of them it holds. The data are drawn with w = -1.

    Args:
        cell: ``seed`` of the data, number of ``points``, of ``widths`` between .05 and 1e8 and of
            ``draws`` of the prior for simple Monte Carlo.

    Returns:
        Over ``width``: ``lml`` by quadrature, ``laplace`` (none where the prior ends short of the
        mode nearest to zero) and ``sampled``, by simple Monte Carlo; in nats. ``mode``, that mode.
    """
    generator = torch.Generator().manual_seed(cell["seed"])
    noise = torch.randn(cell["points"], dtype=torch.float64, generator=generator)
    data = math.sin(_TRUE_WEIGHT) + noise
    low, high = map(math.log10, _WIDTHS)
    widths = torch.logspace(low, high, cell["widths"], dtype=torch.float64).tolist()
    sampled = []
    for width in widths:
        uniform = torch.rand(cell["draws"], dtype=torch.float64, generator=generator)
        sampled.append(log_mean(_log_likelihood(data, width * (2 * uniform - 1))).value)
    laplace = [laplace_evidence(data, width) for width in widths]
    return {
        "width": widths,
        "lml": [true_evidence(data, width) for width in widths],
        "laplace": [None if math.isnan(value) else value for value in laplace],
        "sampled": sampled,
        "mode": _mode(data),
    }


def true_evidence(data: Tensor, width: float) -> float:
    r"""The log evidence under :math:`U[-\alpha, \alpha]`, in nats.

    By the trapezoidal rule over one period, which counts as often as it fits into the prior, and
    over what is left.

    Args:
        data: ``(n,)``.
        width: :math:`\alpha`.
    """
    # The likelihood has the period 2 π: whole periods are integrated once.
    periods = math.floor(width / math.pi)
    whole = math.pi * periods
    remainder = width - whole
    # On either side of the whole periods.
    ends = (whole, whole + remainder), (-whole - remainder, -whole)
    integrals = [_log_integral(data, *span) for span in ends]
    if periods:
        integrals.append(_log_integral(data, -math.pi, math.pi) + math.log(periods))
    return float(torch.logsumexp(torch.stack(integrals), dim=0)) - math.log(2 * width)


def laplace_evidence(data: Tensor, width: float) -> float:
    r"""The Laplace approximation at the mode nearest to zero, in nats.

    .. math:: \log p(\mathcal D \mid \hat w) - \log 2 \alpha + \tfrac12 \log 2 \pi / h

    with h the second derivative of the negative log likelihood.

    Args:
        data: ``(n,)``.
        width: :math:`\alpha`.

    Returns:
        NaN if the mode is outside the prior.
    """
    mode, mean = _mode(data), float(data.mean())
    # A mode outside the prior has no Laplace approximation.
    if width < abs(mode):
        return math.nan
    curvature = len(data) * (math.cos(mode) ** 2 + (mean - math.sin(mode)) * math.sin(mode))
    peak = float(_log_likelihood(data, torch.tensor([mode], dtype=torch.float64)))
    return peak - math.log(2 * width) + 0.5 * math.log(2 * math.pi / curvature)


def _mode(data: Tensor) -> float:
    """The likeliest weight nearest to zero."""
    return math.asin(min(max(float(data.mean()), -1.0), 1.0))


def _log_likelihood(data: Tensor, weights: Tensor) -> Tensor:
    """Of all data at each weight, ``(S,)``; the data enter by mean and spread."""
    n, mean = len(data), data.mean()
    # So the cost does not grow with the number of points.
    spread = (data - mean).square().sum()
    squares = spread + n * (mean - weights.sin()).square()
    return -0.5 * (squares + n * math.log(2 * math.pi))


def _log_integral(data: Tensor, low: float, high: float) -> Tensor:
    """Log of the integral of the likelihood between two weights."""
    weights = torch.linspace(low, high, _POINTS, dtype=torch.float64)
    values = _log_likelihood(data, weights)
    # Ends of a trapezoidal rule have half the weight.
    values[[0, -1]] -= math.log(2)
    return torch.logsumexp(values, dim=0) + math.log(max(high - low, 1e-300) / (_POINTS - 1))


def _claims(cells: pandas.DataFrame) -> Iterator[Claim]:
    rows = [row for _, row in cells.iterrows()]
    curves = [_beyond(row, "lml", _BEYOND) for row in rows]
    steepest = max(abs(_slope(*curve)) for curve in curves)
    spreads = [np.ptp(values) for _, values in curves]
    sampled = [_beyond(row, "sampled", _BEYOND) for row in rows]
    apart = max(
        np.abs(exact - monte_carlo)[widths > _BEYOND].max()
        for (widths, exact), (_, monte_carlo) in zip(curves, sampled, strict=True)
    )
    yield _claim(
        "Once the prior holds the modes, the evidence no longer depends on its width.",
        "flat beyond the mode",
        f"slope in log width beyond {_BEYOND:g}: {steepest:.1e} nats at most; "
        f"largest minus least {with_error(spreads)} nats",
        graded(steepest < 0.01),
        f"Simple Monte Carlo over draws of the prior agrees within {apart:.3f} nats.",
        rule="slope below .01 nats",
    )

    slopes = [_slope(*_beyond(row, "laplace", abs(row["mode"]))) for row in rows]
    # At the widest prior, where one mode of millions is counted.
    short = [row["lml"][-1] - row["laplace"][-1] for row in rows]
    curved = sum(abs(mode) > math.pi / 2 - 1e-6 for mode in cells["mode"])
    yield _claim(
        "The Laplace evidence, of one mode, falls without end: slope -1 in the log of the width.",
        "slope -1",
        f"slope {min(slopes):.6f} to {max(slopes):.6f}; at width {_WIDTHS[1]:g} it is "
        f"{with_error(short, 1)} nats too low",
        graded(max(abs(slope + 1) for slope in slopes) < 1e-6),
        f"On {curved} of {len(cells)} data sets the mean of the data is outside [-1, 1], where the "
        "two modes coincide."
        if curved
        else "",
        rule="slope -1 to six digits",
        kind="identity",
    )


def _beyond(row: pandas.Series, name: str, least: float) -> tuple[Values, Values]:
    """Widths from the least one on, and the values of a score there."""
    widths, values = np.array(row["width"]), np.array(row[name], dtype=float)
    return widths[widths >= least], values[widths >= least]


def _slope(widths: Values, values: Values) -> float:
    """Slope in the natural logarithm of the width, by least squares."""
    return float(np.polyfit(np.log(widths), values, 1)[0])


def _draw(cells: pandas.DataFrame, figure: Figure) -> None:
    row = cells.sort_values("seed").iloc[0]
    curves, posterior = figure.subplots(1, 2)
    curves.semilogx(row["width"], row["lml"], label="evidence")
    curves.semilogx(row["width"], np.array(row["laplace"], dtype=float), label="Laplace")
    curves.axvline(abs(row["mode"]), color="gray", linewidth=0.8, label="mode")
    curves.set(xlabel="half-width of the prior", ylabel="LML, nats")
    curves.legend()
    weights = torch.linspace(-10, 10, 1001, dtype=torch.float64)
    mean = math.sin(row["mode"])
    likelihood = (-0.5 * 50 * (mean - weights.sin()).square()).exp()
    posterior.plot(weights, likelihood)
    posterior.set(xlabel="w", ylabel="likelihood, largest = 1")


EXPERIMENT = Experiment(
    "laplace-toy", "A prior too wide: the Laplace evidence falls, the evidence does not",
    lambda: [
        {"points": 50, "widths": 120, "draws": 100000, "seed": seed} for seed in range(20)
    ],
    run_cell, _claims, _draw,
    items=("Figure 3",),
    paper={"Lotfi et al. 2022, Figure 3": {"points": 50}},
)  # fmt: skip
