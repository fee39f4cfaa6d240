"""PAC-Bayes bounds: exact probabilities of failure of hypotheses about a coin, and equations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.bounds import evidence_bound, mcallester_bound

RANGE = (-math.log(0.95), -math.log(0.05))
SLACK = 1e-9


def coins(draw):
    """Loss range, losses of hypotheses at both sides, their prior, and the coin's probabilities."""
    lower = draw(st.floats(-1.0, 2.0))
    upper = lower + draw(st.floats(0.05, 5.0))
    count = draw(st.integers(1, 4))
    losses = st.lists(st.floats(lower, upper), min_size=count, max_size=count)
    losses = torch.tensor([draw(losses), draw(losses)], dtype=torch.float64)
    prior = torch.tensor([draw(st.floats(0.01, 1.0)) for _ in range(count)], dtype=torch.float64)
    p = draw(st.floats(0.0, 1.0))
    return (lower, upper), losses, prior / prior.sum(), torch.tensor([1 - p, p]).double()


def outcomes(n, truth):
    """How often each side came, ``(n + 1, 2)``, and the probabilities of these, ``(n + 1,)``."""
    heads = torch.arange(n + 1).double()
    ways = torch.lgamma(torch.tensor(n + 1.0).double())
    ways = ways - torch.lgamma(heads + 1) - torch.lgamma(n - heads + 1)
    log_p = ways + torch.xlogy(heads, truth[1]) + torch.xlogy(n - heads, truth[0])
    return torch.stack([n - heads, heads], -1), log_p.exp()


def log_evidence(counts, losses, prior):
    return torch.logsumexp(prior.log() - counts @ losses, -1)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.composite(coins)(), st.integers(1, 30), st.floats(0.01, 0.9))
def test_mcallesters_bound_fails_for_any_posterior_with_probability_delta_at_most(coin, n, delta):
    loss_range, losses, prior, truth = coin
    counts, probability = outcomes(n, truth)
    totals, risks = counts @ losses, truth @ losses
    options = {"delta": delta, "loss_range": loss_range}
    failed = torch.zeros(n + 1, dtype=torch.bool)  # for any of these posteriors
    for h in range(len(prior)):
        bound = mcallester_bound(totals[:, h] / n, -prior[h].log(), n, **options)
        failed |= risks[h] > bound.value + SLACK
    for temper in (0.2, 1.0, 3.0):
        q = torch.softmax(prior.log() - temper * totals, -1)
        kl = (torch.xlogy(q, q) - q * prior.log()).sum(-1).clamp_min(0)
        bound = mcallester_bound((q * totals).sum(-1) / n, kl, n, **options)
        failed |= q @ risks > bound.value + SLACK
    assert float(probability[failed].sum()) <= delta + SLACK


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.composite(coins)(), st.integers(0, 12), st.integers(1, 12), st.floats(0.01, 0.9))
def test_the_evidence_bound_fails_with_probability_delta_at_most(coin, m, left, delta):
    loss_range, losses, prior, truth = coin
    n, risks = m + left, truth @ losses
    options = {"delta": delta, "loss_range": loss_range}
    first, p_first = outcomes(m, truth)
    others, p_others = outcomes(left, truth)
    counts = first.unsqueeze(1) + others
    probability = p_first.unsqueeze(1) * p_others
    risk = torch.softmax(prior.log() - counts @ losses, -1) @ risks
    evidence = log_evidence(counts, losses, prior)
    clml = evidence - log_evidence(first, losses, prior).unsqueeze(1)
    for bound in (evidence_bound(evidence, n, **options), evidence_bound(clml, n, m=m, **options)):
        assert probability[risk > bound.value + SLACK].sum() <= delta + SLACK


