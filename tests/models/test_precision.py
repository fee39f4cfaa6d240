"""A float32 model predicts as the same model in float64, at hyperparameters that fits end at."""

import copy

import pytest
import torch
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.means import ConstantMean

from gpclml import ConditionalMarginalLogLikelihood, LastPoints, fit_mll
from gpclml.inference import exact_posterior
from gpclml.kernels import DeepKernel
from gpclml.kernels.networks import MLP
from gpclml.models import GPRegression


class FixedFrequencies(Kernel):
    """A kernel that keeps a tensor which is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.frequencies = torch.tensor([[1.0, 2.0], [0.5, -1.0]])

    def forward(self, x1, x2, diag=False, **params):
        left, right = (torch.cos(x @ self.frequencies) for x in (x1, x2))
        return (left * right).sum(-1) if diag else left @ right.mT


OTHERS = {
    "matern 1/2": lambda: ScaleKernel(MaternKernel(0.5)),
    "periodic": lambda: ScaleKernel(PeriodicKernel()),
    "polynomial": lambda: ScaleKernel(PolynomialKernel(2)),
    "linear": lambda: ScaleKernel(LinearKernel()),
    "sum": lambda: ScaleKernel(RBFKernel()) + ScaleKernel(LinearKernel()),
    "product": lambda: ScaleKernel(RBFKernel() * RQKernel()),
    "compact": lambda: ScaleKernel(PiecewisePolynomialKernel()),
    "network": lambda: ScaleKernel(DeepKernel(MLP([2, 8, 2]), RBFKernel(), False)),
}


def smooth(n, batch=()):
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(*batch, n, 2, generator=generator)
    return x, x.sum(-1) ** 2 + 0.02 * torch.randn(*batch, n, generator=generator)


def extreme(n, kernel, batch=()):
    """Variances a million times the noise, as fits of smooth functions end at, and its double."""
    model = GPRegression(*smooth(n, batch), kernel)
    for module in model.modules():
        if isinstance(module, ScaleKernel):
            module.outputscale = 300.0
        elif isinstance(module, RQKernel):
            module.alpha = 1e4
        if isinstance(module, Kernel) and module.has_lengthscale:
            module.lengthscale = 4.0
    model.likelihood.noise = 2e-4
    double = copy.deepcopy(model).double()
    x, y = model.train_inputs[0], model.train_targets
    double.set_train_data(x.double(), y.double(), strict=False)
    return model, double


def check_same(single, expected):
    assert single.mean.dtype == torch.float32
    deviation = expected.variance.sqrt()
    assert ((single.mean - expected.mean).abs() < 0.05 * deviation).all()
    assert ((single.variance.sqrt() / deviation - 1).abs() < 0.02).all()


KERNELS = ["rbf", "rq", "matern", "spectral_mixture", "deep", "deep_bottleneck", "deep_joint"]
CASES = [(name, ()) for name in (*KERNELS, *OTHERS)] + [("matern", (3,)), ("deep", (3,))]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_predictions_are_those_of_the_double(name, batch):
    model, double = extreme(60, OTHERS[name]() if name in OTHERS else name, batch)
    x, _ = smooth(17)
    for options in ({}, {"marginal": True}, {"observation_noise": False}):
        check_same(model.predict(x, **options), double.predict(x.double(), **options))
    check_same(model.posterior(x), double.posterior(x.double()))


@pytest.mark.parametrize("kernel", ["rbf", "rq"])
def test_a_fit_of_a_smooth_function_in_single_precision_predicts_it(kernel):
    model = GPRegression(*smooth(60), kernel)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    fit_mll(mll, progress=False)
    x, _ = smooth(50)
    error = model.predict(x).mean - x.sum(-1) ** 2
    assert error.square().mean().sqrt() < 0.03  # the targets range over 3.5, their noise is .02


def test_gradients_reach_points_and_parameters_and_the_model_stays_single():
    model, double = extreme(30, "matern")
    x = smooth(5)[0].requires_grad_()
    x_double = x.detach().double().requires_grad_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.predict(x, grad=True).mean.sum().backward()
    double.predict(x_double, grad=True).mean.sum().backward()
    torch.testing.assert_close(x.grad.double(), x_double.grad, rtol=1e-3, atol=1e-4)
    for parameter, other in zip(model.parameters(), double.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad.double(), other.grad, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())


def test_a_model_with_a_tensor_of_its_own_predicts_in_its_own_type():
    x, y = smooth(20)
    model = GPRegression(x, y, FixedFrequencies(), ConstantMean())
    model.eval()
    with torch.no_grad():
        normal = exact_posterior(model, smooth(4)[0], marginal=True)
    assert normal.mean.dtype == torch.float32
    assert torch.isfinite(normal.mean).all()
