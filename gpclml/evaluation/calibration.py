"""Calibration of class probabilities: its error, and a temperature.

Numpy arrays and pandas objects are taken where tensors are.
"""

from __future__ import annotations

import math

import torch

from gpclml._utils.arguments import check_classes, check_counts, check_finite, checked
from gpclml._utils.arrays import ArrayLike, takes_arrays

LOG_TEMPERATURE_DEVIATION = 0.5
"""Standard deviation of the prior of log temperatures, here and in ``gpclml.Laplace``."""

_LARGEST_LOG = math.log(1e3)


@takes_arrays()
@checked(probabilities="(*points, ways)", labels="integer (*points)")
def expected_calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = 15
) -> float:
    """The expected calibration error: mean difference of confidence and accuracy, 0 to 1.

    Predictions are put in bins of equal width by the probability of the most probable class. The
    absolute differences of mean probability and accuracy are averaged with the bins' shares of
    predictions as weights (Guo et al. 2017, Eq. 5).

    Args:
        probabilities: Class probabilities, ``(*batch, ways)``.
        labels: True classes, ``(*batch,)``.
        bins: Number of bins.

    Raises:
        ShapeError: If the shapes do not fit each other, or there is no prediction.
        ArgumentError: If there is no bin, or a label is not a class.
        NonFiniteError: If a probability is NaN or infinite.
    """
    check_counts(bins=bins)
    check_classes("labels", labels, probabilities.shape[-1])
    check_finite("probabilities", probabilities)
    confidence, guess = probabilities.detach().double().max(-1)
    # The mean of a bin times its share of points is its sum over all points.
    excess = confidence - (guess == labels).double()
    index = (confidence * bins).long().clamp(0, bins - 1)
    sums = torch.bincount(index.flatten(), weights=excess.flatten())
    return float(sums.abs().sum()) / labels.numel()


@takes_arrays()
@checked(outputs="(N, C) | (S, N, C)", labels="integer (N,)")
def fit_temperature(outputs: ArrayLike, labels: ArrayLike) -> float:
    r"""The most probable temperature T given labels (Guo et al. 2017, Section 4.2, with a prior).

    .. math:: \max_T \sum_n \log \frac1S \sum_s \operatorname{softmax}(f_{sn} / T)_{y_n}
        - \tfrac12 (\log T / 0.5)^2

    S is 1 for one network; with several draws of its weights, the outputs of each are divided by T.
    The last term is a normal prior of log T. The likelihood alone grows without end as T falls to
    zero if every label has the largest logit, which a few hundred held-out points of a good network
    often fulfil; a network so sharp loses many nats at its first mistake. With thousands of points
    the prior hardly counts.

    Args:
        outputs: Logits of points that were not trained on, ``(N, C)`` or ``(S, N, C)``.
        labels: True classes, ``(N,)``.

    Returns:
        T, between .001 and 1000; divide logits by it.

    Raises:
        ShapeError: The shapes do not fit each other, or there is no point.
        ArgumentError: A label is not a class.
        NonFiniteError: An output is NaN or infinite.
    """
    from scipy.optimize import minimize_scalar

    logits = outputs.detach().double()
    logits = logits.unsqueeze(0) if logits.ndim == 2 else logits
    check_classes("labels", labels, logits.shape[-1])
    check_finite("outputs", logits)
    index = labels.long().expand(len(logits), -1).unsqueeze(-1)

    def loss(log_temperature: float) -> float:
        draws = torch.log_softmax(logits / math.exp(log_temperature), dim=-1)
        penalty = 0.5 * (log_temperature / LOG_TEMPERATURE_DEVIATION) ** 2
        return penalty - float(draws.gather(-1, index).squeeze(-1).logsumexp(0).sum())

    # In the logarithm, in which the prior is normal and halving weighs as much as doubling.
    limits = (-_LARGEST_LOG, _LARGEST_LOG)
    optimum = minimize_scalar(loss, bounds=limits, method="bounded", options={"xatol": 1e-6})
    return math.exp(optimum.x)  # pyright: ignore[reportAttributeAccessIssue]
