"""Class probabilities from one Gaussian a class."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor
from torch.distributions import Normal

from gpclml._utils.arguments import checked

__all__ = ["class_log_probabilities", "class_probabilities"]

_NODES = 48


@checked
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
