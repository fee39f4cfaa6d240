"""Covariances with derivatives in closed form equal those of GPyTorch, and so do objectives."""

from __future__ import annotations

import itertools

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)

from gpclml.conditioning import HeldOut, KFold, LastPoints, LeaveOneOut
from gpclml.errors import ShapeError
from gpclml.inference import covariances
from gpclml.inference.kernel_covariances import kernel_covariance
from gpclml.inference.known_kernels import known_parts
from gpclml.kernels import MLP, DeepKernel
from gpclml.linalg import lapack
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

RADIAL = {
    "rbf": RBFKernel,
    "matern-1/2": lambda **options: MaternKernel(0.5, **options),
    "matern-3/2": lambda **options: MaternKernel(1.5, **options),
    "matern-5/2": lambda **options: MaternKernel(2.5, **options),
    "rq": RQKernel,
    "periodic": PeriodicKernel,
}
TWO = torch.Size([2])


def known_covariance(lazy, noise):
    return kernel_covariance(lazy, *known_parts(lazy), noise)


def network(inputs=3):
    return MLP([inputs, 4, 2], torch.nn.Tanh)


def kernels():
    """Every known kernel, isotropic and not, of some dimensions, batched, summed, multiplied."""
    for name, make in RADIAL.items():
        for options in (
            {},
            {"ard_num_dims": 3},
            {"active_dims": (2, 0)},
            {"ard_num_dims": 2, "active_dims": (2, 0), "batch_shape": TWO},
        ):
            kernel = make(**options)
            yield f"{name}-{options}", kernel
            batch = options.get("batch_shape", torch.Size())
            yield f"scaled-{name}-{options}", ScaleKernel(make(**options), batch_shape=batch)
    yield "cosine", ScaleKernel(CosineKernel())
    for (a, first), (b, second) in itertools.combinations(RADIAL.items(), 2):
        yield f"{a}+{b}", ScaleKernel(first(ard_num_dims=3)) + second(active_dims=(1,))
        yield f"{a}*{b}", ScaleKernel(ScaleKernel(first(active_dims=(0,))) * second())
    yield "linear+rbf", LinearKernel() + ScaleKernel(RBFKernel(ard_num_dims=3))
    yield "scaled linear*rbf", ScaleKernel(LinearKernel(active_dims=(1,)) * RBFKernel())
    yield "constant+matern", ScaleKernel(ConstantKernel() + MaternKernel(1.5))
    yield "nested", ScaleKernel(RBFKernel() * (LinearKernel() + ScaleKernel(RQKernel())))
    yield "deep", ScaleKernel(DeepKernel(network(), RBFKernel(ard_num_dims=5)))
    yield "deep, features alone", DeepKernel(network(), ScaleKernel(MaternKernel(2.5)), False)
    yield "deep, some columns", ScaleKernel(
        DeepKernel(network(2), RBFKernel(ard_num_dims=2), False, active_dims=(2, 0))
    )  # fmt: skip
    yield (
        "deep, parts of the features",
        ScaleKernel(
            DeepKernel(
                network(),
                RBFKernel(ard_num_dims=3, active_dims=(0, 1, 2))
                + ScaleKernel(RQKernel(ard_num_dims=2, active_dims=(3, 4)))
                + RBFKernel(active_dims=(4,)) * LinearKernel(ard_num_dims=1, active_dims=(1,)),
            )
        ),
    )
    yield "deep + rbf", RBFKernel() + ScaleKernel(DeepKernel(network(), RBFKernel()))
    yield "deep in deep", DeepKernel(network(), DeepKernel(network(5), MaternKernel(1.5)))
    yield (
        "batched deep",
        ScaleKernel(DeepKernel(network(), RBFKernel(batch_shape=TWO)), batch_shape=TWO),
    )
    yield (
        "batched sum",
        ScaleKernel(
            RBFKernel(batch_shape=TWO) + MaternKernel(2.5, batch_shape=TWO), batch_shape=TWO
        ),
    )


KERNELS = dict(kernels())


def inputs(batch=(), n=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(batch) + n)
    return torch.rand(*batch, n, 3, generator=generator, dtype=dtype)


