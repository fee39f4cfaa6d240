"""Draws of a linear model's weights by gradient descent, and its training speed from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, check_finite, check_positive, checked, seeded
from gpclml.errors import ArgumentError
from gpclml.evidence.sampling.monte_carlo import mean_estimate
from gpclml.evidence.training_speed.estimators import (
    TrainingSpeed,
    expected_terms,
    log_density,
    marginal_terms,
    predict_prefixes,
    sampled_terms,
)
from gpclml.linalg import LowRankPlusDiagonal

__all__ = [
    "DescentDraws",
    "sample_then_optimize",
    "training_speed_by_descent",
]


_checked = checked(
    features="float (N, R)",
    target="float (N,)",
    prior_variance="float () | (R,)",
    noise="float () | (N,)",
)


@dataclass(frozen=True)
class DescentDraws:
    """Weights where gradient descent ended, with the starts and targets that determine them.

    Attributes:
        weights: The draws, ``(S, R)``.
        starts: Draws from the prior, where descent began, ``(S, R)``.
        targets: Targets with noise added, ``(S, N)``.
        gradient_norms: Norms of the last gradients, ``(S,)``: each bounds the distance of its
            draw from an exact one, in prior standard deviations.
    """

    weights: Tensor
    starts: Tensor
    targets: Tensor
    gradient_norms: Tensor


@torch.no_grad()
@_checked
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
    r"""Draws of a linear model's weights from its posterior, each by minimizing a random loss.

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
        steps: Steps of descent; the gradient norms of the result show whether they were enough.
        accelerated: Nesterov's momentum; False is plain descent.
        seed: Seed of the draws; it should differ from that of simulated data, whose random numbers
            would be the same.

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
    check_counts(num_samples=num_samples)
    check_counts(0, steps=steps)
    model = _whiten(features, target, prior_variance, noise)
    starts, targets = model.draws(num_samples, seed)
    weights, gradients = model.descended(starts, starts, targets, steps, accelerated)
    return DescentDraws(
        weights=weights * model.deviations,
        starts=starts * model.deviations,
        targets=targets * model.noise.sqrt(),
        gradient_norms=gradients.norm(dim=-1),
    )


