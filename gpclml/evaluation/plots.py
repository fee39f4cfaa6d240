"""Plots of a comparison: criteria and learning curves; and what all plots share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gpytorch.models import ExactGP

from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.evaluation.comparison import Comparison
from gpclml.evaluation.criteria import CRITERIA, Criterion, difference_in, scored_in, value_of
from gpclml.evaluation.ranking import score_models

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = [
    "GUIDE",
    "as_comparison",
    "figure_and_axes",
    "legend_below",
    "plot_compare",
    "plot_learning_curves",
    "say_nothing_drawn",
    "set_scale_of_nats",
    "set_title",
]

# Inches. Letters of 10 points are legible on a page 390 pixels wide, and not large on a wide one.
_WIDTH = 5.6

_NEAR, _FAR = 10.0, 100.0  # nats

GUIDE: dict[str, Any] = {"color": "gray", "linewidth": 0.8, "zorder": 0}
"""Style of the lines that values are compared with."""

_LABELS = {
    "lml": "log marginal likelihood (filled: the best)",
    "clml": "conditional log marginal likelihood",
    "loo": "leave-one-out",
}

_WINDOWS = 40  # evenly spaced in the logarithm of the number of points
_REACH = 3  # times what the first model learns; the rest of a worse one is cut off


def plot_compare(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    axes: Sequence[Axes] | None = None,
    **options: Any,
) -> Figure:
    """Plots each criterion in a panel: differences from the first-ranked model and their errors.

    Errors are one standard error of paired differences, over points for LOO and over orderings for
    the CLML. The best model by a criterion is filled. A criterion prefers models to the right of
    the line to the first-ranked one: then the criteria disagree. If a model is more than 100 nats
    off, the scale is logarithmic beyond 10 nats. A model whose criterion could not be computed has
    no dot; if it is the first-ranked, the line is that of the next model.

    Args:
        comparison: Result of :func:`score_models`, or models, for which it is called.
        axes: Three axes to draw in, for LML, CLML and LOO.
        **options: Options of :func:`score_models`, if models are given.

    Returns:
        The figure, without a window; save it with ``savefig``.

    Raises:
        UnsupportedError: If ``comparison`` is neither a comparison nor models.
        ArgumentError: If there are not three axes, or options are given with a comparison.
    """
    compared = as_comparison(comparison, options)
    height = 1.2 + 3 * (0.55 + 0.25 * len(compared.scores))
    figure, panels = figure_and_axes(axes, (3, 1), height)
    for criterion, panel in zip(CRITERIA, panels, strict=True):
        _draw(panel, compared, criterion)
    return figure


def _draw(axes: Axes, compared: Comparison, criterion: Criterion) -> None:
    scored = scored_in(criterion, compared.scores)
    given = f", given {compared.m} of {len(compared.targets)}" if criterion == "clml" else ""
    set_title(axes, f"{_LABELS[criterion]}{given}")
    axes.set_yticks(range(len(compared.scores)), list(compared.scores))
    axes.set_ylim(len(compared.scores) - 0.5, -0.5)
    if not scored:
        say_nothing_drawn(axes, criterion.upper())
        return
    reference = compared.scores[scored[0]]
    differences = {
        place: difference_in(criterion, one, reference)
        for place, (name, one) in enumerate(compared.scores.items())
        if name in scored
    }
    best = max(one.value for one in differences.values())
    for place, one in differences.items():
        error = 0.0 if math.isnan(one.standard_error) else one.standard_error
        axes.errorbar(
            one.value, place, xerr=error, fmt="o", color=f"C{place}", capsize=3,
            markerfacecolor=f"C{place}" if one.value == best else "white",
        )  # fmt: skip
    axes.axvline(0, **GUIDE)
    axes.margins(x=0.08)
    set_scale_of_nats(axes, "x", max(abs(one.value) for one in differences.values()))
    value = f"{value_of(criterion, reference):.1f}".replace("-", "\N{MINUS SIGN}")
    axes.set_xlabel(f"nats from the {value} of {scored[0]}")


def plot_learning_curves(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    axes: Sequence[Axes] | None = None,
    **options: Any,
) -> Figure:
    r"""Plots learning curves: log densities of the next point, and their sums, in two panels.

    The upper panel shows :math:`\log p(y_i \mid y_{<i})` against i, the mean over orderings and
    over windows on a logarithmic scale. The lower one shows its sum less that of the first-ranked
    model, which ends at the difference in LML; for a single model its own sum. The CLML counts the
    points after the dotted line at m. Bands are two standard errors of the mean over orderings. A
    model far worse than the first is cut off in the upper panel; the scale of the lower one is then
    logarithmic beyond 10 nats. Models whose curves could not be computed are left out.

    Args:
        comparison: As for :func:`plot_compare`, as are options, result and errors.
        axes: Two axes to draw in.
        **options: Options of :func:`score_models`, if models are given.
    """
    compared = as_comparison(comparison, options)
    places = {name: place for place, name in enumerate(compared.scores)}
    curves = {
        name: scores.curves.numpy()
        for name, scores in compared.scores.items()
        if not bool(scores.curves.isnan().any())
    }
    figure, (above, below) = figure_and_axes(axes, (2, 1), 5.6, sharex=True)
    if not curves:
        say_nothing_drawn(above, "learning curves")
        return figure
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
    set_title(above, "log density of the next point")
    what = f"log evidence less that of {next(iter(curves))}" if len(curves) > 1 else "log evidence"
    set_title(below, what)
    below.axhline(0, **GUIDE)
    below.set(xscale="log", xlabel="points", ylabel="nats")
    below.xaxis.set_major_formatter("{x:g}")
    for panel in (above, below):
        panel.axvline(max(compared.m, 1), linestyle=":", **GUIDE | {"linewidth": 1})
    above.text(
        max(compared.m, 1), 0.03, f"m = {compared.m} ", transform=above.get_xaxis_transform(),
        ha="right", fontsize="small", color="dimgray",
    )  # fmt: skip
    legend_below(below, *above.get_legend_handles_labels())
    return figure


def _line(axes: Axes, x: NDArray, values: NDArray, place: int, name: str) -> None:
    mean, count = values.mean(0), len(values)
    axes.plot(x, mean, color=f"C{place}", label=name)
    if count > 1:
        band = 2 * values.std(0, ddof=1) / np.sqrt(count)
        axes.fill_between(x, mean - band, mean + band, color=f"C{place}", alpha=0.2, lw=0)


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
            "The table of compare has not all that is drawn: use score_models.",
        )  # fmt: skip
    return score_models(comparison, **options)


def figure_and_axes(
    axes: Axes | Sequence[Axes] | None, shape: tuple[int, int], height: float, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A new figure with axes of a shape, or the axes given, whose number is checked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if axes is None:
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        return figure, list(figure.subplots(*shape, squeeze=False, **options).flat)
    given = list(np.ravel(np.asarray(axes, dtype=object)))
    if len(given) != shape[0] * shape[1]:
        raise ArgumentError("axes", len(given), f"{shape[0] * shape[1]}")
    return given[0].get_figure(root=True), given


def set_title(axes: Axes, title: str) -> None:
    """Writes a title above axes, on the left."""
    axes.set_title(title, loc="left", fontsize="medium")


def set_scale_of_nats(axes: Axes, which: Literal["x", "y"], largest: float) -> None:
    """Makes the scale logarithmic beyond 10 nats if the largest difference is above 100."""
    if largest > _FAR:
        set_scale = axes.set_xscale if which == "x" else axes.set_yscale
        set_scale("symlog", linthresh=_NEAR)


def say_nothing_drawn(axes: Axes, missing: str) -> None:
    """Writes into empty axes what could not be computed."""
    axes.text(
        0.5, 0.5, f"{missing} could not be computed", transform=axes.transAxes, ha="center",
        va="center", color="dimgray",
    )  # fmt: skip


def legend_below(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Draws a legend below the label of the lower axis; none without labels."""
    if not labels:
        return
    axes.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False,
        fontsize="small", ncols=min(len(labels), 3),
    )  # fmt: skip
