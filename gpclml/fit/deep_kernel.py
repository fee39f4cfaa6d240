"""Starts of the kernel ``"deep"``: the fitted ARD GP, then a second part beside it.

A fit first runs :func:`warm_start` on a model that is as it was made; :mod:`gpclml.fit.networks`
starts the second part.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple, cast

import gpytorch
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml._utils.arguments import callers_level, checked
from gpclml._utils.resuming import copied_state
from gpclml.conditioning import LastPoints, NearestNeighbors
from gpclml.errors import UnsupportedError
from gpclml.fit.result import FitResult, FitWarning
from gpclml.fit.search import frozen, objective, search
from gpclml.kernels import DeepKernel, SkipFeatures
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss
from gpclml.models import GPRegression, find_networks

_RETRIES = 2  # of the warm start, as many as fit_mll takes
_TRIAL_STEPS, _STEPS = 15, 45  # of the line searches: each start's, and then the better one's
_SHARE = 0.3  # of the variance that the second part starts with
_SHRINK = 0.37  # its lengthscales at the start, relative to the ARD GP's
_LEAST_NOISE = 0.3  # of the ARD GP's: the likelihood makes too much of near duplicates
_APART, _NOTHING = 6.0, -4.0  # logarithms of scales: one value from the next, or no difference
_LARGEST = 7.0  # of the logarithm of a scale
_MOST_EXACT = 5000  # points that a plain GP is fitted to by the LML, which takes n³ an iteration
_ROUNDING = 1e-3  # of squared distances, which are differences of squared scaled inputs


class DeepKernels(NamedTuple):
    """What the kernel ``"deep"`` consists of."""

    whole: ScaleKernel
    ard: RBFKernel
    features: SkipFeatures
    residual: ScaleKernel


@checked
def warm_start(model: GPRegression) -> FitResult:
    """Starts the kernel ``"deep"`` as the fitted ARD GP, in place.

    A plain GP of the same data, with the kernel ``"rbf"``, is fitted as by
    :func:`gpclml.fit.fit_mll` under the log marginal likelihood, or of more than 5,000 points under
    the densities of some given their nearest neighbours. The model takes over its lengthscales,
    variance, mean and noise; the model's second part stays near zero. Networks of the mean are not
    trained. Missing (NaN) targets are left out.

    :func:`~gpclml.fit.fit_mll`, :func:`~gpclml.fit.fit_networks` and :func:`~gpclml.fit.fit_batch`
    do this by themselves for an untrained model with ``warm_start=True``. Call it before a loop of
    your own, or before BoTorch's ``fit_gpytorch_mll``.

    Args:
        model: One with the kernel ``"deep"``. Left in train mode.

    Returns:
        The fit of the plain GP. A search that stops early (usual in float32) keeps its best point.

    Raises:
        UnsupportedError: The model has another kernel.

    Warns:
        FitWarning: The plain GP cannot be evaluated at its start, which is kept.

    Note:
        One line search, O(n^3) an iteration up to 5,000 points.

    Examples:
        >>> import torch
        >>> from gpclml import GPRegression
        >>> from gpclml.fit import warm_start
        >>> x = torch.rand(50, 3, dtype=torch.float64)
        >>> fit = warm_start(GPRegression(x, x.sum(-1).sin(), kernel="deep"))
    """
    return _warm_start(model, has_neighbors=False)


def _warm_start(model: GPRegression, *, has_neighbors: bool) -> FitResult:
    """As :func:`warm_start`; ``has_neighbors`` says that few points are given neighbours too."""
    if deep_kernels(model) is None:
        raise UnsupportedError(
            "model", "another kernel", 'a GPRegression with kernel="deep"', "Fit it with fit_mll."
        )
    plain = model.with_kernel("rbf").train()
    targets = cast(Tensor, plain.train_targets)
    # Not those of the objective: a line search has fixed points, and one block of near ones is few.
    is_many = has_neighbors or (targets.ndim == 1 and len(targets) > _MOST_EXACT)
    conditioning = NearestNeighbors() if is_many else LastPoints(m=0)
    mll = ConditionalMarginalLogLikelihood(plain.likelihood, plain, conditioning)
    missing = bool(torch.isnan(targets).any())
    weights = _weights(plain)
    networks = [name for name, p in mll.named_parameters() if id(p) in weights]
    with (
        frozen(mll, networks),
        torch.enable_grad(),
        gpytorch.settings.observation_nan_policy("mask" if missing else "ignore"),
    ):
        try:
            result = search(mll, None, lambda _: None, _RETRIES)
        except (NanError, NotPSDError) as error:
            message = (
                f"The warm start failed and its start is kept ({error}). Use float64, look for "
                "duplicated rows, or pass warm_start=False."
            )
            warnings.warn(message, FitWarning, stacklevel=callers_level())
            result = FitResult(
                objective=math.nan, history=[], seconds=0.0, message=message, problem="stopped"
            )
    model.load_state_dict(_deep_names(plain.state_dict()), strict=False)
    return result


def warm_start_fresh_models(mll: MarginalLogLikelihood) -> None:
    """Runs :func:`warm_start` on each model of an objective, or a sum, that is as it was made."""
    if isinstance(mll, SumMarginalLogLikelihood):
        for member in cast(Any, mll.mlls):
            warm_start_fresh_models(member)
        return
    model = mll.model
    if isinstance(model, GPRegression) and model.starts_warm and _is_at_start(model):
        given = getattr(mll, "conditioning", None)
        _warm_start(model, has_neighbors=isinstance(given, NearestNeighbors))


def _is_at_start(model: GPRegression) -> bool:
    """Whether it is ``"deep"``, and what a warm start changes is as in a model made anew."""
    if deep_kernels(model) is None:
        return False
    fresh = _deep_names(dict(model.with_kernel("rbf").named_parameters()))
    weights, named = _weights(model), dict(model.named_parameters())
    return all(
        id(named[name]) in weights or torch.equal(named[name], value)
        for name, value in fresh.items()
    )


def _weights(model: GPRegression) -> set[int]:
    """Ids of the weights of networks."""
    return {id(p) for network in find_networks(model) for p in network.parameters()}


def _deep_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries of a plain GP by the names that they have in a model with the kernel ``"deep"``."""
    plain, ard = "covar_module.base_kernel.", "covar_module.base_kernel.base_kernel.kernels.0."
    return {name.replace(plain, ard): value for name, value in state.items()}


