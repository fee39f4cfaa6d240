"""The figures of a page, each as an image in its text, with a sentence on how to read it."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpclml.evaluation import (
    Comparison,
    plot_calibration,
    plot_compare,
    plot_fit,
    plot_learning_curves,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PageFigure", "page_figures"]

_DOTS_PER_INCH = 200  # 1120 pixels wide: sharp on a phone and on a wide screen


@dataclass(frozen=True)
class PageFigure:
    """A figure of a page.

    Attributes:
        title: What it is of.
        reading: How to read it.
        address: The image as a data URI.
    """

    title: str
    reading: str
    address: str


def page_figures(comparison: Comparison, one_input: bool) -> tuple[PageFigure, ...]:
    """What the criteria say, how models learn, how calibrated they are, and how they fit.

    Args:
        comparison: Of the models.
        one_input: Whether they have a single input.
    """
    drawn = (
        (
            "What the criteria say",
            "Each panel is a criterion and each dot a model, as far from the first-ranked as the "
            "criterion puts it: a dot clearly to the right of the line is a model that this "
            "criterion prefers to it.",
            plot_compare(comparison),
        ),
        (
            "How the models learn",
            "Above, how well the next row is predicted from those before it (higher is better); "
            "below, what a model gains on the first-ranked in all rows so far: the last value is "
            "the difference in LML, and what comes before the dotted line is not in the CLML.",
            plot_learning_curves(comparison),
        ),
        (
            "Whether their intervals hold",
            "Lines should stay in the grey band: below it in the lower panel, or high at both ends "
            "in the upper one, a model is surer of its predictions than it should be.",
            plot_calibration(comparison),
        ),
        (
            "How they fit the training rows",
            "Mean and two standard deviations of new observations along the input, with the rows."
            if one_input
            else "The target of each row against its prediction from all other rows, with two "
            "standard deviations: dots should lie along the line.",
            plot_fit(comparison),
        ),
    )
    return tuple(PageFigure(title, reading, _address(figure)) for title, reading, figure in drawn)


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
