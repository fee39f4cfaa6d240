"""What is wrong with where a line search ended, in one word and in a sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from gpytorch import settings
from gpytorch.kernels import ScaleKernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from numpy import ndarray
from torch import Tensor

from gpclml.conditioning import NearestNeighbors
from gpclml.fit.result import Problem
from gpclml.fit.train import trainable
from gpclml.inference import evaluating, exact_posterior, training_observations
from gpclml.inference.posterior import PREDICTED_IN_DOUBLE_UP_TO, are_constant
from gpclml.mlls.fixed_loss import scores_first_points
from gpclml.models import GPRegression, find_networks
from gpclml.models.regression import scales_of

if TYPE_CHECKING:
    from gpclml.fit.search import LineSearchEnd

FAILED = ("abnormal", "constant", "bound")
"""Problems for which other starts are tried."""

# Beyond which predictions are not computed: with objectives given neighbours they would take longer
# than the fit.
_MOST_POINTS, _MOST_GIVEN_NEIGHBORS = 10_000, 1000
# By these two limits 53 of the 264 fits to 25 public tables on which they were chosen are told. Of
# them 42 had 95 % intervals that held less than 85 % of new rows, or an NLL above 3; of the others
# 41 of 211.
_FEW = 10  # points for each hyperparameter, below which noise at its lower bound is told
_EXACT = 0.05**2  # of the targets' variance: mean squared error of points left out, where it is not
_TOO_LARGE = 1e3  # outputscale over the variance of targets
_TOO_FAR = 30.0  # of the mean from that of targets, in their deviations
_OFF = 0.2  # of the deviation of an observation, by which float32 predictions may be off


def numbers(values: Tensor) -> ndarray:
    """A copy in double precision."""
    return values.detach().double().cpu().numpy().copy()


@torch.no_grad()
def problem_of_predictions(
    mll: MarginalLogLikelihood, bounded_names: tuple[str, ...]
) -> Literal["", "constant", "bound", "noise"]:
    """What is wrong with predictions of points from all others, in any member of a batch."""
    model = mll.model
    if not isinstance(model, ExactGP) or model.train_inputs is None:
        return ""
    if not isinstance(mll.likelihood, _GaussianLikelihoodBase):
        return ""
    targets = cast(Tensor, model.train_targets)
    has_neighbors = isinstance(getattr(mll, "conditioning", None), NearestNeighbors)
    most = _MOST_GIVEN_NEIGHBORS if has_neighbors else _MOST_POINTS
    # What was solved for had no memory for a Cholesky factor.
    if getattr(mll, "last_solve", ()) or targets.shape[-1] > most:
        return ""
    try:
        data = training_observations(model, mll.likelihood)
        every = torch.arange(data.residual.shape[-1])
        mean, variance = data.covariance.leave_one_out(data.residual, every)
    except (RuntimeError, TypeError, ValueError):
        return ""  # a fit is not lost to a model whose predictions cannot be had so
    # Missing targets have residual zero and count nowhere.
    error, variance = numbers(data.residual - mean), numbers(variance)
    observed = np.ones_like(error) if data.missing is None else numbers(~data.missing)
    values = np.nan_to_num(numbers(data.flatten(targets)))
    target_variance = _spread(values, observed)
    constant = are_constant(_spread(values - error, observed), _mean(variance, observed))
    varied = target_variance > 0
    if (constant & varied).any():
        return "constant"
    if not bounded_names:
        return ""
    with np.errstate(all="ignore"):
        log_density = -0.5 * (error**2 / variance + np.log(2 * math.pi * variance))
        density_of_mean = -0.5 * (np.log(target_variance) + math.log(2 * math.pi) + 1)
        if ((_mean(log_density, observed) < density_of_mean) & varied).any():
            return "bound"
    # Targets that are predicted from each other almost exactly may have no noise.
    inexact = _mean(error**2, observed) > _EXACT * target_variance
    members = targets.shape[:-1].numel()
    weights = {id(p) for network in find_networks(model) for p in network.parameters()}
    hyperparameters = sum(p.numel() for p in trainable(mll).values() if id(p) not in weights)
    few = observed.sum(-1) * members < _FEW * hyperparameters
    has_prior = any(name.endswith("noise_prior") for name, *_ in mll.named_priors())
    noise_at_bound = any(name.endswith("raw_noise") for name in bounded_names) and not has_prior
    return "noise" if noise_at_bound and (inexact & few).any() else ""


def _mean(values: ndarray, observed: ndarray) -> ndarray:
    return (values * observed).sum(-1) / observed.sum(-1)


def _spread(values: ndarray, observed: ndarray) -> ndarray:
    return _mean((values - _mean(values, observed)[..., None]) ** 2, observed)


@torch.no_grad()
def ran_away(mll: MarginalLogLikelihood) -> str:
    """What has left the range of the targets, in words; empty if nothing has.

    Only objectives that do not score first points are asked: under others a large scale is what the
    targets say.
    """
    model: Any = mll.model
    if not isinstance(model, ExactGP) or scores_first_points(mll):
        return ""
    if not isinstance(mll.likelihood, _GaussianLikelihoodBase):
        return ""  # latent values have no scale that is known
    targets = cast(Tensor, model.train_targets)
    centre = targets.nanmean().item()
    variance = (targets - centre).square().nanmean().item()
    if not variance > 0:
        return ""
    for kernel in scales_of(getattr(model, "covar_module", cast(Any, None))):
        if isinstance(kernel, ScaleKernel) and kernel.is_stationary:
            largest = kernel.outputscale.max().item() / variance
            if kernel.raw_outputscale.requires_grad and largest > _TOO_LARGE:
                return f"the outputscale at {largest:.2g} times the variance of the targets"
    mean = getattr(model, "mean_module", None)
    if isinstance(mean, ConstantMean) and mean.raw_constant.requires_grad:
        farthest = (cast(Tensor, mean.constant) - centre).abs().max().item() / math.sqrt(variance)
        if farthest > _TOO_FAR:
            return f"the mean {farthest:.2g} deviations from that of the targets"
    return ""


@torch.no_grad()
def predicts_in_its_type(mll: MarginalLogLikelihood) -> bool:
    """Whether rounding leaves predictions of the model what its hyperparameters make them.

    The model's own predictions at the training points are compared with those in float64. True
    of models whose predictions are in float64, or cannot be compared: of several tasks, or of more
    points than :func:`~gpclml.inference.exact_posterior` computes in float64.
    """
    model: Any = mll.model
    if not isinstance(model, ExactGP) or isinstance(model, GPRegression):
        return True
    targets, inputs = cast(Tensor, model.train_targets), model.train_inputs
    if inputs is None or len(inputs) > 1 or targets.dtype != torch.float32:
        return True
    is_gaussian = isinstance(mll.likelihood, _GaussianLikelihoodBase)
    if not is_gaussian or targets.shape[-1] > PREDICTED_IN_DOUBLE_UP_TO:
        return True
    with evaluating(model), settings.debug(False):
        x = cast(Any, model.train_inputs)[0]  # in eval mode as the kernel sees them
        try:
            expected = exact_posterior(model, x, marginal=True)
            noise = training_observations(model).noise
        except (RuntimeError, TypeError, ValueError):
            return True
        if noise is None or expected.mean.shape != targets.shape:
            return True
        try:
            error = cast(Any, model(x)).mean - expected.mean
        except RuntimeError:  # no Cholesky factor
            return False
        observed = ~targets.isnan()
        return bool((error.abs() <= _OFF * (expected.variance + noise).sqrt())[observed].all())


def explanation(problem: Problem, end: LineSearchEnd, starts: int, steps: int) -> str:
    """What a fit says that ended with a problem, and what to do."""
    others = "Another start" if starts == 2 else f"{starts - 1} other starts"
    tried = "" if starts == 1 else f" {others} ended no better."
    suggestion = "Check the units of the inputs, start from other lengthscales, or pass restarts."
    sentences: dict[Problem, str] = {
        "constant": (
            "The fit explains nothing: it predicts the same value everywhere and takes all that "
            f"targets vary by for noise.{tried} If the inputs should explain more: {suggestion}"
        ),
        "bound": (
            f"The fit ended at a bound of {', '.join(end.at_bounds)}, where it predicts worse than "
            f"the mean and deviation of the targets.{tried} {suggestion}"
        ),
        "abnormal": (
            f"The fit ended after {steps} steps, before an optimum ({end.message}).{tried} Use "
            "float64, look for near duplicates among the inputs, or pass restarts."
        ),
        "noise": (
            f"The noise ended at its lower bound, where the fit takes targets for exact, with "
            f"fewer than {_FEW} points for each hyperparameter. If they are not exact, intervals "
            "are too narrow: use more points, a prior of the noise, or a StackedGP."
        ),
        "runaway": (
            f"The fit ended with {end.ran_away}. The objective does not score first points, so "
            "that the scale, the mean and the lengthscales of a kernel may grow together, and "
            "predictions beside the data are lost. Register priors, such as LogNormalPrior(0, "
            "1.5) of the outputscale and NormalPrior(0, 1) of the mean for standardized targets, "
            "take a GPRegression, whose line searches have them, or train by the log marginal "
            "likelihood, LastPoints(m=0)."
        ),
        "limit": (
            f"The fit was stopped after {steps} steps, before it converged. Give it more steps."
        ),
    }
    return sentences.get(problem, "")
