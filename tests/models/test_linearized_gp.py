"""The linearized network as a GP: its parts, and its evidence beside the Laplace evidence."""

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, SoftmaxLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml.curvature import Full, GaussianWeightPrior
from gpclml.errors import UnsupportedError
from gpclml.kernels import LinearizedMean, NeuralTangentKernel
from gpclml.kernels.networks import MLP
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedGP, LinearizedNetwork
from network_cases import jacobian

N = 15


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = drawn(N, 2, seed=1), drawn(N, seed=2)


def network_and_objective(steps=0, noise=0.3):
    """A network, a bit or fully trained, its prior and noise."""
    network = MLP([2, 6, 1], torch.nn.Tanh).double()
    prior = GaussianWeightPrior(network, "layer", 2.0)
    with torch.no_grad():
        prior.log_precision.add_(torch.tensor([0.0, 0.7]))
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    model = LinearizedNetwork(network, prior)
    mll = LaplaceMarginalLogLikelihood(likelihood, model, N, Full())
    if steps:
        optimizer = torch.optim.LBFGS(
            network.parameters(), max_iter=steps, tolerance_grad=1e-12, tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure():
            optimizer.zero_grad()
            loss = -mll.log_joint(model(X), Y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model, likelihood, mll


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def precisions(model):
    values = model.prior.precisions()
    sizes = [(values[name], p.numel()) for name, p in model.network.named_parameters()]
    return torch.cat([value.expand(size) for value, size in sizes])


def test_kernel_and_mean_of_the_jacobian():
    model, _, _ = network_and_objective()
    other = drawn(4, 2, seed=3)
    J, J2 = (jacobian(model.network, x)[:, 0] for x in (X, other))
    delta = precisions(model)
    kernel, mean = NeuralTangentKernel(model.network, model.prior), LinearizedMean(model.network)
    torch.testing.assert_close(kernel(X, other).to_dense(), J / delta @ J2.mT)
    torch.testing.assert_close(kernel(X).to_dense(), J / delta @ J.mT)
    torch.testing.assert_close(kernel(X, diag=True), (J / delta * J).sum(-1))
    expected = model.network(X).squeeze(-1) - J @ weights(model.network)
    torch.testing.assert_close(mean(X), expected.detach())


@pytest.mark.parametrize("steps", [0, 5, 400])
def test_the_gap_to_the_laplace_evidence(steps):
    model, likelihood, laplace = network_and_objective(steps)
    gp = LinearizedGP(X, Y, likelihood, model)
    exact = float(ExactMarginalLogLikelihood(likelihood, gp)(gp(X), Y).detach()) * N
    value = float(laplace(model(X), Y).detach()) * N
    log_joint = laplace.log_joint(model(X), Y) * N
    gradients = torch.autograd.grad(log_joint, list(model.network.parameters()))
    g = torch.cat([gradient.flatten() for gradient in gradients])
    J, delta = jacobian(model.network, X)[:, 0], precisions(model).detach()
    H = J.mT @ J / likelihood.noise.detach() + torch.diag(delta)
    gap = 0.5 * float(g @ torch.linalg.solve(H, g))
    assert exact - value == pytest.approx(gap, abs=1e-8)
    if steps == 400:  # the mode: equal in value and in the gradient of hyperparameters
        assert gap < 1e-8
        hyper = [model.prior.log_precision, likelihood.noise_covar.raw_noise]
        ours = torch.autograd.grad(laplace.evidence_of(X, Y)(), hyper)
        mll = ExactMarginalLogLikelihood(likelihood, gp)
        theirs = torch.autograd.grad(mll(gp(X), Y), hyper)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_what_other_libraries_ask_for_is_refused_by_name():
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from gpytorch.mlls import SumMarginalLogLikelihood

    likelihood = GaussianLikelihood().double()
    model = LinearizedNetwork(torch.nn.Linear(X.shape[-1], 1).double())
    mll = LaplaceMarginalLogLikelihood(likelihood, model, len(X))
    assert not hasattr(model, "likelihood")
    with pytest.raises(UnsupportedError, match="Fit with fit_map"):
        fit_gpytorch_mll(mll)
    with pytest.raises(UnsupportedError, match=r"model\.likelihood: got a LinearizedNetwork"):
        SumMarginalLogLikelihood(likelihood, model, LaplaceMarginalLogLikelihood)
    for wrong in (model, LinearizedGP(X, Y, likelihood, model)):
        with pytest.raises(UnsupportedError, match=r"model\.num_outputs: got a Linearized"):
            LogExpectedImprovement(wrong, best_f=0.0)


@pytest.mark.filterwarnings("ignore:The input to SoftmaxLikelihood:DeprecationWarning")
def test_outputs_of_linearized_networks_name_what_predicts():
    """They are for objectives: a likelihood and a GP's objective say so, whatever they ask for."""
    likelihood = GaussianLikelihood().double()
    model = LinearizedNetwork(torch.nn.Linear(X.shape[-1], 1).double())
    output = model(X)
    assert output.mean.shape == (len(X), 1)
    assert not hasattr(output, "variance")
    for ask in (
        lambda: likelihood(output),
        lambda: BernoulliLikelihood()(output),
        lambda: SoftmaxLikelihood(num_features=1, num_classes=2)(output),
        lambda: ExactMarginalLogLikelihood(likelihood, model)(output, Y),
        lambda: output.log_prob(Y),
        output.confidence_region,
    ):
        with pytest.raises(UnsupportedError, match="Predict with Laplace or LinearizedGP"):
            ask()
