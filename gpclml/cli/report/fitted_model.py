"""How a model of a report was fitted."""

from __future__ import annotations

from dataclasses import dataclass

from gpclml.cli.report.recipes import Recipe

__all__ = ["FittedModel"]


@dataclass(frozen=True)
class FittedModel:
    """How a model of a report was fitted.

    Attributes:
        recipe: What it was fitted by.
        seconds: Wall time of the fit.
        note: A sentence on the fit, or empty.
        problem: What is wrong with the fit, or empty.
    """

    recipe: Recipe
    seconds: float
    note: str = ""
    problem: str = ""
