"""PAC-Bayes bounds: against their equations, and by simulation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.bounds import (
    catoni_bound,
    conditional_evidence_bound,
    evidence_bound,
    mcallester_bound,
)

DELTA = 0.1
DATA_SETS = 1000
RANGE = (-math.log(0.95), -math.log(0.05))
BINS = 5


class Classifiers:
    """A finite set of binned logistic classifiers and a uniform prior: everything is exact.

    Probabilities are within [.05, .95], so that the negative log-likelihood is within RANGE.
    """

    def __init__(self, slopes, offsets):
        x = torch.linspace(-1, 1, BINS, dtype=torch.float64)
        slope, offset = torch.meshgrid(
            torch.tensor(slopes).double(), torch.tensor(offsets).double(), indexing="ij"
        )
        p = torch.sigmoid(slope.reshape(-1, 1) * x + offset.reshape(-1, 1)).clamp(0.05, 0.95)
        self.losses = -torch.cat([(1 - p).log(), p.log()], -1)  # (hypotheses, 2 bins)

    def total_losses(self, counts):
        return counts.double() @ self.losses.T

    def log_evidence(self, counts):
        totals = self.total_losses(counts)
        return torch.logsumexp(-totals, -1) - math.log(totals.shape[-1])

    def posterior(self, counts):
        return torch.softmax(-self.total_losses(counts), -1)

    def kl(self, counts):
        q = self.posterior(counts)
        return (torch.xlogy(q, q) + q * math.log(q.shape[-1])).sum(-1)

    def empirical_risk(self, counts):
        totals = self.total_losses(counts)
        return (self.posterior(counts) * totals).sum(-1) / counts.sum(-1)

    def risk(self, counts, truth):
        return self.posterior(counts) @ (self.losses @ truth)


MODELS = [
    Classifiers([0.0], [i / 4 for i in range(-8, 9)]),
    Classifiers([i / 2 for i in range(-10, 11)], [0.0]),
    Classifiers([i / 2 for i in range(-10, 11)], [i / 2 for i in range(-6, 7)]),
    Classifiers([3.0, 4.0], [-1.0, -0.5]),
    Classifiers([-8.0], [3.0]),
]


def the_truth():
    """Probabilities of (y, bin), which no hypothesis has."""
    p = torch.tensor([0.07, 0.1, 0.35, 0.8, 0.9], dtype=torch.float64)
    return torch.cat([1 - p, p]) / BINS


def simulated_counts(n, m, seed):
    """How often each (y, bin) came among the first m points and the others, ``(D, 2 BINS)``."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.multinomial(the_truth(), DATA_SETS * n, replacement=True, generator=generator)
    hits = torch.nn.functional.one_hot(draws.reshape(DATA_SETS, n), 2 * BINS)
    return hits[:, :m].sum(1), hits[:, m:].sum(1)


def all_bounds(model, first, rest, num_models=1):
    counts = first + rest
    n, m = int(counts[0].sum()), int(first[0].sum())
    risk, kl, evidence = (f(counts) for f in (model.empirical_risk, model.kl, model.log_evidence))
    conditional = evidence - model.log_evidence(first)
    options = {"loss_range": RANGE, "delta": DELTA, "num_models": num_models}
    return {
        "mcallester": mcallester_bound(risk, kl, n, **options),
        "catoni": catoni_bound(risk, kl, n, **options),
        "cold": catoni_bound(risk, kl, n, inverse_temperature=0.3, **options),
        "evidence": evidence_bound(evidence, n, **options),
        "conditional": conditional_evidence_bound(conditional, n, m, **options),
    }


