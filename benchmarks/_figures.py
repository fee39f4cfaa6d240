"""Figures as files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpclml.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bare", "legend_above", "new_figure", "save_figure"]

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

    figure = Figure(figsize=(width, height), **options)
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
    labels = [", ".join(names) for names in styles]
    figure.legend(lines, labels, loc="outside upper center", ncols=columns, frameon=False)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Draws a figure in an image file.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DOTS_AN_INCH)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be drawn ({error}). Name another image file.") from error
