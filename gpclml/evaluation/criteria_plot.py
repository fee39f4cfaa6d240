"""The criteria side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpytorch.models import ExactGP

from gpclml.evaluation._criteria import CRITERIA, Criterion, difference_in, scored_in, value_of
from gpclml.evaluation._figures import (
    as_comparison,
    colour,
    figure_and_axes,
    say_nothing_drawn,
    set_scale_of_nats,
)
from gpclml.evaluation.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_compare"]

_LABELS = {
    "lml": "log marginal likelihood (filled: the best)",
    "clml": "conditional log marginal likelihood",
    "loo": "leave-one-out",
}


def plot_compare(
    comparison: Comparison | Mapping[str, ExactGP],
    *,
    axes: Sequence[Axes] | None = None,
    **options: Any,
) -> Figure:
    """A panel a criterion: how far each model is from the first-ranked, with one standard error.

    Errors are those of paired differences: over points for LOO, over orderings for the CLML. The
    best model by a criterion is filled. A model to the right of the line is preferred by that
    criterion to the one that ranks first: then the criteria disagree. Where a model is more than
    100 nats off, the scale is logarithmic beyond 10 nats. A model whose criterion could not be
    computed has no dot; if that is the first, the line is the next one's.

    Args:
        comparison: What :func:`score_models` gives, or models, which it is then called with.
        axes: Three axes to draw in, for LML, CLML and LOO.
        **options: Of :func:`score_models`, with models.

    Returns:
        The figure, of no window; write it with ``savefig``.

    Raises:
        UnsupportedError: If matplotlib is not installed, or this is no comparison.
        ArgumentError: If there are other than three axes, or options beside a comparison.
    """
    compared = as_comparison(comparison, options)
    height = 1.2 + 3 * (0.55 + 0.25 * len(compared.scores))
    figure, panels = figure_and_axes(axes, (3, 1), height)
    for criterion, panel in zip(CRITERIA, panels, strict=True):
        _draw(panel, compared, criterion)
    return figure


def _draw(axes: Axes, compared: Comparison, criterion: Criterion) -> None:
    scored = scored_in(criterion, compared.scores)
    axes.set_title(_title(compared, criterion), loc="left", fontsize="medium")
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
            one.value, place, xerr=error, fmt="o", color=colour(place), capsize=3,
            markerfacecolor=colour(place) if one.value == best else "white",
        )  # fmt: skip
    axes.axvline(0, color="gray", linewidth=0.8, zorder=0)
    axes.margins(x=0.08)
    set_scale_of_nats(axes, "x", max(abs(one.value) for one in differences.values()))
    value = f"{value_of(criterion, reference):.1f}".replace("-", "\N{MINUS SIGN}")
    axes.set_xlabel(f"nats from the {value} of {scored[0]}")


def _title(compared: Comparison, criterion: Criterion) -> str:
    given = f", given {compared.m} of {len(compared.targets)}" if criterion == "clml" else ""
    return f"{_LABELS[criterion]}{given}"
