"""Annealed evidence and its bounds, against closed forms and quadrature."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.evidence.annealing import annealed_importance_sampling, bidirectional_evidence
from gpclml.evidence.sampling import log_mean
from linear_evidence import LinearEvidence, drawn

QUICK = {"temperatures": 60, "leapfrog_steps": 2, "progress": False}


def forward(model, draws=24, **options):
    return annealed_importance_sampling(
        model.log_prior, model.log_likelihood, model.prior_draws(draws), **QUICK | options
    )


def contains(evidence, value):
    """Whether a log evidence lies between both bounds, up to four of their errors."""
    low, high = evidence.forward.bound, evidence.reverse.bound
    errors = 4 * low.standard_error, 4 * high.standard_error
    return low.value - errors[0] <= value <= high.value + errors[1]


def both(model, draws=24, **options):
    return bidirectional_evidence(
        model.log_prior,
        model.log_likelihood,
        model.prior_draws(draws),
        model.posterior_draws(draws),
        **QUICK | options,
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_evidence_of_linear_models_lies_between_both_bounds(seed):
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(5, 31, (), generator=generator))
    P = int(torch.randint(2, 11, (), generator=generator))
    noise = 10 ** (1 - 2 * float(torch.rand((), generator=generator)))
    model = LinearEvidence(n, P, noise, seed=10 * seed)
    evidence = both(model)
    assert contains(evidence, model.exact)
    # Few temperatures; the default number leaves less than a tenth of it.
    assert -4 * evidence.reverse.bound.standard_error < evidence.gap < 1.5 * P


def test_the_gap_with_the_default_temperatures():
    model = LinearEvidence(12, 4, 0.1)
    evidence = bidirectional_evidence(
        model.log_prior,
        model.log_likelihood,
        model.prior_draws(24),
        model.posterior_draws(24),
        progress=False,
    )
    assert contains(evidence, model.exact)
    assert abs(evidence.gap) < 0.5
    assert evidence.forward.bound.standard_error < 0.2
    assert evidence.reverse.bound.standard_error < 0.2
    assert abs(evidence.forward.estimate.value - model.exact) < 0.4


def test_more_temperatures_close_the_gap():
    model = LinearEvidence(20, 5, 0.1)
    gaps = [both(model, temperatures=count).gap for count in (8, 24, 72)]
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2] > 0


@pytest.mark.parametrize("step_size", [0.1, 0.6, None])
def test_weights_are_unbiased_whatever_the_steps(step_size):
    """Also where the chains mix badly: both means are exact, not only in the limit."""
    model = LinearEvidence(3, 2, 2.0)
    options = {"temperatures": 8, "step_size": step_size, "leapfrog_steps": 1}
    evidence = both(model, 8000, **options)
    ahead = (evidence.forward.log_weights - model.exact).exp()
    back = (model.exact - evidence.reverse.log_weights).exp()
    for weights in (ahead, back):
        error = float(weights.std()) / len(weights) ** 0.5
        assert error < 0.1
        assert abs(float(weights.mean()) - 1) < 4 * error


def test_one_temperature_is_simple_monte_carlo():
    model = LinearEvidence(5, 2, 1.0)
    simple = log_mean(model.log_likelihood(model.prior_draws(24)))
    annealed = forward(model, temperatures=1)
    assert annealed.estimate == simple
    assert annealed.acceptance.shape == annealed.step_sizes.shape == (0,)


def test_bounds_are_means_of_what_the_chains_say():
    evidence = both(LinearEvidence(8, 3, 0.3))
    for side in (evidence.forward, evidence.reverse):
        logs = side.log_weights
        assert side.bound.value == pytest.approx(float(logs.mean()))
        assert side.bound.standard_error == pytest.approx(float(logs.std()) / len(logs) ** 0.5)
        assert side.acceptance.shape == side.step_sizes.shape == (59,)
        assert 0.6 < float(side.acceptance.mean()) < 0.95
    ahead, back = evidence.forward, evidence.reverse
    assert ahead.estimate.value == pytest.approx(float(ahead.log_weights.exp().mean().log()))
    assert back.estimate.value == pytest.approx(-float((-back.log_weights).exp().mean().log()))
    assert ahead.bound.value <= ahead.estimate.value
    assert back.estimate.value <= back.bound.value
    assert evidence.gap == evidence.reverse.bound.value - evidence.forward.bound.value
    assert len(ahead.log_weights) == 18
    assert len(back.log_weights) == 24
    assert torch.equal(ahead.step_sizes, back.step_sizes)


def test_a_logistic_regression_against_quadrature():
    x, labels = drawn(12, 2), (drawn(12, seed=1) > 0).double()

    def log_prior(w):
        return -0.5 * (w.square() / 4 + math.log(8 * math.pi)).sum(-1)

    def log_likelihood(w):
        return torch.nn.functional.logsigmoid(w @ x.mT * (2 * labels - 1)).sum(-1)

    line = torch.linspace(-14, 14, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    cell = float(line[1] - line[0]) ** 2
    exact = float((log_prior(grid) + log_likelihood(grid)).logsumexp(0)) + math.log(cell)
    # Exact draws of the posterior: those of the prior, refused by their likelihood.
    many = 2 * drawn(200_000, 2, seed=2)
    top = log_likelihood(grid).max()
    uniform = torch.rand(len(many), generator=torch.Generator().manual_seed(3))
    posterior = many[uniform.log() < log_likelihood(many) - top][:200]
    assert len(posterior) == 200
    evidence = bidirectional_evidence(
        log_prior,
        log_likelihood,
        2 * drawn(200, 2, seed=4),
        posterior,
        temperatures=100,
        scale=torch.full((2,), 2.0),
        progress=False,
    )
    assert contains(evidence, exact)
    assert abs(evidence.gap) < 0.5
    estimate = evidence.forward.estimate
    assert abs(estimate.value - exact) < 4 * estimate.standard_error < 0.2


def test_approximate_draws_of_the_posterior_are_no_bound():
    """Draws that explain the data worse than the posterior's say too little."""
    model = LinearEvidence(10, 3, 0.2)
    draws = model.posterior_draws(200)
    wide = 3 * (draws - draws.mean(0)) + draws.mean(0)
    options = QUICK | {"temperatures": 20, "leapfrog_steps": 1, "step_size": 0.02}
    densities = (model.log_prior, model.log_likelihood)
    evidence = bidirectional_evidence(*densities, model.prior_draws(8), wide, **options)
    low = evidence.reverse.bound
    assert low.value + 4 * low.standard_error < model.exact


