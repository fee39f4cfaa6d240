"""What targets say of a Laplace posterior: factors of its precisions, and how sure it may be.

Factors of precisions come from held-out points, factors of a classifier's outputs from training
points, and temperatures from validation points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from gpclml.curvature.output_likelihoods import OutputLikelihood
from gpclml.evaluation.calibration import LOG_TEMPERATURE_DEVIATION
from gpclml.evidence.sampling import laplace_conditional_log_density
from gpclml.mlls import LaplaceEvidence
from gpclml.models import LinearizedNetwork

FACTORS = tuple(10.0**k for k in range(-2, 7))
"""Factors of precisions that are tried."""

_LOSS = 0.003  # nats a point that predictions of training points may lose
_LARGEST = 12.0  # logarithm of a factor of outputs
_IMAGINED = 60  # points
_STEPS = 20  # from one factor of outputs to the largest that changes validation points


def factor_by_clml(evidence: LaplaceEvidence, held_out: tuple[Tensor, Tensor]) -> float:
    """The factor of the precisions for which the CLML of held-out points is largest.

    The CLML is :func:`gpclml.evidence.sampling.laplace_conditional_log_density`.
    """
    log_precision = cast(LinearizedNetwork, evidence.mll.model).prior.log_precision
    before = log_precision.detach().clone()
    scores = []
    with torch.no_grad():
        for factor in FACTORS:
            log_precision.copy_(before + math.log(factor))
            scores.append(laplace_conditional_log_density(evidence, held_out))
        log_precision.copy_(before)
    return FACTORS[max(range(len(FACTORS)), key=scores.__getitem__)]


def _log_densities(predicted: Distribution, target: Tensor) -> Tensor:
    """Log densities of targets, which may be a column, in double precision."""
    # Bernoulli takes real numbers alone, and other distributions take them too.
    return predicted.log_prob(target.reshape(predicted.batch_shape).double()).double()


@torch.no_grad()
def calibrated(
    likelihood: OutputLikelihood,
    outputs: Tensor,
    target: Tensor,
    covariances: Sequence[Tensor],
    scales: Sequence[float],
) -> tuple[int, float, float]:
    """Chooses one of several covariances, its scale, and a temperature, by the density of targets.

    A scale of zero and a temperature of one are among those tried. Outputs are ``(N, C)`` and
    covariances ``(N, C, C)``; the index of one, its scale and the temperature are returned.
    """
    # The network alone comes first: others have to be better than it.
    best, chosen = math.inf, (0, 0.0, 1.0)
    tried = [(k, scale) for k in range(len(covariances)) for scale in scales]
    for k, scale in [(0, 0.0), *tried]:
        covariance = scale * covariances[k]

        def loss(log_temperature: float, covariance: Tensor = covariance) -> float:
            predicted = likelihood.predictive(outputs, covariance, math.exp(log_temperature))
            penalty = 0.5 * (log_temperature / LOG_TEMPERATURE_DEVIATION) ** 2
            return penalty - float(_log_densities(predicted, target).sum())

        log_temperature, value = _minimize(loss)
        if value < best:
            best, chosen = value, (k, scale, math.exp(log_temperature))
    return chosen


def _minimize(loss: Callable[[float], float]) -> tuple[float, float]:
    """The log temperature of the smallest loss, and that loss; at most that of temperature 1."""
    from scipy.optimize import minimize_scalar

    result: Any = minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded")
    value = loss(0.0)
    return (0.0, value) if value <= result.fun else (float(result.x), float(result.fun))


def scaled_outputs(
    likelihood: OutputLikelihood, outputs: Tensor, variance: Tensor, factor: float
) -> Tensor:
    r"""Outputs times a factor that makes up for their variances v, but for no more than these.

    .. math:: f_k \min\big(a, \sqrt{1 + k v_k}\big)

    with k of the likelihood, :math:`\pi / 8` of a softmax and 1 of a probit. Predictions divide
    outputs by the root, so that none is further from zero than the network's. With a = 1 they are
    as they were.
    """
    if factor == 1:
        return outputs
    return outputs * (1 + likelihood.moderation * variance).sqrt().clamp_max(factor)


@torch.no_grad()
def confident_as_the_network(
    likelihood: OutputLikelihood, outputs: Tensor, target: Tensor, covariance: Tensor
) -> float:
    r"""The smallest factor of outputs by which predictions of training points lose little.

    .. math:: \min \big\{a \ge 1:
        \tfrac1N \sum_n \log p_a(y_n) \ge \tfrac1N \sum_n \log p(y_n \mid f(x_n)) - .003\big\}

    for outputs of :func:`scaled_outputs`. A network has seen these points: how sure it may be of
    others they do not tell, but whether a covariance contradicts them.
    """
    from scipy.optimize import brentq

    covariance = covariance.double()

    def mean_density(scaled: Tensor, covariance: Tensor) -> float:
        predicted = likelihood.predictive(scaled.double(), covariance)
        return float(_log_densities(predicted, target).mean())

    variance = covariance.diagonal(dim1=-2, dim2=-1).to(outputs)
    least = mean_density(outputs, 0 * covariance) - _LOSS

    def excess(logarithm: float) -> float:
        scaled = scaled_outputs(likelihood, outputs, variance, math.exp(logarithm))
        return mean_density(scaled, covariance) - least

    # The excess grows with the factor until variances are made up for.
    if excess(0.0) >= 0:
        return 1.0
    if excess(_LARGEST) <= 0:
        return math.exp(_LARGEST)
    return math.exp(cast(float, brentq(excess, 0.0, _LARGEST)))


@torch.no_grad()
def validated_temperature(
    likelihood: OutputLikelihood,
    outputs: Tensor,
    target: Tensor,
    covariance: Tensor,
    unscaled: Tensor,
) -> tuple[float, float, float]:
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
        unscaled: Outputs of the network alone.

    Returns:
        T, by how much the mean log density is larger than that of the network alone, and the
        standard error of this difference.
    """
    outputs, covariance, unscaled = (v.double() for v in (outputs, covariance, unscaled))
    # Classes as they would be drawn at temperature one, weighted instead of drawn.
    imagined = likelihood.predictive(outputs, covariance)
    support = imagined.enumerate_support()
    shares = imagined.log_prob(support).exp()

    def loss(logarithm: float) -> float:
        predicted = likelihood.predictive(outputs / math.exp(logarithm), covariance)
        expected = (shares * predicted.log_prob(support)).sum(0).mean()
        return -float(_log_densities(predicted, target).sum() + _IMAGINED * expected)

    temperature = math.exp(_minimize(loss)[0])
    pairs = (outputs / temperature, covariance), (unscaled, 0 * covariance)
    moderated, alone = (_log_densities(likelihood.predictive(*pair), target) for pair in pairs)
    gains = moderated - alone
    return temperature, float(gains.mean()), float(gains.std(correction=0)) / len(gains) ** 0.5


