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
    others = torch.tensor([i for i in range(n) if i not in held_out.tolist()], dtype=torch.long)
    K_BB = covariance[held_out][:, held_out]
    if others.numel() == 0:
        return torch.zeros_like(residual[held_out]), K_BB
    K_BA = covariance[held_out][:, others]
    gain = K_BA @ torch.linalg.inv(covariance[others][:, others])
    return gain @ residual[others], K_BB - gain @ K_BA.mT


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


def weight_curvature(network: torch.nn.Module, x: Tensor, columns: Tensor) -> Tensor:
    """Sum of (Jᵀv)(Jᵀv)ᵀ over points and columns ``(N, K, C)``, parameters in order, ``(P, P)``."""
    parameters = list(network.parameters())
    total = torch.zeros((), dtype=x.dtype)
    for point, vectors in zip(x, columns, strict=True):
        output = network(point.unsqueeze(0)).squeeze(0)
        for vector in vectors:
            gradients = torch.autograd.grad(output @ vector, parameters, retain_graph=True)
            row = torch.cat([gradient.flatten() for gradient in gradients])
            total = total + torch.outer(row, row)
    return total


def kronecker_blocks(
    network: torch.nn.Sequential, x: Tensor, columns: Tensor, sharing: str
) -> dict[str, Tensor]:
    """B ⊗ A of each weight and B of each bias, point by point and place by place."""
    blocks = {}
    layers = list(network)
    for index, layer in enumerate(layers):
        if not list(layer.parameters()):
            continue
        first = torch.nn.Sequential(*layers[:index])
        last = torch.nn.Sequential(*layers[index + 1 :])
        inputs, gradients = [], []  # of points: lists of a (T,) and, a column, of g (T,)
        for point, vectors in zip(x, columns, strict=True):
            before = first(point.unsqueeze(0))
            after = layer(before).detach().requires_grad_()
            output = last(after.clone()).squeeze(0)
            a = _patches_one_by_one(layer, before.detach())
            inputs.append(a)
            for vector in vectors:
                (g,) = torch.autograd.grad(output @ vector, after, retain_graph=True)
                gradients.append(list(g[0].flatten(1).mT) if g.ndim == 4 else [g[0]])
        if sharing == "reduce":
            inputs = [[sum(a) / len(a)] for a in inputs]
            gradients = [[sum(g)] for g in gradients]
        every = [a for rows in inputs for a in rows]
        A = sum(torch.outer(a, a) for a in every) / len(every)
        B = sum(torch.outer(g, g) for rows in gradients for g in rows)
        blocks[f"{index}.weight"] = torch.kron(B, A)
        if layer.bias is not None:
            blocks[f"{index}.bias"] = B
    return blocks


def _patches_one_by_one(layer: torch.nn.Module, inputs: Tensor) -> list[Tensor]:
    if isinstance(layer, torch.nn.Linear):
        return [inputs[0]]
    height, width = layer(inputs).shape[-2:]
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    pad = [r // 2 for r in reach] if layer.padding == "same" else list(layer.padding)
    padded = torch.nn.functional.pad(inputs, (pad[1], pad[1] + 1, pad[0], pad[0] + 1))
    patches = []
    for i in range(height):
        for j in range(width):
            top, left = i * layer.stride[0], j * layer.stride[1]
            rows = slice(top, top + reach[0] + 1, layer.dilation[0])
            columns = slice(left, left + reach[1] + 1, layer.dilation[1])
            patches.append(padded[0, :, rows, columns].flatten())
    return patches
