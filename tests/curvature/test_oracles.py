"""The Laplace evidence against laplace-torch, where that is installed."""

import warnings

import pytest
import torch
from gpytorch.likelihoods import SoftmaxLikelihood

from gpclml.curvature import Diagonal, Full, GaussianWeightPrior, Kronecker
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork
from network_cases import cnn, mlp, points

laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")

STRUCTURES = {"full": Full(), "kron": Kronecker(), "diag": Diagonal()}


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_evidence_is_that_of_laplace_torch(make, name):
    from laplace.curvature.asdl import AsdlGGN
    from torch.utils.data import DataLoader, TensorDataset

    network, event = make()
    for module in network.modules():
        if isinstance(module, torch.nn.ReLU):
            module.inplace = False  # which its hooks cannot follow
    x, y = points(event, n=30), torch.arange(30) % 2
    likelihood = SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    model = LinearizedNetwork(network, GaussianWeightPrior(network, "network", 0.7))
    ours = LaplaceMarginalLogLikelihood(likelihood, model, 30, STRUCTURES[name])(model(x), y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its backends warn of their own hooks
        fitted = laplace.Laplace(
            network, "classification", subset_of_weights="all", hessian_structure=name,
            backend=AsdlGGN, prior_precision=0.7,
        )  # fmt: skip
        fitted.fit(DataLoader(TensorDataset(x, y), batch_size=30))
        theirs = fitted.log_marginal_likelihood(torch.tensor(0.7).double())
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()) / 30, abs=1e-6)
