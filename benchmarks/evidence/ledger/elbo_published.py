"""The problem of Harvey and Hughes (2026), and rank one's bound by the steps of their code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = [
    "EPSILON", "MODULES", "NOISE", "NUM_DATA", "NUM_FEATURES", "drawn_features", "published_run",
    "sine",
]  # fmt: skip

NUM_DATA, NUM_FEATURES, NOISE, EPSILON = 20, 1024, 0.1, 1e-6
MODULES = tuple(f"benchmarks.evidence.ledger.elbo_{name}" for name in ("families", "published"))
"""Those that decide the results of each experiment on this problem."""


def sine(random: Any, count: int) -> tuple[Tensor, Tensor]:
    """Points, ``(n, 1)``, and targets, ``(n,)``."""
    x = random.randn(count)
    y = np.sin(3 * x) + NOISE * random.randn(count)
    return torch.tensor(x).unsqueeze(-1), torch.tensor(y)


def drawn_features(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Weights, ``(R, 1)``, and biases, ``(R,)``, of random Fourier features."""
    weight = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return weight, 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)


def published_run(
    seed: int,
    steps: int,
    rates: Sequence[float],
    temperature: float = 1.0,
    start: int | None = None,
) -> dict[str, float]:
    """Rank one by the steps of the authors' public code, which differ from ours in two things.

    What their figures print is of the mean and the noise of the best epoch, with the
    hyperparameters after the step of Adam that ends it. And by empirical Bayes Adam moves the
    column v of the covariance, with the prior variance, where v has a closed form.

    Args:
        seed: Of the data and the features.
        steps: Number of epochs.
        rates: Learning rates, tried one after the other.
        temperature: Of the bound.
        start: Seed of the first v, for empirical Bayes; None holds the prior variance at one.

    Returns:
        ``elbo`` at temperature one, ``lml``, ``noise`` (its deviation), ``prior_variance``.
    """
    x, y = sine(np.random.RandomState(seed), NUM_DATA)
    drawn = drawn_features(torch.Generator().manual_seed(seed), NUM_FEATURES)
    first = torch.Generator().manual_seed(start or 0)
    largest, best = -math.inf, dict[str, float]()
    for rate in rates:
        v = torch.randn(NUM_FEATURES, generator=first, dtype=torch.float64)
        run = _Run(x, y, drawn, None if start is None else v.requires_grad_())
        optimizer = torch.optim.Adam([run.raw] if start is None else [run.raw, v], lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            run.update(temperature)
            optimizer.zero_grad()
            value = run.bound(temperature)
            (-value).backward()
            optimizer.step()
            schedule.step()
            if value.item() >= largest:
                largest, best = value.item(), run.scores()
    return best


class _Run:
    """Hyperparameters and the rank-one posterior with mean m and covariance v v' + ε I.

    Args:
        x: Points, ``(n, 1)``.
        y: Targets, ``(n,)``.
        drawn: Weights and biases of the features.
        v: Its column; None for the best one, along which all features are zero.
    """

    def __init__(self, x: Tensor, y: Tensor, drawn: tuple[Tensor, Tensor], v: Tensor | None):
        self.x, self.y, self.drawn, self.v = x, y, drawn, v
        self.raw = torch.full((3,), math.log(math.e - 1), dtype=torch.float64, requires_grad=True)
        self.noise = torch.tensor(1.0, dtype=torch.float64)
        self.mean = torch.zeros(len(drawn[1]), dtype=torch.float64)

    def model(self) -> tuple[Tensor, Tensor]:
        """Features at the points, ``(n, R)``, and the prior variance."""
        (weight, bias), (lengthscale, amplitude, prior) = self.drawn, softplus(self.raw)
        angles = self.x @ (weight / lengthscale).T + bias
        features = amplitude * math.sqrt(2 / len(bias)) * angles.cos()
        return features, torch.ones_like(prior) if self.v is None else prior

    def squares(self, phi: Tensor) -> Tensor:
        """Expected squared residuals, their sum."""
        total = (self.y - phi @ self.mean).square().sum() + EPSILON * phi.square().sum()
        return total if self.v is None else total + (phi @ self.v).square().sum()

    @torch.no_grad()
    def update(self, temperature: float) -> None:
        """The best mean, then the best noise."""
        phi, prior = self.model()
        noise = temperature * self.noise * torch.eye(len(self.y), dtype=torch.float64)
        self.mean = prior * phi.T @ torch.linalg.solve(prior * phi @ phi.T + noise, self.y)
        self.noise = self.squares(phi) / len(self.y)

    def bound(self, temperature: float) -> Tensor:
        """The lower bound, in nats in all."""
        phi, prior = self.model()
        number = phi.shape[1]
        length = prior - EPSILON if self.v is None else self.v.square().sum()
        fit = len(self.y) * (2 * math.pi * self.noise).log() + self.squares(phi) / self.noise
        second = length + EPSILON * number + self.mean.square().sum()
        log_det = (number - 1) * math.log(EPSILON) + (length + EPSILON).log()
        divergence = second / prior - number + number * prior.log() - log_det
        return -0.5 * (fit / temperature + divergence)

    @torch.no_grad()
    def scores(self) -> dict[str, float]:
        """At the hyperparameters as they are now, see :func:`published_run`."""
        phi, prior = self.model()
        K = prior * phi @ phi.T + self.noise * torch.eye(len(self.y), dtype=torch.float64)
        evidence = torch.distributions.MultivariateNormal(torch.zeros_like(self.y), K)
        return {
            "elbo": float(self.bound(1.0)), "lml": float(evidence.log_prob(self.y)),
            "noise": float(self.noise.sqrt()), "prior_variance": float(prior),
        }  # fmt: skip