@pytest.mark.parametrize("n", [10, 60, 400])
def test_every_bound_holds_in_simulation(n):
    first, rest = simulated_counts(n, n // 2, seed=n)
    for model in MODELS:
        risk = model.risk(first + rest, the_truth())
        for name, bound in all_bounds(model, first, rest).items():
            holds = (risk <= bound.value).double().mean()
            assert holds >= 1 - DELTA, (name, holds)


@pytest.mark.parametrize("n", [10, 60, 400])
def test_the_union_bound_holds_for_the_model_that_the_data_choose(n):
    first, rest = simulated_counts(n, n // 2, seed=n + 1)
    risks = torch.stack([model.risk(first + rest, the_truth()) for model in MODELS])
    bounds = [all_bounds(model, first, rest, num_models=len(MODELS)) for model in MODELS]
    for name in bounds[0]:
        values = torch.stack([of_model[name].value for of_model in bounds])
        chosen = values.argmin(0, keepdim=True)
        holds = (risks.gather(0, chosen) <= values.gather(0, chosen)).double().mean()
        assert holds >= 1 - DELTA, (name, holds)
        # All at once, which is more.
        assert (risks <= values).all(0).double().mean() >= 1 - DELTA


def test_without_the_union_a_chosen_model_breaks_its_bound():
    # Twenty predictors of a coin, each by a coin of its own: losses of .05 or 3 nats, evenly.
    # A model whose predictor is right four times in four has a bound below its risk: .0625 of
    # the data sets for one model, below δ = .1, and .72 for the best of twenty.
    k, n = 20, 4
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randint(2, (DATA_SETS, n, k), generator=generator).sum(1).double()
    evidence = -(RANGE[0] * (n - wrong) + RANGE[1] * wrong)
    risk = sum(RANGE) / 2

    def share_that_holds(log_evidence, num_models):
        options = {"loss_range": RANGE, "delta": DELTA, "num_models": num_models}
        bound = evidence_bound(log_evidence, n, **options)
        return float((bound.value >= risk).double().mean())

    def error(p):
        return 4 * math.sqrt(p * (1 - p) / DATA_SETS)

    alone = share_that_holds(evidence[:, 0], 1)
    assert alone >= 1 - DELTA
    assert abs(alone - 15 / 16) < error(15 / 16)
    best = evidence.max(-1).values
    uncorrected = share_that_holds(best, 1)
    assert abs(uncorrected - (15 / 16) ** k) < error((15 / 16) ** k)
    assert uncorrected < 0.5
    assert share_that_holds(best, k) >= 1 - DELTA


def test_the_mean_over_orderings_needs_no_union():
    n, m, orderings = 40, 30, 20
    generator = torch.Generator().manual_seed(3)
    draws = torch.multinomial(the_truth(), DATA_SETS * n, replacement=True, generator=generator)
    hits = torch.nn.functional.one_hot(draws.reshape(DATA_SETS, n), 2 * BINS)
    counts = hits.sum(1)
    for model in MODELS:
        curves = []
        for _ in range(orderings):
            first = hits[:, torch.randperm(n, generator=generator)[:m]].sum(1)
            curves.append(model.log_evidence(counts) - model.log_evidence(first))
        mean = torch.stack(curves).mean(0)
        bound = conditional_evidence_bound(mean, n, m, loss_range=RANGE, delta=DELTA)
        assert (model.risk(counts, the_truth()) <= bound.value).double().mean() >= 1 - DELTA


def test_bounds_are_not_vacuous_with_data_enough():
    # 400 points, 273 hypotheses: the risk is near .42 nats and the range ends at 3.
    first, rest = simulated_counts(400, 200, seed=7)
    counts = first + rest
    model = MODELS[2]
    bounds = all_bounds(model, first, rest)
    assert not any(bound.vacuous.any() for bound in bounds.values())
    risk = model.risk(counts, the_truth()).mean()
    gaps = {name: float(bound.value.mean() - risk) for name, bound in bounds.items()}
    assert 0 < gaps["cold"] < 0.25
    assert gaps["mcallester"] < 0.45
    assert gaps["evidence"] < 0.65
    # With few data and many models the square root says nothing where Catoni's form still does.
    first, rest = simulated_counts(10, 5, seed=7)
    bounds = all_bounds(model, first, rest, num_models=1000)
    assert bounds["mcallester"].vacuous.double().mean() > 0.25
    assert not bounds["evidence"].vacuous.any()


def test_conditioning_pays_where_most_of_the_prior_is_wasted():
    # Of 2001 hypotheses one is any good: learning which takes log 2001 nats, spent on the first.
    model = Classifiers([-5.0] * 2000 + [3.0], [-1.0])
    first, rest = simulated_counts(60, 30, seed=8)
    bounds = all_bounds(model, first, rest)
    assert bounds["conditional"].value.mean() < bounds["evidence"].value.mean() - 0.1
    holds = model.risk(first + rest, the_truth()) <= bounds["conditional"].value
    assert holds.double().mean() >= 1 - DELTA


# Formulas and identities.


def test_bounds_match_their_equations():
    bound = mcallester_bound(0.1, 5.0, 1000, delta=0.05)
    expected = 0.1 + math.sqrt((5 + math.log(1000 / 0.05) + 2) / 1999)
    assert float(bound.value) == pytest.approx(expected, rel=1e-12)
    n, m, delta, a, b = 50, 20, 0.03, 0.05, 3.0
    z = math.exp(-37.0)
    factor = (b - a) / (1 - math.exp(a - b))
    options = {"delta": delta, "loss_range": (a, b)}
    expected = a + factor * (1 - math.exp(a) * (z * delta) ** (1 / n))
    assert float(evidence_bound(-37.0, n, **options).value) == pytest.approx(expected, rel=1e-12)
    expected = a + factor * (1 - math.exp(a) * (z * delta) ** (1 / (n - m)))
    bound = conditional_evidence_bound(-37.0, n, m, **options)
    assert float(bound.value) == pytest.approx(expected, rel=1e-12)
    exponent = -0.6 + a - (4.0 + math.log(1 / delta)) / n
    expected = a + factor * (1 - math.exp(exponent))
    bound = catoni_bound(0.6, 4.0, n, **options)
    assert float(bound.value) == pytest.approx(expected, rel=1e-12)


def test_the_evidence_bound_is_the_smallest_over_posteriors():
    first, rest = simulated_counts(25, 10, seed=2)
    counts = (first + rest)[:50]
    for model in MODELS[:3]:
        evidence = evidence_bound(model.log_evidence(counts), 25, loss_range=RANGE)
        risk, kl = model.empirical_risk(counts), model.kl(counts)
        at_posterior = catoni_bound(risk, kl, 25, loss_range=RANGE)
        torch.testing.assert_close(at_posterior.value, evidence.value)
        count = len(model.losses)
        q = torch.softmax(3 * torch.randn(50, count, dtype=torch.float64), -1)
        kl = (torch.xlogy(q, q) + q * math.log(count)).sum(-1)
        risk = (q * model.total_losses(counts)).sum(-1) / 25
        assert (catoni_bound(risk, kl, 25, loss_range=RANGE).value > evidence.value).all()


def test_the_evidence_bound_orders_models_as_the_evidence_does():
    first, rest = simulated_counts(30, 0, seed=5)
    evidence = torch.stack([model.log_evidence(first + rest) for model in MODELS])
    value = evidence_bound(evidence, 30, loss_range=RANGE).value
    assert torch.equal(evidence.argsort(0, descending=True), value.argsort(0))


def test_conditioning_on_nothing_gives_the_evidence_bound():
    options = {"loss_range": RANGE, "delta": 0.2, "num_models": 3}
    whole = evidence_bound(-20.0, 30, **options)
    part = conditional_evidence_bound(-20.0, 30, 0, **options)
    assert torch.equal(whole.value, part.value)
    part = conditional_evidence_bound(-20.0, 40, 10, **options)
    assert torch.equal(whole.value, part.value)
    assert (part.num_data, whole.num_data) == (30, 30)


risks = st.floats(0.0, 1.0)
divergences = st.floats(0.0, 50.0)
numbers = st.integers(1, 10_000)
deltas = st.floats(1e-6, 0.999)


@given(risks, divergences, numbers, deltas, st.integers(1, 50))
def test_bounds_fall_with_n_and_delta_and_rise_with_risk_kl_and_models(r, kl, n, delta, k):
    def values(r=r, kl=kl, n=n, delta=delta, k=k):
        options = {"delta": delta, "loss_range": (0.0, 1.0), "num_models": k}
        evidence = -n * min(r + kl / n, 1.0)
        return (
            mcallester_bound(r, kl, n, **options).value,
            catoni_bound(r, kl, n, **options).value,
            catoni_bound(r, kl, n, inverse_temperature=2.5, **options).value,
            evidence_bound(evidence, n, **options).value,
        )

    here = values()
    larger = [values(r=(1 + r) / 2), values(kl=2 * kl), values(delta=delta / 2), values(k=2 * k)]
    for others in larger:
        assert all(other >= value for other, value in zip(others, here, strict=True))
    for other, value in zip(values(n=2 * n)[:3], here[:3], strict=True):
        assert other <= value + 1e-12
    if kl < n * (1 - r):  # the evidence at twice the points is twice as many nats then
        evidence = -2 * n * (r + kl / n)
        doubled = evidence_bound(evidence, 2 * n, loss_range=(0.0, 1.0), delta=delta, num_models=k)
        assert doubled.value <= here[3] + 1e-12
    # δ / k is all that k is.
    for value, other in zip(here, values(k=1, delta=delta / k), strict=True):
        torch.testing.assert_close(value, other)
    # No bound is below the empirical risk.
    assert min(here[:3]) >= r


@given(risks, divergences, numbers, st.floats(-3.0, 3.0), st.floats(0.1, 10.0))
def test_bounds_scale_and_shift_with_the_loss(r, kl, n, shift, scale):
    moved, moved_range = shift + scale * r, (shift, shift + scale)
    unit = mcallester_bound(r, kl, n).value
    value = mcallester_bound(moved, kl, n, loss_range=moved_range).value
    torch.testing.assert_close(value, shift + scale * unit)
    unit = catoni_bound(r, kl, n, loss_range=(0.0, 1.0), inverse_temperature=2.0).value
    value = catoni_bound(
        moved, kl, n, loss_range=moved_range, inverse_temperature=2.0 / scale
    ).value
    torch.testing.assert_close(value, shift + scale * unit)


def test_gradients():
    risk = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    kl = torch.tensor([3.0, 0.4], dtype=torch.float64, requires_grad=True)
    options = {"loss_range": (0.1, 2.0)}
    bounds = (mcallester_bound, catoni_bound)
    for bound in bounds:
        assert torch.autograd.gradcheck(
            lambda r, d, bound=bound: bound(r, d, 20, **options).value, (risk, kl)
        )
    evidence = torch.tensor([-9.0, -22.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda e: evidence_bound(e, 20, **options).value, evidence)


def test_batches_dtypes_and_devices(device):
    risk = torch.rand(3, 2, dtype=torch.float64, device=device)
    kl = 5 * torch.rand(2, dtype=torch.float64, device=device)
    for bound in (mcallester_bound, catoni_bound):
        whole = bound(risk, kl, 80, loss_range=(0.0, 1.0)).value
        assert whole.shape == (3, 2)
        assert whole.device.type == device.type
        one = bound(float(risk[1, 0]), float(kl[0]), 80, loss_range=(0.0, 1.0)).value
        torch.testing.assert_close(whole[1, 0].cpu(), one)
        single = bound(risk.float(), kl.float(), 80, loss_range=(0.0, 1.0)).value
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), whole, rtol=1e-5, atol=1e-6)
    # A whole number beside a tensor does not become its type, nor the reverse.
    value = mcallester_bound(torch.tensor(0), 0.5, 10).value
    assert torch.equal(value, mcallester_bound(0.0, 0.5, 10).value)


def test_float32_keeps_many_points():
    n = 10_000_000
    double = evidence_bound(-0.3 * n, n, loss_range=RANGE).value
    single = evidence_bound(torch.tensor(-0.3 * n), n, loss_range=RANGE).value
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)