@settings(max_examples=100, deadline=None)
@given(st.composite(coins)(), st.integers(1, 12), st.floats(0.01, 0.9))
def test_the_mean_over_orderings_fails_as_seldom(coin, half, delta):
    loss_range, losses, prior, truth = coin
    counts, p = outcomes(half, truth)
    both = counts.unsqueeze(1) + counts
    given_one_half = log_evidence(counts, losses, prior)
    # Either half may come first.
    mean = log_evidence(both, losses, prior) - (given_one_half.unsqueeze(1) + given_one_half) / 2
    bound = evidence_bound(mean, 2 * half, m=half, delta=delta, loss_range=loss_range)
    risk = torch.softmax(prior.log() - both @ losses, -1) @ (truth @ losses)
    failed = risk > bound.value + SLACK
    assert (p.unsqueeze(1) * p)[failed].sum() <= delta + SLACK


def test_without_the_union_a_chosen_model_breaks_its_bound():
    # Twenty predictors of a coin, each by a coin of its own: losses of .05 or 3 nats, evenly.
    # A model whose predictor is right four times in four has a bound below its risk: .0625 of
    # the data sets for one model, below δ = .1, and .72 for the best of twenty.
    k, n, data_sets, delta = 20, 4, 1000, 0.1
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randint(2, (data_sets, n, k), generator=generator).sum(1).double()
    evidence = -(RANGE[0] * (n - wrong) + RANGE[1] * wrong)

    def share_that_holds(log_evidence, delta=delta):
        bound = evidence_bound(log_evidence, n, loss_range=RANGE, delta=delta)
        return float((bound.value >= sum(RANGE) / 2).double().mean())

    def error(p):
        return 4 * math.sqrt(p * (1 - p) / data_sets)

    alone, best = 15 / 16, (15 / 16) ** k
    assert share_that_holds(evidence[:, 0]) == pytest.approx(alone, abs=error(alone))
    chosen = evidence.max(-1).values
    assert share_that_holds(chosen) == pytest.approx(best, abs=error(best))
    assert share_that_holds(chosen, delta / k) >= 1 - delta


def test_bounds_match_their_equations():
    bound = mcallester_bound(0.1, 5.0, 1000, delta=0.05)
    expected = 0.1 + math.sqrt((5 + math.log(1000 / 0.05) + 2) / 1999)
    assert float(bound.value) == pytest.approx(expected, rel=1e-12)
    n, m, delta, a, b = 50, 20, 0.03, 0.05, 3.0
    z = math.exp(-37.0)
    factor = (b - a) / (1 - math.exp(a - b))
    for points, seen in ((n, 0), (n - m, m)):
        bound = evidence_bound(-37.0, n, m=seen, delta=delta, loss_range=(a, b))
        expected = a + factor * (1 - math.exp(a) * (z * delta) ** (1 / points))
        assert float(bound.value) == pytest.approx(expected, rel=1e-12)


def test_gradients():
    risk = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    kl = torch.tensor([3.0, 0.4], dtype=torch.float64, requires_grad=True)
    options = {"loss_range": (0.1, 2.0)}
    assert torch.autograd.gradcheck(
        lambda r, d: mcallester_bound(r, d, 20, **options).value, (risk, kl)
    )
    evidence = torch.tensor([-9.0, -22.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda e: evidence_bound(e, 20, **options).value, evidence)


def test_batches_dtypes_and_devices(device):
    risk = torch.rand(3, 2, dtype=torch.float64, device=device)
    kl = 5 * torch.rand(2, dtype=torch.float64, device=device)
    whole = mcallester_bound(risk, kl, 80).value
    assert whole.shape == (3, 2)
    assert whole.device.type == device.type
    alone = mcallester_bound(float(risk[1, 0]), float(kl[0]), 80).value
    torch.testing.assert_close(whole[1, 0].cpu(), alone)
    single = mcallester_bound(risk.float(), kl.float(), 80).value
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), whole, rtol=1e-5, atol=1e-6)
    # A whole number beside a tensor does not become its type, nor the reverse.
    value = mcallester_bound(torch.tensor(0), 0.5, 10).value
    assert torch.equal(value, mcallester_bound(0.0, 0.5, 10).value)
    n = 10_000_000
    double = evidence_bound(-0.3 * n, n, loss_range=RANGE).value
    single = evidence_bound(torch.tensor(-0.3 * n), n, loss_range=RANGE).value
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)


