"""The objectives of the benchmark by name."""

from __future__ import annotations

from collections.abc import Callable

from gpclml.conditioning import Conditioning, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import UnknownNameError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["DEFAULT_HELD_OUT", "make_objective", "objective_names", "uses_held_out"]

DEFAULT_HELD_OUT = 0.1
"""The share for which ``"clml"`` leaves the choice of held-out points to the library."""

_CONDITIONINGS: dict[str, Callable[[float], Conditioning | None]] = {
    "clml": lambda share: None if share == DEFAULT_HELD_OUT else RandomHoldout(share),
    "lml": lambda share: LastPoints(m=0),
    "loo": lambda share: LeaveOneOut(),
}


def objective_names() -> tuple[str, ...]:
    """Names that ``make_objective`` knows, sorted."""
    return tuple(sorted(_CONDITIONINGS))


def uses_held_out(name: str) -> bool:
    """Whether the objective depends on the held-out share."""
    return name == "clml"


def make_objective(
    name: str, model: GPRegression, *, held_out: float | None = None, seed: int = 0
) -> ConditionalMarginalLogLikelihood:
    """The objective of that name for a model; all share one code path and differ in blocks.

    - ``"lml"``: the log marginal likelihood, every point held out;
    - ``"clml"``: the conditional log marginal likelihood. At a held-out share of 0.1 the
      library chooses: a fresh tenth a step for Adam, ten fixed folds for L-BFGS. At another
      share, that share at random, fresh for Adam and drawn once for L-BFGS;
    - ``"loo"``: the leave-one-out log predictive density.

    Args:
        name: One of ``objective_names()``.
        model: A model in train mode.
        held_out: Share of the training points that ``"clml"`` holds out; 0.1 if None.
        seed: Seed of the draws of held-out points.

    Raises:
        UnknownNameError: No such objective.
    """
    if name not in _CONDITIONINGS:
        raise UnknownNameError("objective", name, _CONDITIONINGS)
    conditioning = _CONDITIONINGS[name](DEFAULT_HELD_OUT if held_out is None else held_out)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)