def test_what_a_bound_says_of_itself():
    bound = conditional_evidence_bound(-20.0, 40, 10, loss_range=(0.1, 2.0), num_models=3)
    assert bound.units == "nats a point"
    assert (bound.delta, bound.num_models, bound.loss_range) == (0.05, 3, (0.1, 2.0))
    for words in ("independent points", r"[0.1, 2]", "10 other points", "one of 3 models"):
        assert words in bound.assumptions
    assert float(bound.terms["log_evidence"]) == -20.0
    assert float(bound.terms["confidence"]) == pytest.approx(math.log(60))
    assert not bound.vacuous
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound.delta = 0.5
    single = mcallester_bound(0.9, 100.0, 10)
    assert single.units == "units of the loss"
    assert "models" not in single.assumptions
    assert single.vacuous
    assert set(single.terms) == {"empirical_risk", "kl", "confidence"}


def test_a_range_that_every_loss_reaches_is_no_error_for_rounding():
    n = 1000
    for dtype in (torch.float32, torch.float64):
        worst = (torch.full((n,), 0.05, dtype=dtype).log()).sum()
        assert evidence_bound(worst, n, loss_range=RANGE).vacuous
        best = (torch.full((n,), 0.95, dtype=dtype).log()).sum()
        assert evidence_bound(best, n, loss_range=RANGE).value >= RANGE[0]
    assert mcallester_bound(0.2, -1e-16, 10).value > 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta: got 0.0, expected between 0 and 1"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"loss_range": (1.0, 1.0)}, "loss_range.*a < b.*clip it"),
        ({"loss_range": (2.0, 1.0)}, "loss_range"),
        ({"loss_range": (0.0, math.inf)}, "loss_range.*must be bounded"),
        ({"loss_range": (0.0, math.nan)}, "loss_range"),
        ({"num_data": 0}, "num_data: got 0, expected an integer of at least 1"),
        ({"num_data": 1.5}, "num_data"),
        ({"num_models": 0}, "num_models"),
    ],
)
def test_bad_settings(options, message):
    options = {"num_data": 10, "loss_range": (0.0, 1.0), **options}
    with pytest.raises(ArgumentError, match=message):
        mcallester_bound(0.5, 1.0, **options)
    with pytest.raises(ArgumentError, match=message):
        catoni_bound(0.5, 1.0, **options)
    with pytest.raises(ArgumentError, match=message):
        evidence_bound(-5.0, **options)
    with pytest.raises(ArgumentError, match=message):
        conditional_evidence_bound(-5.0, m=0, **options)


