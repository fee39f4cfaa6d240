"""Draws from the posterior of a linear model by gradient descent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.evidence.training_speed._checks import check_count
from gpclml.evidence.training_speed._descend import descend, whiten

__all__ = ["DescentDraws", "sample_then_optimize"]


@dataclass(frozen=True)
class DescentDraws:
    """Weights that descent ended at, with what determines where it would end.

    Attributes:
        weights: The draws, ``(S, R)``.
        starts: Draws from the prior, where descent began, ``(S, R)``.
        targets: Targets with noise added, ``(S, N)``.
        gradient_norms: Norms of the gradients left, ``(S,)``: each is a bound on the distance
            of its draw from an exact one, in prior standard deviations.
    """

    weights: Tensor
    starts: Tensor
    targets: Tensor
    gradient_norms: Tensor


@torch.no_grad()
@checked(
    features="float (N, R)",
    target="float (N,)",
    prior_variance="float () | (R,)",
    noise="float () | (N,)",
)
def sample_then_optimize(
    features: Tensor,
    target: Tensor,
    prior_variance: Tensor | float,
    noise: Tensor | float,
    num_samples: int,
    *,
    steps: int = 1000,
    accelerated: bool = True,
    seed: int = 0,
) -> DescentDraws:
    r"""Draws of the weights of a linear model from its posterior, each a minimizer.

    The model is :math:`y = \Phi w + \epsilon`, :math:`w \sim N(0, P)`,
    :math:`\epsilon \sim N(0, \Sigma)`, P and Σ diagonal. Each draw starts from the prior at
    :math:`w_0` and descends on

    .. math:: \tfrac12 |\Sigma^{-1/2} (y + \epsilon' - \Phi w)|^2
        + \tfrac12 |P^{-1/2} (w - w_0)|^2, \qquad \epsilon' \sim N(0, \Sigma)

    whose minimizer is an exact draw (Matthews et al. 2017; Lyle et al. 2020, Section 3.2).
    Descent runs in units of the prior, where no curvature is below one.

    Args:
        features: Φ, ``(N, R)``.
        target: y, ``(N,)``.
        prior_variance: Diagonal of P, one number or ``(R,)``.
        noise: Diagonal of Σ, one number or ``(N,)``.
        num_samples: Number S of draws.
        steps: Steps of descent; the gradients left say whether they were enough.
        accelerated: Nesterov's momentum; False is plain descent.
        seed: Of the draws; not that of simulated data, which would be made of the same numbers.

    Returns:
        Draws in the type and on the device of ``features``.

    Raises:
        ArgumentError: A count is out of range or a variance not positive.
        ShapeError: Arguments do not fit together.
        NonFiniteError: Features or targets are not finite.

    Note:
        At most 4 S R min(N, R) floating-point operations a step, and a norm of the features. With κ
        the largest eigenvalue of I + P^{1/2} Φᵀ Σ⁻¹ Φ P^{1/2} the error shrinks by
        about 1 - 1/√κ a step, 1 - 2/κ without momentum.
    """
    check_count("num_samples", num_samples, 1)
    check_count("steps", steps, 0)
    model = whiten(features, target, prior_variance, noise)
    starts, targets = model.draws(num_samples, seed)
    weights, gradients = descend(
        starts,
        starts,
        model.features,
        targets,
        steps=steps,
        largest=model.largest,
        accelerated=accelerated,
    )
    return DescentDraws(
        weights=weights * model.deviations,
        starts=starts * model.deviations,
        targets=targets * model.noise.sqrt(),
        gradient_norms=gradients.norm(dim=-1),
    )
