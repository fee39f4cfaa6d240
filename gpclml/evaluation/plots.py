"""Plots of a comparison: criteria, learning curves, calibration, and fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.extras import needs_extra
from gpclml.errors import ArgumentError, UnknownNameError, UnsupportedError
from gpclml.evaluation.comparison import Comparison, Scores
from gpclml.evaluation.model_scores import CRITERIA, Criterion, scored_in
from gpclml.inference.posterior import marginal_predictive
from gpclml.inference.units import units_of_targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    AxesGiven = Axes | Sequence[Axes] | NDArray[np.object_] | None

GUIDE: dict[str, Any] = {"color": "gray", "linewidth": 0.8, "zorder": 0}
"""Style of the lines that values are compared with."""

# Okabe and Ito's colours, which stay apart for all kinds of colour vision, in place of matplotlib's
# default. The lines differ too, so that no plot rests on colours alone.
_COLOURS = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999"
_LINES = "-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1))
_LABELS = {
    "lml": "log marginal likelihood",
    "clml": "conditional log marginal likelihood",
    "loo": "leave-one-out",
}
_NEAR, _FAR = 10.0, 100.0  # nats up to which a scale is linear, where differences are above
_BELOW = 0.25  # of the distance of two models: a difference below its score
_WINDOWS = 40  # evenly spaced in the logarithm of the number of points
_REACH = 3  # times what the first model learns; the rest of a worse one is cut off
_BINS = 10
_TAILS = (0.025, 0.975)
_DEVIATIONS = 2
_GRID = 300  # points along one input
_MARGIN = 0.05  # beyond the data


def plot_compare(
    comparison: Comparison, criterion: Criterion | None = None, *, ax: Axes | None = None
) -> Axes:
    """Plots the scores of models by a criterion and their differences, in the manner of ArviZ.

    Dots are the scores, with one standard error: over points for LOO, over orderings for the CLML.
    The best is filled. Triangles below are the same distances from the first-ranked model, with the
    standard error of the paired difference, which is usually far smaller; compare models by it.
    Models to the right of the line are better by this criterion than the first-ranked one. If a
    model is more than 100 nats off, the scale is logarithmic beyond 10 nats. A model whose
    criterion could not be computed has no dot; if it is the first-ranked, the line is that of the
    next model.

    Args:
        comparison: Result of :func:`score_models`.
        criterion: ``"lml"``, ``"clml"`` or ``"loo"``; None for the one that ranks.
        ax: Axes to draw in; None for those of a new figure of pyplot.

    Returns:
        The axes.

    Raises:
        UnsupportedError: If ``comparison`` is no result of :func:`score_models`.
        UnknownNameError: If there is no such criterion.
        ArgumentError: If there are several axes.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression, plot_compare, score_models
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)
        >>> y = (9 * x).sin() + 0.2 * (70 * x).cos()
        >>> models = {name: GPRegression(x, y, name) for name in ("rbf", "matern")}
        >>> axes = plot_compare(score_models(models))
        >>> axes.figure.savefig("criteria.png")
    """
    scores = _scores_of(comparison)
    criterion = comparison.rank_by if criterion is None else criterion
    if criterion not in CRITERIA:
        raise UnknownNameError("criterion", criterion, CRITERIA)
    axes = panels_for(ax, 1, 1.2 + 0.4 * len(scores))[0]
    scored = scored_in(criterion, scores)
    given = f", given {comparison.m} of {len(comparison.targets)}" if criterion == "clml" else ""
    axes.set_title(f"{_LABELS[criterion]}{given}")
    axes.set_yticks(range(len(scores)), list(scores))
    axes.set_ylim(len(scores) - 0.5, -0.5)
    if not scored:
        _say_nothing_drawn(axes, criterion.upper())
        return axes
    first = scores[scored[0]]
    differences = {name: scores[name].difference(first, criterion) for name in scored}
    best = max(difference.value for difference in differences.values())
    errors = comparison.table.get(f"{criterion}_se")  # the LML has none
    for row, name in enumerate(scores):
        if name not in scored:
            continue
        value, paired = differences[name].value, differences[name].standard_error
        colour = style_of(row)["color"]
        error = None if errors is None else errors[name]
        dot = {"fmt": "o", "color": colour, "markerfacecolor": colour if value == best else "none"}
        axes.errorbar(value, row, xerr=error, capsize=3, **dot)
        # The paired error is small where models fail at the same points, as they mostly do.
        if name != scored[0] and not math.isnan(paired):
            triangle = {"fmt": "^", "color": "gray", "markersize": 4, "capsize": 2}
            axes.errorbar(value, row + _BELOW, xerr=paired, **triangle)
    axes.axvline(0, **GUIDE)
    axes.margins(x=0.08)
    if max(abs(difference.value) for difference in differences.values()) > _FAR:
        axes.set_xscale("symlog", linthresh=_NEAR)
    value = f"{first.value(criterion):.1f}".replace("-", "\N{MINUS SIGN}")
    axes.set_xlabel(f"nats from the {value} of {scored[0]}")
    return axes


def plot_learning_curves(comparison: Comparison, *, ax: AxesGiven = None) -> NDArray[np.object_]:
    r"""Plots learning curves: log densities of the next point, and their sums, in two panels.

    The upper panel shows :math:`\log p(y_i \mid y_{<i})` against i, the mean over orderings and
    over windows on a logarithmic scale. The lower one shows its sum less that of the first-ranked
    model, which ends at the difference in LML; for a single model its own sum. The CLML counts the
    points after the dotted line at m. Bands are two standard errors of the mean over orderings. A
    model far worse than the first is cut off in the upper panel; the scale of the lower one is then
    logarithmic beyond 10 nats. Models whose curves could not be computed are left out.

    Args:
        comparison: As for :func:`plot_compare`, as are errors.
        ax: Two axes to draw in; None for those of a new figure of pyplot.

    Returns:
        The two axes.
    """
    scores = _scores_of(comparison)
    panels = panels_for(ax, 2, 5.6, sharex=True)
    above, below = panels
    curves = {
        name: (model.curves.numpy(), style_of(row))
        for row, (name, model) in enumerate(scores.items())
        if not bool(model.curves.isnan().any())
    }
    if not curves:
        _say_nothing_drawn(above, "learning curves")
        return panels
    count = len(comparison.targets)
    # Late terms are many and noisy: windows that widen with n average most where curves are flat.
    edges = np.unique(np.geomspace(1, count + 1, _WINDOWS + 1).round().astype(np.int64))
    middles = np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1, 1))
    first = next(iter(curves))
    # Less the first model in the same order, most of what the orders differ by cancels.
    base = curves[first][0] if len(curves) > 1 else 0.0
    means, largest = [], 0.0
    for name, (terms, style) in curves.items():
        windows = np.add.reduceat(terms, edges[:-1] - 1, axis=1) / np.diff(edges)
        means.append(_line(above, middles, windows, style, name))
        sums = (terms - base).cumsum(1)
        largest = max(largest, abs(float(sums[:, -1].mean())))
        if terms is not base:
            _line(below, np.arange(1, count + 1), sums, style, name)
    # Most means, and the first model in detail if another is far worse.
    top = max(float(mean.max()) for mean in means)
    reach = _REACH * max(float(np.ptp(means[0])), 0.5)
    low = max(float(np.quantile(np.concatenate(means), 0.02)), top - reach)
    margin = 0.1 * max(top - low, 1e-3)
    above.set(ylabel="nats a point", ylim=(low - margin, top + margin))
    above.set_title("log density of the next point")
    below.set_title(f"log evidence less that of {first}" if len(curves) > 1 else "log evidence")
    below.axhline(0, **GUIDE)
    below.set(xlabel="points", ylabel="nats")
    if largest > _FAR:
        below.set_yscale("symlog", linthresh=_NEAR)
    for panel in panels:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axvline(max(comparison.m, 1), linestyle=":", **GUIDE | {"linewidth": 1})
    above.text(
        max(comparison.m, 1), 0.03, f"m = {comparison.m} ", transform=above.get_xaxis_transform(),
        ha="right", fontsize=9, color="gray",
    )  # fmt: skip
    _legend_below(below, above)
    return panels


def _line(axes: Axes, x: NDArray, values: NDArray, style: dict[str, Any], name: str) -> NDArray:
    """Draws the mean of k curves ``(k, x)``, which it returns, and a band of its error."""
    mean, count = values.mean(0), len(values)
    axes.plot(x, mean, label=name, **style)
    if count > 1:
        band = 2 * values.std(0, ddof=1) / np.sqrt(count)
        axes.fill_between(x, mean - band, mean + band, color=style["color"], alpha=0.2, lw=0)
    return mean


def plot_calibration(comparison: Comparison, *, ax: AxesGiven = None) -> NDArray[np.object_]:
    r"""Plots calibration: probability integral transforms and coverage of intervals, in two panels.

    Predictions are from all other points; models without LOO are left out. The upper panel is a
    histogram of :math:`\Phi((y_i - \mu_{-i}) / \sigma_{-i})`: flat for calibrated predictions, high
    at both ends for overconfident ones, high in the middle for underconfident ones. The lower panel
    is the share of targets within the central interval of each nominal share, less that share; an
    overconfident model is below zero. Grey bands contain 95% of what chance gives for independent
    points, which is an approximation.

    Args:
        comparison: As for :func:`plot_compare`, as are errors.
        ax: Two axes to draw in; None for those of a new figure of pyplot.

    Returns:
        The two axes.
    """
    from scipy.stats import binom

    scores = _scores_of(comparison)
    panels = panels_for(ax, 2, 5.6)
    above, below = panels
    count = len(comparison.targets)
    nominal = np.linspace(0, 1, 101)
    # Counts in a bin, and within an interval, are binomial if points are independent.
    low, high = (float(binom.ppf(q, count, 1 / _BINS)) * _BINS / count for q in _TAILS)
    above.axhspan(low, high, color="gray", alpha=0.2, lw=0)
    low, high = (binom.ppf(q, count, nominal) / count - nominal for q in _TAILS)
    below.fill_between(nominal, low, high, color="gray", alpha=0.2, lw=0)
    scored = scored_in("loo", scores)
    for row, (name, model) in enumerate(scores.items()):
        if name not in scored:
            continue
        errors = (comparison.targets - model.loo_mean) / model.loo_variance.sqrt()
        # The probability integral transform, uniform if predictions are calibrated.
        shares = torch.special.ndtr(errors).numpy()
        heights, edges = np.histogram(shares, bins=_BINS, range=(0, 1), density=True)
        above.stairs(heights, edges, baseline=None, linewidth=1.5, **style_of(row))
        inside = (np.abs(2 * shares - 1)[:, None] <= nominal).mean(0)
        below.plot(nominal, inside - nominal, label=name, **style_of(row))
    above.axhline(1, **GUIDE)
    below.axhline(0, **GUIDE)
    above.set_title("place of targets in their predictions")
    above.set(
        xlabel="predictive probability of less", ylabel="density", xlim=(0, 1), ylim=(0, None)
    )
    below.set_title("coverage of central intervals")
    below.set(xlabel="nominal share", ylabel="observed less nominal", xlim=(0, 1))
    if not scored:
        _say_nothing_drawn(above, "LOO")
    _legend_below(below, below)
    return panels


def plot_fit(comparison: Comparison, *, ax: AxesGiven = None) -> NDArray[np.object_]:
    """Plots the predictions of each model and the targets, a panel for each model.

    With one input it shows mean and two standard deviations of observations over the input, given
    all targets; otherwise targets against their predictions from all other points, with two
    standard deviations. The panel of a model without LOO says so.

    Args:
        comparison: As for :func:`plot_compare`, as are errors.
        ax: Axes to draw in, one for each model in the order of the ranking; None for those of a
            new figure of pyplot.

    Returns:
        The axes, one for each model.
    """
    scores = _scores_of(comparison)
    inputs = {name: _single_input(model) for name, model in comparison.models.items()}
    count = len(inputs)
    is_function = all(x is not None for x in inputs.values())
    columns = 1 if is_function else min(count, 2)
    height = 0.4 + (2.7 if columns == 2 else 4.2) * -(-count // columns)
    panels = panels_for(ax, count, 0.6 + 1.9 * count if is_function else height, columns)
    from matplotlib import rcParams

    ink = rcParams["text.color"]  # black on white, white on black
    targets, scored = comparison.targets.numpy(), scored_in("loo", scores)
    for row, (name, panel) in enumerate(zip(inputs, panels, strict=True)):
        model, style = scores[name], style_of(row)
        panel.set_title(name)
        if name not in scored:
            _say_nothing_drawn(panel, "predictions")
        elif is_function:
            x = cast(Tensor, inputs[name])
            at, mean, deviation = _function(comparison, name, x)
            low, high = mean - _DEVIATIONS * deviation, mean + _DEVIATIONS * deviation
            panel.fill_between(at, low, high, alpha=0.2, lw=0, color=style["color"])
            panel.plot(at, mean, **style)
            points = x.squeeze(-1).cpu()[comparison.rows].numpy()
            panel.plot(points, targets, ".", color=ink, markersize=4, alpha=0.7)
        else:
            mean, deviation = model.loo_mean.numpy(), model.loo_variance.sqrt().numpy()
            panel.errorbar(
                mean, targets, xerr=_DEVIATIONS * deviation, fmt=".", markersize=5,
                elinewidth=0.6, color=style["color"], alpha=min(1.0, 0.15 + 30 / len(targets)),
            )  # fmt: skip
            ends = [min(targets.min(), mean.min()), max(targets.max(), mean.max())]
            panel.plot(ends, ends, color=ink, linewidth=0.8)
        if row % columns == 0:
            panel.set_ylabel("target")
        if row + columns >= count:
            panel.set_xlabel("input" if is_function else "prediction from the others")
    return panels


def _single_input(model: ExactGP) -> Tensor | None:
    """Inputs ``(n, 1)`` of a model of one column, in the user's units, if these are known."""
    inputs = cast(tuple[Tensor, ...], model.train_inputs)
    if len(inputs) != 1 or inputs[0].shape[-1] != 1:
        return None
    # In eval mode BoTorch's models hold their inputs transformed.
    transform = getattr(model, "input_transform", None)
    if transform is None or model.training:
        return inputs[0].detach()
    try:
        return transform.untransform(inputs[0].detach())
    except NotImplementedError:
        return None


