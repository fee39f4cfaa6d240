"""What targets say of a Laplace posterior: factors of its precisions, and how sure it may be.

Factors of precisions come from held-out points, factors of a classifier's outputs from training
points, and temperatures from validation points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Categorical, Distribution

from gpclml.curvature import output_gradients
from gpclml.curvature.output_likelihoods import OutputLikelihood, output_likelihood
from gpclml.curvature.structure import OutputCovariance
from gpclml.errors import ArgumentError
from gpclml.evaluation.calibration import LOG_TEMPERATURE_DEVIATION
from gpclml.evidence.sampling import laplace_conditional_log_density, linearized_outputs
from gpclml.mlls import LaplaceEvidence, LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

__all__ = [
    "FACTORS",
    "bridged",
    "calibrated",
    "confident_as_the_network",
    "factor_by_clml",
    "factor_by_folds",
    "fold_log_density",
    "log_likelihood_gradient",
    "output_covariances",
    "scaled_outputs",
    "validated_temperature",
]

FACTORS = tuple(10.0**k for k in range(-2, 7))
"""Factors of precisions that are tried."""

_FOLDS = 5
_LOSS = 0.003  # nats a point that predictions of training points may lose
_LARGEST = 12.0  # logarithm of a factor of outputs
_IMAGINED = 60  # points
_NUMBERS = 2**24  # of gradients in memory at a time


def output_covariances(
    network: torch.nn.Module,
    functions: Sequence[OutputCovariance],
    x: Tensor,
    outputs: int,
) -> list[Tensor]:
    """Covariances of C outputs at points, ``(N, C, C)``, by each function of their gradients."""
    chunks = []
    first = output_gradients(network, x[:1], outputs).values()
    numbers = sum(
        rows.numel() if isinstance(rows, Tensor) else rows.gradients.numel() for rows in first
    )
    for points in x.split(max(1, _NUMBERS // numbers)):
        gradients = output_gradients(network, points, outputs)
        chunks.append([function(gradients) for function in functions])
    return [torch.cat(covariances) for covariances in zip(*chunks, strict=True)]


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


def factor_by_folds(
    mll: LaplaceMarginalLogLikelihood,
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]],
) -> float:
    r"""The factor of the precisions of the largest cross-validated density, without training again.

    A fold of batches is left out by a Newton step of the linearized network from its mode,

    .. math:: w_{-k} = w_* - \Sigma_{-k} \nabla \log p(\mathcal D_k \mid w_*), \qquad
        \Sigma_{-k} = (H - H_k + P_0)^{-1}

    (Giordano et al. 2019), and its targets are predicted with the covariance
    :math:`J \Sigma_{-k} J^\top`. An ArgumentError says that there are fewer batches than two, or
    that ``batches()`` gives others in a second pass.
    """
    evidences: list[LaplaceEvidence] = []
    gradients: list[dict[str, Tensor]] = []
    seen = []
    for index, (x, y) in enumerate(batches()):
        evidence, gradient = mll.evidence_of(x, y), log_likelihood_gradient(mll, x, y)
        if index < _FOLDS:
            evidences.append(evidence)
            gradients.append(gradient)
        else:
            fold = index % _FOLDS
            evidences[fold] = evidences[fold] + evidence
            gradients[fold] = {name: g + gradients[fold][name] for name, g in gradient.items()}
        seen.append((x.double().sum(), y.clone()))
    if len(seen) < 2:
        suggestion = "Give a smaller batch_size."
        raise ArgumentError("data", "one batch", "at least two for cross-validation", suggestion)
    # The curvature without a fold is the sum of all others': a difference could lose its digits.
    others = [sum(e for e in evidences if e is not evidence) for evidence in evidences]
    scores = torch.zeros(len(FACTORS), dtype=torch.float64)
    for (total, labels), (index, (x, y)) in zip(seen, enumerate(batches()), strict=True):
        if not torch.equal(labels, y) or not torch.equal(total, x.double().sum()):
            suggestion = "Set shuffle=False."
            expected = "a loader that gives the same batches in each pass"
            raise ArgumentError("data", "batches in another order", expected, suggestion)
        fold = index % _FOLDS
        without = cast(LaplaceEvidence, others[fold])
        for k, factor in enumerate(FACTORS):
            scores[k] += fold_log_density(without, gradients[fold], x, y, factor)
    return FACTORS[int(scores.nan_to_num(-math.inf).argmax())]


def log_likelihood_gradient(
    mll: LaplaceMarginalLogLikelihood, x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """The gradient of a batch's log likelihood with respect to the trained weights, by name."""
    network = cast(LinearizedNetwork, mll.model).network
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        likelihood = output_likelihood(cast(Likelihood, mll.likelihood))
        value = likelihood.log_density(network(x), y).sum()
    gradients = torch.autograd.grad(value, list(named.values()), materialize_grads=True)
    return dict(zip(named, gradients, strict=True))


