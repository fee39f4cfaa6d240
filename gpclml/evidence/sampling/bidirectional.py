"""The evidence between a lower and an upper bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.errors import ShapeError
from gpclml.evidence.sampling._annealing import annealing
from gpclml.evidence.sampling._log_values import LogDensity, drawn_parameters
from gpclml.evidence.sampling.annealed import AnnealedEvidence, EvidenceBound, annealed_evidence

__all__ = ["BidirectionalEvidence", "bidirectional_evidence"]


@dataclass(frozen=True)
class BidirectionalEvidence:
    """A log evidence from both sides.

    Attributes:
        forward: Chains from the prior.
        reverse: Chains from the posterior, at the same temperatures with the same steps.
    """

    forward: AnnealedEvidence
    reverse: AnnealedEvidence

    @property
    def lower(self) -> EvidenceBound:
        """Below the log evidence in expectation, in nats."""
        return self.forward.bound

    @property
    def upper(self) -> EvidenceBound:
        """Above it in expectation, where the draws of the posterior were exact."""
        return self.reverse.bound

    @property
    def gap(self) -> float:
        """Upper less lower, in nats: how far either can be from the log evidence.

        It is also what approximate draws of the posterior would show: negative beyond its errors,
        they were not exact.
        """
        return self.upper.value - self.lower.value

    def contains(self, value: float, errors: float = 4.0) -> bool:
        """Whether a log evidence lies between both bounds.

        Args:
            value: In nats.
            errors: Standard errors that each bound is moved outwards by.
        """
        low = self.lower.value - errors * self.lower.standard_error
        return low <= value <= self.upper.value + errors * self.upper.standard_error


@checked(
    prior_draws="float (S, P)",
    posterior_draws="float (V, P)",
    temperatures="float (T,)",
    step_size="float () | (U,)",
    scale="float (P,)",
)
def bidirectional_evidence(
    log_prior: LogDensity,
    log_likelihood: LogDensity,
    prior_draws: Tensor,
    posterior_draws: Tensor,
    *,
    temperatures: int | Sequence[float] | Tensor = 1000,
    leapfrog_steps: int = 2,
    step_size: float | Sequence[float] | Tensor | None = None,
    scale: Tensor | None = None,
    seed: int = 0,
    progress: bool = True,
) -> BidirectionalEvidence:
    """A lower and an upper bound of the log evidence, whose gap says how good either is.

    Bidirectional Monte Carlo (Grosse, Ghahramani and Adams 2015): chains from the prior to the
    posterior, and back. The upper bound is one only if the draws of the posterior are exact, as
    those of a model in closed form are, and the parameters of simulated data; for a model of
    other data, simulate from it and take the gap for that of the lower bound.

    Args:
        log_prior: As :func:`annealed_importance_sampling` takes it.
        log_likelihood: The same.
        prior_draws: Independent draws of the prior, ``(S, P)``; if steps are adapted, pilot chains
            take a quarter of them.
        posterior_draws: Exact draws of the posterior, ``(S', P)``.
        temperatures: As there.
        leapfrog_steps: As there.
        step_size: As there.
        scale: As there.
        seed: As there.
        progress: As there.

    Returns:
        Both bounds, and the chains of each.

    Raises:
        ShapeError, ArgumentError, NonFiniteError, UnsupportedError: As there.

    Note:
        Three times T times the leapfrog steps gradients, two times if steps are given. With
        the defaults the gap was 0.02 to 0.7 nats for twenty linear models of 5 to 30 points, 2 to
        10 parameters and noise variances of 0.01 to 1.
    """
    start = drawn_parameters("prior_draws", prior_draws)
    end = drawn_parameters("posterior_draws", posterior_draws)
    if end.shape[1] != start.shape[1]:
        expected = f"{start.shape[1]} parameters, as the prior's"
        raise ShapeError("posterior_draws", tuple(end.shape), expected)
    path = annealing(
        log_prior,
        log_likelihood,
        start,
        temperatures=temperatures,
        leapfrog_steps=leapfrog_steps,
        scale=scale,
        seed=seed,
        progress=progress,
    )
    forward = annealed_evidence(path, "prior_draws", start, step_size)
    end = end.to(start)
    reverse = annealed_evidence(path, "posterior_draws", end, forward.step_sizes, reverse=True)
    return BidirectionalEvidence(forward, reverse)
