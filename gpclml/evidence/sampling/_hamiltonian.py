"""Hamiltonian moves of many chains that leave a tempered posterior as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.evidence.sampling._log_values import LogDensity, log_values

__all__ = ["Chains", "TemperedPosterior", "hamiltonian_move", "leapfrog"]

JITTER = 0.5
"""Steps vary by this share either way, lest a trajectory be as long as an orbit."""


@dataclass(frozen=True)
class Chains:
    """Where S chains are, both log densities there and their gradients.

    Attributes:
        position: Parameters, ``(S, P)``.
        log_prior: Nats, ``(S,)``.
        log_likelihood: Nats, ``(S,)``.
        prior_gradient: Of the log prior, ``(S, P)``.
        likelihood_gradient: Of the log likelihood, ``(S, P)``.
    """

    position: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    prior_gradient: Tensor
    likelihood_gradient: Tensor

    def log_density(self, beta: float) -> Tensor:
        """Of the posterior at an inverse temperature, up to its evidence, ``(S,)``."""
        return self.log_prior + beta * self.log_likelihood

    def gradient(self, beta: float) -> Tensor:
        """Of that, ``(S, P)``."""
        return self.prior_gradient + beta * self.likelihood_gradient

    def replaced(self, where: Tensor, other: Chains) -> Chains:
        """These chains, but others where a mask ``(S,)`` is true."""
        return Chains(
            *(
                torch.where(where if old.ndim == 1 else where.unsqueeze(-1), new, old)
                for old, new in zip(vars(self).values(), vars(other).values(), strict=True)
            )
        )


@dataclass(frozen=True)
class TemperedPosterior:
    r"""The densities :math:`p(w) p(\mathcal D \mid w)^\beta` between prior and posterior.

    Attributes:
        log_prior: Maps parameters ``(S, P)`` to nats ``(S,)``.
        log_likelihood: The same.
    """

    log_prior: LogDensity
    log_likelihood: LogDensity

    @torch.enable_grad()
    def at(self, position: Tensor) -> Chains:
        """Chains at these parameters, ``(S, P)``."""
        inputs = position.detach().requires_grad_()
        prior, likelihood = self._values(inputs)
        (prior_gradient,) = torch.autograd.grad(prior.sum(), inputs)
        (likelihood_gradient,) = torch.autograd.grad(likelihood.sum(), inputs)
        return Chains(
            inputs.detach(),
            prior.detach(),
            likelihood.detach(),
            prior_gradient,
            likelihood_gradient,
        )

    @torch.enable_grad()
    def gradient(self, position: Tensor, beta: float) -> Tensor:
        """Of the log density at an inverse temperature, in one pass, ``(S, P)``."""
        inputs = position.detach().requires_grad_()
        prior, likelihood = self._values(inputs)
        (gradient,) = torch.autograd.grad((prior + beta * likelihood).sum(), inputs)
        return gradient

    def _values(self, position: Tensor) -> tuple[Tensor, Tensor]:
        prior = log_values("log_prior", self.log_prior, position)
        return prior, log_values("log_likelihood", self.log_likelihood, position)


def leapfrog(
    posterior: TemperedPosterior,
    chains: Chains,
    momentum: Tensor,
    beta: float,
    step: Tensor,
    count: int,
) -> tuple[Chains, Tensor, Tensor]:
    r"""Where trajectories end, with which momentum, and which stayed finite.

    .. math:: p \leftarrow p + \tfrac12 \epsilon g(w), \quad w \leftarrow w + \epsilon p, \quad
        p \leftarrow p + \tfrac12 \epsilon g(w)

    so many times (Neal 2011). A trajectory that leaves the finite numbers stops, so
    that densities which check their arguments are not asked beyond. Momenta come first: begun
    with positions, the integrator refuses what moves in from the tails, and chains that the
    temperature has left behind never catch up.

    Args:
        posterior: The densities.
        chains: Where trajectories start.
        momentum: ``(S, P)``.
        beta: Inverse temperature.
        step: Steps, ``(S, P)`` or of a shape that expands to it.
        count: Number of steps.

    Returns:
        The end, its momentum ``(S, P)``, and a mask ``(S,)``.

    Note:
        One gradient a step.
    """
    finite = torch.ones(len(momentum), dtype=torch.bool, device=momentum.device)
    position = chains.position
    momentum = momentum + 0.5 * step * chains.gradient(beta)
    for i in range(count):
        if i:
            momentum = momentum + step * posterior.gradient(position, beta)
        there = position + step * momentum
        finite = finite & torch.isfinite(there).all(-1)
        position = torch.where(finite.unsqueeze(-1), there, position)
    end = posterior.at(position)
    return end, momentum + 0.5 * step * end.gradient(beta), finite


def hamiltonian_move(
    posterior: TemperedPosterior,
    chains: Chains,
    beta: float,
    step: Tensor,
    count: int,
    generator: torch.Generator,
) -> tuple[Chains, float]:
    """Chains after one Hamiltonian trajectory each, accepted or refused, and how likely that was.

    Momenta are fresh and standard normal; the Metropolis test makes the move leave the density at
    this temperature as it is, whatever the step.

    Args:
        posterior: The densities.
        chains: The chains.
        beta: Inverse temperature.
        step: A step for each parameter, ``(P,)``.
        count: Leapfrog steps.
        generator: On the CPU; draws in float64 whatever the chains are.

    Returns:
        The chains and the mean probability of acceptance.
    """

    def drawn(draw, *shape: int) -> Tensor:
        values = draw(shape, generator=generator, dtype=torch.float64)
        return values.to(chains.position)

    size, dimension = chains.position.shape
    momentum = drawn(torch.randn, size, dimension)
    jittered = step * (1 + JITTER * (2 * drawn(torch.rand, size, 1) - 1))
    end, last, finite = leapfrog(posterior, chains, momentum, beta, jittered, count)
    gain = end.log_density(beta) - chains.log_density(beta)
    gain = gain - 0.5 * (last.square().sum(-1) - momentum.square().sum(-1))
    finite = finite & torch.isfinite(gain)
    probability = torch.where(finite, gain.clamp(max=0).exp(), 0.0)
    accepted = drawn(torch.rand, size) < probability
    return chains.replaced(accepted, end), float(probability.mean())
