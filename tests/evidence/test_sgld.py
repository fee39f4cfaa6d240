"""Langevin dynamics against a posterior in closed form."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood

from gpclml.curvature import Full, GaussianWeightPrior
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.evidence.sampling import sample_sgld
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

N, NOISE, DELTA = 50, 0.5, 2.0


def linear():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    x[:, 1] += x[:, 0]
    y = x[:, 0] + NOISE**0.5 * torch.randn(N, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 1, bias=False).double()
    likelihood = GaussianLikelihood().double()
    likelihood.noise = NOISE
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", DELTA))
    return LaplaceMarginalLogLikelihood(likelihood, model, N, Full()), x, y


def draws(**options):
    mll, x, y = linear()
    weights = sample_sgld(mll, x, y, progress=False, **options)
    return weights["weight"].squeeze(1)


@pytest.mark.parametrize("batch_size", [None, pytest.param(25, marks=pytest.mark.slow)])
def test_the_posterior_of_a_linear_model(batch_size):
    _, x, y = linear()
    precision = x.mT @ x / NOISE + DELTA * torch.eye(2)
    mean = torch.linalg.solve(precision, x.mT @ y / NOISE)
    covariance = torch.linalg.inv(precision)
    epochs = 8000 if batch_size is None else 4000
    found = draws(
        count=4000, cycles=1, epochs_per_cycle=epochs, batch_size=batch_size, lr=0.04,
        exploration=0.1,
    )  # fmt: skip
    # Steps fall to zero, so that draws late in the cycle are alike: about 200 are independent.
    scale = covariance.diagonal().sqrt()
    assert bool(((found.mean(0) - mean).abs() < 0.4 * scale).all())
    # A mini-batch of half the points adds the noise of its gradient to that of the step.
    limits = (0.65, 1.4) if batch_size is None else (0.65, 2.5)
    spread = found.var(0) / covariance.diagonal()
    assert bool(((spread > limits[0]) & (spread < limits[1])).all())
    together = float(torch.corrcoef(found.mT)[0, 1])
    exact = float(covariance[0, 1] / scale.prod())
    assert together == pytest.approx(exact, abs=0.25)


def test_cycles_and_seeds():
    options = {"count": 6, "cycles": 3, "epochs_per_cycle": 10, "exploration": 0.8, "lr": 0.01}
    first, again = draws(**options), draws(**options)
    assert first.shape == (6, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, draws(seed=1, **options))
    assert len(first.unique(dim=0)) == 6


def test_bad_arguments():
    for name in ("count", "cycles", "epochs_per_cycle", "batch_size"):
        with pytest.raises(ArgumentError, match=name):
            draws(**{name: 0})
    with pytest.raises(ArgumentError, match="lr"):
        draws(lr=0.0)
    with pytest.raises(ArgumentError, match="exploration"):
        draws(exploration=1.0)
    with pytest.raises(ArgumentError, match="multiple of 4"):
        draws(count=7)
    with pytest.raises(ArgumentError, match="at most 2"):
        draws(count=12, cycles=4, epochs_per_cycle=10)
    with pytest.raises(NonFiniteError, match="Lower the learning rate"):
        draws(lr=1e200, exploration=0.0)
    mll, x, y = linear()
    with pytest.raises(ShapeError, match="train_y"):
        sample_sgld(mll, x, y[1:], progress=False)
