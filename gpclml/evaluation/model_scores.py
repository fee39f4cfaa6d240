"""Scores of one model for a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

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
        wider_lml: The log marginal likelihood with a prior covariance of the function, noise and
            mean left out, that is four times as large.
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
    parts = _Parts(name)
    given = parts.covariance(lambda: observed_gaussian(model, rows))
    covariance, residual = given or (DenseCovariance(scale.new_empty(0, 0)), scale.new_empty(0))
    place = torch.full((len(targets),), -1)
    place[rows] = torch.arange(count)
    tails = place[orders[:, m:count]]
    log_scale = float(scale.log())

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

    (total,) = parts("LML", lml, ())
    (conditional,) = parts("CLML", clml, (len(orders),))
    left_out_densities, error, variance = parts("LOO", loo, (count,), (count,), (count,))
    (terms,) = parts("learning curves", curves, (num_curves, count))
    wider_total, wider_left_out = parts("wider prior", wider, (), (count,))
    (number,) = parts("condition number", condition, (), finite=False)
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
        failures={part: _said(error) for part, error in parts.errors.items()},
    )
    return scores, parts.errors


class _Parts:
    """Computes parts of a model's scores, of which one that fails does not affect the others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors: dict[str, Exception] = {}
        self._of_covariance: Exception | None = None

    def covariance(
        self, compute: Callable[[], tuple[Covariance, Tensor]]
    ) -> tuple[Covariance, Tensor] | None:
        """The covariance and residuals, without which all parts fail."""
        try:
            covariance, residual = compute()
        except Warning:
            raise
        except Exception as error:
            self._of_covariance = error
            return None
        if len(covariance.shape) != 2 or residual.ndim != 1:
            got = f"a covariance of shape {tuple(covariance.shape)}"
            expected = "(n, n), one output and no batch"
            raise ShapeError(f"models[{self.name!r}]", got, expected)
        return covariance, residual

    def __call__(
        self,
        part: str,
        compute: Callable[[], tuple[Tensor, ...]],
        *shapes: tuple[int, ...],
        finite: bool = True,
    ) -> tuple[Tensor, ...]:
        """The values of a part, or NaN of these shapes and an error in ``errors``."""
        nothing = tuple(torch.full(shape, torch.nan, dtype=torch.float64) for shape in shapes)
        if self._of_covariance is not None:
            self.errors[part] = self._of_covariance
            return nothing
        try:
            values = compute()
            if finite and not all(all_finite(value) for value in values):
                raise NonFiniteError(
                    f"models[{self.name!r}]", f"{part}: values that are not finite",
                    "finite ones", "Its covariance is singular: add noise.",
                )  # fmt: skip
            return values
        except Warning:  # the caller has made errors of warnings
            raise
        except Exception as error:
            self.errors[part] = error
            return nothing


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
