"""The models of a stack, and what they are weighted by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.estimators.calibration import Calibration, fit_calibration
from gpclml.estimators.fitting import FittedCandidate
from gpclml.estimators.warps import Warp
from gpclml.inference import training_observations
from gpclml.linalg import leave_one_out_moments
from gpclml.models import GPRegression, find_networks

__all__ = ["Component", "Scored", "leave_one_out_residuals", "num_hyperparameters", "scored_by_loo"]


@dataclass(frozen=True, eq=False)
class Component:
    """A fitted model of a stack, with its weight and its calibration.

    Attributes:
        name: Name of the candidate.
        model: The fitted model of all rows.
        weight: Its share of the mixture.
        calibration: How its predictions are widened.
        loo: Mean log density of a row given all others after calibration, in nats, original units.
        loo_uncalibrated: The same before calibration.
        note: A sentence on a problem of the fit; empty if there is none.
        seconds: Wall time of the fit.
        warp: The transform of its targets, if they have one; its model and calibration are of the
            transformed targets.
    """

    name: str
    model: GPRegression
    weight: float
    calibration: Calibration
    loo: float
    loo_uncalibrated: float
    note: str = ""
    seconds: float = 0.0
    warp: Warp | None = None

    def moments(self, X: Tensor, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Mean and covariance of points in original units, through which gradients flow.

        Of transformed targets the correlations are those of the transform.

        Args:
            X: Points, ``(*batch, q, d)``.
            observation_noise: Whether to add the noise of observations.

        Returns:
            ``(*batch, q)`` and ``(*batch, q, q)``.
        """
        normal = self.model.predict(X, observation_noise=observation_noise)
        widened = self.calibration.tail_variance**0.5 * self.calibration.scales(normal.mean)
        mean = normal.mean
        if self.warp is not None:
            deviation = normal.variance.sqrt()
            mean, variance = self.warp.moments(normal.mean, widened * deviation)
            widened = variance.sqrt() / deviation
        return mean, normal.covariance_matrix * widened.unsqueeze(-1) * widened.unsqueeze(-2)


@dataclass
class Scored:
    """A fitted candidate, and the log densities by which it is weighted."""

    name: str
    fit: FittedCandidate
    calibration: Calibration
    logs: Tensor
    uncalibrated: float

    def component(self, weight: float) -> Component:
        """The component, once its weight is known."""
        return Component(
            self.name, self.fit.model, weight, self.calibration, float(self.logs.mean()),
            self.uncalibrated, self.fit.note, self.fit.seconds, self.fit.warp,
        )  # fmt: skip


def scored_by_loo(name: str, fit: FittedCandidate, y: Tensor, calibrate: bool) -> Scored:
    """Calibrates a fitted candidate to its leave-one-out residuals.

    Args:
        name: Name of the candidate.
        fit: The candidate.
        y: Targets in original units.
        calibrate: Whether to; else its predictions stay normal.

    Raises:
        NonFiniteError, NotPSDError: A residual cannot be computed.
    """
    model = fit.model
    error, deviation = leave_one_out_residuals(model)
    residuals = (error / deviation).double().cpu()
    y = y.double().cpu()
    targets = y if fit.warp is None else fit.warp.forward(y)
    scale = float(model.target_scale)
    locations = targets - scale * error.double().cpu()
    calibration = Calibration()
    if calibrate:
        # Heavy tails of the logarithm of a target would have no mean.
        count, tails = num_hyperparameters(model), fit.warp is None
        calibration = fit_calibration(residuals, locations, hyperparameters=count, tails=tails)
    unit = (scale * deviation.double().cpu()).log()
    if fit.warp is not None:
        unit = unit - fit.warp.log_slope(y)
    logs, plain = (
        torch.as_tensor(one.log_density(residuals.numpy(), locations.numpy())) - unit
        for one in (calibration, Calibration())
    )
    return Scored(name, fit, calibration, logs, float(plain.mean()))


def num_hyperparameters(model: GPRegression) -> int:
    """Number of trained parameters, without the weights of networks."""
    networks = find_networks(model)
    inner = {id(one) for network in networks for one in network.parameters()}
    free = (one for one in model.parameters() if one.requires_grad and id(one) not in inner)
    return sum(one.numel() for one in free)


@torch.no_grad()
def leave_one_out_residuals(model: GPRegression) -> tuple[Tensor, Tensor]:
    """Error and deviation of the prediction of each row from all others, in standardized units.

    The hyperparameters are those fitted to all rows. (Rasmussen and Williams 2006, Eq. 5.12.)

    Args:
        model: A fitted model.

    Returns:
        Errors, observed less predicted, and predictive standard deviations with noise, ``(n,)``.

    Note:
        About n³ floating-point operations.
    """
    data = training_observations(model, model.likelihood)
    every = torch.arange(data.residual.shape[-1])
    mean, variance = leave_one_out_moments(data.covariance, data.residual, every)
    return data.residual - mean, variance.sqrt()
