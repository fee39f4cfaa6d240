from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evaluation import stacking_weights


def drawn(models, points, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (models, points)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def objective(weights, logs):
    return float(torch.logsumexp(logs + weights.log().unsqueeze(-1), dim=0).sum())


@pytest.mark.parametrize("seed", range(4))
def test_no_point_of_a_grid_is_better(seed):
    logs = drawn(3, 30, seed)
    found = stacking_weights(logs)
    grid = [
        torch.tensor([a, b, 100 - a - b], dtype=torch.float64) / 100
        for a, b in itertools.product(range(101), repeat=2)
        if a + b <= 100
    ]
    values = [objective(point, logs) for point in grid]
    best = max(values)
    assert objective(found, logs) >= best
    torch.testing.assert_close(found, grid[values.index(best)], atol=0.02, rtol=0)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([0.1, 1, 20]))
@settings(max_examples=60, deadline=None)
def test_conditions_of_the_maximum(models, points, seed, spread):
    logs = drawn(models, points, seed, spread)
    weights = stacking_weights(logs)
    assert bool((weights >= 0).all())
    assert float(weights.sum()) == pytest.approx(1)
    # The gradient a point: no model may have more than one, those with weight have one.
    shares = torch.softmax(logs + weights.log().unsqueeze(-1), dim=0)
    gradient = (logs - torch.logsumexp(logs + weights.log().unsqueeze(-1), dim=0)).exp().mean(-1)
    assert float(gradient.max()) <= 1 + 1e-4
    torch.testing.assert_close(shares.mean(-1), weights, atol=1e-4, rtol=0)


def test_equal_models_share_and_dominated_ones_get_nothing():
    logs = drawn(1, 12)
    torch.testing.assert_close(
        stacking_weights(logs.repeat(3, 1)), torch.full((3,), 1 / 3, dtype=torch.float64)
    )
    assert stacking_weights(torch.cat([logs, logs - 1.0])).tolist() == [1.0, 0.0]
    assert stacking_weights(logs).tolist() == [1.0]


def test_order_and_units_do_not_matter():
    logs = drawn(4, 30, seed=5)
    weights = stacking_weights(logs)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(stacking_weights(logs[order]), weights[order], atol=1e-6, rtol=0)
    # Densities far below the smallest number that is not zero.
    shifted = logs - 1e4 * torch.rand(30, dtype=torch.float64)
    torch.testing.assert_close(stacking_weights(shifted), weights, atol=1e-6, rtol=0)
    assert stacking_weights(logs.float()).dtype == torch.float32


def test_bad_input():
    with pytest.raises(ShapeError, match="log_densities"):
        stacking_weights(torch.zeros(3))
    with pytest.raises(ShapeError, match="log_densities"):
        stacking_weights(torch.zeros(2, 0))
    with pytest.raises(NonFiniteError, match="log_densities"):
        stacking_weights(torch.tensor([[0.0, float("nan")]]))


def test_integers_are_refused():
    """Weights in their type would all be zero."""
    with pytest.raises(ArgumentError, match=r"log_densities: got a tensor of torch.int64"):
        stacking_weights(torch.tensor([[-1, -2, -1], [-2, -1, -2]]))


@pytest.mark.parametrize("pseudo_counts", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("seed", range(2))
def test_pseudo_counts_against_a_convex_solver(seed, pseudo_counts):
    logs = drawn(4, 30, seed)
    found = stacking_weights(logs, pseudo_counts=pseudo_counts)

    def loss(free):
        weights = torch.softmax(torch.from_numpy(free), 0)
        return -objective(weights, logs) - pseudo_counts * float(weights.log().sum())

    best = optimize.minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-7})
    torch.testing.assert_close(found, torch.softmax(torch.from_numpy(best.x), 0), atol=1e-5, rtol=0)
    assert float(found.sum()) == pytest.approx(1)
    assert float(found.min()) >= pseudo_counts / (30 + 4 * pseudo_counts)


def test_pseudo_counts_shrink_to_equal_weights_and_vanish_to_none():
    logs = drawn(3, 25, seed=2)
    equal = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(stacking_weights(logs, pseudo_counts=1e6), equal, atol=1e-4, rtol=0)
    nearly_none = stacking_weights(logs, pseudo_counts=1e-6)
    torch.testing.assert_close(nearly_none, stacking_weights(logs), atol=1e-3, rtol=0)
    # Of equal models none is preferred, and densities far below the smallest number count.
    same = stacking_weights(logs[:1].repeat(2, 1) - 1e4, pseudo_counts=3.0)
    assert same.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("pseudo_counts", [-1.0, float("inf")])
def test_pseudo_counts_out_of_range(pseudo_counts):
    with pytest.raises(ArgumentError, match="pseudo_counts: got"):
        stacking_weights(drawn(2, 5), pseudo_counts=pseudo_counts)
