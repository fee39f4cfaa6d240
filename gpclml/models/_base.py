"""What the models of this package share: one tensor of inputs, one of targets, mean and kernel."""

from __future__ import annotations

from typing import Any, cast

from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

__all__ = ["RegressionGP"]


class RegressionGP(ExactGP):
    """An exact GP with ``mean_module`` and ``covar_module`` that BoTorch's optimizers fit.

    Its constructor is that of ``gpytorch.models.ExactGP``.
    """

    mean_module: Any
    covar_module: Any

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at points.

        Args:
            x: ``(*batch, n, d)``.
        """
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def compute_custom_loss(self, mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
        """The loss BoTorch minimizes under an objective that brings none of its own.

        Args:
            mll: The objective.
            **kwargs: Passed on to it.

        Returns:
            Minus the objective, ``(*batch,)``.
        """
        x, y = self._training_data()
        return -cast(Tensor, mll(self(x), y, x, **kwargs))

    def _training_data(self) -> tuple[Tensor, Tensor]:
        return cast(Any, self.train_inputs)[0], cast(Tensor, self.train_targets)