def start_second_part(model: GPRegression, rows: Tensor, is_started: bool = False) -> None:
    """Fits everything but network and mixing matrix by L-BFGS on the LML of some rows, in place.

    The second part starts with a share of the ARD GP's variance, once with a shorter lengthscale
    and once as an indicator of the values of the one column for which the LML is largest; after a
    few iterations the better of both goes on. A model that was so started on other rows takes a few
    iterations from where it is. The noise stays above three tenths of what it was.
    """
    trial = copy.deepcopy(model)
    kernels = cast(DeepKernels, deep_kernels(trial))
    features, likelihood = kernels.features, trial.likelihood
    x, y = cast(Any, trial.train_inputs)[0], cast(Tensor, trial.train_targets)
    trial.set_train_data(x[rows], y[rows], strict=False)
    with torch.no_grad():
        if not is_started:
            # The variance of both together stays.
            kernels.residual.outputscale = _SHARE / (1 - _SHARE)
            kernels.whole.outputscale = kernels.whole.outputscale * (1 - _SHARE)
        if isinstance(likelihood, GaussianLikelihood):
            noise = likelihood.noise.clone()
            least = max(_LEAST_NOISE * float(noise), 1e-4)
            likelihood.noise_covar.register_constraint("raw_noise", GreaterThan(least))
            likelihood.noise = noise.clamp_min(1.01 * least)
    mll = ConditionalMarginalLogLikelihood(trial.likelihood, trial, LastPoints(0))
    if is_started:
        _fit(mll, features, _TRIAL_STEPS)
    else:
        # Scales are logarithms of inverse lengthscales.
        shorter = -(_SHRINK * kernels.ard.lengthscale.detach()).log().flatten()
        starts = [shorter.expand_as(features.log_scale), _best_indicator(mll, features)]
        before, trials = copied_state(mll), []
        for start in starts:
            mll.load_state_dict(before)
            with torch.no_grad():
                features.log_scale.copy_(start)
            trials.append((_fit(mll, features, _TRIAL_STEPS), copied_state(mll)))
        mll.load_state_dict(max(trials, key=itemgetter(0))[1])
        _fit(mll, features, _STEPS)
    with torch.no_grad():
        features.log_scale.clamp_(-_LARGEST, _largest(features.log_scale.dtype))
        for ours, fitted in zip(model.parameters(), trial.parameters(), strict=True):
            ours.copy_(fitted)
        if isinstance(model.likelihood, GaussianLikelihood):  # its bound was the trial's
            model.likelihood.noise = cast(GaussianLikelihood, likelihood).noise


def _largest(dtype: torch.dtype) -> float:
    """The largest logarithm of a scale at which the kernel is definite beside its noise."""
    return min(_LARGEST, 0.5 * math.log(_ROUNDING / torch.finfo(dtype).eps))


def _fit(mll: ConditionalMarginalLogLikelihood, features: SkipFeatures, steps: int) -> float:
    """The LML after a line search in place; network and mixing matrix are held."""
    kept = {id(p) for p in features.parameters()} - {id(features.log_scale)}
    freeze = [name for name, p in mll.named_parameters() if id(p) in kept]
    mll.train()
    with frozen(mll, freeze):
        search(mll, steps, lambda _: None, retries=0)
        mll.train()
        return objective(mll)


@torch.no_grad()
def _best_indicator(mll: ConditionalMarginalLogLikelihood, features: SkipFeatures) -> Tensor:
    """Scales at which the second part tells the values of one column apart, and no others."""
    mll.train()
    d = features.log_scale.numel()
    apart = min(_APART, _largest(features.log_scale.dtype))
    # One row for each column that is told apart.
    starts = torch.full((d, d), _NOTHING).fill_diagonal_(apart).to(features.log_scale)
    values = [-math.inf] * d
    for column, start in enumerate(starts):
        features.log_scale.copy_(start)
        with contextlib.suppress(NanError, NotPSDError):
            values[column] = -float(fixed_loss(mll))
    return starts[values.index(max(values))]


def deep_kernels(model: GPRegression) -> DeepKernels | None:
    """Those that the kernel ``"deep"`` consists of; None for another."""
    whole: Any = model.covar_module
    deep: Any = getattr(whole, "base_kernel", None)
    if not isinstance(deep, DeepKernel) or not isinstance(deep.feature_extractor, SkipFeatures):
        return None
    kernels = list(getattr(deep.base_kernel, "kernels", ()))
    if [type(kernel) for kernel in kernels] != [RBFKernel, ScaleKernel]:
        return None
    return DeepKernels(whole, *cast(Any, (kernels[0], deep.feature_extractor, kernels[1])))
