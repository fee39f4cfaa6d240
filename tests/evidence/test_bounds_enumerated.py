"""Exact failure probabilities of PAC-Bayes bounds: hypotheses about a coin, enumerated."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml.evidence.bounds import (
    catoni_bound,
    conditional_evidence_bound,
    evidence_bound,
    mcallester_bound,
)


def coins(draw):
    lower = draw(st.floats(-1.0, 2.0))
    upper = lower + draw(st.floats(0.05, 5.0))
    count = draw(st.integers(1, 4))
    of_losses = st.lists(st.floats(lower, upper), min_size=count, max_size=count)
    losses = torch.tensor([draw(of_losses), draw(of_losses)], dtype=torch.float64)
    weights = [draw(st.floats(0.01, 1.0)) for _ in range(count)]
    prior = torch.tensor(weights, dtype=torch.float64)
    p = draw(st.floats(0.0, 1.0))
    return (lower, upper), losses, prior / prior.sum(), torch.tensor([1 - p, p]).double()


def outcomes(n, truth):
    """How often each side came, ``(n + 1, 2)``, and the probabilities of these, ``(n + 1,)``."""
    heads = torch.arange(n + 1).double()
    ways = torch.lgamma(torch.tensor(n + 1.0).double())
    ways = ways - torch.lgamma(heads + 1) - torch.lgamma(n - heads + 1)
    log_p = ways + torch.xlogy(heads, truth[1]) + torch.xlogy(n - heads, truth[0])
    return torch.stack([n - heads, heads], -1), log_p.exp()


SLACK = 1e-9


@settings(max_examples=150, deadline=None)
@given(st.composite(coins)(), st.integers(1, 30), st.floats(0.01, 0.9), st.floats(0.05, 4.0))
def test_the_probability_of_failure_is_at_most_delta_for_all_posteriors(coin, n, delta, beta):
    loss_range, losses, prior, truth = coin
    counts, probability = outcomes(n, truth)
    totals, risks = counts @ losses, truth @ losses
    options = {"delta": delta, "loss_range": loss_range}

    def any_failure(bound_of):
        """Of all point masses and of tempered posteriors, together."""
        failed = torch.zeros(n + 1, dtype=torch.bool)
        for h in range(len(prior)):
            bound = bound_of(totals[:, h] / n, -prior[h].log())
            failed |= risks[h] > bound.value + SLACK
        for temper in (0.2, 1.0, beta):
            q = torch.softmax(prior.log() - temper * totals, -1)
            kl = (torch.xlogy(q, q) - q * prior.log()).sum(-1).clamp_min(0)
            bound = bound_of((q * totals).sum(-1) / n, kl)
            failed |= q @ risks > bound.value + SLACK
        return float(probability[failed].sum())

    assert any_failure(lambda r, kl: mcallester_bound(r, kl, n, **options)) <= delta + SLACK
    options["inverse_temperature"] = beta
    assert any_failure(lambda r, kl: catoni_bound(r, kl, n, **options)) <= delta + SLACK


@settings(max_examples=100, deadline=None)
@given(st.composite(coins)(), st.integers(0, 12), st.integers(1, 12), st.floats(0.01, 0.9))
def test_the_probability_that_an_evidence_bound_fails_is_at_most_delta(coin, m, left, delta):
    loss_range, losses, prior, truth = coin
    n, risks = m + left, truth @ losses
    options = {"delta": delta, "loss_range": loss_range}
    first, p_first = outcomes(m, truth)
    rest, p_rest = outcomes(left, truth)
    counts = first.unsqueeze(1) + rest
    probability = p_first.unsqueeze(1) * p_rest

    def log_evidence(counts):
        return torch.logsumexp(prior.log() - counts @ losses, -1)

    risk = torch.softmax(prior.log() - counts @ losses, -1) @ risks
    evidence = log_evidence(counts)
    bound = evidence_bound(evidence, n, **options)
    assert probability[risk > bound.value + SLACK].sum() <= delta + SLACK
    conditional = evidence - log_evidence(first).unsqueeze(1)
    bound = conditional_evidence_bound(conditional, n, m, **options)
    assert probability[risk > bound.value + SLACK].sum() <= delta + SLACK


@settings(max_examples=100, deadline=None)
@given(st.composite(coins)(), st.integers(1, 12), st.floats(0.01, 0.9))
def test_the_mean_over_orderings_fails_as_seldom(coin, half, delta):
    loss_range, losses, prior, truth = coin
    counts, p = outcomes(half, truth)
    both = counts.unsqueeze(1) + counts

    def log_evidence(counts):
        return torch.logsumexp(prior.log() - counts @ losses, -1)

    given_one_half = log_evidence(counts)
    # Either half may come first.
    mean = log_evidence(both) - (given_one_half.unsqueeze(1) + given_one_half) / 2
    bound = conditional_evidence_bound(mean, 2 * half, half, delta=delta, loss_range=loss_range)
    risk = torch.softmax(prior.log() - both @ losses, -1) @ (truth @ losses)
    failed = risk > bound.value + SLACK
    assert (p.unsqueeze(1) * p)[failed].sum() <= delta + SLACK
