"""What is asked of the Gaussian of a model's observed targets."""

from __future__ import annotations

import math
from typing import Any, cast

from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator.operators import LowRankRootLinearOperator
from torch import Tensor

from gpclml.inference.observations import training_observations
from gpclml.linalg import Covariance

__all__ = ["observed_gaussian"]


def observed_gaussian(
    model: ExactGP, rows: Tensor, prior_scale: float = 1.0
) -> tuple[Covariance, Tensor]:
    """Covariance and residuals of these rows, the prior of the function that much more variable."""
    likelihood = cast(Likelihood, model.likelihood)
    if prior_scale != 1.0:
        likelihood = _WiderPrior(likelihood, prior_scale)
    data = training_observations(model, likelihood)
    if len(rows) == data.num_rows:
        return data.covariance, data.residual
    rows = rows.to(data.residual.device)
    return data.covariance.take(rows), data.residual[rows]


class _WiderPrior(Likelihood):
    """A likelihood that sees the covariance of the function times a number."""

    def __init__(self, likelihood: Likelihood, scale: float) -> None:
        super().__init__()
        self.likelihood, self.scale = likelihood, scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.likelihood(*args, **kwargs)

    def __call__(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        covariance = input.lazy_covariance_matrix
        if isinstance(covariance, LazyEvaluatedKernelTensor):
            covariance = covariance.evaluate_kernel()
        if isinstance(covariance, LowRankRootLinearOperator):
            wider = LowRankRootLinearOperator(covariance.root * math.sqrt(self.scale))
        else:
            wider = covariance * self.scale
        return self.forward(MultivariateNormal(input.mean, cast(Any, wider)), *args, **kwargs)