@torch.no_grad()
def validated_factor(
    likelihood: OutputLikelihood,
    outputs: Tensor,
    target: Tensor,
    covariance: Tensor,
    least: float,
) -> tuple[float, float]:
    """The smallest factor of outputs by which validation points lose little, and its temperature.

    Their mean log density is at most a standard error below that of the network alone: few points
    with a small loss say nothing of it. The largest factor that is tried makes up for all their
    variances. Points with larger variances stay less sure than under the network. Outputs
    ``(N, C)`` are those of the network alone; by the factor ``least`` training points lose little.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    most = max(least, float((1 + likelihood.moderation * variance.max()).sqrt()))
    factor, temperature = least, 1.0
    for step in range(_STEPS + 1):
        factor = least * (most / least) ** (step / _STEPS)
        scaled = scaled_outputs(likelihood, outputs, variance, factor)
        temperature, gain, error = validated_temperature(
            likelihood, scaled, target, covariance, outputs
        )
        if gain >= -error:
            break
    return factor, temperature


def bridged(outputs: Tensor, covariance: Tensor) -> Categorical:
    r"""Mean class probabilities of a softmax of normal outputs, by the Laplace bridge.

    .. math:: \alpha_k = \frac1{\Sigma_{kk}} \Big(1 - \frac2C
        + \frac{e^{\mu_k}}{C^2} \sum_l e^{-\mu_l}\Big), \qquad
        \mu - \frac{\Sigma 1 1^\top \mu}{1^\top \Sigma 1}, \quad
        \Sigma - \frac{\Sigma 1 1^\top \Sigma}{1^\top \Sigma 1} \text{ for } \mu, \Sigma

    is the Dirichlet distribution whose Laplace approximation in the outputs, on the plane where
    they add up to zero, is the normal (Hobbhahn et al. 2022, Eq. 7); its mean is
    :math:`\alpha / \sum_l \alpha_l`. Unlike the probit approximation it does not tend to the
    softmax as covariances vanish.

    Args:
        outputs: Means of outputs, ``(N, C)``; one output f stands for two, (-f, f) / 2.
        covariance: Their covariances, ``(N, C, C)``.
    """
    if outputs.shape[-1] == 1:
        halves = outputs.new_tensor([-0.5, 0.5])
        outputs, covariance = outputs * halves, covariance * halves * halves.unsqueeze(-1)
    mu, sigma, count = outputs.double(), covariance.double(), outputs.shape[-1]
    row_sums = sigma.sum(-1)  # covariance of each output with their sum
    variance, diagonal = row_sums.sum(-1, keepdim=True), sigma.diagonal(dim1=-2, dim2=-1)
    inverse = torch.where(variance > 1e-9 * diagonal.sum(-1, keepdim=True), 1 / variance, 0.0)
    mu = mu - row_sums * mu.sum(-1, keepdim=True) * inverse
    diagonal = diagonal - row_sums.square() * inverse
    # In logarithms, since exponentials of sure outputs overflow.
    terms = torch.stack(
        [
            torch.full_like(mu, math.log1p(-2 / count) if count > 2 else -math.inf),
            mu - 2 * math.log(count) + torch.logsumexp(-mu, -1, keepdim=True),
        ]
    ).logsumexp(0)
    return Categorical(logits=(terms - diagonal.clamp_min(1e-300).log()).to(outputs))
