"""Draws of a linear model's weights by gradient descent, and its training speed from them."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml.evidence.sampling import mean_estimate
from gpclml.evidence.training_speed import (
    TrainingSpeed,
    expected_terms,
    log_density,
    marginal_terms,
    predict_prefixes,
    sampled_terms,
)
from gpclml.linalg import LowRankPlusDiagonal


@torch.no_grad()
def training_speed_by_descent(
    features: Tensor,
    target: Tensor,
    prior_variance: Tensor,
    noise: Tensor,
    num_samples: int = 10,
    *,
    steps: int = 100,
    repeats: int = 10,
    seed: int = 0,
) -> TrainingSpeed:
    r"""The estimators of :func:`gpclml.evidence.training_speed.training_speed`, draws by descent.

    All draws start from the prior of :math:`y = \Phi w + \epsilon`, :math:`w \sim N(0, P)`,
    :math:`\epsilon \sim N(0, \Sigma)`, P and Σ diagonal. Points come in the order of the rows:
    each is first predicted by every draw, then joins the points trained on, and descent, with
    Nesterov's momentum, continues on

    .. math:: \tfrac12 |\Sigma^{-1/2} (y + \epsilon' - \Phi w)|^2
        + \tfrac12 |P^{-1/2} (w - w_0)|^2, \qquad \epsilon' \sim N(0, \Sigma)

    of the points so far, whose minimizer is an exact draw of the posterior (Matthews et al. 2017;
    Lyle et al. 2020, Section 3.2). The sum of the losses along the way tends to :math:`-L(D)` as
    descent converges.

    Args:
        features: Φ, ``(N, R)``.
        target: y, ``(N,)``.
        prior_variance: Diagonal of P, ``(R,)``.
        noise: Diagonal of Σ, ``(N,)``.
        num_samples: Draws k of one estimate, at least 2.
        steps: Steps of descent after each point.
        repeats: Number of independent estimates, of k draws each.
        seed: Seed of the draws; it should differ from that of simulated data, whose random numbers
            would be the same.

    Returns:
        Total nats, for this one order; ``expected`` and the log marginal likelihood are exact.

    Note:
        With S = k ``repeats`` draws, at most 4 N S R min(N, R) ``steps`` floating-point
        operations, N² R (R + S) for the objectives and 4 N R² for the exact values.
    """
    model = WhitenedModel(features, target, prior_variance, noise)
    noise = noise.double()
    starts, targets = model.draws(num_samples * repeats, seed)
    weights, deviations = starts, []
    # Each point is predicted before the draws are trained on it.
    for i, (row, value) in enumerate(zip(model.features, model.target, strict=True)):
        if i:
            weights = model.descended(weights, starts, targets[:, :i], steps)
        deviations.append(value - weights @ row)
    deviations = (torch.stack(deviations, dim=-1) * noise.sqrt()).double()
    groups = deviations.reshape(repeats, num_samples, len(target))
    _, *group_terms = sampled_terms(groups, noise)
    multi_sample, gaussian = (mean_estimate(terms.sum(-1)) for terms in group_terms)
    scaled = features.double() * prior_variance.double().sqrt()
    covariance, order = LowRankPlusDiagonal(scaled, noise), torch.arange(len(target))
    exact = predict_prefixes(covariance, target.double(), noise, order.unsqueeze(0))
    return TrainingSpeed(
        log_marginal_likelihood=float(marginal_terms(exact).sum()),
        expected=mean_estimate(expected_terms(exact).sum(-1)),
        # Every draw is independent of the others along all points: more values than groups.
        lower=mean_estimate(log_density(deviations, noise).sum(-1)),
        multi_sample=multi_sample,
        gaussian=gaussian,
    )


class WhitenedModel:
    """A linear model with prior variances ``(R,)`` and noise ``(N,)``, made to have unit variances.

    Rows of the features A, ``(N, R)``, and targets are divided by the noise's deviations, columns
    multiplied by the prior's. Of the Hessian I + AᵀA ``largest`` is the largest eigenvalue; the
    smallest is at least one.
    """

    def __init__(
        self, features: Tensor, target: Tensor, prior_variance: Tensor, noise: Tensor
    ) -> None:
        self.features = features * prior_variance.sqrt() / noise.sqrt().unsqueeze(-1)
        self.largest = 1 + float(torch.linalg.matrix_norm(self.features, ord=2)) ** 2
        self.target = target / noise.sqrt()

    def draws(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Weights from the prior ``(S, R)`` and perturbed targets ``(S, N)``, whitened."""
        generator = torch.Generator().manual_seed(seed)
        n, num_weights = self.features.shape
        weights = torch.randn(count, num_weights, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, n, generator=generator, dtype=torch.float64)
        return weights.to(self.target), self.target + noise.to(self.target)

    def descended(self, weights: Tensor, starts: Tensor, targets: Tensor, steps: int) -> Tensor:
        r"""Weights after descent on :math:`\frac12 (|b - A u|^2 + |u - u_0|^2)`, ``(S, R)``.

        Targets b, ``(S, m)``, are those of the first m points. The Hessian's eigenvalues lie in
        [1, largest], also for those alone. Steps and momentum are Nesterov's for strongly convex
        functions: the error shrinks by about 1 - 1/√κ a step, κ the largest eigenvalue.
        """
        matrix = self.features[: targets.shape[-1]]
        n, num_weights = matrix.shape
        right = starts + targets @ matrix
        # With more points than weights the small Hessian is cheaper than two products a step.
        hessian = matrix.mT @ matrix if n > num_weights else None
        if hessian is not None:
            hessian.diagonal().add_(1.0)

        def gradient(u: Tensor) -> Tensor:
            if hessian is not None:
                return u @ hessian - right
            return torch.addmm(u - right, u @ matrix.mT, matrix)

        # The smallest eigenvalue is taken to be one, so the condition number is the largest.
        root = self.largest**0.5
        momentum = (root - 1) / (root + 1)
        ahead = weights
        for _ in range(steps):
            previous, weights = weights, ahead - gradient(ahead) / self.largest
            ahead = weights + momentum * (weights - previous)
        return weights
