"""Hamiltonian Monte Carlo chains that move from the prior to the posterior, or back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml._utils.arguments import check_finite
from gpclml._utils.environment import progress_bar
from gpclml.errors import ArgumentError, ShapeError
from gpclml.evidence.sampling.monte_carlo import LogDensity, log_values

__all__ = [
    "AnnealingPath",
    "Chains",
    "TemperedPosterior",
    "hamiltonian_move",
    "leapfrog",
]

ACCEPTANCE = 0.8
"""Mean acceptance that steps are adapted to."""

PILOTS = 0.25
"""Share of the draws from which steps are adapted."""

WARM_UP = 30
"""Moves of the pilots at their first temperature, in which the first step is found."""

JITTER = 0.5
"""Step sizes vary by this share, so that no trajectory returns to where it began."""


@dataclass(frozen=True)
class AnnealingPath:
    """A path of tempered posteriors between inverse temperatures 0 and 1, and chains along it.

    ``scale`` is a factor of each parameter's step, ``(P,)``; the generator is the source of momenta
    and acceptances.
    """

    posterior: TemperedPosterior
    betas: list[float]
    leapfrog_steps: int
    scale: Tensor
    generator: torch.Generator
    progress: bool | None

    def given_steps(self, step_size: float | Sequence[float] | Tensor) -> list[float]:
        """A step for each temperature at which chains move, as the caller gives them."""
        count = len(self.betas) - 2
        steps = torch.as_tensor(step_size, dtype=torch.float64)
        if steps.ndim > 0 and steps.shape != (count,):
            expected = f"one number, or ({count},) for the temperatures between 0 and 1"
            raise ShapeError("step_size", tuple(steps.shape), expected)
        if not bool(((steps > 0) & (steps < math.inf)).all()):
            raise ArgumentError("step_size", step_size, "positive numbers")
        return steps.expand(count).tolist()

    def adapted_steps(
        self, argument: str, draws: Tensor, reverse: bool = False
    ) -> tuple[list[float], Tensor]:
        """Step sizes adapted on pilot chains of the first draws, and the draws that are left.

        The pilots are not used again: step sizes that depend on the chains that they move would
        bias the weights of these.
        """
        if len(self.betas) == 2:
            return [], draws
        if len(draws) < 2:
            expected = "at least 2, of which some adapt steps"
            raise ArgumentError(argument, "1 draw", expected, "Take more, or give step_size.")
        count = max(1, round(PILOTS * len(draws)))
        chains = self._start(argument, draws[:count])
        log_step, steps = math.log(0.1), []
        temperatures = list(self._inner(reverse, "pilot"))
        for beta in [temperatures[0]] * WARM_UP + temperatures:
            steps.append(math.exp(log_step))
            chains, accepted = self._move(chains, beta, steps[-1])
            log_step += accepted - ACCEPTANCE
        steps = steps[WARM_UP:]
        return steps[::-1] if reverse else steps, draws[count:]

    def log_weights(
        self, argument: str, draws: Tensor, steps: list[float], reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sums of what each change of temperature adds, ``(S,)``, and acceptance ``(T - 1,)``.

        Their exponentials have the mean Z from draws of the prior, and 1/Z from draws of the
        posterior, where Z is the evidence.
        """
        chains = self._start(argument, draws)
        order = self.betas[::-1] if reverse else self.betas
        total = (order[1] - order[0]) * chains.log_likelihood.double()
        acceptance = []
        moves = zip(self._inner(reverse), steps[::-1] if reverse else steps, strict=True)
        for t, (beta, step) in enumerate(moves, start=1):
            chains, accepted = self._move(chains, beta, step)
            acceptance.append(accepted)
            total += (order[t + 1] - order[t]) * chains.log_likelihood.double()
        return total, total.new_tensor(acceptance[::-1] if reverse else acceptance)

    def _start(self, argument: str, draws: Tensor) -> Chains:
        chains = self.posterior.at(draws)
        check_finite(f"log_prior at {argument}", chains.log_prior)
        check_finite(f"log_likelihood at {argument}", chains.log_likelihood)
        return chains

    def _move(self, chains: Chains, beta: float, step: float) -> tuple[Chains, float]:
        return hamiltonian_move(
            self.posterior, chains, beta, step * self.scale, self.leapfrog_steps, self.generator
        )

    def _inner(self, reverse: bool, name: str = "") -> Iterator[float]:
        inner = self.betas[-2:0:-1] if reverse else self.betas[1:-1]
        label = " ".join(filter(None, ["reverse" if reverse else "", "annealing", name]))
        return iter(progress_bar(inner, desc=label, progress=self.progress))


