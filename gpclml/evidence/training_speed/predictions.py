"""What several models predict at each point, under three ways of drawing their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, NonFiniteError, UnknownNameError
from gpclml.evidence.training_speed._prefixes import (
    noise_variances,
    predict_prefixes,
    single_target_data,
)
from gpclml.inference.observations import Observations
from gpclml.linalg import leave_one_out_moments

__all__ = ["ModelPredictions", "Scheme", "model_predictions"]

Scheme = Literal["prior", "posterior", "concurrent"]
"""Where parameters are drawn: before the data, after it, or along it."""


@checked(means="float (n, M)", variances="float (n, M)", target="float (n,)")
@dataclass(frozen=True)
class ModelPredictions:
    """Gaussian predictions of the function at n points by M models, and the targets.

    Attributes:
        means: ``(n, M)``.
        variances: Without noise, ``(n, M)``.
        target: ``(n,)``.

    Raises:
        ShapeError: If they do not fit together.
        NonFiniteError: If a number is not finite.
        ArgumentError: If a variance is negative.
    """

    means: Tensor
    variances: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        for name in ("means", "variances", "target"):
            values = getattr(self, name)
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError(name, "non-finite values", "finite values")
        if bool((self.variances < 0).any()):
            raise ArgumentError("variances", float(self.variances.min()), "at least 0")


@torch.no_grad()
@checked(order="integer (n,)")
def model_predictions(
    models: Sequence[ExactGP], scheme: Scheme, order: Tensor | None = None
) -> ModelPredictions:
    r"""The predictions of each training point by models of the same targets.

    The schemes of Lyle et al. (2020, Sections 3.3 and 4.1). The prediction of point i by model j
    is the function there, with parameters drawn from

    - ``"prior"``: :math:`p(\theta_j)`, which knows no target;
    - ``"posterior"``: :math:`p(\theta_j \mid D)`, which knows all, the point's own too;
    - ``"concurrent"``: :math:`p(\theta_j \mid D_{<i})`, which knows those before it.

    Args:
        models: Exact GPs on the same training targets, one a row.
        scheme: One of the three names.
        order: Order in which the points arrive, ``(n,)``; data order if None.

    Returns:
        In order of arrival, missing targets left out, in float64.

    Raises:
        UnknownNameError: If the scheme is none of the three.
        ArgumentError: If there is no model, targets differ, or ``order`` is no permutation.
        UnsupportedError: If noise is correlated.

    Note:
        One factorization a model; none for the prior.
    """
    if scheme not in get_args(Scheme):
        raise UnknownNameError("scheme", scheme, get_args(Scheme))
    target = _common_target(models)
    order = _as_order(order, len(target)).to(target.device)
    of_scheme = {"prior": _prior, "posterior": _posterior, "concurrent": _concurrent}[scheme]
    predicted = []
    for model in models:
        data = single_target_data(model)
        noise = noise_variances(cast(Likelihood, model.likelihood), data)
        predicted.append(of_scheme(data, noise, order))
    errors, variances = (torch.stack(part, -1).double() for part in zip(*predicted, strict=True))
    target = target[order].double()
    there = ~target.isnan()
    means = target.unsqueeze(-1) - errors
    return ModelPredictions(means[there], variances[there].clamp_min(0.0), target[there])


def _prior(data: Observations, noise: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    variances = data.covariance.diagonal() - noise
    return data.residual[order], variances[order]


def _posterior(data: Observations, noise: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """With Q = K⁻¹ and S the noise: errors S Q r and variances s - s² Q_ii."""
    mean, variance = leave_one_out_moments(data.covariance, data.residual, order)
    share = noise[order] / variance
    return share * (data.residual[order] - mean), noise[order] * (1 - share)


def _concurrent(data: Observations, noise: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    prefixes = predict_prefixes(data.covariance, data.residual, noise, order.unsqueeze(0))
    return prefixes.errors.squeeze(0), prefixes.variances.squeeze(0)


def _common_target(models: Sequence[ExactGP]) -> Tensor:
    if len(models) == 0:
        raise ArgumentError("models", "none", "at least one model")
    first = models[0].train_targets
    for place, model in enumerate(models):
        target = model.train_targets
        if not isinstance(target, Tensor) or not isinstance(first, Tensor):
            raise ArgumentError("models", f"models[{place}] without data", "training data in each")
        if target.shape != first.shape or not torch.allclose(target, first, equal_nan=True):
            raise ArgumentError(
                "models",
                f"training targets of models[{place}] that are not those of models[0]",
                "the same targets, in the same units and order",
                "Fit all models to one data set, standardized the same way.",
            )
    return cast(Tensor, first)


def _as_order(order: Tensor | None, n: int) -> Tensor:
    every = torch.arange(n)
    if order is None:
        return every
    if order.is_floating_point() or not torch.equal(order.cpu().long().sort().values, every):
        got = f"shape {tuple(order.shape)} of {order.dtype}"
        raise ArgumentError("order", got, f"a permutation of the integers from 0 to {n - 1}")
    return order
