"""The evidence from draws of the prior, or of a proposal."""

from __future__ import annotations

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml.evidence.sampling._log_values import LogDensity, drawn_parameters, log_values
from gpclml.evidence.sampling.densities import SampledDensity, log_mean

__all__ = ["importance_sampling", "simple_monte_carlo"]


@torch.no_grad()
@checked(prior_draws="float (S, P)")
def simple_monte_carlo(log_likelihood: LogDensity, prior_draws: Tensor) -> SampledDensity:
    r"""The log evidence as the log mean likelihood over draws of the prior, in nats.

    .. math:: \log p(\mathcal D) \approx \log \frac1S \sum_s p(\mathcal D \mid w_s),
        \qquad w_s \sim p(w)

    The mean is unbiased, its log a lower bound in expectation. Useful where some draws explain
    the data: it takes about :math:`e^{\mathrm{KL}}` draws, KL the divergence of the posterior
    from the prior in nats (Chatterjee and Diaconis 2018). With fewer the estimate is
    too low and its error too small: look at the effective draws.

    Args:
        log_likelihood: Maps parameters ``(S, P)`` to the log likelihood of all data, ``(S,)``;
            minus infinity for none.
        prior_draws: Independent draws of the prior, ``(S, P)``.

    Returns:
        The estimate, its standard error and the effective draws.

    Raises:
        ShapeError: There are no draws, or the log likelihood is not one number a draw.
        NonFiniteError: Draws are not finite, a log likelihood is NaN or plus infinity, or it is
            minus infinity at every draw.

    Note:
        One evaluation of the log likelihood at all draws together.
    """
    draws = drawn_parameters("prior_draws", prior_draws)
    return log_mean(log_values("log_likelihood", log_likelihood, draws))


@torch.no_grad()
@checked(draws="float (S, P)")
def importance_sampling(
    log_joint: LogDensity, draws: Tensor, log_proposal: LogDensity
) -> SampledDensity:
    r"""The log evidence from draws of a proposal, in nats.

    .. math:: \log p(\mathcal D) \approx
        \log \frac1S \sum_s \frac{p(\mathcal D, w_s)}{q(w_s)}, \qquad w_s \sim q(w)

    With the posterior as proposal every term is the evidence and one draw is enough. The proposal
    must have the wider tails: where it has not, no number of draws shows that the error reported
    is too small.

    Args:
        log_joint: Maps parameters ``(S, P)`` to :math:`\log p(\mathcal D, w)`, ``(S,)``;
            minus infinity outside the prior's support.
        draws: Independent draws of the proposal, ``(S, P)``.
        log_proposal: Maps the same to the log of its normalized density, ``(S,)``, such as
            ``MultivariateNormal(mean, covariance).log_prob``.

    Returns:
        The estimate, its standard error and the effective draws.

    Raises:
        ShapeError: There are no draws, or a log density is not one number a draw.
        NonFiniteError: Draws or log densities of the proposal are not finite, a log joint is NaN
            or plus infinity, or it is minus infinity at every draw.

    Note:
        One evaluation of either function at all draws together.
    """
    draws = drawn_parameters("draws", draws)
    joint = log_values("log_joint", log_joint, draws)
    proposal = log_values("log_proposal", log_proposal, draws, finite=True)
    return log_mean(joint.double() - proposal.double())