@torch.no_grad()
def fold_log_density(
    others: LaplaceEvidence,
    gradient: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    factor: float,
) -> float:
    """The log density of points of a fold, predicted from the evidence of the other folds."""
    network = cast(LinearizedNetwork, others.mll.model).network
    prior = cast(LinearizedNetwork, others.mll.model).prior
    precisions = {name: factor * p.detach() for name, p in prior.precisions().items()}
    function = others.curvature.output_covariance(precisions, others.curvature_scale())
    # The covariance of weights times a vector is the gradient of half a quadratic form.
    rows = {name: g[None, None].requires_grad_() for name, g in gradient.items()}
    with torch.enable_grad():
        half = 0.5 * function(rows).sum()
    steps = torch.autograd.grad(half, list(rows.values()), materialize_grads=True)
    moved = {
        name: network.get_parameter(name) - step[0] for name, step in zip(rows, steps, strict=True)
    }
    outputs = linearized_outputs(network, moved, x)[0]
    (covariance,) = output_covariances(network, [function], x, outputs.shape[-1])
    likelihood = output_likelihood(cast(Likelihood, others.mll.likelihood))
    return float(_log_densities(likelihood.predictive(outputs, covariance), y).sum())


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

    A scale of zero and a temperature of one are among those tried.

    Args:
        likelihood: Of the targets.
        outputs: ``(N, C)``.
        target: Their targets.
        covariances: Those of the outputs, ``(N, C, C)`` each.
        scales: Factors of a covariance that are tried.

    Returns:
        The index of the covariance, the scale, and the temperature.
    """
    likelihood.log_density(outputs, target)  # its checks
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
    likelihood: OutputLikelihood, outputs: Tensor, covariance: Tensor, factor: float
) -> Tensor:
    r"""Outputs times a factor that makes up for their variances v, but for no more than these.

    .. math:: f_k \min\big(a, \sqrt{1 + k v_k}\big)

    with k of the likelihood, :math:`\pi / 8` of a softmax and 1 of a probit. Predictions divide
    outputs by the root, so that none is further from zero than the network's. With a = 1 they are
    as they were.
    """
    if factor == 1:
        return outputs
    variance = covariance.diagonal(dim1=-2, dim2=-1)
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

    likelihood.log_density(outputs, target)  # its checks

    def mean_density(scaled: Tensor, covariance: Tensor) -> float:
        predicted = likelihood.predictive(scaled.double(), covariance.double())
        return float(_log_densities(predicted, target).mean())

    least = mean_density(outputs, 0 * covariance) - _LOSS

    def excess(logarithm: float) -> float:
        scaled = scaled_outputs(likelihood, outputs, covariance, math.exp(logarithm))
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
        unscaled: Outputs of the network alone.

    Returns:
        T, and by how much the mean log density is larger than that of the network alone.
    """
    likelihood.log_density(unscaled, target)  # its checks
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
    moderated, alone = (
        _log_densities(likelihood.predictive(*pair), target).mean() for pair in pairs
    )
    return temperature, float(moderated - alone)


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