def test_what_a_bound_says_of_itself():
    bound = evidence_bound(-20.0, 40, m=10, loss_range=(0.1, 2.0))
    assert bound.units == "nats a point"
    for words in ("independent points", r"[0.1, 2]", "10 other points"):
        assert words in bound.assumptions
    assert not bound.vacuous
    single = mcallester_bound(0.9, 100.0, 10)
    assert single.units == "units of the loss"
    assert single.vacuous


def test_a_range_that_every_loss_reaches_is_no_error_for_rounding():
    for dtype in (torch.float32, torch.float64):
        worst, best = (torch.full((1000,), p, dtype=dtype).log().sum() for p in (0.05, 0.95))
        assert evidence_bound(worst, 1000, loss_range=RANGE).vacuous
        assert evidence_bound(best, 1000, loss_range=RANGE).value >= RANGE[0]
    assert mcallester_bound(0.2, -1e-16, 10).value > 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta: got 0.0, expected between 0 and 1"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"loss_range": (1.0, 1.0)}, "loss_range.*a < b.*clip it"),
        ({"loss_range": (0.0, math.inf)}, "loss_range.*must be bounded"),
        ({"loss_range": (0.0, math.nan)}, "loss_range"),
        ({"num_data": 0}, "num_data: got 0, expected an integer of at least 1"),
        ({"num_data": 1.5}, "num_data"),
    ],
)
def test_bad_settings(options, message):
    options = {"num_data": 10, "loss_range": (0.0, 1.0), **options}
    with pytest.raises(ArgumentError, match=message):
        mcallester_bound(0.5, 1.0, **options)
    with pytest.raises(ArgumentError, match=message):
        evidence_bound(-5.0, **options)


@pytest.mark.parametrize(
    ("risk", "kl", "error", "message"),
    [
        (torch.tensor([0.2, 1.2]), 1.0, ArgumentError, r"risk: got 1.2, expected within \[0, 1\]"),
        (-0.1, 1.0, ArgumentError, r"empirical_risk: got -0\.1"),
        (0.1, -0.5, ArgumentError, r"kl: got -0\.5"),
        (0.1, math.inf, NonFiniteError, "kl"),
        (torch.tensor([math.nan]), 0.5, NonFiniteError, "empirical_risk"),
        (torch.zeros(2), torch.zeros(3), ShapeError, r"kl: got \(3,\).*\(2,\) as empirical_risk"),
    ],
)
def test_bad_risk_and_kl(risk, kl, error, message):
    with pytest.raises(error, match=message):
        mcallester_bound(risk, kl, 10)


@pytest.mark.parametrize(
    ("evidence", "m", "error", "message"),
    [
        (-21.0, 0, ArgumentError, r"log_evidence: got -21.*within \[-20, -1\].*in nats"),
        (-0.5, 0, ArgumentError, r"log_evidence: got -0.5"),
        (-math.inf, 0, NonFiniteError, "log_evidence"),
        # The range counts the points left, not all.
        (-10.0, 6, ArgumentError, r"log_evidence.*within \[-8, -0.4\]"),
        (-5.0, -1, ArgumentError, "m: got -1"),
        (-5.0, 10, ArgumentError, "m: got 10, expected an integer from 0 to 9"),
        (-5.0, 2.5, ArgumentError, "m: got 2.5"),
    ],
)
def test_bad_evidence(evidence, m, error, message):
    with pytest.raises(error, match=message):
        evidence_bound(evidence, 10, m=m, loss_range=(0.1, 2.0))
