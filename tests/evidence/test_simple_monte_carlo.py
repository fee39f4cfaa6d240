"""Evidence from draws of the prior or of a proposal, against linear models in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.sampling import importance_sampling, log_mean, simple_monte_carlo
from linear_evidence import LinearEvidence, drawn

CASES = [(5, 2, 1.0), (10, 3, 2.0), (30, 2, 4.0)]


@pytest.mark.parametrize("case", CASES)
def test_draws_of_the_prior(case):
    model = LinearEvidence(*case)
    estimate = simple_monte_carlo(model.log_likelihood, model.prior_draws(50_000))
    assert 0 < estimate.standard_error < 0.1
    assert abs(estimate.value - model.exact) < 4 * estimate.standard_error
    assert 10 < estimate.effective_draws < 50_000


@pytest.mark.parametrize("case", CASES)
def test_draws_of_a_proposal_wider_than_the_posterior(case):
    model = LinearEvidence(*case)
    posterior = model.posterior()
    wide = MultivariateNormal(posterior.loc + 0.1, 2 * posterior.covariance_matrix)
    draws = wide.loc + drawn(5000, case[1], seed=9) @ wide.scale_tril.mT
    estimate = importance_sampling(model.log_joint, draws, wide.log_prob)
    assert 0 < estimate.standard_error < 0.05
    assert abs(estimate.value - model.exact) < 4 * estimate.standard_error
    prior = simple_monte_carlo(model.log_likelihood, model.prior_draws(5000))
    assert estimate.standard_error < prior.standard_error


@pytest.mark.parametrize("case", CASES)
def test_the_posterior_as_proposal_is_exact(case):
    model = LinearEvidence(*case)
    draws, log_proposal = model.posterior_draws(20), model.posterior().log_prob
    estimate = importance_sampling(model.log_joint, draws, log_proposal)
    assert estimate.value == pytest.approx(model.exact, abs=1e-9)
    assert estimate.standard_error < 1e-10
    assert estimate.effective_draws == pytest.approx(20)
    one = importance_sampling(model.log_joint, draws[:1], log_proposal)
    assert one.value == pytest.approx(model.exact, abs=1e-9)
    assert one.standard_error == math.inf


def test_the_prior_as_proposal_is_simple_monte_carlo():
    model = LinearEvidence(6, 3, 0.5)
    draws = model.prior_draws(100)
    by_proposal = importance_sampling(model.log_joint, draws, model.log_prior)
    by_prior = simple_monte_carlo(model.log_likelihood, draws)
    assert by_proposal.value == pytest.approx(by_prior.value)
    assert by_proposal.standard_error == pytest.approx(by_prior.standard_error)


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
        importance_sampling(
            model.log_joint, draws.where(draws > draws.min(), math.nan), model.log_prior
        )
    with pytest.raises(ShapeError, match=r"log_likelihood: got \(4, 2\).*Sum over"):
        simple_monte_carlo(lambda w: w, draws)
    with pytest.raises(ShapeError, match=r"log_proposal: got \(\)"):
        importance_sampling(model.log_joint, draws, lambda w: model.log_prior(w).sum())
    with pytest.raises(NonFiniteError, match=r"log_proposal: got 4 of 4 values not finite"):
        importance_sampling(model.log_joint, draws, lambda w: model.log_prior(w) - math.inf)
    with pytest.raises(NonFiniteError, match=r"log_values: got a log mean of nan"):
        simple_monte_carlo(lambda w: model.log_likelihood(w) * math.nan, draws)
    with pytest.raises(ShapeError, match=r"log_values: got \(0,\)"):
        log_mean(draws[:0, 0])