@torch.no_grad()
@_checked
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
    predicted by every draw, then joins the points trained on, and descent continues on the
    objective of :func:`sample_then_optimize` for the points so far (Lyle et al. 2020, Section
    3.2). The sum of the losses along the way tends to :math:`-L(D)` as descent converges.

    Args:
        features: Φ, ``(N, R)``.
        target: y, ``(N,)``.
        prior_variance: Prior variances of the weights, one number or ``(R,)``.
        noise: Noise variances, one number or ``(N,)``.
        num_samples: Draws k of one estimate, at least 2.
        steps: Steps of descent after each point.
        repeats: Number of independent estimates, of k draws each.
        accelerated: Nesterov's momentum, which restarts at each point; False is plain descent.
        seed: Seed of the draws, as for :func:`sample_then_optimize`.

    Returns:
        Total nats, for this one order; ``expected`` and the log marginal likelihood are exact,
        and ``gradient_norm`` is the largest over all points.

    Raises:
        ArgumentError, ShapeError, NonFiniteError: As :func:`sample_then_optimize`.

    Note:
        With S = k ``repeats`` draws, at most 4 N S R min(N, R) ``steps`` floating-point
        operations, N² R (R + S) for the objectives and 4 N R² for the exact values.
    """
    check_counts(2, "A variance needs two draws.", num_samples=num_samples)
    check_counts(repeats=repeats)
    check_counts(0, steps=steps)
    model = _whiten(features, target, prior_variance, noise)
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
    model: _Whitened, count: int, *, steps: int, accelerated: bool, seed: int
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
        seen = targets[:, : i + 1]
        weights, gradients = model.descended(weights, anchors, seen, steps, accelerated)
        left = torch.maximum(left, gradients.norm(dim=-1).max())
    return torch.stack(deviations, dim=-1) * model.noise.sqrt(), float(left)


def _gaussian(model: _Whitened) -> tuple[LowRankPlusDiagonal, Tensor, Tensor]:
    """Covariance, residual and noise of the observations, in float64."""
    noise = model.noise.double()
    features = model.features.double() * noise.sqrt().unsqueeze(-1)
    residual = model.target.double() * noise.sqrt()
    return LowRankPlusDiagonal(features, noise), residual, noise


@dataclass(frozen=True)
class _Whitened:
    """A linear model whose weights and noise have unit variance.

    Rows of the features A, ``(N, R)``, and targets are divided by the noise's deviations, columns
    multiplied by the prior's. Of the Hessian I + AᵀA ``largest`` is the largest eigenvalue; the
    smallest is at least one.
    """

    features: Tensor
    target: Tensor
    deviations: Tensor
    noise: Tensor
    largest: float

    def draws(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Weights from the prior ``(S, R)`` and perturbed targets ``(S, N)``, whitened."""
        generator = seeded(seed)
        n, num_weights = self.features.shape
        weights = torch.randn(count, num_weights, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, n, generator=generator, dtype=torch.float64)
        return weights.to(self.target), self.target + noise.to(self.target)

    def descended(
        self, weights: Tensor, anchors: Tensor, targets: Tensor, steps: int, accelerated: bool
    ) -> tuple[Tensor, Tensor]:
        r"""Weights and gradients where :math:`\frac12 (|b - A u|^2 + |u - u_0|^2)` was descended.

        Targets b are those of the first points. The Hessian's eigenvalues lie in [1, largest],
        also for those alone. Plain descent takes the step 2 / (1 + largest), which shrinks the
        error by (largest - 1) / (largest + 1) each time; the accelerated one is Nesterov's for
        strongly convex functions.
        """
        matrix = self.features[: targets.shape[-1]]
        n, num_weights = matrix.shape
        right = anchors + targets @ matrix
        hessian = matrix.mT @ matrix if n > num_weights else None
        if hessian is not None:
            hessian.diagonal().add_(1.0)

        def gradient(at: Tensor) -> Tensor:
            if hessian is not None:
                return at @ hessian - right
            return torch.addmm(at - right, at @ matrix.mT, matrix)

        step = 1 / self.largest if accelerated else 2 / (1 + self.largest)
        root = self.largest**0.5
        momentum = (root - 1) / (root + 1) if accelerated else 0.0
        ahead = weights
        for _ in range(steps):
            previous, weights = weights, ahead - step * gradient(ahead)
            ahead = weights + momentum * (weights - previous) if accelerated else weights
        return weights, gradient(weights)


def _whiten(
    features: Tensor, target: Tensor, prior_variance: Tensor | float, noise: Tensor | float
) -> _Whitened:
    """The model in units of its prior and its noise, if its numbers are finite and positive."""
    n, num_weights = features.shape
    for argument, values in (("features", features), ("target", target)):
        check_finite(argument, values, "Remove those rows.")
    deviations = _variances("prior_variance", prior_variance, num_weights, features).sqrt()
    noise = _variances("noise", noise, n, features)
    roots = noise.sqrt()
    matrix = features * deviations / roots.unsqueeze(-1)
    norm = float(torch.linalg.matrix_norm(matrix, ord=2))
    if not norm < torch.finfo(matrix.dtype).max ** 0.5:
        suggestion = "Measure the features in another unit."
        raise ArgumentError(
            "features",
            f"a norm of {norm:.3g} in units of the noise",
            f"one whose square {matrix.dtype} can hold",
            suggestion,
        )
    largest = 1 + norm**2
    return _Whitened(matrix, target.to(features) / roots, deviations, noise, largest)


def _variances(argument: str, values: Tensor | float, size: int, like: Tensor) -> Tensor:
    values = torch.as_tensor(values, dtype=like.dtype, device=like.device)
    check_finite(argument, values)
    check_positive(**{argument: values})
    return values.expand(size)
