"""Figures as files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpclml.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's and two of Tol's, which colour-blind readers tell apart too. The first is for what
# is ours.
PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999933",
    "#882255",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DOTS_AN_INCH = 150


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """A figure that no window and no global state knows of.

    Args:
        width: Inches.
        height: Inches.
        **options: As for ``matplotlib.figure.Figure``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class PaletteFigure(Figure):
        def add_subplot(self, *args: Any, **kwargs: Any) -> Any:
            axes = super().add_subplot(*args, **kwargs)
            axes.set_prop_cycle(color=PALETTE)
            return axes

    figure = PaletteFigure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    return figure


def bare(axes: Axes) -> None:
    """Axes with faint horizontal lines and no frame above and to the right."""
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(
    figure: Figure, styles: Mapping[tuple[str, str], Mapping[str, Any]], columns: int
) -> None:
    """A legend of lines by the two names of each, above all panels."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **style) for style in styles.values()]
    labels = [", ".join(map(_in_words, names)) for names in styles]
    figure.legend(lines, labels, loc="outside upper center", ncols=columns, frameon=False)


_WORDS = {
    "lml": "LML", "clml": "CLML", "loo": "leave-one-out", "rbf": "RBF", "matern": "Matern",
    "rq": "rational quadratic", "sm": "spectral mixture", "single-task": "SingleTaskGP",
    "deep": "deep kernel", "deep-bottleneck": "deep kernel (bottleneck)",
}  # fmt: skip


def _in_words(label: str) -> str:
    """A label of kernel or objective as people say it: ``clml held_out=0.2`` is CLML, m = 0.8 n."""
    name, *options = label.split()
    if name not in _WORDS:
        return label
    said = [
        f"m = {1 - float(value):.2g} n" if key == "held_out" else f"{key} {value}"
        for key, _, value in (option.partition("=") for option in options)
    ]
    return ", ".join([_WORDS[name], *said])


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Draws a figure in an image file.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DOTS_AN_INCH)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be drawn ({error}). Name another image file.") from error
