"""Plots of a comparison: criteria and learning curves; and what all plots share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from gpytorch.models import ExactGP

from gpclml._utils.extras import needs_extra
from gpclml.errors import ArgumentError, UnknownNameError, UnsupportedError
from gpclml.evaluation.comparison import Comparison
from gpclml.evaluation.model_scores import CRITERIA, Criterion, difference_in, scored_in, value_of
from gpclml.evaluation.ranking import score_models

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    AxesGiven = Axes | Sequence[Axes] | NDArray[np.object_] | None

__all__ = [
    "GUIDE",
    "as_comparison",
    "axes_for",
    "ink",
    "legend_below",
    "plot_compare",
    "plot_learning_curves",
    "say_nothing_drawn",
    "set_scale_of_nats",
    "style_of",
]

_NEAR, _FAR = 10.0, 100.0  # nats

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

_WINDOWS = 40  # evenly spaced in the logarithm of the number of points
_REACH = 3  # times what the first model learns; the rest of a worse one is cut off
_BELOW = 0.25  # of the distance of two models: a difference below its score


def plot_compare(
    comparison: Comparison | Mapping[str, ExactGP],
    criterion: Criterion | None = None,
    *,
    ax: Axes | None = None,
    **options: Any,
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
        comparison: Result of :func:`score_models`, or models, for which it is called.
        criterion: ``"lml"``, ``"clml"`` or ``"loo"``; None for the one that ranks.
        ax: Axes to draw in; None for those of a new figure of pyplot.
        **options: Options of :func:`score_models`, if models are given.

    Returns:
        The axes.

    Raises:
        UnsupportedError: If ``comparison`` is neither a comparison nor models.
        UnknownNameError: If there is no such criterion.
        ArgumentError: If there are several axes, or options are given with a comparison.
    """
    compared = as_comparison(comparison, options)
    criterion = compared.rank_by if criterion is None else criterion
    if criterion not in CRITERIA:
        raise UnknownNameError("criterion", criterion, CRITERIA)
    axes = axes_for(ax, 1, 1.2 + 0.4 * len(compared.scores))[0]
    scored = scored_in(criterion, compared.scores)
    given = f", given {compared.m} of {len(compared.targets)}" if criterion == "clml" else ""
    axes.set_title(f"{_LABELS[criterion]}{given}")
    axes.set_yticks(range(len(compared.scores)), list(compared.scores))
    axes.set_ylim(len(compared.scores) - 0.5, -0.5)
    if not scored:
        say_nothing_drawn(axes, criterion.upper())
        return axes
    first = compared.scores[scored[0]]
    differences = {name: difference_in(criterion, compared.scores[name], first) for name in scored}
    best = max(one.value for one in differences.values())
    errors = compared.table.get(f"{criterion}_se")  # the LML has none
    for place, name in enumerate(compared.scores):
        if name not in scored:
            continue
        value, paired = differences[name].value, differences[name].standard_error
        colour = style_of(place)["color"]
        axes.errorbar(
            value, place, xerr=None if errors is None else errors[name], fmt="o", color=colour,
            capsize=3, markerfacecolor=colour if value == best else "none",
        )  # fmt: skip
        if name != scored[0] and not math.isnan(paired):
            triangle = {"fmt": "^", "color": "gray", "markersize": 4, "capsize": 2}
            axes.errorbar(value, place + _BELOW, xerr=paired, **triangle)
    axes.axvline(0, **GUIDE)
    axes.margins(x=0.08)
    set_scale_of_nats(axes, "x", max(abs(one.value) for one in differences.values()))
    value = f"{value_of(criterion, first):.1f}".replace("-", "\N{MINUS SIGN}")
    axes.set_xlabel(f"nats from the {value} of {scored[0]}")
    return axes


