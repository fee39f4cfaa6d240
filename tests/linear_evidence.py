"""Linear Gaussian models whose evidence and posterior are known."""

import math

import torch
from torch.distributions import MultivariateNormal

import reference


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class LinearEvidence:
    """y = X w + noise with a standard normal prior, of n points and P parameters."""

    def __init__(self, n, P, noise, seed=0):
        self.X, self.noise = drawn(n, P, seed=seed), noise
        self.y = self.X @ drawn(P, seed=seed + 1) + noise**0.5 * drawn(n, seed=seed + 2)
        identity = torch.eye(n, dtype=torch.float64)
        self.exact = float(reference.log_density(self.X @ self.X.mT + noise * identity, self.y))
        self.seed = seed

    def log_prior(self, w):
        return -0.5 * (w.square() + math.log(2 * math.pi)).sum(-1)

    def log_likelihood(self, w):
        residual = self.y.to(w) - w @ self.X.mT.to(w)
        return -0.5 * (residual.square() / self.noise + math.log(2 * math.pi * self.noise)).sum(-1)

    def log_joint(self, w):
        return self.log_prior(w) + self.log_likelihood(w)

    def prior_draws(self, count):
        return drawn(count, self.X.shape[1], seed=self.seed + 3)

    def posterior(self, beta=1.0):
        P = self.X.shape[1]
        H = beta * self.X.mT @ self.X / self.noise + torch.eye(P, dtype=torch.float64)
        mean = torch.linalg.solve(H, beta * self.X.mT @ self.y / self.noise)
        return MultivariateNormal(mean, precision_matrix=H)

    def posterior_draws(self, count, beta=1.0):
        normal = self.posterior(beta)
        return normal.loc + drawn(count, len(normal.loc), seed=self.seed + 4) @ normal.scale_tril.mT
