"""Priors that are registered beside that of a network's weights."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, NormalPrior

from gpclml.curvature import Full
from gpclml.errors import UnsupportedError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork


def test_registered_priors_count_and_those_of_weights_are_refused():
    torch.manual_seed(0)
    x, y = torch.randn(20, 2).double(), torch.randn(20).double()
    network = torch.nn.Linear(2, 1).double()
    values, joints = [], []
    prior = GammaPrior(2.0, 3.0)
    for noise_prior in (None, prior):
        likelihood = GaussianLikelihood(noise_prior=noise_prior).double()
        mll = LaplaceMarginalLogLikelihood(likelihood, LinearizedNetwork(network), 20)
        values.append(mll(mll.model(x), y))
        joints.append(mll.log_joint(mll.model(x), y))
    expected = prior.log_prob(likelihood.noise).sum() / 20
    torch.testing.assert_close(values[1] - values[0], expected)
    torch.testing.assert_close(joints[1] - joints[0], expected)
    mll.model.register_prior("p", NormalPrior(0.0, 1.0), lambda m: m.prior.log_precision)
    more = mll(mll.model(x), y) - values[1]
    normal = NormalPrior(0.0, 1.0).log_prob(mll.model.prior.log_precision).sum() / 20
    torch.testing.assert_close(more, normal.to(more))

    class Weights(gpytorch.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("weight", torch.nn.Parameter(torch.ones(2, 1)))
            self.register_prior("of_weight", NormalPrior(0.0, 1.0), "weight")

        def forward(self, x):
            return x @ self.weight

    mll = LaplaceMarginalLogLikelihood(
        GaussianLikelihood(), LinearizedNetwork(Weights()), 20, Full()
    )
    with pytest.raises(UnsupportedError, match=r"a prior of weights, network.of_weight"):
        mll(mll.model(x.float()), y.float())
