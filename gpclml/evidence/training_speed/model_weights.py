"""Posterior probabilities of models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError

__all__ = ["model_weights"]


@checked(log_evidences="(M,)", prior="(M,)")
def model_weights(
    log_evidences: Tensor | Sequence[float], prior: Tensor | Sequence[float] | None = None
) -> Tensor:
    r"""The posterior probability of each model.

    .. math:: p(M_j \mid D) = \frac{p(M_j)\, p(D \mid M_j)}{\sum_l p(M_l)\, p(D \mid M_l)}

    Lyle et al. (2020, Section 3.3) compare these weights of Bayesian model averaging with those
    that :func:`expected_combination` and :func:`sampled_combination` learn.

    Args:
        log_evidences: Log marginal likelihoods of the same targets in the same units, or
            estimates of them, in total nats, ``(M,)``; minus infinity is weight zero.
        prior: Probabilities of the models, ``(M,)``, with sum one; equal ones if None.

    Returns:
        ``(M,)``, with sum one.

    Raises:
        ShapeError: If the two do not fit together.
        NonFiniteError: If an evidence is NaN or plus infinity, or all are minus infinity.
        ArgumentError: If the prior has a negative entry or another sum.
    """
    values = log_evidences
    if not isinstance(values, Tensor) or not values.is_floating_point():
        values = torch.as_tensor(values, dtype=torch.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ShapeError("log_evidences", tuple(values.shape), "(M,), one for each of M models")
    if bool((values.isnan() | values.isposinf()).any()) or bool(values.isneginf().all()):
        expected = "numbers, or minus infinity for some"
        raise NonFiniteError("log_evidences", values.tolist(), expected)
    if prior is None:
        return torch.softmax(values, dim=0)
    probabilities = torch.as_tensor(prior, dtype=values.dtype, device=values.device)
    if probabilities.shape != values.shape:
        expected = f"({len(values)},), as the evidences"
        raise ShapeError("prior", tuple(probabilities.shape), expected)
    total = float(probabilities.sum())
    if not bool((probabilities >= 0).all()) or abs(total - 1) > 1e-6:
        raise ArgumentError(
            "prior",
            f"{probabilities.tolist()} with sum {total:.6g}",
            "probabilities, not negative and with sum 1",
            "Divide them by their sum.",
        )
    return torch.softmax(values + probabilities.log(), dim=0)
