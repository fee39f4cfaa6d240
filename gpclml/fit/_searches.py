"""Line searches that start again, from elsewhere, where one failed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal, cast

import numpy as np
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.utils.warnings import NumericalWarning
from numpy import ndarray
from torch import Tensor

from gpclml._utils.resuming import copied_state
from gpclml.fit._optimize import LineSearchEnd, Record, StoppedError, line_search, objective
from gpclml.fit._scales import sentence
from gpclml.fit._vector import numbers, trainable
from gpclml.fit.result import Problem
from gpclml.inference import Road
from gpclml.inference.observations import training_observations
from gpclml.inference.posterior import are_constant
from gpclml.models import find_networks

_FAILED = ("abnormal", "constant", "bound")
# Of the start lengthscales: far shorter ones tell all points apart, where nothing can be learned.
_SHORTER, _LONGER = (0.25,), (8.0, 64.0)
_LESS_NOISE = 0.1  # of the start noise: what it takes for noise it need not explain
_MOST_POINTS = 10_000  # beyond which predictions are not computed
# By these two limits 53 of the 264 fits to 25 public tables on which they were chosen are told. Of
# them 42 had 95 % intervals that held less than 85 % of new rows, or an NLL above 3; of the others
# 41 of 211.
_FEW = 10  # points for each hyperparameter, below which noise at its lower bound is told
_EXACT = 0.05**2  # of the targets' variance: mean squared error of points left out, where it is not


@dataclass(frozen=True)
class Search:
    """Result of line searches: the history and objective of the search that was kept.

    Of a sum they are the histories of its members, one after the other, and the mean objective.
    """

    problem: Problem
    message: str
    starts: int
    history: list[float]
    objective: float
    road: Road | None = None


def search(mll: MarginalLogLikelihood, steps: int | None, record: Record, retries: int) -> Search:
    """Line searches of an objective, each member of a sum on its own, in place.

    If one fails, others start from less noise with shorter and with longer lengthscales, the higher
    objective first, until one succeeds; the best result is kept. ``FitResult.problem`` names what
    failed. A StoppedError is raised if the start cannot be evaluated. The cost beside the line
    search is one leave-one-out prediction.
    """
    if isinstance(mll, SumMarginalLogLikelihood):
        members = cast(Any, mll.mlls)
        found = [search(member, steps, record, retries) for member in members]
        worst = next((one for one in found if one.problem in _FAILED), None)
        worst = worst or next((one for one in found if one.problem), found[0])
        starts = sum(one.starts for one in found) - len(found) + 1
        return replace(
            worst, starts=starts, history=[v for one in found for v in one.history],
            objective=sum(one.objective for one in found) / len(found),
        )  # fmt: skip
    initial = copied_state(mll)
    history: list[float] = []
    end = line_search(mll, steps, _into(history, record))
    problem, starts = _problem(mll, end), 1
    value = -end.loss
    if problem in _FAILED and retries:
        state = copied_state(mll)
        try:
            for start in _other_starts(mll, initial)[:retries]:
                mll.load_state_dict(start)
                starts += 1
                values: list[float] = []
                try:
                    other = line_search(mll, steps, _into(values, record))
                except StoppedError:
                    continue
                if -other.loss > value or math.isnan(value):
                    value, state = -other.loss, copied_state(mll)
                    end, problem, history = other, _problem(mll, other), values
                    if problem not in _FAILED:
                        break
        finally:
            mll.load_state_dict(state)
    message = _sentence(problem, end, starts, len(history))
    return Search(problem, message, starts, history, value, end.road)


def _into(history: list[float], record: Record) -> Record:
    def both(loss: float) -> None:
        history.append(-loss)
        record(loss)

    return both


def _problem(mll: MarginalLogLikelihood, end: LineSearchEnd) -> Problem:
    of_predictions = _problem_of_predictions(mll, end.at_bounds)
    if end.ran_away and of_predictions not in _FAILED:
        return "runaway"
    if of_predictions in _FAILED or end.reason == "converged":
        return of_predictions
    return end.reason


@torch.no_grad()
def _problem_of_predictions(
    mll: MarginalLogLikelihood, at_bounds: tuple[str, ...]
) -> Literal["", "constant", "bound", "noise"]:
    """What is wrong with predictions of points from all others, in any member of a batch."""
    model = mll.model
    if not isinstance(model, ExactGP) or model.train_inputs is None:
        return ""
    targets = cast(Tensor, model.train_targets)
    solved = bool(getattr(mll, "last_solve", ()))  # where no Cholesky factor fitted
    if solved or targets.shape[-1] > _MOST_POINTS:
        return ""
    try:
        data = training_observations(model, mll.likelihood)
        every = torch.arange(data.residual.shape[-1])
        mean, variance = data.covariance.leave_one_out(data.residual, every)
    except (RuntimeError, TypeError, ValueError):
        return ""  # a fit is not lost to a model whose predictions cannot be had so
    error, variance = numbers(data.residual - mean), numbers(variance)
    observed = np.ones_like(error) if data.missing is None else numbers(~data.missing)
    values = np.nan_to_num(numbers(data.flatten(targets)))
    of_targets = _spread(values, observed)
    of_predictions = _spread(values - error, observed)
    constant = are_constant(of_predictions, _mean(variance, observed))
    varied = of_targets > 0
    if (constant & varied).any():
        return "constant"
    if not at_bounds:
        return ""
    with np.errstate(all="ignore"):
        log_density = -0.5 * (error**2 / variance + np.log(2 * math.pi * variance))
        of_one = -0.5 * (np.log(of_targets) + math.log(2 * math.pi) + 1)
        if ((_mean(log_density, observed) < of_one) & varied).any():
            return "bound"
    inexact = _mean(error**2, observed) > _EXACT * of_targets
    members = targets.shape[:-1].numel()
    few = observed.sum(-1) * members < _FEW * _num_hyperparameters(mll)
    return "noise" if _noise_at_bound(mll, at_bounds) and (inexact & few).any() else ""


def _noise_at_bound(mll: MarginalLogLikelihood, at_bounds: tuple[str, ...]) -> bool:
    """Whether the noise is at its lower bound, and has no prior that would expect it there."""
    has_prior = any(name.endswith("noise_prior") for name, *_ in mll.named_priors())
    return not has_prior and any(name.endswith("raw_noise") for name in at_bounds)


def _num_hyperparameters(mll: MarginalLogLikelihood) -> int:
    """Trained parameters, without the weights of networks."""
    of_networks = {id(p) for network in find_networks(mll.model) for p in network.parameters()}
    return sum(p.numel() for p in trainable(mll).values() if id(p) not in of_networks)


def _mean(values: ndarray, observed: ndarray) -> ndarray:
    return (values * observed).sum(-1) / observed.sum(-1)


def _spread(values: ndarray, observed: ndarray) -> ndarray:
    return _mean((values - _mean(values, observed)[..., None]) ** 2, observed)


def _other_starts(
    mll: MarginalLogLikelihood, initial: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """A start of shorter lengthscales and one of longer, of the higher objective first."""
    kernels = [
        module
        for module in mll.model.modules()
        if isinstance(module, Kernel) and module.has_lengthscale
        and cast(Tensor, module.raw_lengthscale).requires_grad
    ]  # fmt: skip
    found: list[tuple[float, Mapping[str, Any]]] = []
    for factors in (_SHORTER, _LONGER) if kernels else ((1.0,),):
        tried = []
        for factor in factors:
            mll.load_state_dict(initial)
            _rescale(mll, kernels, factor)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # it may be given up at once
                value = objective(mll)
            if math.isfinite(value):
                tried.append((value, copied_state(mll)))
        found += [max(tried, key=itemgetter(0))] if tried else []
    return [state for _, state in sorted(found, key=itemgetter(0), reverse=True)]


@torch.no_grad()
def _rescale(mll: MarginalLogLikelihood, kernels: list[Kernel], factor: float) -> None:
    for kernel in kernels:
        constraint = cast(Interval, kernel.raw_lengthscale_constraint)
        kernel.lengthscale = _within(constraint, factor * cast(Tensor, kernel.lengthscale))
    for module in cast(torch.nn.Module, mll.likelihood).modules():
        raw = module._parameters.get("raw_noise")
        if raw is not None and raw.requires_grad:
            constraint = cast(Interval, module.raw_noise_constraint)
            value = constraint.transform(raw)
            raw.copy_(constraint.inverse_transform(_within(constraint, _LESS_NOISE * value)))


def _within(constraint: Interval, values: Tensor) -> Tensor:
    """Values moved to where the bounds leave room to move."""
    lower, upper = cast(Tensor, constraint.lower_bound), cast(Tensor, constraint.upper_bound)
    return torch.minimum(torch.maximum(values, 1.5 * lower), upper / 1.5)


def _sentence(problem: Problem, end: LineSearchEnd, starts: int, steps: int) -> str:
    others = "Another start" if starts == 2 else f"{starts - 1} other starts"
    tried = "" if starts == 1 else f" {others} ended no better."
    suggestion = "Check the units of the inputs, start from other lengthscales, or pass restarts."
    if problem == "constant":
        return (
            "The fit explains nothing: it predicts the same value everywhere and takes all that "
            f"targets vary by for noise.{tried} If the inputs should explain more: {suggestion}"
        )
    if problem == "bound":
        return (
            f"The fit ended at a bound of {', '.join(end.at_bounds)}, where it predicts worse than "
            f"the mean and deviation of the targets.{tried} {suggestion}"
        )
    if problem == "abnormal":
        return (
            f"The fit ended after {steps} steps, before an optimum ({end.message}).{tried} Use "
            "float64, look for near duplicates among the inputs, or pass restarts."
        )
    if problem == "noise":
        return (
            f"The noise ended at its lower bound, where the fit takes targets for exact, with "
            f"fewer than {_FEW} points for each hyperparameter. If they are not exact, intervals "
            "are too narrow: use more points, a prior of the noise, or a StackedGP."
        )
    if problem == "runaway":
        return sentence(end.ran_away)
    if problem == "limit":
        return f"The fit was stopped after {steps} steps, before it converged. Give it more steps."
    return ""
