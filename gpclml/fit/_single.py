"""Line searches of float32 models that predict in float32.

Objectives are computed in float64, and a smooth function raises the variance of its kernel to a
million times the noise. An entry of a float32 covariance has no digit of the noise left then, nor
have predictions that are made of it. ``GPRegression`` predicts in float64. Other models, which
GPyTorch and BoTorch predict with, have to end where float32 suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from gpytorch import settings
from gpytorch.kernels import RQKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.mlls.added_loss_term import AddedLossTerm
from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.inference import evaluating, exact_posterior, training_observations
from gpclml.inference.posterior import PREDICTED_IN_DOUBLE_UP_TO
from gpclml.models import GPRegression

__all__ = ["ROUNDING_LIMITS", "limited_rounding", "predicts_in_its_type"]

ROUNDING_LIMITS = (1e5, 1e4, 1e3)
"""Ratios of rounding to noise, in epsilons, that a search is kept below, one after the other."""
_NAME = "limited_rounding"
_OFF = 0.2  # of the deviation of an observation, by which predictions may be off


@torch.no_grad()
def predicts_in_its_type(mll: MarginalLogLikelihood) -> bool:
    """Whether rounding leaves predictions of the model what its hyperparameters make them.

    The model's own predictions at the training points are compared with those in float64. True
    of models whose predictions are in float64, or cannot be compared: of several tasks, or of more
    points than :func:`~gpclml.inference.exact_posterior` computes in float64.
    """
    model = mll.model
    if not isinstance(model, ExactGP) or isinstance(model, GPRegression):
        return True
    targets, inputs = model.train_targets, model.train_inputs
    if not isinstance(targets, Tensor) or inputs is None or targets.dtype != torch.float32:
        return True
    if len(inputs) > 1 or targets.shape[-1] > PREDICTED_IN_DOUBLE_UP_TO:
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


@contextmanager
def limited_rounding(mll: MarginalLogLikelihood, limit: float) -> Iterator[None]:
    """Within the block the objective falls where rounding is above so many epsilons of the noise.

    An entry of a covariance is off by about an epsilon of the prior variance, of GPyTorch's
    rational quadratic kernel by alpha epsilons. The objective falls by the square of the logarithm
    of the ratio over its limit, in nats a point.
    """
    model = cast(ExactGP, mll.model)
    model.register_added_loss_term(_NAME)
    model.update_added_loss_term(_NAME, _Limit(mll, limit))
    try:
        yield
    finally:
        del model._added_loss_terms[_NAME]


class _Limit(AddedLossTerm):
    def __init__(self, mll: MarginalLogLikelihood, limit: float) -> None:
        self._mll, self._log_limit = mll, math.log(limit)

    def loss(self, *params: Any) -> Tensor:
        mll = self._mll
        data = training_observations(cast(ExactGP, mll.model), cast(Likelihood, mll.likelihood))
        rounding = data.latent.diagonal(dim1=-1, dim2=-2).mean(-1)
        for kernel in mll.model.modules():
            if isinstance(kernel, RQKernel):
                rounding = rounding * (1.0 + cast(Tensor, kernel.alpha).squeeze(-1))
        ratio = rounding / cast(Tensor, data.noise).mean(-1)
        return -data.residual.shape[-1] * (ratio.log() - self._log_limit).clamp_min(0.0).square()
