"""All scores of one model that a comparison is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.models import ExactGP
from torch import Tensor
from torch.distributions import Normal

from gpclml._finite import all_finite
from gpclml.compare._gaussian import (
    Covariance,
    condition_number,
    left_out,
    log_density,
    observed_gaussian,
)
from gpclml.errors import NonFiniteError, ShapeError
from gpclml.linalg import block_conditional_log_densities, conditional_log_density
from gpclml.scores import learning_curve
from gpclml.units import Units, units_of_targets

__all__ = ["WIDER", "ModelScores", "score_model"]

WIDER = 4.0
"""How much more variable the function is under the wider prior: its deviations are doubled."""

_NUMBERS_AT_ONCE = 2**25  # in the covariances of held-out blocks
_WORTH_AN_INVERSE = 4  # held-out blocks at once


@dataclass(frozen=True, eq=False)
class ModelScores:
    """Scores of a model as it stands, in nats, in float64 on the CPU; n observed targets.

    Attributes:
        lml: The log marginal likelihood.
        clml: Log densities of the points after the m-th given the first m, one for each
            ordering, ``(k,)``.
        loo: Log densities of points given all others, ``(n,)``.
        loo_mean: Their predictive means, in the units of the comparison, ``(n,)``.
        loo_variance: Their predictive variances, noise included, ``(n,)``.
        curves: Terms log p(y_i | y_<i) of the first orderings, ``(c, n)``.
        wider_lml: The log marginal likelihood with a prior covariance of the function, noise and
            mean left out, that is four times as large.
        wider_loo: Log densities of points given all others under that prior, ``(n,)``.
        condition_number: Of the covariance of the observations, in the 1-norm; for a model of
            fewer features than points the ratio of its extreme eigenvalues.
        rounding: The condition number times the rounding of the covariance's type.
    """

    lml: float
    clml: Tensor
    loo: Tensor
    loo_mean: Tensor
    loo_variance: Tensor
    curves: Tensor
    wider_lml: float
    wider_loo: Tensor
    condition_number: float
    rounding: float


@torch.no_grad()
def score_model(
    name: str,
    model: ExactGP,
    targets: Tensor,
    orders: Tensor,
    m: int,
    num_curves: int,
    units: Units,
) -> ModelScores:
    """Scores a model on its training data; its parameters, mode and caches stay as they are.

    Args:
        name: Of the model, for errors.
        model: An exact GP of one output.
        targets: Its targets in these units, NaN where missing, ``(n,)``.
        orders: Orders of all rows, those with missing targets last, ``(k, n)``.
        m: Number of points that the CLML conditions on.
        num_curves: Number of orders whose learning curves are computed.
        units: Of the targets.

    Raises:
        ShapeError: If the model's covariance has a batch.
        NonFiniteError: If a score is not finite.
    """
    rows = (~targets.isnan()).nonzero().squeeze(-1)
    count = len(rows)
    scale, _ = units_of_targets(model, units)
    covariance, residual = observed_gaussian(model, rows)
    if len(covariance.shape) != 2 or residual.ndim != 1:
        got = f"a covariance of shape {tuple(covariance.shape)}"
        raise ShapeError(f"models[{name!r}]", got, "(n, n), one output and no batch")
    place = torch.full((len(targets),), -1)
    place[rows] = torch.arange(count)
    tails = place[orders[:, m:count]]
    loo, error, variance = _leave_one_out(covariance, residual, scale)
    if not all_finite(loo):
        got, mend = "densities that are not finite", "Its covariance is singular: add noise."
        raise NonFiniteError(f"models[{name!r}]", got, "finite ones", mend)
    wider, _ = observed_gaussian(model, rows, WIDER)
    condition = condition_number(covariance)
    curves = learning_curve(model, orders[:num_curves], units=units)[:, :count]
    log_scale = float(scale.log())
    return ModelScores(
        lml=log_density(covariance, residual) - count * log_scale,
        clml=_tail_densities(covariance, residual, tails) - (count - m) * log_scale,
        loo=loo,
        loo_mean=targets[rows] - scale * error,
        loo_variance=scale.square() * variance,
        curves=_plain(curves),
        wider_lml=log_density(wider, residual) - count * log_scale,
        wider_loo=_leave_one_out(wider, residual, scale)[0],
        condition_number=condition,
        rounding=condition * torch.finfo(covariance.dtype).eps,
    )


def _leave_one_out(
    covariance: Covariance, residual: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities in units of this scale; errors and variances in training units."""
    mean, variance = (_plain(part) for part in left_out(covariance, residual))
    error = _plain(residual) - mean
    normal = Normal(torch.zeros_like(error), variance.sqrt(), validate_args=False)
    return normal.log_prob(error) - scale.log(), error, variance


def _tail_densities(covariance: Covariance, residual: Tensor, tails: Tensor) -> Tensor:
    """The joint density of each tail given all other points."""
    at_once = _NUMBERS_AT_ONCE // tails.shape[-1] ** 2
    if at_once < _WORTH_AN_INVERSE:
        values = [conditional_log_density(covariance, residual, tail) for tail in tails]
        return _plain(torch.stack(values))
    parts = tails.split(at_once)
    values = [block_conditional_log_densities(covariance, residual, [part]) for part in parts]
    return _plain(torch.cat(values))


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)
