"""How sure a Laplace posterior's predictions are: factors of outputs and covariances, temperature.

By training points for classes, and by validation points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution

from gpclml.conditioning.batches import Data, batches_of
from gpclml.curvature import Curvature
from gpclml.curvature.output_likelihoods import output_likelihood
from gpclml.curvature.structure import OutputCovariance
from gpclml.evaluation.calibration import LOG_TEMPERATURE_DEVIATION
from gpclml.laplace.laplace_outputs import covariances_of
from gpclml.laplace.laplace_parts import outputs_of

__all__ = [
    "FACTORS",
    "CalibratedPosterior",
    "calibrated",
    "confident_as_the_network",
    "scaled_outputs",
    "validated_temperature",
]

FACTORS = tuple(10.0**k for k in range(-2, 7))
"""Factors of precisions that are tried."""

_SAMPLE = 1000  # training points at which predictions are compared with the network's
_LOSS = 0.003  # nats a point that predictions of training points may lose
_LARGEST = 12.0  # logarithm of a factor of outputs
_IMAGINED = 60  # points


@torch.no_grad()
def calibrated(
    likelihood: Likelihood,
    outputs: Tensor,
    target: Tensor,
    covariances: Sequence[Tensor],
    scales: Sequence[float],
) -> tuple[int, float, float]:
    """Chooses one of several covariances, its scale, and a temperature, by the density of targets.

    A scale of zero and a temperature of one are among those tried.

    Args:
        likelihood: Of the targets.
        outputs: ``(N, C)``.
        target: Their targets.
        covariances: Those of the outputs, ``(N, C, C)`` each.
        scales: Factors of a covariance that are tried.

    Returns:
        The place of the covariance, the scale, and the temperature.
    """
    of_outputs = output_likelihood(likelihood)
    of_outputs.log_density(outputs, target)  # its checks
    best, chosen = math.inf, (0, 0.0, 1.0)
    tried = [(place, scale) for place in range(len(covariances)) for scale in scales]
    for place, scale in [(0, 0.0), *tried]:

        def loss(log_temperature: float, place: int = place, scale: float = scale) -> float:
            predicted = of_outputs.predictive(
                outputs, scale * covariances[place], math.exp(log_temperature)
            )
            of_temperature = 0.5 * (log_temperature / LOG_TEMPERATURE_DEVIATION) ** 2
            own = target.reshape(predicted.batch_shape)  # of one output also as a column
            return of_temperature - float(predicted.log_prob(own).double().sum())

        log_temperature, value = _minimize(loss)
        if value < best:
            best, chosen = value, (place, scale, math.exp(log_temperature))
    return chosen


def scaled_outputs(
    likelihood: Likelihood, outputs: Tensor, covariance: Tensor, factor: float
) -> Tensor:
    r"""Outputs times a factor that makes up for their variances v, but for no more than these.

    .. math:: f_k \min\big(a, \sqrt{1 + k v_k}\big)

    with k of the likelihood, :math:`\pi / 8` of a softmax and 1 of a probit. Predictions divide
    outputs by the root, so that none is further from zero than the network's. With a = 1 they are
    as they were.

    Args:
        likelihood: Of classes.
        outputs: ``(N, C)``.
        covariance: That of the outputs, ``(N, C, C)``.
        factor: The factor a.
    """
    if factor == 1:
        return outputs
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    moderation = output_likelihood(likelihood).moderation
    return outputs * (1 + moderation * variance).sqrt().clamp_max(factor)


@torch.no_grad()
def confident_as_the_network(
    likelihood: Likelihood, outputs: Tensor, target: Tensor, covariance: Tensor
) -> float:
    r"""The smallest factor of outputs by which predictions of training points lose little.

    .. math:: \min \big\{a \ge 1:
        \tfrac1N \sum_n \log p_a(y_n) \ge \tfrac1N \sum_n \log p(y_n \mid f(x_n)) - .003\big\}

    for outputs of :func:`scaled_outputs`. A network has seen these points: how sure it may be of
    others they do not tell, but whether a covariance contradicts them.

    Args:
        likelihood: Of classes.
        outputs: ``(N, C)``.
        target: Their targets.
        covariance: That of the outputs, ``(N, C, C)``.
    """
    from scipy.optimize import brentq

    density = _Density(likelihood, outputs, target)
    least = float(density(outputs, 0 * covariance).mean()) - _LOSS

    def excess(logarithm: float) -> float:
        scaled = scaled_outputs(likelihood, outputs, covariance, math.exp(logarithm))
        return float(density(scaled, covariance).mean()) - least

    if excess(0.0) >= 0:
        return 1.0
    if excess(_LARGEST) <= 0:
        return math.exp(_LARGEST)
    return math.exp(cast(float, brentq(excess, 0.0, _LARGEST)))


@torch.no_grad()
def validated_temperature(
    likelihood: Likelihood, outputs: Tensor, target: Tensor, covariance: Tensor, alone: Tensor
) -> tuple[float, float]:
    r"""The most probable temperature given points that were not trained on, and its gain.

    .. math:: \max_T \sum_n \log p_T(y_n) + \tfrac{60}N \sum_n \sum_k p_1(k) \log p_T(k)

    for N points, where outputs divided by T are means of normal outputs. The second sum stands for
    60 points more, with labels drawn from the predictions at T = 1: a conjugate prior of T. It
    expects as many mistakes of them as the predictions say. Without it a few dozen points without
    a mistake make predictions so sharp that the first mistake costs more than they gain.

    Args:
        likelihood: Of classes.
        outputs: At temperature 1, ``(N, C)``.
        target: Their targets.
        covariance: That of the outputs, ``(N, C, C)``.
        alone: Outputs of the network alone.

    Returns:
        T, and by how much the mean log density is larger than that of the network alone.
    """
    density = _Density(likelihood, alone, target)
    imagined = density.predicted(outputs, covariance)
    support = imagined.enumerate_support()
    shares = imagined.log_prob(support).exp()

    def loss(logarithm: float) -> float:
        predicted = density.predicted(outputs / math.exp(logarithm), covariance)
        expected = (shares * predicted.log_prob(support)).sum(0).mean()
        return -float(density.of(predicted).sum() + _IMAGINED * expected)

    temperature = math.exp(_minimize(loss)[0])
    gain = density(outputs / temperature, covariance) - density(alone, 0 * covariance)
    return temperature, float(gain.mean())


class _Density:
    """Log densities of classes, in double precision, where a network's outputs are normal."""

    def __init__(self, likelihood: Likelihood, outputs: Tensor, target: Tensor) -> None:
        self._likelihood, self._target = output_likelihood(likelihood), target
        self._likelihood.log_density(outputs, target)  # its checks

    def predicted(self, outputs: Tensor, covariance: Tensor) -> Distribution:
        return self._likelihood.predictive(outputs.double(), covariance.double())

    def of(self, predicted: Distribution) -> Tensor:
        target = self._target.reshape(predicted.batch_shape)
        return predicted.log_prob(target.double())  # which Bernoulli needs, and others take too

    def __call__(self, outputs: Tensor, covariance: Tensor) -> Tensor:
        return self.of(self.predicted(outputs, covariance))


