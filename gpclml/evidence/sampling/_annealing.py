"""Chains that go through all temperatures, and the steps they take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpclml.errors import ArgumentError, ShapeError
from gpclml.evidence.sampling._hamiltonian import Chains, TemperedPosterior, hamiltonian_move
from gpclml.evidence.sampling._log_values import LogDensity, check_differentiable, check_finite
from gpclml.evidence.sampling.temperatures import checked_schedule

__all__ = ["Annealing", "annealing"]

ACCEPTANCE = 0.8
"""Mean acceptance that steps are adapted to."""

PILOTS = 0.25
"""Share of the draws from which steps are adapted."""

WARM_UP = 30
"""Moves of the pilots at their first temperature, in which the first step is found."""


@dataclass(frozen=True)
class Annealing:
    """How chains go from one end of a schedule to the other.

    Attributes:
        posterior: The densities.
        betas: Inverse temperatures, from 0 to 1.
        leapfrog_steps: Of one move.
        scale: Of each parameter, ``(P,)``.
        generator: Of momenta and acceptances.
        progress: Whether to show a progress bar.
    """

    posterior: TemperedPosterior
    betas: list[float]
    leapfrog_steps: int
    scale: Tensor
    generator: torch.Generator
    progress: bool

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
        """Steps from chains of the first draws, and the other draws.

        What pilots teach is used on other chains alone: steps that depend on the chains they
        move would leave their weights biased.
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
        return total, torch.tensor(acceptance[::-1] if reverse else acceptance)

    def _start(self, argument: str, draws: Tensor) -> Chains:
        chains = self.posterior.at(draws)
        for name, values in (
            ("log_prior", chains.log_prior),
            ("log_likelihood", chains.log_likelihood),
        ):
            check_finite(f"{name} at {argument}", values)
        return chains

    def _move(self, chains: Chains, beta: float, step: float) -> tuple[Chains, float]:
        return hamiltonian_move(
            self.posterior, chains, beta, step * self.scale, self.leapfrog_steps, self.generator
        )

    def _inner(self, reverse: bool, name: str = "") -> Iterator[float]:
        from tqdm import tqdm

        inner = self.betas[-2:0:-1] if reverse else self.betas[1:-1]
        label = " ".join(filter(None, ["reverse" if reverse else "", "annealing", name]))
        return iter(tqdm(inner, desc=label, disable=not self.progress))


def annealing(
    log_prior: LogDensity,
    log_likelihood: LogDensity,
    draws: Tensor,
    *,
    temperatures: int | Sequence[float] | Tensor,
    leapfrog_steps: int,
    scale: Tensor | None,
    seed: int,
    progress: bool,
) -> Annealing:
    """An annealing of these densities, for draws like these, if all can be used."""
    for name, density in (("log_prior", log_prior), ("log_likelihood", log_likelihood)):
        check_differentiable(name, density, draws)
    if leapfrog_steps < 1:
        raise ArgumentError("leapfrog_steps", leapfrog_steps, "at least 1")
    size = draws.shape[1]
    scale = torch.ones(size) if scale is None else scale.detach()
    if scale.shape != (size,):
        raise ShapeError("scale", tuple(scale.shape), f"({size},), one number a parameter")
    if not bool(((scale > 0) & (scale < math.inf)).all()):
        raise ArgumentError("scale", scale.tolist(), "positive numbers")
    return Annealing(
        TemperedPosterior(log_prior, log_likelihood),
        checked_schedule(temperatures),
        leapfrog_steps,
        scale.to(draws),
        torch.Generator().manual_seed(seed),
        progress,
    )
