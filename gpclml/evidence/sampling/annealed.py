"""The evidence by annealing chains from the prior to the posterior, or back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.evidence.sampling._annealing import Annealing, annealing
from gpclml.evidence.sampling._log_values import LogDensity, drawn_parameters
from gpclml.evidence.sampling.densities import SampledDensity, log_mean

__all__ = [
    "AnnealedEvidence",
    "EvidenceBound",
    "annealed_evidence",
    "annealed_importance_sampling",
    "reverse_annealed_importance_sampling",
]


@dataclass(frozen=True)
class EvidenceBound:
    """A stochastic bound of a log evidence.

    Attributes:
        value: A mean over chains whose expectation is a bound, in nats.
        standard_error: Of that mean; infinite for one chain.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class AnnealedEvidence:
    """What chains between prior and posterior say of a log evidence.

    Attributes:
        bound: Mean of the log weights: below the log evidence in expectation where chains began
            at the prior, above it where they began at exact draws of the posterior.
        estimate: The log mean weight (reversed: minus the log mean inverse weight), a tighter
            bound on the same side, whose error is less sure; with effective draws.
        log_weights: One log evidence a chain, in nats, ``(S,)``.
        acceptance: Mean acceptance at each temperature between 0 and 1, ``(T - 1,)``.
        step_sizes: The leapfrog steps there, before jitter and scale, ``(T - 1,)``.
    """

    bound: EvidenceBound
    estimate: SampledDensity
    log_weights: Tensor
    acceptance: Tensor
    step_sizes: Tensor


@checked(
    prior_draws="float (S, P)",
    temperatures="float (T,)",
    step_size="float () | (U,)",
    scale="float (P,)",
)
def annealed_importance_sampling(
    log_prior: LogDensity,
    log_likelihood: LogDensity,
    prior_draws: Tensor,
    *,
    temperatures: int | Sequence[float] | Tensor = 1000,
    leapfrog_steps: int = 2,
    step_size: float | Sequence[float] | Tensor | None = None,
    scale: Tensor | None = None,
    seed: int = 0,
    progress: bool = True,
) -> AnnealedEvidence:
    r"""A lower bound and an estimate of the log evidence, from chains that begin at the prior.

    .. math:: \log w = \sum_{t=1}^T (\beta_t - \beta_{t-1}) \log p(\mathcal D \mid w_{t-1}),
        \qquad \mathbb E\, w = p(\mathcal D), \quad \mathbb E \log w \le \log p(\mathcal D)

    where :math:`w_t` is :math:`w_{t-1}` after one Hamiltonian move that leaves
    :math:`p(w)\, p(\mathcal D \mid w)^{\beta_t}` as it is (Neal 2001). The equality
    holds for any number of temperatures and leapfrog steps, any step and any scale; these decide
    how near the bound comes.

    Args:
        log_prior: Maps parameters ``(S, P)`` to the log of the normalized prior, ``(S,)``,
            differentiable; each chain's value depends on its own parameters alone.
        log_likelihood: Maps the same to the log likelihood of all data, ``(S,)``.
        prior_draws: Independent draws of that prior, ``(S, P)``.
        temperatures: Number T of steps from 0 to 1, spaced by :func:`power_schedule`, or the
            inverse temperatures themselves, ``(T + 1,)``.
        leapfrog_steps: Leapfrog steps of a move.
        step_size: Their length, or one for each temperature between 0 and 1, ``(T - 1,)``. If None
            it follows the acceptance (to 0.8) of pilot chains, which a quarter of the draws
            begin and which are not in the result; adapted on the chains themselves, steps
            would bias the weights.
        scale: What the step of each parameter is multiplied by, ``(P,)``, such as the
            prior's standard deviations; ones if None.
        seed: Seed of momenta and acceptances.
        progress: Whether to show progress bars on standard error.

    Returns:
        The bound, the estimate, and what each chain says.

    Raises:
        ShapeError: Draws, steps, a scale or a log density have the wrong shape.
        ArgumentError: The schedule does not increase from 0 to 1, a number is out of range, or
            there is one draw and no step.
        NonFiniteError: Draws, or a log density at them, are not finite.
        UnsupportedError: A log density is not differentiable.

    Note:
        T times the leapfrog steps gradients of both densities at all chains together, twice where
        steps are adapted. The expected gap falls as 1/T.
    """
    draws = drawn_parameters("prior_draws", prior_draws)
    path = annealing(
        log_prior,
        log_likelihood,
        draws,
        temperatures=temperatures,
        leapfrog_steps=leapfrog_steps,
        scale=scale,
        seed=seed,
        progress=progress,
    )
    return annealed_evidence(path, "prior_draws", draws, step_size)


