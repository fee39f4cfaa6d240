"""Weights of a mixture of predictive distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import all_finite, checked
from gpclml.errors import NonFiniteError

__all__ = ["stacking_weights"]

_TOLERANCE = 1e-12  # of the objective a point
_MOST_STEPS = 1000
_ROUNDING = 1e-10  # of a weight


@checked(log_densities="float (M, n)")
def stacking_weights(log_densities: Tensor) -> Tensor:
    r"""The mixture of models that would have predicted each point best given the others.

    .. math:: \max_w \sum_i \log \sum_k w_k\, p_k(y_i \mid y_{-i}), \qquad
        w_k \ge 0, \; \sum_k w_k = 1

    (Yao et al. 2018, Eq. 5). The problem is convex. A weight says what a model adds to the others,
    not how probable it is: of two models that predict alike one may get nothing.

    Args:
        log_densities: log p_k(y_i | y_-i) of n points under M models, ``(M, n)``.

    Returns:
        The weights, ``(M,)``, with sum one.

    Raises:
        ShapeError: If the shape is another one.
        NonFiniteError: If a log density is not finite.

    Note:
        n M operations a step of sequential quadratic programming, on the CPU in float64.
    """
    import numpy as np
    from scipy.optimize import minimize

    got = tuple(log_densities.shape)
    if not all_finite(log_densities):
        raise NonFiniteError("log_densities", f"NaN or infinite values, shape {got}", "finite nats")
    logs = log_densities.detach().to("cpu", torch.float64)
    densities = (logs - logs.amax(0)).exp().numpy()  # relative to the best model of each point
    start = np.full(got[0], 1 / got[0])
    if got[0] > 1:
        found = minimize(
            lambda w: -float(np.log(w @ densities).mean()),
            start,
            jac=lambda w: -(densities / (w @ densities)).mean(1),
            method="SLSQP",
            bounds=[(0.0, 1.0)] * got[0],
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            options={"ftol": _TOLERANCE, "maxiter": _MOST_STEPS},
        )
        start = np.where(found.x > _ROUNDING, found.x, 0.0)
    return torch.as_tensor(start / start.sum()).to(log_densities)
