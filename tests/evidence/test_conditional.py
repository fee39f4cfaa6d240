"""The conditional evidence of a network by draws: splits, scales, ensembles."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood

import reference
from gpclml.curvature import Full, GaussianWeightPrior
from gpclml.errors import ArgumentError, ShapeError
from gpclml.evidence.sampling import (
    conditional_split,
    estimate_conditional_log_density,
    rescaled,
    sampled_outputs,
    stacked_weights,
)
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

N, NOISE, DELTA = 60, 0.3, 2.0


def linear(widened=1.0):
    """Draws of a linear model's posterior, their covariance multiplied, and the split data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -0.5, 0.2]).double()
    y = y + NOISE**0.5 * torch.randn(N, generator=generator, dtype=torch.float64)
    split = conditional_split(N, (0.5, 0.4, 0.1), seed=1)
    (seen, seen_y), scaling, held_out = ((x[rows], y[rows]) for rows in split)
    network = torch.nn.Linear(3, 1, bias=False).double()
    H = seen.mT @ seen / NOISE + DELTA * torch.eye(3)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.solve(H, seen.mT @ seen_y / NOISE))
    likelihood = GaussianLikelihood().double()
    likelihood.noise = NOISE
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", DELTA))
    mll = LaplaceMarginalLogLikelihood(likelihood, model, len(seen), Full())
    weights = mll.evidence_at(model(seen), seen_y).sample_weights(20_000)
    center = {"weight": network.weight.detach()}
    outputs_of = functools.partial(sampled_outputs, network, at_once=5000)
    weights = rescaled(weights, widened, center)
    return likelihood, outputs_of, weights, (seen, seen_y), scaling, held_out, center


def exact(seen, held_out):
    x = torch.cat([seen[0], held_out[0]])
    K = x @ x.mT / DELTA + NOISE * torch.eye(len(x))
    rows = torch.arange(len(seen[0]), len(x))
    y = torch.cat([seen[1], held_out[1]])
    return float(reference.conditional_log_density(K, y, rows))


def test_the_joint_density_of_a_linear_model():
    likelihood, outputs_of, weights, seen, _, held_out, _ = linear()
    found = estimate_conditional_log_density(likelihood, outputs_of, weights, held_out)
    assert found.scale == 1.0
    assert found.num_held_out == 6
    assert abs(found.joint.value - exact(seen, held_out)) < 4 * found.joint.standard_error
    assert found.joint.value / 6 != pytest.approx(found.marginal, abs=1e-6)


def test_draws_that_are_too_wide_are_narrowed():
    likelihood, outputs_of, weights, seen, scaling, held_out, center = linear(widened=100.0)
    wide = estimate_conditional_log_density(likelihood, outputs_of, weights, held_out)
    mended = estimate_conditional_log_density(
        likelihood, outputs_of, weights, held_out, scaling=scaling, center=center
    )
    assert mended.scale in (1e-3, 1e-2, 3e-2)
    assert mended.joint.value > wide.joint.value + 1
    assert mended.joint.value == pytest.approx(exact(seen, held_out), abs=0.7)


def test_rescaled_draws():
    weights = {"a": torch.randn(50, 3, 2, dtype=torch.float64)}
    made = rescaled(weights, 0.25)["a"]
    torch.testing.assert_close(made.mean(0), weights["a"].mean(0))
    torch.testing.assert_close(made.var(0), 0.25 * weights["a"].var(0))
    center = {"a": torch.ones(3, 2).double()}
    torch.testing.assert_close(rescaled(weights, 4.0, center)["a"], 2 * weights["a"] - 1)


def test_an_ensemble_is_draws():
    members = [MLP([2, 4, 3]).double() for _ in range(3)]
    weights = stacked_weights(members)
    x = torch.randn(5, 2, dtype=torch.float64)
    outputs = sampled_outputs(members[0], weights, x)
    torch.testing.assert_close(outputs, torch.stack([member(x) for member in members]))
    with pytest.raises(ShapeError, match="as the first"):
        stacked_weights([*members, MLP([2, 5, 3])])
    with pytest.raises(ArgumentError, match="networks"):
        stacked_weights([])


def test_splits():
    parts = conditional_split(1000)
    assert [len(part) for part in parts] == [800, 50, 150]
    assert sorted(torch.cat(parts).tolist()) == list(range(1000))
    assert torch.equal(parts[0], conditional_split(1000)[0])
    assert not torch.equal(parts[0], conditional_split(1000, seed=1)[0])
    for shares in ((0.5, 0.4), (0.5, math.nan, 0.5), (math.inf, 0.5)):
        with pytest.raises(ArgumentError, match="add up to one"):
            conditional_split(10, shares)
    with pytest.raises(ArgumentError, match="each share"):
        conditional_split(5)


def test_bad_scales():
    likelihood, outputs_of, weights, _, scaling, held_out, _ = linear()
    for scales in ((), (0.0, 1.0), (1.0, math.nan), (math.inf,)):
        with pytest.raises(ArgumentError, match="scales"):
            estimate_conditional_log_density(
                likelihood, outputs_of, weights, held_out, scaling=scaling, scales=scales
            )
