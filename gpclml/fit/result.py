"""Results of fits."""

from __future__ import annotations

import html
from dataclasses import dataclass, field, fields
from typing import Literal

from gpclml.inference import Road

Problem = Literal[
    "", "limit", "stopped", "abnormal", "constant", "bound", "noise", "runaway", "units"
]
"""What is wrong with a fit; empty if nothing is."""


class FitWarning(RuntimeWarning):
    """A fit failed, or ended where it is of little use.

    Examples:
        >>> import warnings
        >>> from gpclml import FitWarning
        >>> warnings.simplefilter("error", FitWarning)  # a fit of little use ends the program
    """


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a fit did; methods that have more to say return a subclass.

    Attributes:
        objective: What the fit maximized, at the parameters that it kept; nats per point.
        history: The objective at each step or epoch, for the held-out points or the batch of that
            step.
        seconds: Wall time of the whole fit.
        message: What is wrong with the fit, and what to do; empty if nothing is.
        problem: The problem in one word: "limit" if the limit of steps came before convergence,
            "stopped" if a value was not finite, "abnormal" if a line search ended before an
            optimum, "constant" if all leave-one-out predictions are the same, "bound" if a
            parameter is at a bound and predictions are worse than the mean, "noise" if the noise
            is at its lower bound with fewer than ten points for each hyperparameter, though the
            points are not predicted from each other almost exactly. Such a fit may be right, for
            targets without noise; more often its intervals are too narrow. "runaway" if an
            objective that does not score first points has left the range of the targets: an
            outputscale above 1,000 times their variance, or a constant mean more than 30 of their
            deviations off. "units" if a network's outputs and its targets are of different sizes,
            or those of several outputs are.
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

    def _repr_html_(self) -> str:
        shown = [(f.name, str(getattr(self, f.name))) for f in fields(self) if f.repr]
        rows = [f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in shown]
        return f"<p>{type(self).__name__}</p><table>{''.join(rows)}</table>"


@dataclass(frozen=True, kw_only=True)
class MLLFitResult(FitResult):
    """What :func:`gpclml.fit.fit_mll` did.

    ``objective`` is computed with fixed held-out points and summed over a batch; ``history``
    belongs to the attempt that was kept.

    Attributes:
        attempts: The objective that each attempt reached; NaN for one that failed.
        starts: Number of line searches in the kept attempt.
        road: Which way evaluations of the objective went, and why not a faster one; of a sum that
            of one member. None where the objective or the model does not say.
    """

    attempts: list[float]
    starts: int = 1
    road: Road | None = None
