"""The models of a stack, and what they are weighted by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from gpclml.estimators.calibration import Calibration, fit_calibration
from gpclml.estimators.candidates import FittedCandidate, restored_model
from gpclml.estimators.warps import Warp
from gpclml.inference import training_observations
from gpclml.linalg import leave_one_out_moments
from gpclml.models import GPRegression, find_networks

__all__ = [
    "Component",
    "leave_one_out_residuals",
    "num_hyperparameters",
    "restored_component",
    "scored_by_loo",
    "stored_component",
]


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


def stored_component(one: Component) -> dict[str, Any]:
    """A component in tensors and primitives, without its training data."""
    return {
        "name": one.name, "state": dict(one.model.state_dict()), "weight": one.weight,
        "calibration": list(astuple(one.calibration)), "loo": one.loo,
        "loo_uncalibrated": one.loo_uncalibrated, "note": one.note, "seconds": one.seconds,
        "warp": None if one.warp is None else list(astuple(one.warp)),
    }  # fmt: skip


def restored_component(
    stored: Mapping[str, Any], x: Tensor, y: Tensor, seed: int, categories: Sequence[Sequence[int]]
) -> Component:
    """The component that :func:`stored_component` stored, with its training data."""
    values = {name: value for name, value in stored.items() if name != "state"}
    warp = None if values["warp"] is None else Warp(*values["warp"])
    model = restored_model(values["name"], stored["state"], x, y, warp, seed, categories)
    calibration = Calibration(*values["calibration"])
    return Component(**values | {"model": model, "calibration": calibration, "warp": warp})


def scored_by_loo(
    name: str, fit: FittedCandidate, y: Tensor, calibrate: bool
) -> tuple[Component, Tensor]:
    """Calibrates a fitted candidate to its leave-one-out residuals.

    Returns:
        The component, whose weight is not known yet, and the log densities of the rows, ``(n,)``.
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
    scores = float(logs.mean()), float(plain.mean())
    said = fit.note, fit.seconds, fit.warp
    return Component(name, model, 0.0, calibration, *scores, *said), logs


def num_hyperparameters(model: GPRegression) -> int:
    """Number of trained parameters, without the weights of networks."""
    networks = find_networks(model)
    inner = {id(one) for network in networks for one in network.parameters()}
    free = (one for one in model.parameters() if one.requires_grad and id(one) not in inner)
    return sum(one.numel() for one in free)


@torch.no_grad()
def leave_one_out_residuals(model: GPRegression) -> tuple[Tensor, Tensor]:
    """Error and deviation of each row given all others, in standardized units, ``(n,)`` each.

    The hyperparameters are those fitted to all rows; deviations are with noise. (Rasmussen and
    Williams 2006, Eq. 5.12.) About n³ floating-point operations.
    """
    data = training_observations(model, model.likelihood)
    every = torch.arange(data.residual.shape[-1])
    mean, variance = leave_one_out_moments(data.covariance, data.residual, every)
    return data.residual - mean, variance.sqrt()