def _minimize(loss: Callable[[float], float]) -> tuple[float, float]:
    """The log temperature of the smallest loss, and that loss; at most that of temperature 1."""
    from scipy.optimize import minimize_scalar

    found: Any = minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded")
    one = loss(0.0)
    return (0.0, one) if one <= found.fun else (float(found.x), float(found.fun))


class CalibratedPosterior:
    """Base class of a posterior: covariances of outputs, and the choice of how sure they are."""

    network: torch.nn.Module
    names: list[str]
    num_data: int
    covariance_scale: float
    output_scale: float
    output_temperature: float
    _curvature: Curvature | None
    _precisions: dict[str, Tensor]
    _scale: float
    _of_gradients: OutputCovariance | None

    @property
    def _device(self) -> torch.device:
        return next(iter(self.network.parameters()), torch.zeros(())).device

    def _function(self, factor: float) -> OutputCovariance:
        """What gives covariances of outputs with so many times the precisions."""
        assert self._curvature is not None
        precisions = {name: factor * p for name, p in self._precisions.items()}
        return self._curvature.output_covariance(precisions, self._scale)

    def _covariances(self, x: Tensor, outputs: int, factors: Sequence[float]) -> list[Tensor]:
        """Covariances of outputs, ``(N, C, C)``, for each factor of the precisions."""
        kept = self._of_gradients = self._of_gradients or self._function(1.0)
        functions = [kept if f == 1 else self._function(f) for f in factors]
        return covariances_of(self.network, self.names, functions, x, outputs)

    @torch.no_grad()
    def _evaluated(
        self, batches: Iterator[tuple[Tensor, Tensor]], factors: Sequence[float] = (1.0,)
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs, targets and covariances of outputs, for each factor of the precisions."""
        outputs, targets, covariances = [], [], []
        for x, y in batches:
            outputs.append(outputs_of(self.network, x))
            targets.append(y)
            covariances.append(self._covariances(x, outputs[-1].shape[-1], factors))
        joined = [torch.cat(of_factor) for of_factor in zip(*covariances, strict=True)]
        return torch.cat(outputs), torch.cat(targets), joined

    def _multiply_precisions(self, precision: float | str, place: int) -> None:
        """Takes the factor of the precisions that validation points chose, if they choose it."""
        if precision == "validation":
            factor = FACTORS[place]
            self._precisions = {name: factor * p for name, p in self._precisions.items()}
            self._of_gradients = self._function(1.0)

    @torch.no_grad()
    def _balance(
        self,
        likelihood: Likelihood,
        data: Data,
        batch_size: int,
        held_out: tuple[Tensor, Tensor, list[Tensor]] | None,
        precision: float | str,
        spread: str,
    ) -> None:
        """Chooses the factor of a classifier's outputs, and its temperature."""
        place = 0
        if held_out is not None and precision == "validation":
            place, scale, _ = calibrated(likelihood, *held_out, (1.0,))
            place = place if scale else FACTORS.index(1.0)
            self._multiply_precisions(precision, place)
        outputs, target, (covariance,) = self._evaluated(self._sample(data, batch_size))
        self.output_scale = confident_as_the_network(likelihood, outputs, target, covariance)
        if held_out is None:
            return
        outputs, target, covariances = held_out
        scaled = scaled_outputs(likelihood, outputs, covariances[place], self.output_scale)
        temperature, gain = validated_temperature(
            likelihood, scaled, target, covariances[place], outputs
        )
        self.output_temperature = temperature
        if gain < 0 and spread == "validation":
            self.covariance_scale, self.output_scale, self.output_temperature = 0.0, 1.0, 1.0

    def _sample(self, data: Data, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """About 1,000 of the training points, at even distances."""
        every, seen = max(1, self.num_data // _SAMPLE), 0
        for x, y in batches_of("data", data, batch_size, self._device):
            rows = torch.arange(-seen % every, len(x), every, device=x.device)
            seen += len(x)
            if len(rows):
                yield x[rows], y[rows]
