"""Gradient descent on a regularized least-squares problem, for many starts at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.finite import all_finite
from gpclml.errors import ArgumentError, NonFiniteError

__all__ = ["Whitened", "descend", "whiten"]


@dataclass(frozen=True)
class Whitened:
    """A linear model whose weights and noise have unit variance.

    Attributes:
        features: Rows divided by the noise's deviations, columns times the prior's, ``(N, R)``.
        target: Divided by the noise's deviations, ``(N,)``.
        deviations: Of the prior, ``(R,)``.
        noise: Noise variances, ``(N,)``.
        largest: Largest eigenvalue of the Hessian I + AᵀA, A the features; the smallest is at
            least one.
    """

    features: Tensor
    target: Tensor
    deviations: Tensor
    noise: Tensor
    largest: float

    def draws(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Weights from the prior ``(S, R)`` and perturbed targets ``(S, N)``, whitened."""
        generator = torch.Generator().manual_seed(seed)
        n, num_weights = self.features.shape
        weights = torch.randn(count, num_weights, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, n, generator=generator, dtype=torch.float64)
        return weights.to(self.target), self.target + noise.to(self.target)


def whiten(
    features: Tensor,  # shape: (N, R)
    target: Tensor,  # shape: (N,)
    prior_variance: Tensor | float,
    noise: Tensor | float,
) -> Whitened:
    """The model in units of its prior and its noise.

    Raises:
        ShapeError: If the arguments do not fit together.
        NonFiniteError: If features or targets are not finite.
        ArgumentError: If a variance is not a positive number.
    """
    n, num_weights = features.shape
    for argument, values in (("features", features), ("target", target)):
        if not all_finite(values):
            bad = f"{int((~torch.isfinite(values)).sum())} non-finite of {values.numel()} values"
            raise NonFiniteError(argument, bad, "finite values", "Remove those rows.")
    deviations = _variances("prior_variance", prior_variance, num_weights, features).sqrt()
    noise = _variances("noise", noise, n, features)
    roots = noise.sqrt()
    matrix = features * deviations / roots.unsqueeze(-1)
    norm = float(torch.linalg.matrix_norm(matrix, ord=2))
    if not norm < torch.finfo(matrix.dtype).max ** 0.5:
        mend = "Measure the features in another unit."
        raise ArgumentError("features", f"a norm of {norm:.3g} over the noise", "its square", mend)
    largest = 1 + norm**2
    return Whitened(matrix, target.to(features) / roots, deviations, noise, largest)


def descend(
    weights: Tensor,  # shape: (S, R)
    anchors: Tensor,  # shape: (S, R)
    matrix: Tensor,  # shape: (N, R)
    targets: Tensor,  # shape: (S, N)
    *,
    steps: int,
    largest: float,
    accelerated: bool,
) -> tuple[Tensor, Tensor]:
    r"""Weights after descent on :math:`\frac12 |b - A u|^2 + \frac12 |u - u_0|^2`, and gradients.

    The Hessian's eigenvalues lie in [1, largest]. Plain descent takes the step
    2 / (1 + largest), which shrinks the error by (largest - 1) / (largest + 1) each time; the
    accelerated one is Nesterov's for strongly convex functions.

    Args:
        weights: Where to start.
        anchors: The points :math:`u_0` that the prior pulls to.
        matrix: A.
        targets: b.
        steps: Number of steps.
        largest: At least the largest eigenvalue of the Hessian.
        accelerated: Whether to add momentum.

    Returns:
        Weights and the gradients at them, ``(S, R)`` each.
    """
    n, num_weights = matrix.shape
    right = anchors + targets @ matrix
    if n > num_weights:
        hessian = matrix.mT @ matrix
        hessian.diagonal().add_(1.0)

        def gradient(at: Tensor) -> Tensor:
            return at @ hessian - right

    else:

        def gradient(at: Tensor) -> Tensor:
            return torch.addmm(at - right, at @ matrix.mT, matrix)

    step = 1 / largest if accelerated else 2 / (1 + largest)
    root = largest**0.5
    momentum = (root - 1) / (root + 1) if accelerated else 0.0
    ahead = weights
    for _ in range(steps):
        previous, weights = weights, ahead - step * gradient(ahead)
        ahead = weights + momentum * (weights - previous) if accelerated else weights
    return weights, gradient(weights)


def _variances(argument: str, values: Tensor | float, size: int, like: Tensor) -> Tensor:
    values = torch.as_tensor(values, dtype=like.dtype, device=like.device)
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise ArgumentError(argument, f"as little as {float(values.min()):.3g}", "positive numbers")
    return values.expand(size)