def plot_learning_curves(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    ax: AxesGiven = None,
    **options: Any,
) -> NDArray[np.object_]:
    r"""Plots learning curves: log densities of the next point, and their sums, in two panels.

    The upper panel shows :math:`\log p(y_i \mid y_{<i})` against i, the mean over orderings and
    over windows on a logarithmic scale. The lower one shows its sum less that of the first-ranked
    model, which ends at the difference in LML; for a single model its own sum. The CLML counts the
    points after the dotted line at m. Bands are two standard errors of the mean over orderings. A
    model far worse than the first is cut off in the upper panel; the scale of the lower one is then
    logarithmic beyond 10 nats. Models whose curves could not be computed are left out.

    Args:
        comparison: As for :func:`plot_compare`, as are options and errors.
        ax: Two axes to draw in; None for those of a new figure of pyplot.
        **options: Options of :func:`score_models`, if models are given.

    Returns:
        The two axes.
    """
    compared = as_comparison(comparison, options)
    places = {name: place for place, name in enumerate(compared.scores)}
    curves = {
        name: scores.curves.numpy()
        for name, scores in compared.scores.items()
        if not bool(scores.curves.isnan().any())
    }
    panels = axes_for(ax, 2, 5.6, sharex=True)
    above, below = panels
    if not curves:
        say_nothing_drawn(above, "learning curves")
        return panels
    count = len(compared.targets)
    edges = np.unique(np.geomspace(1, count + 1, _WINDOWS + 1).round().astype(np.int64))
    middles = np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1, 1))
    first = next(iter(curves.values()))
    base = first if len(curves) > 1 else 0.0
    largest = max(abs(float((terms - base).sum(1).mean())) for terms in curves.values())
    set_scale_of_nats(below, "y", largest)
    for name, terms in curves.items():
        means = np.add.reduceat(terms, edges[:-1] - 1, axis=1) / np.diff(edges)
        _line(above, middles, means, places[name], name)
        if terms is not base:
            _line(below, np.arange(1, count + 1), (terms - base).cumsum(1), places[name], name)
    above.set(ylabel="nats a point", ylim=_limits(list(curves.values()), edges))
    above.set_title("log density of the next point")
    what = f"log evidence less that of {next(iter(curves))}" if len(curves) > 1 else "log evidence"
    below.set_title(what)
    below.axhline(0, **GUIDE)
    below.set(xlabel="points", ylabel="nats")
    for panel in (above, below):
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axvline(max(compared.m, 1), linestyle=":", **GUIDE | {"linewidth": 1})
    above.text(
        max(compared.m, 1), 0.03, f"m = {compared.m} ", transform=above.get_xaxis_transform(),
        ha="right", fontsize="small", color="gray",
    )  # fmt: skip
    legend_below(below, *above.get_legend_handles_labels())
    return panels


def _line(axes: Axes, x: NDArray, values: NDArray, place: int, name: str) -> None:
    mean, count, style = values.mean(0), len(values), style_of(place)
    axes.plot(x, mean, label=name, **style)
    if count > 1:
        band = 2 * values.std(0, ddof=1) / np.sqrt(count)
        axes.fill_between(
            x, mean - band, mean + band, color=style_of(place)["color"], alpha=0.2, lw=0
        )


def _limits(curves: Sequence[NDArray], edges: NDArray[np.int64]) -> tuple[float, float]:
    """Limits that show most means, and the first model in detail if another is far worse."""
    means = [np.add.reduceat(one.mean(0), edges[:-1] - 1) / np.diff(edges) for one in curves]
    every, top = np.concatenate(means), max(float(one.max()) for one in means)
    reach = _REACH * max(float(np.ptp(means[0])), 0.5)
    low = max(float(np.quantile(every, 0.02)), top - reach)
    margin = 0.1 * max(top - low, 1e-3)
    return low - margin, top + margin


def as_comparison(comparison: object, options: Mapping[str, Any]) -> Comparison:
    """The comparison itself, or that of models, which are scored."""
    if isinstance(comparison, Comparison):
        if options:
            suggestion = "Give them to score_models."
            raise ArgumentError(
                "options", ", ".join(options), "none beside a comparison", suggestion
            )
        return comparison
    if not isinstance(comparison, Mapping):
        raise UnsupportedError(
            "comparison", type(comparison).__name__, "what score_models gives, or models by name",
            "The table of compare is not enough for a plot: use score_models.",
        )  # fmt: skip
    return score_models(comparison, **options)


def axes_for(
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
    if len(given) != count or not all(isinstance(one, Axes) for one in given):
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in given))
        expected = f"{count} axes of matplotlib"
        raise ArgumentError("ax", f"{len(given)} of type {kinds or 'none'}", expected)
    return given


def style_of(place: int) -> dict[str, Any]:
    """Colour and line of a model by its place: those of the style in use, if one is."""
    from matplotlib import rcParams, rcParamsDefault

    cycle = rcParams["axes.prop_cycle"]
    own = cycle == rcParamsDefault["axes.prop_cycle"]
    colours = _COLOURS if own else cycle.by_key().get("color", _COLOURS)
    lines = cycle.by_key().get("linestyle", _LINES)
    return {"color": colours[place % len(colours)], "linestyle": lines[place % len(lines)]}


def ink() -> str:
    """The colour of text in the style in use: black on white, white on black."""
    from matplotlib import rcParams

    return cast(str, rcParams["text.color"])


def set_scale_of_nats(axes: Axes, which: Literal["x", "y"], largest: float) -> None:
    """Makes the scale logarithmic beyond 10 nats if the largest difference is above 100."""
    if largest > _FAR:
        set_scale = axes.set_xscale if which == "x" else axes.set_yscale
        set_scale("symlog", linthresh=_NEAR)


def say_nothing_drawn(axes: Axes, missing: str) -> None:
    """Writes into empty axes what could not be computed."""
    axes.text(
        0.5, 0.5, f"{missing} could not be computed", transform=axes.transAxes, ha="center",
        va="center", color="gray",
    )  # fmt: skip


def legend_below(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Draws a legend below the label of the lower axis; none without labels."""
    if not labels:
        return
    axes.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False,
        fontsize="small", ncols=min(len(labels), 3),
    )  # fmt: skip
