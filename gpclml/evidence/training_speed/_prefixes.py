"""Each point as the points before it predict it: what all training-speed estimators are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.inference.observations import Observations, observations, training_observations
from gpclml.linalg import LowRankPlusDiagonal, sequential_predictions

__all__ = ["Prefixes", "noise_variances", "predict_prefixes", "single_target_data"]


@dataclass(frozen=True)
class Prefixes:
    """Predictions of each point given the points before it, in k orders, in float64.

    Attributes:
        errors: Targets less their predicted means, ``(k, n)``.
        variances: Of the latent function at the point, without noise, ``(k, n)``.
        noise: Noise variances, ``(k, n)``.
    """

    errors: Tensor
    variances: Tensor
    noise: Tensor


def predict_prefixes(
    covariance: Tensor | LowRankPlusDiagonal,  # shape: (n, n)
    residual: Tensor,  # shape: (n,)
    noise: Tensor,  # shape: (n,)
    orders: Tensor,  # shape: (k, n)
) -> Prefixes:
    """The predictions in each order.

    Args:
        covariance: Of the observations, noise included.
        residual: Targets less their prior mean.
        noise: The part of the covariance's diagonal that is noise.
        orders: Point ``orders[j, i]`` is the i-th to arrive in order j.

    Raises:
        ArgumentError: If a row of ``orders`` is no permutation.

    Note:
        As :func:`gpclml.linalg.sequential_predictions`.
    """
    errors, variances = sequential_predictions(covariance, residual, orders)
    ordered = noise.double()[orders.to(noise.device)]
    # Rounding may leave a variance below the noise where the function is known.
    latent = (variances.double() - ordered).clamp_min(0.0)
    return Prefixes(errors.double(), latent, ordered)


def single_target_data(model: ExactGP) -> Observations:
    """The model's training data, if it is one model with one target a row.

    Args:
        model: An exact GP with training data.

    Raises:
        ArgumentError: If it is a batch of models, or has several targets a row.
    """
    data = training_observations(model)
    if data.num_tasks > 1:
        raise ArgumentError(
            "model", f"{data.num_tasks} targets a row", "one", "Use a long-format model."
        )
    if data.residual.ndim > 1:
        got = f"a batch of shape {tuple(data.residual.shape[:-1])}"
        raise ArgumentError("model", got, "one model", "Ask each model of the batch by itself.")
    return data


def noise_variances(likelihood: Likelihood, data: Observations) -> Tensor:
    """Variance of each observation about the latent function, ``(n,)``.

    It is what the likelihood makes of a function without variance: exact, where a difference of
    two covariances would round.

    Args:
        likelihood: The one that made the data.
        data: As :func:`single_target_data` gives it.

    Raises:
        UnsupportedError: If the noise of two observations is correlated.
    """
    if isinstance(data.covariance, LowRankPlusDiagonal):
        return data.covariance.noise
    zero = torch.zeros_like(data.residual)
    target = zero if data.missing is None else zero.masked_fill(data.missing, float("nan"))
    certain = MultivariateNormal(zero, DiagLinearOperator(zero))
    covariance = observations(likelihood, certain, target, *data.params).covariance
    assert isinstance(covariance, Tensor)
    noise = covariance.diagonal()
    if bool((covariance != torch.diag_embed(noise)).any()):
        raise UnsupportedError(
            "model.likelihood",
            f"{type(likelihood).__name__} with correlated noise",
            "independent noise of the observations",
            "The expected log density of one point needs a noise of its own.",
        )
    return noise