def randomized(module, seed=0):
    """The module in float64 with other parameters than those it starts with."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator).double()
    return module


def gradients(value, wanted):
    loss = (value * torch.linspace(-1, 2, value.numel()).reshape(value.shape).to(value)).sum()
    return torch.autograd.grad(loss, wanted)


def assert_gradients_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        scale = max(1e-4, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8 * scale)


@pytest.mark.parametrize("batch", [(), (3, 1)])
@pytest.mark.parametrize("name", KERNELS)
def test_covariance_equals_that_of_the_kernel(name, batch):
    kernel, x = randomized(KERNELS[name]), inputs(batch)
    noise = torch.linspace(0.1, 1, 7).double()
    for with_inputs in (False, True):
        x = inputs(batch).requires_grad_(with_inputs)
        with gpytorch.settings.lazily_evaluate_kernels(False):
            with torch.no_grad():  # where a gradient is wanted, diagonals have a distance
                exact = kernel(x).to_dense()
            expected = kernel(x).to_dense()
        if with_inputs and "matern-1/2" in name:
            # GPyTorch's gradient by equal points is infinite there: finite differences are not.
            assert torch.autograd.gradcheck(lambda x: known_covariance(kernel(x), None).matrix, x)
            continue
        value = known_covariance(kernel(x), None).matrix
        torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
        wanted = [*kernel.parameters(), *([x] if with_inputs else [])]
        assert_gradients_close(gradients(value, wanted), gradients(expected, wanted))
        with_noise = known_covariance(kernel(x), noise).matrix
        torch.testing.assert_close(with_noise, exact + torch.diag(noise), rtol=1e-10, atol=1e-10)


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, mean, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


MEANS = {
    "zero": lambda batch: gpytorch.means.ZeroMean(),
    "constant": lambda batch: gpytorch.means.ConstantMean(batch_shape=batch),
    "linear": lambda batch: gpytorch.means.LinearMean(3, batch_shape=batch),
}
LIKELIHOODS = {
    "gaussian": lambda batch: gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch),
    "fixed": lambda batch: gpytorch.likelihoods.FixedNoiseGaussianLikelihood(
        torch.linspace(0.1, 0.5, 12).double().expand(*batch, 12), learn_additional_noise=True,
        batch_shape=batch,
    ),
}  # fmt: skip
CONDITIONINGS = {
    "lml": LastPoints(m=0),
    "held-out": HeldOut([3, 8, 0]),
    "folds": KFold(4, seed=1),
    "loo": LeaveOneOut(),
}
MODELS = {
    "rbf": lambda batch: ScaleKernel(
        RBFKernel(ard_num_dims=3, batch_shape=batch), batch_shape=batch
    ),
    "sum": lambda batch: (
        ScaleKernel(MaternKernel(1.5, batch_shape=batch), batch_shape=batch)
        + ScaleKernel(RQKernel(batch_shape=batch), batch_shape=batch)
    ),
    "deep": lambda batch: ScaleKernel(
        DeepKernel(
            network(),
            RBFKernel(ard_num_dims=3, active_dims=(0, 1, 2), batch_shape=batch)
            + ScaleKernel(RQKernel(active_dims=(3, 4), batch_shape=batch), batch_shape=batch),
        ),
        batch_shape=batch,
    ),
    "product": lambda batch: ScaleKernel(
        PeriodicKernel(batch_shape=batch) * LinearKernel(batch_shape=batch), batch_shape=batch
    ),
}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("batch", [torch.Size(), TWO])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("kernel", MODELS)
def test_objectives_equal_those_by_the_kernels_own_covariance(
    monkeypatch, kernel, mean, likelihood, conditioning, batch, missing
):
    x, y = inputs(n=12), torch.sin(7 * inputs(n=12).sum(-1)).expand(*batch, 12).clone()
    if missing:
        y[..., 5] = torch.nan
    model = ExactGP(x, y, LIKELIHOODS[likelihood](batch), MEANS[mean](batch), MODELS[kernel](batch))
    randomized(model)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, CONDITIONINGS[conditioning])

    def objective():
        policy = gpytorch.settings.observation_nan_policy("mask" if missing else "ignore")
        with policy:
            value = mll(model(x), y, x)
        return value, torch.autograd.grad(value.sum(), list(model.parameters()))

    by_numpy = objective()
    monkeypatch.setattr(lapack, "LARGEST", {})
    by_torch = objective()
    monkeypatch.setattr(covariances, "known_parts", lambda kernel: None)
    expected, theirs = objective()
    for value, ours in (by_numpy, by_torch):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        assert_gradients_close(ours, theirs)


class OwnForward(RBFKernel):
    def forward(self, x1, x2, **options):
        return 2.0 * super().forward(x1, x2, **options)


def hooked():
    kernel = RBFKernel()
    kernel.register_forward_hook(lambda module, args, output: output)
    return kernel


def replaced():
    kernel = RBFKernel()
    kernel.forward = lambda x1, x2, **options: x1 @ x2.mT
    return kernel


@pytest.mark.parametrize(
    "kernel",
    [
        OwnForward(),
        ScaleKernel(OwnForward()),
        RBFKernel() + OwnForward(),
        RBFKernel() * OwnForward(),
        hooked(),
        replaced(),
        ScaleKernel(replaced()),
        LinearKernel(),
        ScaleKernel(LinearKernel()) + ConstantKernel(),
        gpytorch.kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3),
        RBFKernel() + RBFKernel(ard_num_dims=2),
        DeepKernel(network(), LinearKernel()),
        DeepKernel(network(), OwnForward()),
        type("Own", (DeepKernel,), {})(network(), RBFKernel()),
    ],
)
def test_other_kernels_are_left_to_gpytorch(kernel):
    assert known_parts(kernel(inputs().to(torch.float32))) is None


@pytest.mark.parametrize("by_numpy", [True, False])
@pytest.mark.parametrize("make", [RBFKernel, LinearKernel])
def test_lengthscales_that_are_not_as_many_as_features(monkeypatch, make, by_numpy):
    if not by_numpy:
        monkeypatch.setattr(lapack, "LARGEST", {})
    base = make(ard_num_dims=4) + RBFKernel()
    model = GPRegression(inputs(), inputs().sum(-1), DeepKernel(network(), base).double())
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
    with pytest.raises(ShapeError, match=r"5 columns.*4 columns.*as many lengthscales"):
        mll(model(*model.train_inputs), model.train_targets)


def test_the_grad_mode_is_that_in_which_the_kernel_was_called():
    kernel, x = RBFKernel().double(), inputs()
    with torch.no_grad():
        without = kernel(x)
    assert not known_covariance(without, None).matrix.requires_grad
    assert known_covariance(kernel(x), None).matrix.requires_grad


@pytest.mark.parametrize("name", ["scaled-rbf-{}", "scaled-matern-5/2-{}", "rq-{}"])
def test_no_array_of_all_points_and_dimensions(name):
    """The largest tensor that is made has n x n numbers, whatever the number of dimensions."""
    kernel = randomized(KERNELS[name])
    x = torch.rand(20, 50, dtype=torch.float64)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), options=None):
            nonlocal largest
            out = function(*args, **(options or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, torch.Tensor):
                    largest = max(largest, one.numel())
            return out

    with Largest():
        known_covariance(kernel(x), None).matrix.sum().backward()
    assert largest <= 20 * 54
