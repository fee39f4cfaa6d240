"""Brute-force references: every density by its definition, nothing shared with gpclml."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_density(covariance: Tensor, residual: Tensor) -> Tensor:
    """log N(residual; 0, covariance) of one Gaussian by inverse and log-determinant."""
    n = residual.shape[-1]
    quadratic = residual @ torch.linalg.inv(covariance) @ residual
    return -0.5 * (quadratic + torch.linalg.slogdet(covariance)[1] + n * math.log(2 * math.pi))


def conditional_moments(
    covariance: Tensor, residual: Tensor, held_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the held-out residuals given all others."""
    n = residual.shape[-1]
    rest = torch.tensor([i for i in range(n) if i not in held_out.tolist()], dtype=torch.long)
    K_BB = covariance[held_out][:, held_out]
    if rest.numel() == 0:
        return torch.zeros_like(residual[held_out]), K_BB
    K_BA = covariance[held_out][:, rest]
    gain = K_BA @ torch.linalg.inv(covariance[rest][:, rest])
    return gain @ residual[rest], K_BB - gain @ K_BA.mT


def conditional_log_density(covariance: Tensor, residual: Tensor, held_out: Tensor) -> Tensor:
    """log p(held out | rest) of one Gaussian, from the explicit conditional."""
    mean, conditional = conditional_moments(covariance, residual, held_out)
    return log_density(conditional, residual[held_out] - mean)


def sequential_log_densities(covariance: Tensor, residual: Tensor, order: Tensor) -> Tensor:
    """log p(r_i | r_<i) for every i, each from its own explicit conditional."""
    terms = []
    for i in range(len(order)):
        seen = order[: i + 1]
        terms.append(
            conditional_log_density(covariance[seen][:, seen], residual[seen], torch.tensor([i]))
        )
    return torch.stack(terms)


def random_covariance(
    n: int, batch: tuple[int, ...] = (), seed: int = 0, noise: float = 0.1
) -> Tensor:
    """An RBF covariance of random points plus noise, float64, ``(*batch, n, n)``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(*batch, n, 2, generator=generator, dtype=torch.float64)
    distance = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)
    return torch.exp(-4.0 * distance) + noise * torch.eye(n, dtype=torch.float64)


def random_residual(n: int, batch: tuple[int, ...] = (), seed: int = 1) -> Tensor:
    """Standard normal residuals, float64, ``(*batch, n)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, n, generator=generator, dtype=torch.float64)


def gradients(value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the sum of ``value``."""
    return torch.autograd.grad(value.sum(), inputs)


def symmetrized(gradient: Tensor) -> Tensor:
    """The gradient with respect to a symmetric matrix."""
    return 0.5 * (gradient + gradient.mT)
