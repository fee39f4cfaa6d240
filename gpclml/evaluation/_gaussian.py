"""What is asked of the Gaussian of a model's observed targets."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator.operators import LowRankRootLinearOperator
from torch import Tensor

from gpclml.inference.observations import training_observations
from gpclml.linalg import (
    LowRankPlusDiagonal,
    conditional_log_density,
    leave_one_out_moments,
    permute,
    safe_cholesky,
)

__all__ = ["condition_number", "left_out", "log_density", "observed_gaussian"]

Covariance = Tensor | LowRankPlusDiagonal


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
    covariance = data.covariance
    if isinstance(covariance, LowRankPlusDiagonal):
        return covariance.take(rows), data.residual[rows]
    return permute(covariance, rows), data.residual[rows]


def log_density(covariance: Covariance, residual: Tensor) -> float:
    """The joint log density of all residuals."""
    return float(conditional_log_density(covariance, residual, torch.arange(len(residual))))


def left_out(covariance: Covariance, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each residual given all others, ``(n,)`` each."""
    return leave_one_out_moments(covariance, residual, torch.arange(len(residual)))


def condition_number(covariance: Covariance) -> float:
    """Of a dense covariance LAPACK's estimate in the 1-norm; of low rank the eigenvalues' ratio."""
    if isinstance(covariance, LowRankPlusDiagonal):
        features = covariance.features.double()
        largest = torch.linalg.eigvalsh(features.mT @ features)[-1] + covariance.noise.max()
        return float(largest / covariance.noise.min())
    from scipy.linalg import lapack

    factor = safe_cholesky(covariance).to("cpu", torch.float64)
    norm = float(covariance.abs().sum(0).max())
    estimate, _ = cast(Any, lapack).dpocon(factor.numpy().T, norm, uplo="U")
    return 1 / estimate if estimate > 0 else math.inf


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
