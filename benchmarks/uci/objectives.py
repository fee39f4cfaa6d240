"""The objectives of the benchmark by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Generator, Tensor

from gpclml.conditioning import (
    Conditioning,
    KFold,
    LastPoints,
    LeaveOneOut,
    RandomHoldout,
    RandomOrderings,
)
from gpclml.errors import UnknownNameError
from gpclml.inference.observations import Observations, observations, training_observations
from gpclml.linalg import conditional_log_density, take
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = [
    "DEFAULT_HELD_OUT", "SubsetMarginalLogLikelihood", "make_objective", "objective_names",
    "uses_held_out",
]  # fmt: skip


class SubsetMarginalLogLikelihood(ExactMarginalLogLikelihood):
    """The log marginal likelihood of a random share of the training points, nats per point.

    It tells what redrawing points does from what conditioning on points does: like the
    conditional log marginal likelihood it sees other points at each call, but it conditions
    on none of them.

    Args:
        likelihood: A Gaussian likelihood.
        model: An exact GP in train mode.
        share: Share of the points that count, in (0, 1]; at least one point.
        seed: Seed of the draws.

    Raises:
        ArgumentError: ``share`` is outside (0, 1].
    """

    def __init__(
        self, likelihood: Likelihood, model: ExactGP, share: float, *, seed: int = 0
    ) -> None:
        super().__init__(likelihood, model)
        self.drawing = RandomHoldout(share)
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def forward(
        self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any
    ) -> Tensor:
        """The objective on freshly drawn points.

        Args:
            function_dist: The model's prior at its training inputs, event shape ``(n,)``.
            target: Training targets, ``(*batch, n)``.
            *params: Passed on to likelihood and added losses.
            **kwargs: Passed on to the likelihood.

        Returns:
            Nats per point drawn, ``(*batch,)``.
        """
        data = observations(self.likelihood, function_dist, target, *params, **kwargs)
        return self._objective(data, self._generator)

    def compute_custom_loss(self, **kwargs: Any) -> Tensor:
        """The negative objective on the model's own data, at points that stay the same.

        Returns:
            The loss, ``(*batch,)``.
        """
        data = training_observations(cast(ExactGP, self.model), self.likelihood, **kwargs)
        return -self._objective(data, torch.Generator().manual_seed(self.seed))

    def _objective(self, data: Observations, generator: torch.Generator) -> Tensor:
        [block] = data.split(self.drawing, generator).held_out
        rows = block.squeeze(0).to(data.residual.device)
        covariance, residual = data.covariance.take(rows), take(data.residual, rows)
        density = conditional_log_density(covariance, residual, torch.arange(len(rows)))
        terms = self._add_other_terms(torch.zeros_like(density), data.params)
        return data.per_held_out_target(density, [block]) + terms / data.num_observed()


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
