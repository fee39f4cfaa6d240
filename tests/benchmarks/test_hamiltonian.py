"""Hamiltonian moves: the integrator's geometry, and the densities they leave as they are."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

from benchmarks.evidence.annealing import TemperedPosterior, hamiltonian_move, leapfrog
from linear_evidence import LinearEvidence, drawn


def log_prior(w):
    return -0.5 * w.square().sum(-1)


def log_likelihood(w):
    """Far from Gaussian, and parameters depend on each other."""
    return torch.cos(2 * w[:, 0] * w[:, 1]) - 0.1 * w.pow(4).sum(-1)


CURVED = TemperedPosterior(log_prior, log_likelihood)
STEP = torch.tensor([0.3, 0.2], dtype=torch.float64)


def flow(state, count=7, beta=0.7):
    """Positions and momenta ``(S, 4)`` after some steps."""
    end, momentum, finite = leapfrog(
        CURVED, CURVED.chains_at(state[:, :2]), state[:, 2:], beta, STEP, count
    )
    assert bool(finite.all())
    return torch.cat([end.position, momentum], -1)


def test_leapfrog_is_reversible():
    state = drawn(20, 4)
    turned = flow(state) * torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert float((flow(state) - state).abs().amax(-1).min()) > 0.1
    back = flow(turned) * torch.tensor([1.0, 1.0, -1.0, -1.0])
    torch.testing.assert_close(back, state, rtol=0, atol=1e-12)


def test_leapfrog_preserves_volume():
    h = 1e-5
    for state in drawn(5, 1, 4):
        columns = [
            (flow(state + h * e) - flow(state - h * e))[0] / (2 * h)
            for e in torch.eye(4, dtype=torch.float64)
        ]
        jacobian = torch.stack(columns, -1)
        assert float(torch.linalg.det(jacobian)) == pytest.approx(1.0, abs=1e-7)
        assert float((jacobian - torch.eye(4)).abs().max()) > 0.5


def test_the_energy_error_is_of_second_order():
    state = drawn(50, 4)
    chains = CURVED.chains_at(state[:, :2])

    def error(parts):
        step = STEP / parts
        end, momentum, _ = leapfrog(CURVED, chains, state[:, 2:], 1.0, step, 4 * parts)
        gain = end.log_density(1.0) - chains.log_density(1.0)
        kinetic = 0.5 * (momentum.square() - state[:, 2:].square()).sum(-1)
        return (gain - kinetic).abs().mean()

    assert 3.4 < float(error(4) / error(8)) < 4.6


def test_densities_and_gradients_at_a_temperature():
    w = drawn(6, 2).requires_grad_()
    chains = CURVED.chains_at(w)
    exact = log_prior(w) + 0.3 * log_likelihood(w)
    (gradient,) = torch.autograd.grad(exact.sum(), w)
    torch.testing.assert_close(chains.log_density(0.3), exact.detach())
    torch.testing.assert_close(chains.gradient(0.3), gradient)
    torch.testing.assert_close(CURVED.gradient(w, 0.3), gradient)


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_moves_keep_the_moments_of_a_gaussian(beta):
    """With steps so large that a move without its Metropolis test would not."""
    model = LinearEvidence(6, 3, 0.5)
    posterior = TemperedPosterior(model.log_prior, model.log_likelihood)
    exact, count = model.posterior(beta), 20_000
    step = 1.3 * exact.covariance_matrix.diagonal().min().sqrt() * torch.ones(3)
    chains = posterior.chains_at(model.posterior_draws(count, beta))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        chains, accepted = hamiltonian_move(posterior, chains, beta, step, 3, generator)
        assert 0.3 < accepted < 0.95
    # In coordinates in which the target is standard normal.
    z = torch.linalg.solve_triangular(
        exact.scale_tril, (chains.position - exact.loc).mT, upper=False
    ).mT
    assert float(z.mean(0).abs().max()) < 4 / count**0.5
    moments = z.mT @ z / count
    assert float((moments.diagonal() - 1).abs().max()) < 4 * (2 / count) ** 0.5
    assert float((moments - moments.diagonal().diag()).abs().max()) < 4 / count**0.5


def test_moves_find_the_target_from_elsewhere():
    model = LinearEvidence(6, 2, 0.5)
    posterior = TemperedPosterior(model.log_prior, model.log_likelihood)
    exact = model.posterior()
    chains = posterior.chains_at(5 + model.prior_draws(4000))
    step, generator = torch.full((2,), 0.3), torch.Generator().manual_seed(0)
    for _ in range(60):
        chains, _ = hamiltonian_move(posterior, chains, 1.0, step, 3, generator)
    deviation = exact.covariance_matrix.diagonal().sqrt()
    away = (chains.position.mean(0) - exact.loc).abs() / deviation
    assert float(away.max()) < 4 / 4000**0.5


def test_trajectories_that_overflow_are_refused():
    """Also by a density that checks its argument."""
    normal = Normal(torch.zeros(2), torch.ones(2))
    posterior = TemperedPosterior(lambda w: normal.log_prob(w).sum(-1), lambda w: -w.pow(4).sum(-1))
    chains = posterior.chains_at(drawn(5, 2))
    step, generator = torch.full((2,), 1e80, dtype=torch.float64), torch.Generator().manual_seed(0)
    moved, accepted = hamiltonian_move(posterior, chains, 1.0, step, 10, generator)
    assert accepted == 0.0
    assert torch.equal(moved.position, chains.position)
    assert torch.equal(moved.log_likelihood, chains.log_likelihood)
