"""Figures as files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gpclml.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure", "save_figure"]

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


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Draws a figure in an image file.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=_DOTS_AN_INCH)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be drawn ({error}). Name another image file.") from error
