"""Training speed of a linear model by descent that goes on from point to point."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.evidence.training_speed._checks import check_count
from gpclml.evidence.training_speed._descend import Whitened, descend, whiten
from gpclml.evidence.training_speed._prefixes import predict_prefixes
from gpclml.evidence.training_speed._terms import (
    expected_terms,
    log_density,
    marginal_terms,
    sampled_terms,
)
from gpclml.evidence.training_speed.results import TrainingSpeed, mean_estimate
from gpclml.linalg import LowRankPlusDiagonal

__all__ = ["training_speed_by_descent"]


@torch.no_grad()
@checked(
    features="float (N, R)",
    target="float (N,)",
    prior_variance="float () | (R,)",
    noise="float () | (N,)",
)
def training_speed_by_descent(
    features: Tensor,
    target: Tensor,
    prior_variance: Tensor | float,
    noise: Tensor | float,
    num_samples: int = 10,
    *,
    steps: int = 100,
    repeats: int = 10,
    accelerated: bool = True,
    seed: int = 0,
) -> TrainingSpeed:
    r"""The estimators of :func:`training_speed` with draws trained by gradient descent.

    All draws start from the prior. Points come in the order of the rows: each is first
    predicted by every draw, then joins the points trained on, and descent goes on from where
    it was, on the objective of :func:`sample_then_optimize` for the points so far (Lyle et al.
    2020, Section 3.2). The sum of losses met along the way is :math:`-L(D)` up to what descent
    left undone.

    Args:
        features: Φ, ``(N, R)``.
        target: y, ``(N,)``.
        prior_variance: Of the weights, one number or ``(R,)``.
        noise: Noise variances, one number or ``(N,)``.
        num_samples: Draws k of one estimate, at least 2.
        steps: Steps of descent after each point.
        repeats: Number of independent estimates, of k draws each.
        accelerated: Nesterov's momentum, begun anew at each point; False is plain descent.
        seed: Of the draws; not that of simulated data, which would be made of the same numbers.

    Returns:
        Total nats, for this one order; ``expected`` and the log marginal likelihood are exact,
        and ``gradient_norm`` is the largest left at any point.

    Raises:
        ArgumentError, ShapeError, NonFiniteError: As :func:`sample_then_optimize`.

    Note:
        With S = k ``repeats`` draws, at most 4 N S R min(N, R) ``steps`` floating-point
        operations, N² R (R + S) for the objectives and 4 N R² for the exact values.
    """
    check_count("num_samples", num_samples, 2, "A variance needs two draws.")
    check_count("repeats", repeats, 1)
    check_count("steps", steps, 0)
    model = whiten(features, target, prior_variance, noise)
    n = len(target)
    deviations, gradient_norm = _deviations(
        model, num_samples * repeats, steps=steps, accelerated=accelerated, seed=seed
    )
    deviations, noise = deviations.double(), model.noise.double()
    _, *of_groups = sampled_terms(deviations.reshape(repeats, num_samples, n), noise)
    multi_sample, gaussian = (mean_estimate(terms.sum(-1)) for terms in of_groups)
    exact = predict_prefixes(*_gaussian(model), torch.arange(n).unsqueeze(0))
    return TrainingSpeed(
        log_marginal_likelihood=float(marginal_terms(exact).sum()),
        expected=mean_estimate(expected_terms(exact).sum(-1)),
        # Every draw is independent of the others along all points: more values than groups.
        lower=mean_estimate(log_density(deviations, noise).sum(-1)),
        multi_sample=multi_sample,
        gaussian=gaussian,
        num_samples=num_samples,
        gradient_norm=gradient_norm,
    )


def _deviations(
    model: Whitened, count: int, *, steps: int, accelerated: bool, seed: int
) -> tuple[Tensor, float]:
    """Targets less the draws' predictions, ``(S, N)``, and the largest gradient norm left."""
    anchors, targets = model.draws(count, seed)
    weights = anchors
    left = weights.new_zeros(())
    deviations = []
    for i, (row, value) in enumerate(zip(model.features, model.target, strict=True)):
        deviations.append(value - weights @ row)
        if i + 1 == len(model.target):
            break
        # The largest eigenvalue of all points bounds that of the first ones.
        weights, gradients = descend(
            weights,
            anchors,
            model.features[: i + 1],
            targets[:, : i + 1],
            steps=steps,
            largest=model.largest,
            accelerated=accelerated,
        )
        left = torch.maximum(left, gradients.norm(dim=-1).max())
    return torch.stack(deviations, dim=-1) * model.noise.sqrt(), float(left)


def _gaussian(model: Whitened) -> tuple[LowRankPlusDiagonal, Tensor, Tensor]:
    """Covariance, residual and noise of the observations, in float64."""
    noise = model.noise.double()
    features = model.features.double() * noise.sqrt().unsqueeze(-1)
    residual = model.target.double() * noise.sqrt()
    return LowRankPlusDiagonal(features, noise), residual, noise