@pytest.mark.parametrize("bound", [mcallester_bound, catoni_bound])
def test_bad_risk_and_kl(bound):
    unit = {"loss_range": (0.0, 1.0)}
    with pytest.raises(ArgumentError, match=r"empirical_risk: got 1.2, expected within \[0, 1\]"):
        bound(torch.tensor([0.2, 1.2]), 1.0, 10, **unit)
    with pytest.raises(ArgumentError, match=r"empirical_risk: got -0\.1"):
        bound(-0.1, 1.0, 10, **unit)
    with pytest.raises(ArgumentError, match=r"kl: got -0\.5"):
        bound(0.1, -0.5, 10, **unit)
    with pytest.raises(NonFiniteError, match="kl"):
        bound(0.1, math.inf, 10, **unit)
    with pytest.raises(NonFiniteError, match="empirical_risk"):
        bound(torch.tensor([math.nan]), 0.5, 10, **unit)
    with pytest.raises(ShapeError, match=r"kl: got \(3,\).*\(2,\) as empirical_risk"):
        bound(torch.zeros(2), torch.zeros(3), 10, **unit)


def test_bad_evidence_and_temperature():
    options = {"loss_range": (0.1, 2.0)}
    with pytest.raises(ArgumentError, match=r"log_evidence: got -21.*within \[-20, -1\].*in nats"):
        evidence_bound(-21.0, 10, **options)
    with pytest.raises(ArgumentError, match=r"log_evidence: got -0.5"):
        evidence_bound(-0.5, 10, **options)
    with pytest.raises(NonFiniteError, match="log_evidence"):
        evidence_bound(-math.inf, 10, **options)
    # The range counts the points left, not all.
    with pytest.raises(ArgumentError, match=r"conditional_log_evidence.*within \[-8, -0.4\]"):
        conditional_evidence_bound(-10.0, 10, 6, **options)
    for m in (-1, 10, 11, 2.5):
        with pytest.raises(ArgumentError, match=f"m: got {m}"):
            conditional_evidence_bound(-5.0, 10, m, **options)
    for beta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="inverse_temperature"):
            catoni_bound(0.5, 1.0, 10, inverse_temperature=beta, **options)
