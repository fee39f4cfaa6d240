"""Class probabilities from one Gaussian a class, and how well calibrated they are."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor
from torch.distributions import Normal

from gpclml.errors import ArgumentError, ShapeError

__all__ = ["class_log_probabilities", "class_probabilities", "expected_calibration_error"]

_NODES = 48


def class_probabilities(predictive: Normal) -> Tensor:
    r"""The probability that the target of a class is the largest of all.

    .. math:: p_c = \int \mathcal N(t; \mu_c, \sigma_c^2)
        \prod_{k \ne c} \Phi\!\left(\frac{t - \mu_k}{\sigma_k}\right) dt

    with the one-vs-rest targets independent: the multiclass probit rule on the predictive
    marginals. By Gauss-Hermite quadrature, then normalized to one. The likeliest class is that
    of the largest mean where the variances are equal.

    Args:
        predictive: Marginals of the one-vs-rest targets, ``(*batch, ways, q)``.

    Returns:
        Probabilities, ``(*batch, q, ways)``.
    """
    return class_log_probabilities(predictive).exp()


def class_log_probabilities(predictive: Normal) -> Tensor:
    """The logarithms of :func:`class_probabilities`, finite where those are too small.

    Args:
        predictive: Marginals of the one-vs-rest targets, ``(*batch, ways, q)``.

    Returns:
        Log probabilities, ``(*batch, q, ways)``.
    """
    mean, scale = predictive.mean.mT, predictive.stddev.mT  # (*batch, q, ways)
    nodes, weights = (
        torch.as_tensor(part).to(mean) for part in numpy.polynomial.hermite_e.hermegauss(_NODES)
    )
    at = mean.unsqueeze(-1) + scale.unsqueeze(-1) * nodes  # (*batch, q, ways, nodes)
    standard = (at.unsqueeze(-2) - mean[..., None, :, None]) / scale[..., None, :, None]
    below = torch.special.log_ndtr(standard)  # (*batch, q, ways, ways, nodes)
    own = torch.eye(mean.shape[-1], dtype=torch.bool, device=mean.device).unsqueeze(-1)
    others = below.masked_fill(own, 0.0).sum(-2)
    log_terms = others + weights.log()
    return torch.log_softmax(log_terms.logsumexp(-1), dim=-1)


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """How far confidence is from accuracy on average, between 0 and 1.

    Predictions are put in bins of equal width by the probability of the likeliest class; the
    absolute differences of mean probability and accuracy are averaged by the bins' shares of
    the predictions (Guo et al. 2017, Eq. 5).

    Args:
        probabilities: ``(*batch, ways)``.
        labels: True classes, ``(*batch,)``.
        bins: Number of bins.

    Raises:
        ShapeError: If the two do not fit.
        ArgumentError: If there is no prediction, or no bin.
    """
    if probabilities.shape[:-1] != labels.shape:
        expected = f"{tuple(probabilities.shape[:-1])}, as the probabilities"
        raise ShapeError("labels", tuple(labels.shape), expected)
    if labels.numel() == 0:
        raise ArgumentError("probabilities", "none", "at least one prediction")
    if bins < 1:
        raise ArgumentError("bins", bins, "at least 1")
    confidence, guess = probabilities.detach().double().max(-1)
    right = (guess == labels).double().flatten()
    confidence = confidence.flatten()
    place = (confidence * bins).long().clamp(0, bins - 1)
    excess = torch.zeros(bins, dtype=torch.float64, device=place.device)
    excess.index_add_(0, place, confidence - right)
    return float(excess.abs().sum()) / labels.numel()