def test_seeds():
    model = LinearEvidence(8, 3, 0.3)
    quick = {"temperatures": 15}
    first, again, other = (both(model, seed=seed, **quick) for seed in (0, 0, 1))
    assert torch.equal(first.forward.log_weights, again.forward.log_weights)
    assert torch.equal(first.reverse.log_weights, again.reverse.log_weights)
    assert not torch.equal(first.forward.log_weights, other.forward.log_weights)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    assert torch.equal(both(model, **quick).forward.log_weights, first.forward.log_weights)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_single_precision():
    model = LinearEvidence(8, 3, 0.3)
    double, single = (
        bidirectional_evidence(
            model.log_prior,
            lambda w: model.log_likelihood(w).to(w),
            model.prior_draws(24).to(dtype),
            model.posterior_draws(24).to(dtype),
            **QUICK | {"temperatures": 30},
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert single.forward.bound.value == pytest.approx(double.forward.bound.value, abs=1e-2)
    assert single.reverse.bound.value == pytest.approx(double.reverse.bound.value, abs=1e-2)
    assert single.forward.log_weights.dtype == torch.float64


def test_a_scale_is_a_change_of_units():
    model, scale = LinearEvidence(8, 2, 0.3), torch.tensor([0.01, 100.0], dtype=torch.float64)
    options = QUICK | {"step_size": 0.2}
    plain = forward(model, step_size=0.2)
    scaled = annealed_importance_sampling(
        lambda w: model.log_prior(w / scale),
        lambda w: model.log_likelihood(w / scale),
        model.prior_draws(24) * scale,
        scale=scale,
        **options,
    )
    torch.testing.assert_close(scaled.log_weights, plain.log_weights)
    torch.testing.assert_close(scaled.acceptance, plain.acceptance)


def test_steps_and_temperatures_that_are_given():
    model = LinearEvidence(8, 3, 0.3)
    steps = torch.linspace(0.3, 0.1, 59)
    by_steps = forward(model, step_size=steps)
    torch.testing.assert_close(by_steps.step_sizes, steps.double())
    assert len(by_steps.log_weights) == 24
    by_values = forward(model, step_size=steps, temperatures=[(t / 60) ** 4 for t in range(61)])
    torch.testing.assert_close(by_values.log_weights, by_steps.log_weights)
    one = forward(model, step_size=0.1, draws=1)
    assert one.bound.standard_error == math.inf


def test_progress_is_shown(capsys):
    forward(LinearEvidence(5, 2, 1.0), temperatures=3)
    assert capsys.readouterr().err == ""
    forward(LinearEvidence(5, 2, 1.0), temperatures=3, progress=True)
    assert "annealing pilot" in capsys.readouterr().err
