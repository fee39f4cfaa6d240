"""Predictive densities of new observations, independent of GPyTorch's settings."""

from __future__ import annotations

from typing import Any, cast

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.models import ExactGP
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import all_finite, checked
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.inference.observations import Observations, observations
from gpclml.inference.posterior import evaluating, exact_posterior, joint_prior, new_points
from gpclml.inference.units import to_training_units

__all__ = ["are_constant", "marginal_predictive", "predictive_observations"]

_LEAST_SHARE = 1e-3  # of the predictive variance that predictions must vary by


@checked(x="float (*batch, t, d) | (t,)")
def predictive_observations(
    model: ExactGP, x: Tensor, y: Tensor, noise: Tensor | None = None
) -> tuple[Observations, Tensor]:
    """The prior Gaussian of training and new observations together.

    The predictive density of the new ones is their density given all others.

    Args:
        model: An exact GP with training data.
        x: New inputs as the model takes them, ``(*batch, t, d)``.
        y: Their targets in original units, ``(*batch, t)`` or with a task dimension.
        noise: Noise variances of the new points, for a fixed-noise likelihood, ``(*batch, t)``.

    Returns:
        The observations, and the flat indices of the new ones, ``(t,)``.

    Raises:
        ShapeError: If ``y`` does not fit ``x`` or ``x`` the training inputs.
        ArgumentError: If the model has no training data, or noise is missing or superfluous.
    """
    with evaluating(model):
        x = new_points(model, x)
        points, prior = joint_prior(model, x)
        multitask = isinstance(prior, MultitaskMultivariateNormal)
        dim = -2 if multitask else -1
        rows = x.shape[-2]
        _check_targets(y, rows, dim)
        trained_on = cast(Tensor, model.train_targets)
        target = _cat(trained_on, to_training_units(model, y, multitask), dim)
        likelihood = cast(Likelihood, model.likelihood)
        if _takes_noise(likelihood, noise):
            trained = cast(FixedNoiseGaussianLikelihood, likelihood).noise_covar
            noise = _cat(cast(Any, trained).noise, cast(Tensor, noise), -1)
        arguments: dict[str, Any] = {} if noise is None else {"noise": noise}
        data = observations(likelihood, prior, target, points, **arguments)
    new = torch.arange(data.num_rows - rows, data.num_rows)
    return data, data.flat_indices(new.unsqueeze(0))[0]


@checked(x="float (*batch, t, d) | (t,)", y="float (*batch, t)", noise="float (*batch, t)")
def marginal_predictive(
    model: ExactGP, x: Tensor, y: Tensor, noise: Tensor | None = None
) -> tuple[Normal, Tensor]:
    """The predictive marginals of new observations, and the targets in training units.

    Args:
        model: An exact GP with training data and one target for each row.
        x: New inputs as the model takes them, ``(*batch, t, d)``.
        y: Their targets in original units, ``(*batch, t)``.
        noise: Noise variances of the new points, for a fixed-noise likelihood, ``(*batch, t)``.

    Returns:
        Normals and targets, ``(*batch, t)``, in training units.

    Raises:
        ShapeError, ArgumentError: As for :func:`predictive_observations`.
    """
    with evaluating(model):
        x = new_points(model, x)
        _check_targets(y, x.shape[-2], -1)
        likelihood = cast(Likelihood, model.likelihood)
        arguments = {"noise": noise} if _takes_noise(likelihood, noise) else {}
        latent = exact_posterior(model, x, marginal=True)
        predictive = cast(MultivariateNormal, likelihood(latent, x, **arguments))
        mean, deviation = predictive.mean, predictive.variance.sqrt()
        if not all_finite(mean) or not all_finite(deviation):
            suggestion = "Check the magnitudes of x and of the training inputs."
            raise NonFiniteError(
                "predictions at x", "NaN or infinite values", "finite ones", suggestion
            )
        normal = Normal(mean, deviation)
        return normal, to_training_units(model, y)


def _check_targets(y: Tensor, rows: int, dim: int) -> None:
    if y.ndim < -dim or y.shape[dim] != rows:
        raise ShapeError("y", tuple(y.shape), f"targets of the {rows} rows of x")


def are_constant(spread: Tensor, variance: Tensor) -> Tensor:
    """Whether means of predictions vary by less than a thousandth of their variance."""
    return spread < _LEAST_SHARE * variance


def _takes_noise(likelihood: Likelihood, noise: Tensor | None) -> bool:
    fixed = isinstance(likelihood, FixedNoiseGaussianLikelihood)
    if fixed and noise is None:
        raise ArgumentError(
            "noise",
            None,
            "noise variances of the new points",
            "The likelihood has fixed noise variances, for the training points only.",
        )
    if noise is not None and not fixed:
        raise ArgumentError(
            "noise",
            "a tensor",
            "None",
            f"{type(likelihood).__name__} has one noise for all points.",
        )
    return fixed


def _cat(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Both along ``dim`` (negative), their batch dimensions broadcast."""
    batch = torch.broadcast_shapes(first.shape[:dim], second.shape[:dim])
    return torch.cat([part.expand(*batch, *part.shape[dim:]) for part in (first, second)], dim=dim)
