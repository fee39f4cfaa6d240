"""How far class probabilities are from what happens, and the temperature that mends them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpclml.errors import ArgumentError, ShapeError

__all__ = ["expected_calibration_error", "fit_temperature", "out_of_distribution_auroc"]

_LARGEST_LOG = math.log(1e3)


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


def fit_temperature(outputs: Tensor, labels: Tensor) -> float:
    r"""The temperature T of the largest log likelihood of labels (Guo et al. 2017, Section 4.2).

    .. math:: \max_T \sum_n \log \frac1S \sum_s \operatorname{softmax}(f_{sn} / T)_{y_n}

    One network is S = 1; with several draws of its weights the average of them is tempered.

    Args:
        outputs: Logits of points that were not trained on, ``(N, C)`` or ``(S, N, C)``.
        labels: True classes, ``(N,)``.

    Returns:
        T, between .001 and 1000; to be divided by.

    Raises:
        ShapeError: Outputs and labels do not fit.
        ArgumentError: There is no label.
    """
    from scipy.optimize import minimize_scalar

    logits = outputs.detach().double()
    logits = logits.unsqueeze(0) if logits.ndim == 2 else logits
    if logits.ndim != 3 or logits.shape[1:2] != labels.shape:
        expected = "(N, C) or (S, N, C) outputs and (N,) labels"
        got = f"{tuple(outputs.shape)} and {tuple(labels.shape)}"
        raise ShapeError("outputs", got, expected)
    if labels.numel() == 0:
        raise ArgumentError("labels", "none", "at least one")
    index = labels.expand(len(logits), -1).unsqueeze(-1)

    def loss(log_temperature: float) -> float:
        of_draws = torch.log_softmax(logits / math.exp(log_temperature), dim=-1)
        return -float(of_draws.gather(-1, index).squeeze(-1).logsumexp(0).mean())

    limits = (-_LARGEST_LOG, _LARGEST_LOG)
    found = minimize_scalar(loss, bounds=limits, method="bounded", options={"xatol": 1e-6})
    return math.exp(found.x)  # pyright: ignore[reportAttributeAccessIssue]


def out_of_distribution_auroc(inside: Tensor, outside: Tensor) -> float:
    """How well confidence tells points of the classes from others, 0.5 by chance.

    The area under the receiver operating characteristic of the probability of the likeliest
    class: how often a point inside has a larger one than a point outside (Hendrycks and Gimpel
    2017).

    Args:
        inside: Probabilities of points of the classes, ``(N, C)``.
        outside: Probabilities of other points, ``(M, C)``.

    Raises:
        ArgumentError: Either has no point.
    """
    from sklearn.metrics import roc_auc_score

    for name, probabilities in (("inside", inside), ("outside", outside)):
        if len(probabilities) == 0:
            raise ArgumentError(name, "no point", "at least one")
    confidence = torch.cat([inside, outside]).detach().double().max(-1).values.cpu()
    of_inside = torch.cat([torch.ones(len(inside)), torch.zeros(len(outside))])
    return float(roc_auc_score(of_inside.numpy(), confidence.numpy()))
