"""Draws of weights and what they predict, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood

import reference
from gpclml.curvature import Full, FunctionSpace, GaussianWeightPrior
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evidence.sampling import (
    joint_log_density,
    linearized_outputs,
    marginal_log_densities,
    sampled_outputs,
)
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

N = 8


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian(noise=0.3):
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    return likelihood


def linear(delta=2.0, noise=0.3):
    """A linear model at its mode, whose Laplace posterior is exact."""
    x, y = drawn(N, 3, seed=1), drawn(N, seed=2)
    network = torch.nn.Linear(3, 1, bias=False).double()
    H = x.mT @ x / noise + delta * torch.eye(3)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.solve(H, x.mT @ y / noise))
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", delta))
    return model, LaplaceMarginalLogLikelihood(gaussian(noise), model, N, Full()), x, y


def test_the_conditional_evidence_of_a_linear_model():
    model, mll, x, y = linear()
    weights = mll.evidence_of(x, y).sample_weights(20_000)
    other, target = 0.5 * drawn(3, 3, seed=3), drawn(3, seed=4)
    outputs = sampled_outputs(model.network, weights, other)
    assert outputs.shape == (20_000, 3, 1)
    torch.testing.assert_close(outputs, linearized_outputs(model.network, weights, other))
    every = torch.cat([x, other])
    K = every @ every.mT / 2.0 + 0.3 * torch.eye(N + 3)
    held_out = torch.arange(N, N + 3)
    exact = float(reference.conditional_log_density(K, torch.cat([y, target]), held_out))
    joint = joint_log_density(mll.likelihood, outputs, target)
    assert 0 < joint.standard_error < 0.05
    assert abs(joint.value - exact) < 4 * joint.standard_error
    marginal = marginal_log_densities(mll.likelihood, outputs, target)
    for i, value in enumerate(marginal):
        rows = [*range(N), N + i]
        one = reference.conditional_log_density(
            K[rows][:, rows], torch.cat([y, target[i : i + 1]]), torch.tensor([N])
        )
        assert float(value) == pytest.approx(float(one), abs=0.05)


def test_linearized_outputs_of_a_network():
    network = MLP([2, 4, 3], torch.nn.Tanh).double()
    x = drawn(5, 2)
    weights = {
        name: p.detach() + 0.3 * drawn(4, *p.shape, seed=i)
        for i, (name, p) in enumerate(network.named_parameters())
    }
    outputs = linearized_outputs(network, weights, x)
    for s in range(4):
        for n in range(5):
            for c in range(3):
                gradients = torch.autograd.grad(network(x)[n, c], list(network.parameters()))
                slope = sum(
                    float((g * (weights[name][s] - p.detach())).sum())
                    for g, (name, p) in zip(gradients, network.named_parameters(), strict=True)
                )
                expected = float(network(x)[n, c].detach()) + slope
                assert float(outputs[s, n, c]) == pytest.approx(expected)


def test_joint_and_marginal_densities_differ():
    """Two draws, each sure of one of two contrary answers to both questions."""
    likelihood = SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    sure = math.log(0.9 / 0.1)
    outputs = torch.tensor([[[sure, 0.0], [sure, 0.0]], [[0.0, sure], [0.0, sure]]])
    target = torch.tensor([0, 1])
    joint = joint_log_density(likelihood, outputs, target)
    marginal = marginal_log_densities(likelihood, outputs, target)
    assert math.exp(joint.value) == pytest.approx(0.09)
    assert math.exp(float(marginal.sum())) == pytest.approx(0.25)
    assert joint.effective_draws == pytest.approx(2.0)
    assert joint.standard_error == pytest.approx(0.0, abs=1e-6)


def test_the_error_of_an_estimate_is_that_of_repeated_ones():
    likelihood, target = gaussian(0.5), drawn(4, seed=9)
    estimates = [
        joint_log_density(likelihood, 0.4 * drawn(400, 4, 1, seed=seed), target)
        for seed in range(200)
    ]
    spread = torch.tensor([one.value for one in estimates]).std()
    reported = torch.tensor([one.standard_error for one in estimates]).mean()
    assert 0.75 < float(reported / spread) < 1.25
    assert all(1 <= one.effective_draws <= 400 for one in estimates)


def test_what_is_refused():
    model, mll, x, y = linear()
    evidence = mll.evidence_of(x, y)
    with pytest.raises(ArgumentError, match="count"):
        evidence.sample_weights(0)
    with pytest.raises(UnsupportedError, match="one at 4 of 8 points"):
        mll.evidence_of(x[:4], y[:4]).sample_weights(1)
    kernel = LaplaceMarginalLogLikelihood(gaussian(), model, N, FunctionSpace())
    with pytest.raises(UnsupportedError, match="Use Full"):
        kernel.evidence_of(x, y).sample_weights(1)
    with pytest.raises(ShapeError, match="outputs"):
        joint_log_density(gaussian(), drawn(3, 4), drawn(3))
    with pytest.raises(ShapeError, match="N = 3 as outputs has it"):
        joint_log_density(gaussian(), drawn(2, 3, 1), drawn(4))
    with pytest.raises(ShapeError, match="weights"):
        sampled_outputs(model.network, {"weight": drawn(2, 3)}, x)
    with pytest.raises(ShapeError, match="draws of weight"):
        sampled_outputs(model.network, {"other": drawn(2, 3)}, x)
