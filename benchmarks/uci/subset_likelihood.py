"""The log marginal likelihood of a few of the training points, drawn afresh at each call."""

from __future__ import annotations

from typing import Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.conditioning import RandomHoldout
from gpclml.inference.observations import Observations, observations, training_observations
from gpclml.linalg import conditional_log_density, take

__all__ = ["SubsetMarginalLogLikelihood"]


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

        Args:
            **kwargs: Passed on to the likelihood.

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