@torch.no_grad()
def _function(comparison: Comparison, name: str, x: Tensor) -> tuple[NDArray, NDArray, NDArray]:
    """A grid along one input, and means and deviations of new observations there."""
    model, margin = comparison.models[name], _MARGIN * float(x.max() - x.min())
    grid = torch.linspace(float(x.min()) - margin, float(x.max()) + margin, _GRID).to(x)
    noise = None
    if isinstance(model.likelihood, FixedNoiseGaussianLikelihood):  # of new points unknown
        noise = cast(Any, model.likelihood.noise_covar).noise.mean().expand(_GRID)
    normal = marginal_predictive(model, grid.unsqueeze(-1), noise)
    scale, shift = units_of_targets(model, comparison.units)
    mean = scale.cpu() * normal.mean.cpu().double() + shift.cpu()
    return grid.cpu().numpy(), mean.numpy(), (scale * normal.stddev.double()).cpu().numpy()


def _scores_of(comparison: Comparison) -> Scores:
    if not isinstance(comparison, Comparison):
        raise UnsupportedError(
            "comparison", type(comparison).__name__, "what score_models gives",
            "Models, or the table of compare, are not enough for a plot: use score_models.",
        )  # fmt: skip
    return comparison.scores


def panels_for(
    ax: AxesGiven, count: int, height: float, columns: int = 1, **options: Any
) -> NDArray[np.object_]:
    """The axes given, whose number is checked, or those of a new figure of pyplot.

    A new figure is so many inches high and as wide as matplotlib's settings say.
    """
    with needs_extra("plots"):
        from matplotlib import pyplot, rcParams
        from matplotlib.axes import Axes

    if ax is None:
        lines, width = -(-count // columns), rcParams["figure.figsize"][0]
        options |= {"figsize": (width, height), "layout": "constrained", "squeeze": False}
        panels = pyplot.subplots(lines, columns, **options)[1].ravel()
        for panel in panels[count:]:
            panel.remove()
        return panels[:count]
    given = np.ravel(np.asarray(ax, dtype=object))
    if len(given) != count or not all(isinstance(axes, Axes) for axes in given):
        kinds = ", ".join(dict.fromkeys(type(axes).__name__ for axes in given))
        expected = f"{count} axes of matplotlib"
        raise ArgumentError("ax", f"{len(given)} of type {kinds or 'none'}", expected)
    return given


def style_of(number: int) -> dict[str, Any]:
    """Colour and line of a model by its number: those of the style in use, if one is."""
    from matplotlib import rcParams, rcParamsDefault

    cycle = rcParams["axes.prop_cycle"]
    is_default = cycle == rcParamsDefault["axes.prop_cycle"]
    colours = _COLOURS if is_default else cycle.by_key().get("color", _COLOURS)
    lines = cycle.by_key().get("linestyle", _LINES)
    return {"color": colours[number % len(colours)], "linestyle": lines[number % len(lines)]}


def _say_nothing_drawn(axes: Axes, missing: str) -> None:
    """Writes into empty axes what could not be computed."""
    axes.text(
        0.5, 0.5, f"{missing} could not be computed", transform=axes.transAxes, ha="center",
        va="center", color="gray",
    )  # fmt: skip


def _legend_below(axes: Axes, labelled: Axes) -> None:
    """Draws a legend of the labels of some axes below those at the bottom; none without labels."""
    handles, labels = labelled.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False,
            fontsize=9, ncols=min(len(labels), 3),
        )  # fmt: skip
