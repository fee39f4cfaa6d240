"""The result of a fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["FitResult", "FitWarning", "Problem"]

Problem = Literal["", "limit", "stopped", "abnormal", "constant", "bound"]
"""What is wrong with a fit; empty if nothing is."""


class FitWarning(RuntimeWarning):
    """A fit failed, or ended where it is of little use."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a fit did; methods that have more to say return a subclass.

    Attributes:
        objective: What the fit maximized, at the parameters that it kept; nats per point.
        history: The same at each step or epoch; where held-out points or batches are redrawn, of
            those of the step.
        seconds: Wall time of everything.
        message: What is wrong with the fit, and what to do; empty if nothing is.
        problem: The same in a word: "limit" if its steps were spent before it converged, "stopped"
            if it met values it could not use, "abnormal" if a line search ended before an
            optimum, "constant" if points predicted from all others get all the same prediction,
            "bound" if a parameter is at a bound and predictions are worse than the mean.
    """

    objective: float
    history: list[float] = field(repr=False)
    seconds: float
    message: str = ""
    problem: Problem = ""

    @property
    def converged(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return not self.problem
