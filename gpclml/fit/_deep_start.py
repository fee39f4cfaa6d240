"""The start of the kernel ``"deep"``: a second part beside the fitted ARD GP, network aside."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from typing import NamedTuple, cast

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpclml.conditioning import LastPoints
from gpclml.fit.mll import FitWarning, fit_mll
from gpclml.kernels import DeepKernel, SkipFeatures
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

__all__ = ["drop_second_part", "has_second_part", "start_second_part"]

_TRIAL_STEPS, _STEPS = 15, 45  # of the line searches: each start's, and then the better one's
_SHARE = 0.3  # of the variance that the second part starts with
_SHRINK = 0.37  # its lengthscales at the start, relative to the ARD GP's
_NO_VARIANCE = 1e-12
_LEAST_NOISE = 0.3  # of the ARD GP's: the likelihood makes too much of near duplicates
_APART, _NOTHING = 6.0, -4.0  # logarithms of scales: one value from the next, or no difference
_LARGEST = 7.0  # of the logarithm of a scale
_ROUNDING = 1e-3  # of squared distances, which are differences of squared scaled inputs


class _Parts(NamedTuple):
    whole: ScaleKernel
    ard: RBFKernel
    features: SkipFeatures
    residual: ScaleKernel


class _Fit(NamedTuple):
    lml: float
    state: dict[str, Tensor]


def has_second_part(model: GPRegression) -> bool:
    """Whether the kernel is the one that goes by the name of ``"deep"``."""
    return _parts(model) is not None


@torch.no_grad()
def drop_second_part(model: GPRegression) -> None:
    """Leaves the ARD GP alone: the second part's variance becomes nothing beside rounding.

    Args:
        model: One that :func:`has_second_part`.
    """
    parts = _parts(model)
    assert parts is not None
    parts.residual.outputscale = _NO_VARIANCE


def start_second_part(model: GPRegression, rows: Tensor) -> None:
    """Fits everything but network and mixing matrix by L-BFGS on the LML, in place.

    The second part starts with a share of the ARD GP's variance, once with a shorter lengthscale
    and once as an indicator of the values of the one column for which the LML is largest; after
    a few iterations the better of both goes on. The noise stays above three tenths of what it was.
    Costs O(n^3) an iteration, n of them rows.

    Args:
        model: One that :func:`has_second_part`, with fitted ARD hyperparameters.
        rows: Indices of the rows to fit to.

    Raises:
        NonFiniteError, NotPSDError: If a start cannot be evaluated.
    """
    trial = copy.deepcopy(model)
    parts = _parts(trial)
    assert parts is not None
    assert trial.train_inputs is not None
    targets = cast(Tensor, trial.train_targets)
    trial.set_train_data(trial.train_inputs[0][rows], targets[rows], strict=False)
    with torch.no_grad():
        parts.residual.outputscale = _SHARE / (1 - _SHARE)
        parts.whole.outputscale = parts.whole.outputscale * (1 - _SHARE)
        _bound_noise(trial)
    mll = ConditionalMarginalLogLikelihood(trial.likelihood, trial, LastPoints(0))
    shorter = -(_SHRINK * parts.ard.lengthscale.detach()).log().flatten()
    starts = [shorter.expand_as(parts.features.log_scale), _best_indicator(mll, parts.features)]
    before = _state(mll)
    trials = []
    for start in starts:
        mll.load_state_dict(before)
        with torch.no_grad():
            parts.features.log_scale.copy_(start)
        trials.append(_Fit(_fit(mll, parts.features, _TRIAL_STEPS), _state(mll)))
    mll.load_state_dict(max(trials, key=lambda fit: fit.lml).state)
    _fit(mll, parts.features, _STEPS)
    with torch.no_grad():
        parts.features.log_scale.clamp_(-_LARGEST, _largest(parts.features.log_scale.dtype))
        for ours, fitted in zip(model.parameters(), trial.parameters(), strict=True):
            ours.copy_(fitted)
        if isinstance(model.likelihood, GaussianLikelihood):  # its bound was the trial's
            model.likelihood.noise = cast(GaussianLikelihood, trial.likelihood).noise


def _largest(dtype: torch.dtype) -> float:
    """The largest logarithm of a scale at which the kernel is definite beside its noise."""
    return min(_LARGEST, 0.5 * math.log(_ROUNDING / torch.finfo(dtype).eps))


def _state(mll: ConditionalMarginalLogLikelihood) -> dict[str, Tensor]:
    return copy.deepcopy(mll.state_dict())


def _fit(mll: ConditionalMarginalLogLikelihood, features: SkipFeatures, steps: int) -> float:
    """The LML after a line search in place; network and mixing matrix are held."""
    kept = {id(p) for p in features.parameters()} - {id(features.log_scale)}
    freeze = [name for name, p in mll.named_parameters() if id(p) in kept]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # its best point so far will do
        fit = fit_mll(mll, "lbfgs", steps=steps, freeze=freeze, retries=0, progress=False)
    return fit.objective


@torch.no_grad()
def _best_indicator(mll: ConditionalMarginalLogLikelihood, features: SkipFeatures) -> Tensor:
    """Scales at which the second part tells the values of one column apart, and no others."""
    mll.train()
    d = features.log_scale.numel()
    apart = min(_APART, _largest(features.log_scale.dtype))
    starts = torch.full((d, d), _NOTHING).fill_diagonal_(apart).to(features.log_scale)
    values = [-math.inf] * d
    for column, start in enumerate(starts):
        features.log_scale.copy_(start)
        with contextlib.suppress(NanError, NotPSDError):
            values[column] = -float(mll.compute_custom_loss())
    return starts[values.index(max(values))]


def _parts(model: GPRegression) -> _Parts | None:
    whole = model.covar_module
    deep = whole.base_kernel if isinstance(whole, ScaleKernel) else None
    if not isinstance(deep, DeepKernel) or not isinstance(deep.feature_extractor, SkipFeatures):
        return None
    if not isinstance(deep.base_kernel, AdditiveKernel):
        return None
    ard, residual = deep.base_kernel.kernels
    if not isinstance(ard, RBFKernel) or not isinstance(residual, ScaleKernel):
        return None
    return _Parts(cast(ScaleKernel, whole), ard, deep.feature_extractor, residual)


def _bound_noise(model: GPRegression) -> None:
    likelihood = model.likelihood
    if isinstance(likelihood, GaussianLikelihood):
        noise = likelihood.noise.clone()
        least = max(_LEAST_NOISE * float(noise), 1e-4)
        likelihood.noise_covar.register_constraint("raw_noise", GreaterThan(least))
        likelihood.noise = noise.clamp_min(1.01 * least)
