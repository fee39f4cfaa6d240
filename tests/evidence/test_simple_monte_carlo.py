"""Evidence from draws of the prior, against linear models in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.sampling import log_mean, simple_monte_carlo
from linear_evidence import LinearEvidence, drawn

CASES = [(5, 2, 1.0), (10, 3, 2.0), (30, 2, 4.0)]


@pytest.mark.parametrize("case", CASES)
def test_draws_of_the_prior(case):
    model = LinearEvidence(*case)
    estimate = simple_monte_carlo(model.log_likelihood, model.prior_draws(50_000))
    assert 0 < estimate.standard_error < 0.1
    assert abs(estimate.value - model.exact) < 4 * estimate.standard_error
    assert 10 < estimate.effective_draws < 50_000


def test_the_reported_error_is_that_of_repeated_estimates():
    model = LinearEvidence(5, 2, 2.0)
    estimates = [
        simple_monte_carlo(model.log_likelihood, drawn(500, 2, seed=100 + i)) for i in range(200)
    ]
    spread = torch.tensor([one.value for one in estimates]).std()
    reported = torch.tensor([one.standard_error for one in estimates]).mean()
    assert 0.75 < float(reported / spread) < 1.25


def test_single_precision():
    model = LinearEvidence(10, 3, 1.0)
    draws = model.prior_draws(1000)
    double = simple_monte_carlo(model.log_likelihood, draws)
    single = simple_monte_carlo(model.log_likelihood, draws.float())
    assert single.value == pytest.approx(double.value, abs=1e-4)
    assert single.standard_error == pytest.approx(double.standard_error, rel=1e-3)


def test_draws_that_exclude_the_data_count_as_zeros():
    """Half the prior cannot have made the data: half the mean, twice the work."""
    half = simple_monte_carlo(lambda w: torch.where(w[:, 0] > 0, 0.0, -math.inf), signs(10))
    assert half.value == pytest.approx(math.log(0.5))
    assert half.effective_draws == pytest.approx(5)
    with pytest.raises(NonFiniteError, match=r"log_values.*log mean of -inf"):
        simple_monte_carlo(lambda w: torch.full((len(w),), -math.inf), signs(10))


def signs(count):
    return torch.ones(count, 1).cumsum(0).remainder(2) * 2 - 1


def test_a_log_mean_by_hand():
    mean = log_mean(torch.tensor([1.0, 2.0, 3.0]).log())
    assert mean.value == pytest.approx(math.log(2.0))
    assert mean.standard_error == pytest.approx(1.0 / 3**0.5 / 2.0)
    assert mean.effective_draws == pytest.approx(36 / 14)
    shifted = log_mean(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log() - 2000)
    assert shifted.value == pytest.approx(math.log(2.0) - 2000)
    assert shifted.standard_error == pytest.approx(mean.standard_error)


def test_what_is_refused():
    model = LinearEvidence(5, 2, 1.0)
    draws = model.prior_draws(4)
    with pytest.raises(ShapeError, match=r"prior_draws: got \(0, 2\)"):
        simple_monte_carlo(model.log_likelihood, draws[:0])
    with pytest.raises(ShapeError, match=r"prior_draws: got \(4,\).*\(S, P\)"):
        simple_monte_carlo(model.log_likelihood, draws[:, 0])
    with pytest.raises(ArgumentError, match=r"prior_draws: got a tensor of torch.int64"):
        simple_monte_carlo(model.log_likelihood, draws.long())
    with pytest.raises(NonFiniteError, match=r"draws: got 1 of 8"):
        simple_monte_carlo(model.log_likelihood, draws.where(draws > draws.min(), math.nan))
    with pytest.raises(ShapeError, match=r"log_likelihood: got \(4, 2\).*Sum over"):
        simple_monte_carlo(lambda w: w, draws)
    with pytest.raises(NonFiniteError, match=r"log_values: got a log mean of nan"):
        simple_monte_carlo(lambda w: model.log_likelihood(w) * math.nan, draws)
    with pytest.raises(ShapeError, match=r"log_values: got \(0,\)"):
        log_mean(draws[:0, 0])
