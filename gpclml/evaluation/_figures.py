"""Figures without a window or global state, and the parts that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.evaluation.comparison import Comparison
from gpclml.evaluation.ranking import score_models

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "as_comparison",
    "colour",
    "figure_and_axes",
    "legend_below",
    "say_nothing_drawn",
    "set_scale_of_nats",
]

# Inches. Letters of 10 points are legible on a page 390 pixels wide, and not large on a wide one.
_WIDTH = 5.6
_NEAR, _FAR = 10.0, 100.0  # nats


def as_comparison(comparison: object, options: Mapping[str, Any]) -> Comparison:
    """A comparison as it is, or that of models."""
    if isinstance(comparison, Comparison):
        if options:
            mend = "Give them to score_models."
            raise ArgumentError("options", ", ".join(options), "none beside a comparison", mend)
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
    """A new figure with axes of this shape, or those given, which must be as many.

    Raises:
        ArgumentError: There are other than so many axes.
    """
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


def colour(place: int) -> str:
    """Of the model in this place of the ranking, the same in all figures."""
    return f"C{place % 10}"


def set_scale_of_nats(axes: Axes, which: Literal["x", "y"], largest: float) -> None:
    """Logarithmic beyond 10 nats where the largest difference is more than 100."""
    if largest > _FAR:
        set_scale = axes.set_xscale if which == "x" else axes.set_yscale
        set_scale("symlog", linthresh=_NEAR)


def say_nothing_drawn(axes: Axes, missing: str) -> None:
    """A text in the middle of axes in which nothing is drawn."""
    axes.text(
        0.5, 0.5, f"{missing} could not be computed", transform=axes.transAxes, ha="center",
        va="center", color="dimgray",
    )  # fmt: skip


def legend_below(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend under the label of the lower axis, where it hides nothing; none for no labels."""
    if not labels:
        return
    axes.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False,
        fontsize="small", ncols=min(len(labels), 3),
    )  # fmt: skip
