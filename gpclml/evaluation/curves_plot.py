"""How models learn: the density of the next point, and the evidence that adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gpytorch.models import ExactGP

from gpclml.evaluation._figures import (
    as_comparison,
    colour,
    figure_and_axes,
    legend_below,
    say_nothing_drawn,
    set_scale_of_nats,
)
from gpclml.evaluation.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["plot_learning_curves"]

_WINDOWS = 40
_REACH = 3  # of what the first model learns: the rest of a worse one is cut off


def plot_learning_curves(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    axes: Sequence[Axes] | None = None,
    **options: Any,
) -> Figure:
    r"""Two panels: the next point's log density, and the sum of it compared with the first model.

    Above :math:`\log p(y_i \mid y_{<i})` against i, the mean over orderings and over windows of a
    logarithmic scale. Below the sum of what a model gains on the first-ranked, whose last value is
    the difference in LML; of a single model its own sum. From the dotted line on, at m, the CLML
    counts. Bands are two standard errors of the mean over orderings. A model far worse than the
    first is cut off above; below the scale is then logarithmic beyond 10 nats. A model whose curves
    could not be computed is left out.

    Args:
        comparison: What :func:`score_models` gives, or models, which it is then called with.
        axes: Two axes to draw in.
        **options: Of :func:`score_models`, with models.

    Returns:
        The figure, of no window; write it with ``savefig``.

    Raises:
        UnsupportedError: If matplotlib is not installed, or this is no comparison.
        ArgumentError: If there are other than two axes, or options beside a comparison.
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
    edges = _windows(count)
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
    above.set_title("log density of the next point", loc="left", fontsize="medium")
    what = f"log evidence less that of {next(iter(curves))}" if len(curves) > 1 else "log evidence"
    below.set_title(what, loc="left", fontsize="medium")
    below.axhline(0, color="gray", linewidth=0.8, zorder=0)
    below.set(xscale="log", xlabel="points", ylabel="nats")
    below.xaxis.set_major_formatter("{x:g}")
    for panel in (above, below):
        panel.axvline(max(compared.m, 1), color="gray", linestyle=":", linewidth=1, zorder=0)
    above.text(
        max(compared.m, 1), 0.03, f"m = {compared.m} ", transform=above.get_xaxis_transform(),
        ha="right", fontsize="small", color="dimgray",
    )  # fmt: skip
    legend_below(below, *above.get_legend_handles_labels())
    return figure


def _windows(count: int) -> NDArray[np.int64]:
    """Edges of windows of the numbers 1 to count, evenly spaced in their logarithm."""
    edges = np.geomspace(1, count + 1, _WINDOWS + 1).round().astype(np.int64)
    return np.unique(edges)


def _line(axes: Axes, x: NDArray, values: NDArray, place: int, name: str) -> None:
    mean, count = values.mean(0), len(values)
    axes.plot(x, mean, color=colour(place), label=name)
    if count > 1:
        band = 2 * values.std(0, ddof=1) / np.sqrt(count)
        axes.fill_between(x, mean - band, mean + band, color=colour(place), alpha=0.2, lw=0)


def _limits(curves: Sequence[NDArray], edges: NDArray[np.int64]) -> tuple[float, float]:
    """What shows most of all means, and the first model well however bad another is."""
    means = [np.add.reduceat(one.mean(0), edges[:-1] - 1) / np.diff(edges) for one in curves]
    every, top = np.concatenate(means), max(float(one.max()) for one in means)
    reach = _REACH * max(float(np.ptp(means[0])), 0.5)
    low = max(float(np.quantile(every, 0.02)), top - reach)
    margin = 0.1 * max(top - low, 1e-3)
    return low - margin, top + margin
