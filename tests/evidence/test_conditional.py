"""The conditional evidence of a network by draws: splits, scales, ensembles."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, SoftmaxLikelihood

import reference
from gpclml.curvature import Diagonal, Full, GaussianWeightPrior, Kronecker
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.evidence.sampling import (
    estimate_conditional_log_density,
    laplace_conditional_log_density,
    linearized_outputs,
    rescaled,
    sampled_outputs,
)
from gpclml.fit import fit_map
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
    split = torch.randperm(N, generator=torch.Generator().manual_seed(1)).split([30, 24, 6])
    (seen, seen_y), scaling, held_out = ((x[rows], y[rows]) for rows in split)
    network = torch.nn.Linear(3, 1, bias=False).double()
    H = seen.mT @ seen / NOISE + DELTA * torch.eye(3)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.solve(H, seen.mT @ seen_y / NOISE))
    likelihood = GaussianLikelihood().double()
    likelihood.noise = NOISE
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", DELTA))
    mll = LaplaceMarginalLogLikelihood(likelihood, model, len(seen), Full())
    weights = mll.evidence_of(seen, seen_y).sample_weights(20_000)
    center = {"weight": network.weight.detach()}
    outputs_of = functools.partial(linearized_outputs, network)
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
    few = {name: draws[:50] for name, draws in weights.items()}
    with pytest.warns(UserWarning, match=r"of 50 draws have nearly all the weight"):
        estimate_conditional_log_density(likelihood, outputs_of, few, held_out)
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
    weights = torch.func.stack_module_state(members)[0]
    x = torch.randn(5, 2, dtype=torch.float64)
    outputs = sampled_outputs(members[0], weights, x)
    torch.testing.assert_close(outputs, torch.stack([member(x) for member in members]))


def test_bad_scales():
    likelihood, outputs_of, weights, _, scaling, held_out, _ = linear()
    for scales in ((), (0.0, 1.0), (1.0, math.nan), (math.inf,)):
        with pytest.raises(ArgumentError, match="scales"):
            estimate_conditional_log_density(
                likelihood, outputs_of, weights, held_out, scaling=scaling, scales=scales
            )


@pytest.mark.parametrize("classes", [2, 3])
def test_the_scale_of_the_best_accuracy(classes):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    truth = torch.randn(3, classes, generator=generator, dtype=torch.float64)
    if classes == 2:
        truth = truth[:, :1]
        y = (x @ truth)[:, 0].gt(0).long()
        likelihood = BernoulliLikelihood()
    else:
        y = (x @ truth).argmax(-1)
        likelihood = SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
    draws = torch.randn(40, *truth.shape, generator=generator, dtype=torch.float64)
    weights, center = {"w": truth + 10 * draws}, {"w": truth}

    def outputs_of(weights, x):
        return x @ weights["w"]

    scales = (1e-10, 1e-9, 1e-8, 3.0)
    parts = (x[:150], y[:150]), (x[150:], y[150:])
    found = estimate_conditional_log_density(
        likelihood, outputs_of, weights, parts[1], scaling=parts[0], center=center, scales=scales,
        scale_by="accuracy",
    )  # fmt: skip
    # All are right at the mode and nearby, and some wrong far from it: the largest of equal ones.
    assert found.scale == 1e-8
    assert not found.at_edge
    by_density = estimate_conditional_log_density(
        likelihood, outputs_of, weights, parts[1], scaling=parts[0], center=center,
        scales=(1e-9, 1e-8, 10.0),
    )  # fmt: skip
    assert by_density.scale < 1
    with pytest.raises(UnsupportedError, match="regression"):
        estimate_conditional_log_density(
            GaussianLikelihood(), outputs_of, weights, parts[1], scaling=parts[0],
            scale_by="accuracy",
        )  # fmt: skip


def in_one_layer(likelihood, outputs, structure):
    """A trained linear network, its evidence and further points."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    network = torch.nn.Linear(3, outputs, bias=False).double()
    classes = not isinstance(likelihood, GaussianLikelihood)
    y = (x @ torch.randn(3, max(outputs, 2), generator=generator, dtype=torch.float64)).argmax(-1)
    y = y if classes else x[:, 0] + 0.5 * torch.randn(40, generator=generator, dtype=torch.float64)
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", DELTA))
    mll = LaplaceMarginalLogLikelihood(likelihood, model, 25, structure)
    fit_map(mll, x[:25], y[:25], epochs=500, lr=0.1, final_lr=1e-4, progress=False)
    return mll.evidence_of(x[:25], y[:25]), (x[25:], y[25:])


@pytest.mark.parametrize("structure", [Full(), Kronecker(), Diagonal()])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_laplace_without_draws_of_a_regression(structure, scale):
    likelihood = GaussianLikelihood().double()
    likelihood.noise = NOISE
    evidence, (x, y) = in_one_layer(likelihood, 1, structure)
    network = evidence.mll.model.network
    found = laplace_conditional_log_density(evidence, (x, y), scale=scale)
    seen = torch.Generator().manual_seed(2)
    first = torch.randn(40, 3, generator=seen, dtype=torch.float64)[:25]
    H = first.mT @ first / NOISE
    both = H + scale * x.mT @ x / NOISE
    if isinstance(structure, Diagonal):
        H, both = (torch.diag(one.diagonal()) for one in (H, both))
    eye = torch.eye(3, dtype=torch.float64)
    if isinstance(structure, Full) or (isinstance(structure, Kronecker) and scale == 1):  # exact
        covariance = scale * x @ torch.linalg.inv(H + DELTA * eye) @ x.mT
        normal = torch.distributions.MultivariateNormal(
            network(x)[:, 0], covariance + NOISE * torch.eye(len(x))
        )
        expected = float(normal.log_prob(y).detach())
        assert found == pytest.approx(expected, abs=1e-5)
    elif isinstance(structure, Diagonal):
        ratio = (both + DELTA * eye).logdet() - (H + DELTA * eye).logdet()
        at_mode = torch.distributions.Normal(network(x)[:, 0], NOISE**0.5).log_prob(y).sum()
        assert found >= float((at_mode - 0.5 * ratio).detach())


@pytest.mark.parametrize("classes", [2, 3])
def test_laplace_without_draws_of_classes(classes):
    if classes == 2:
        likelihood = BernoulliLikelihood()
    else:
        likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    evidence, held_out = in_one_layer(likelihood, 1 if classes == 2 else 3, Full())
    weights = evidence.sample_weights(20_000)
    outputs_of = functools.partial(linearized_outputs, evidence.mll.model.network)
    drawn = estimate_conditional_log_density(likelihood, outputs_of, weights, held_out)
    assert drawn.joint.standard_error < 0.05
    found = laplace_conditional_log_density(evidence, held_out)
    assert found == pytest.approx(drawn.joint.value, abs=0.3)


def test_laplace_without_draws_of_wrong_input():
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    evidence, held_out = in_one_layer(likelihood, 3, Full())
    x, y = held_out
    with pytest.raises(ArgumentError, match="scale"):
        laplace_conditional_log_density(evidence, held_out, scale=0.0)
    with pytest.raises(ShapeError, match="uint8"):
        laplace_conditional_log_density(evidence, (x.abs().to(torch.uint8), y))
    with pytest.raises(ShapeError, match="target"):
        laplace_conditional_log_density(evidence, (x, y[1:]))
    part = evidence.mll.evidence_of(x, y)
    with pytest.raises(UnsupportedError, match="all points"):
        laplace_conditional_log_density(part, held_out)
