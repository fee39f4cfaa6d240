"""The objectives of the benchmark by name."""

from __future__ import annotations

from collections.abc import Callable

from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Generator, Tensor

from benchmarks.uci.subset_likelihood import SubsetMarginalLogLikelihood
from gpclml.conditioning import (
    Conditioning,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
)
from gpclml.errors import UnknownNameError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["DEFAULT_HELD_OUT", "make_objective", "objective_names", "uses_held_out"]

DEFAULT_HELD_OUT = 0.1
"""The share for which ``"clml"`` leaves the choice of held-out points to the library."""

_ORDERINGS = 5


class _ShareOrderings(Conditioning):
    """The tails of five random orderings, a share of the points each.

    Args:
        share: The share, in (0, 1); at least one point.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def _blocks(self, rows: Tensor, num_data: int, generator: Generator | None) -> list[Tensor]:
        n = rows.numel()
        orderings = RandomOrderings(_ORDERINGS, m=n - max(1, round(self.share * n)))
        return orderings._blocks(rows, num_data, generator)


# Of the held-out share and a seed.
_CONDITIONINGS: dict[str, Callable[[float, int], Conditioning | None]] = {
    "clml": lambda share, seed: None if share == DEFAULT_HELD_OUT else RandomHoldout(share),
    "clml-fixed": lambda share, seed: RandomHoldout(share, seed=seed),
    "clml-folds": lambda share, seed: KFold(10),
    "clml-orderings": lambda share, seed: _ShareOrderings(share),
    "lml": lambda share, seed: LastPoints(m=0),
    "loo": lambda share, seed: LeaveOneOut(),
}
_SUBSET = "lml-subset"
_WITH_SHARE = ("clml", "clml-fixed", "clml-orderings", _SUBSET)


def objective_names() -> tuple[str, ...]:
    """Names that ``make_objective`` knows, sorted."""
    return tuple(sorted((*_CONDITIONINGS, _SUBSET)))


def uses_held_out(name: str) -> bool:
    """Whether the objective depends on the held-out share."""
    return name in _WITH_SHARE


def make_objective(
    name: str, model: GPRegression, *, held_out: float | None = None, seed: int = 0
) -> ExactMarginalLogLikelihood:
    """The objective of that name for a model; all share one code path and differ in blocks.

    - ``"lml"``: the log marginal likelihood, every point held out;
    - ``"clml"``: the conditional log marginal likelihood. At a held-out share of 0.1 the
      library chooses: a fresh tenth a step for Adam, ten fixed folds for L-BFGS. At another
      share, that share at random, fresh for Adam and drawn once for L-BFGS;
    - ``"clml-fixed"``: that share drawn once, the same throughout;
    - ``"clml-folds"``: all ten folds of a partition, which is redrawn at each Adam step;
    - ``"clml-orderings"``: the mean over five random orders, each conditioning on its first
      points and scoring that share, its last ones; redrawn at each Adam step;
    - ``"loo"``: the leave-one-out log predictive density;
    - ``"lml-subset"``: the log marginal likelihood of all points but that share, which is
      redrawn at each Adam step.

    Args:
        name: One of ``objective_names()``.
        model: A model in train mode.
        held_out: That share of the training points; 0.1 if None.
        seed: Seed of the draws of points.

    Raises:
        UnknownNameError: No such objective.
    """
    if name not in objective_names():
        raise UnknownNameError("objective", name, objective_names())
    share = DEFAULT_HELD_OUT if held_out is None else held_out
    if name == _SUBSET:
        return SubsetMarginalLogLikelihood(model.likelihood, model, 1 - share, seed=seed)
    conditioning = _CONDITIONINGS[name](share, seed)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=seed)