@dataclass(frozen=True)
class TemperedPosterior:
    r"""The densities :math:`p(w) p(\mathcal D \mid w)^\beta`, ``(S, P)`` to nats ``(S,)``."""

    log_prior: LogDensity
    log_likelihood: LogDensity

    @torch.enable_grad()
    def at(self, position: Tensor) -> Chains:
        """Chains at these parameters, ``(S, P)``."""
        inputs = position.detach().requires_grad_()
        prior, likelihood = self._values(inputs)
        (prior_gradient,) = torch.autograd.grad(prior.sum(), inputs)
        (likelihood_gradient,) = torch.autograd.grad(likelihood.sum(), inputs)
        values = inputs.detach(), prior.detach(), likelihood.detach()
        return Chains(*values, prior_gradient, likelihood_gradient)

    @torch.enable_grad()
    def gradient(self, position: Tensor, beta: float) -> Tensor:
        """Gradient of the log density at an inverse temperature, in one pass, ``(S, P)``."""
        inputs = position.detach().requires_grad_()
        prior, likelihood = self._values(inputs)
        (gradient,) = torch.autograd.grad((prior + beta * likelihood).sum(), inputs)
        return gradient

    def _values(self, position: Tensor) -> tuple[Tensor, Tensor]:
        prior = log_values("log_prior", self.log_prior, position)
        return prior, log_values("log_likelihood", self.log_likelihood, position)


@dataclass(frozen=True)
class Chains:
    """Positions ``(S, P)`` of S chains, with both log densities ``(S,)`` and their gradients."""

    position: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    prior_gradient: Tensor
    likelihood_gradient: Tensor

    def log_density(self, beta: float) -> Tensor:
        """The log posterior at an inverse temperature, without its evidence, ``(S,)``."""
        return self.log_prior + beta * self.log_likelihood

    def gradient(self, beta: float) -> Tensor:
        """The gradient of :meth:`log_density`, ``(S, P)``."""
        return self.prior_gradient + beta * self.likelihood_gradient

    def replaced(self, where: Tensor, other: Chains) -> Chains:
        """These chains, replaced by others where a mask ``(S,)`` is true."""
        return Chains(
            *(
                torch.where(where if old.ndim == 1 else where.unsqueeze(-1), new, old)
                for old, new in zip(vars(self).values(), vars(other).values(), strict=True)
            )
        )


def hamiltonian_move(
    posterior: TemperedPosterior,
    chains: Chains,
    beta: float,
    step: Tensor,
    count: int,
    generator: torch.Generator,
) -> tuple[Chains, float]:
    """Chains after one Hamiltonian trajectory each, accepted or not, and the mean acceptance.

    Momenta are drawn from a standard normal. By the Metropolis test the move leaves the density at
    this temperature invariant for any steps ``(P,)``. Draws are in float64 for chains of any dtype.
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


def leapfrog(
    posterior: TemperedPosterior,
    chains: Chains,
    momentum: Tensor,
    beta: float,
    step: Tensor,
    count: int,
) -> tuple[Chains, Tensor, Tensor]:
    r"""The ends of Hamiltonian trajectories, their momenta, and a mask of those that stayed finite.

    .. math:: p \leftarrow p + \tfrac12 \epsilon g(w), \quad w \leftarrow w + \epsilon p, \quad
        p \leftarrow p + \tfrac12 \epsilon g(w)

    ``count`` times (Neal 2011), with one gradient each. A trajectory stops if its position would be
    infinite or NaN, so that densities which check their arguments raise no error. The momenta take
    the first half step; otherwise moves from the tails towards the mode would be rejected.
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
