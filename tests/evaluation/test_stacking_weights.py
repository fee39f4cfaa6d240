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


@pytest.mark.parametrize("pseudo_counts", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("seed", range(2))
def test_pseudo_counts_against_a_convex_solver(seed, pseudo_counts):
    logs = drawn(4, 30, seed)
    weights = stacking_weights(logs, pseudo_counts=pseudo_counts)

    def loss(free):
        tried = torch.softmax(torch.from_numpy(free), 0)
        return -objective(tried, logs) - pseudo_counts * float(tried.log().sum())

    best = optimize.minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-7})
    expected = torch.softmax(torch.from_numpy(best.x), 0)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)
    assert float(weights.sum()) == pytest.approx(1)
    assert float(weights.min()) >= pseudo_counts / (30 + 4 * pseudo_counts)


def test_pseudo_counts_shrink_to_equal_weights_and_vanish_to_none():
    logs = drawn(3, 25, seed=2)
    equal = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(stacking_weights(logs, pseudo_counts=1e6), equal, atol=1e-4, rtol=0)
    nearly_none = stacking_weights(logs, pseudo_counts=1e-6)
    torch.testing.assert_close(nearly_none, stacking_weights(logs), atol=1e-3, rtol=0)
    # Of equal models none is preferred, and densities far below the smallest number count.
    same = stacking_weights(logs[:1].repeat(2, 1) - 1e4, pseudo_counts=3.0)
    assert same.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("logs", "pseudo_counts", "error", "match"),
    [
        (torch.zeros(3), 0.0, ShapeError, "log_densities"),
        (torch.zeros(2, 0), 0.0, ShapeError, "log_densities"),
        (torch.tensor([[0.0, torch.nan]]), 0.0, NonFiniteError, "log_densities"),
        # Weights in their type would all be zero.
        (torch.tensor([[-1, -2], [-2, -1]]), 0.0, ArgumentError, "got a tensor of torch.int64"),
        (drawn(2, 5), -1.0, ArgumentError, "pseudo_counts: got"),
        (drawn(2, 5), float("inf"), ArgumentError, "pseudo_counts: got"),
    ],
)
def test_bad_input(logs, pseudo_counts, error, match):
    with pytest.raises(error, match=match):
        stacking_weights(logs, pseudo_counts=pseudo_counts)