@checked(
    posterior_draws="float (S, P)",
    temperatures="float (T,)",
    step_size="float () | (U,)",
    scale="float (P,)",
)
def reverse_annealed_importance_sampling(
    log_prior: LogDensity,
    log_likelihood: LogDensity,
    posterior_draws: Tensor,
    *,
    temperatures: int | Sequence[float] | Tensor = 1000,
    leapfrog_steps: int = 2,
    step_size: float | Sequence[float] | Tensor | None = None,
    scale: Tensor | None = None,
    seed: int = 0,
    progress: bool = True,
) -> AnnealedEvidence:
    r"""An upper bound of the log evidence, from chains that begin at the posterior.

    .. math:: -\log w = \sum_{t=1}^T (\beta_t - \beta_{t-1}) \log p(\mathcal D \mid w_t),
        \qquad \mathbb E\, w = \frac1{p(\mathcal D)}, \quad
        -\mathbb E \log w \ge \log p(\mathcal D)

    from :math:`\beta_T = 1` down to 0 (Grosse, Ghahramani and Adams 2015).

    **It is a bound only if the draws are exact**: of a posterior in closed form, or the parameters
    from which the data were simulated, which are one exact draw, and what a chain that leaves
    the posterior as it is makes of it. From approximate draws (a Laplace posterior, Langevin
    dynamics) it is an estimate that may lie on either side. Draws that depend on each other keep
    the bound, but its error is too small.

    Args:
        log_prior: As :func:`annealed_importance_sampling` takes it.
        log_likelihood: The same.
        posterior_draws: Draws of the posterior, ``(S, P)``.
        temperatures: As there.
        leapfrog_steps: As there.
        step_size: As there; a quarter of these draws begin the pilots.
        scale: As there.
        seed: As there.
        progress: As there.

    Returns:
        The bound, the estimate, and what each chain says.

    Raises:
        ShapeError, ArgumentError, NonFiniteError, UnsupportedError: As there.

    Note:
        The cost is the same.
    """
    draws = drawn_parameters("posterior_draws", posterior_draws)
    path = annealing(
        log_prior,
        log_likelihood,
        draws,
        temperatures=temperatures,
        leapfrog_steps=leapfrog_steps,
        scale=scale,
        seed=seed,
        progress=progress,
    )
    return annealed_evidence(path, "posterior_draws", draws, step_size, reverse=True)


def annealed_evidence(
    path: Annealing,
    argument: str,
    draws: Tensor,
    step_size: float | Sequence[float] | Tensor | None,
    reverse: bool = False,
) -> AnnealedEvidence:
    """What chains from these draws say, with the steps given or adapted."""
    if step_size is None:
        steps, draws = path.adapted_steps(argument, draws, reverse)
    else:
        steps = path.given_steps(step_size)
    log_weights, acceptance = path.log_weights(argument, draws, steps, reverse)
    estimate = log_mean(log_weights)
    if reverse:
        log_weights, estimate = -log_weights, replace(estimate, value=-estimate.value)
    count = len(log_weights)
    spread = float(log_weights.std()) if count > 1 else math.inf
    bound = EvidenceBound(float(log_weights.mean()), spread / math.sqrt(count))
    return AnnealedEvidence(
        bound, estimate, log_weights, acceptance, torch.tensor(steps, dtype=torch.float64)
    )
