"""Scores of one model for a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator.operators import LowRankRootLinearOperator
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import all_finite
from gpclml.errors import NonFiniteError, ShapeError
from gpclml.evaluation.scores import learning_curve
from gpclml.inference.observations import training_observations
from gpclml.inference.units import Units, units_of_targets
from gpclml.linalg import Covariance, DenseCovariance

__all__ = ["ModelScores", "score_model"]

T = TypeVar("T")

_WIDER = 4.0  # times the prior covariance of the function
_NUMBERS_AT_ONCE = 2**25  # in the covariances of held-out blocks
_WORTH_AN_INVERSE = 4  # held-out blocks at once


@dataclass(frozen=True, eq=False)
class ModelScores:
    """Scores of a model on its n observed training targets, in nats, in float64 on the CPU.

    Attributes:
        lml: The log marginal likelihood.
        clml: Log densities of the points after the m-th given the first m, one for each
            ordering, ``(k,)``.
        loo: Log densities of points given all others, ``(n,)``.
        loo_mean: Predictive means of points given all others, in the units of the comparison,
            ``(n,)``.
        loo_variance: Predictive variances of points given all others, with noise, ``(n,)``.
        curves: Terms log p(y_i | y_<i) of the first orderings, ``(c, n)``.
        wider_lml: The log marginal likelihood if the prior covariance of the function is four times
            as large, with the same noise and mean.
        wider_loo: Log densities of points given all others under that prior, ``(n,)``.
        condition_number: Condition number of the observations' covariance, in the 1-norm; for a
            model of fewer features than points the ratio of its extreme eigenvalues.
        rounding: The condition number times the machine precision of the covariance's dtype.
        failures: Reasons why parts are NaN, by name: "LML", "CLML", "LOO", "learning curves",
            "wider prior", "condition number". Empty if all could be computed.
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
    failures: Mapping[str, str] = field(default_factory=dict)


@torch.no_grad()
def score_model(
    name: str,
    model: ExactGP,
    targets: Tensor,
    orders: Tensor,
    m: int,
    num_curves: int,
    units: Units,
) -> tuple[ModelScores, Mapping[str, Exception]]:
    """Scores a model on its training data, without changing its parameters, mode and caches.

    A part that fails is NaN and does not affect the others; an interrupt ends everything.

    ``orders`` are of all rows, those with missing targets last; targets are in the units asked for.

    Returns:
        The scores, and the errors of the parts that failed, by the names of the parts.
    """
    rows = (~targets.isnan()).nonzero().squeeze(-1)
    count = len(rows)
    scale = units_of_targets(model, units)[0].cpu()
    errors: dict[str, Exception] = {}
    given = _attempt(lambda: observed_gaussian(model, rows))
    nothing = DenseCovariance(scale.new_empty(0, 0)), scale.new_empty(0)
    covariance, residual = nothing if isinstance(given, Exception) else given
    if len(covariance.shape) != 2 or residual.ndim != 1:
        got = f"a covariance of shape {tuple(covariance.shape)}"
        raise ShapeError(f"models[{name!r}]", got, "(n, n), one output and no batch")
    place = torch.full((len(targets),), -1)
    place[rows] = torch.arange(count)
    tails = place[orders[:, m:count]]
    log_scale = float(scale.log())

    def part(
        which: str, compute: Callable[[], tuple[Tensor, ...]], *shapes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """The values of a part; NaN and an error where it, or the covariance, fails."""
        values = given if isinstance(given, Exception) else _attempt(compute)
        if not isinstance(values, Exception):
            if which == "condition number" or all(map(all_finite, values)):
                return values
            values = NonFiniteError(
                f"models[{name!r}]", f"{which}: values that are not finite", "finite ones",
                "Its covariance is singular: add noise.",
            )  # fmt: skip
        errors[which] = values
        return tuple(torch.full(shape, torch.nan, dtype=torch.float64) for shape in shapes)

    def lml() -> tuple[Tensor, ...]:
        return (_plain(covariance.log_density(residual)) - count * log_scale,)

    def clml() -> tuple[Tensor, ...]:
        return (_tail_densities(covariance, residual, tails) - (count - m) * log_scale,)

    def loo() -> tuple[Tensor, ...]:
        return _leave_one_out(covariance, residual, scale)

    def curves() -> tuple[Tensor, ...]:
        terms = learning_curve(model, orders[:num_curves], units=units)
        return (_plain(terms[:, :count]),)

    def wider() -> tuple[Tensor, ...]:
        wide, _ = observed_gaussian(model, rows, _WIDER)
        total = _plain(wide.log_density(residual)) - count * log_scale
        return total, _leave_one_out(wide, residual, scale)[0]

    def condition() -> tuple[Tensor, ...]:
        return (torch.tensor(covariance.condition_number(), dtype=torch.float64),)

    (total,) = part("LML", lml, ())
    (conditional,) = part("CLML", clml, (len(orders),))
    left_out_densities, error, variance = part("LOO", loo, (count,), (count,), (count,))
    (terms,) = part("learning curves", curves, (num_curves, count))
    wider_total, wider_left_out = part("wider prior", wider, (), (count,))
    (number,) = part("condition number", condition, ())
    scores = ModelScores(
        lml=float(total),
        clml=conditional,
        loo=left_out_densities,
        loo_mean=targets[rows] - scale * error,
        loo_variance=scale.square() * variance,
        curves=terms,
        wider_lml=float(wider_total),
        wider_loo=wider_left_out,
        condition_number=float(number),
        rounding=float(number) * torch.finfo(covariance.dtype).eps,
        failures={which: _said(error) for which, error in errors.items()},
    )
    return scores, errors


def _attempt(compute: Callable[[], T]) -> T | Exception:
    """A result, or the error in its place; warnings that the caller has made errors are raised."""
    try:
        return compute()
    except Warning:
        raise
    except Exception as error:
        return error


def _said(error: Exception) -> str:
    """The text of an error and its notes, in one line."""
    notes = getattr(error, "__notes__", ())
    return " ".join(" ".join([str(error) or type(error).__name__, *notes]).split())


def _leave_one_out(
    covariance: Covariance, residual: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities in units of this scale; errors and variances in training units."""
    mean, variance = map(_plain, covariance.leave_one_out(residual, torch.arange(len(residual))))
    error = _plain(residual) - mean
    normal = Normal(torch.zeros_like(error), variance.sqrt(), validate_args=False)
    return normal.log_prob(error) - scale.log(), error, variance


def _tail_densities(covariance: Covariance, residual: Tensor, tails: Tensor) -> Tensor:
    """The joint density of each tail given all other points."""
    at_once = _NUMBERS_AT_ONCE // tails.shape[-1] ** 2
    if at_once < _WORTH_AN_INVERSE:
        values = [covariance.conditional_log_density(residual, tail) for tail in tails]
        return _plain(torch.stack(values))
    parts = tails.split(at_once)
    values = [covariance.block_log_densities(residual, [part]) for part in parts]
    return _plain(torch.cat(values))


def _plain(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)


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
