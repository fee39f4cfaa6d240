"""Densities from parameters by NumPy equal those of the covariance as a matrix, by PyTorch."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from botorch.models import MultiTaskGP
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from linear_operator.utils.warnings import NumericalWarning

from gpclml.conditioning import LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import ArgumentError
from gpclml.inference import covariances
from gpclml.inference.kernel_covariances import KernelCovariance, kernel_covariance
from gpclml.inference.known_kernels import known_parts
from gpclml.linalg import DenseCovariance, array_kernels, lapack
from gpclml.linalg.array_kernels import FixedPoints, RadialArrayKernel
from gpclml.mlls import ConditionalMarginalLogLikelihood

N = 9
BLOCKS = {
    "all": [torch.arange(9).unsqueeze(0)],
    "last": [torch.tensor([[7, 8]])],
    "some": [torch.tensor([[6, 1, 4]])],
    "each": [torch.arange(9).unsqueeze(-1)],
    "folds": [torch.tensor([[0, 3], [8, 1]]), torch.tensor([[2, 4, 5]])],
    "overlapping": [torch.tensor([[0, 3], [3, 1]]), torch.tensor([[1]])],
}


def own_transform():
    kernel = RBFKernel()
    kernel.raw_lengthscale_constraint.transform = torch.exp
    return kernel


KERNELS = {
    "rbf": lambda: RBFKernel(ard_num_dims=2),
    "scaled matern": lambda: ScaleKernel(MaternKernel(2.5)),
    "interval": lambda: ScaleKernel(
        MaternKernel(1.5, ard_num_dims=2, lengthscale_constraint=Interval(0.1, 3.0))
    ),
    "another softplus": lambda: ScaleKernel(
        RBFKernel(lengthscale_constraint=Positive(torch.nn.Softplus(beta=3.0), torch.log))
    ),
    "own transform": own_transform,
    "rq": lambda: ScaleKernel(RQKernel(ard_num_dims=2)),
    "periodic": lambda: PeriodicKernel(),
    "cosine": lambda: ScaleKernel(CosineKernel()) + ConstantKernel() + ScaleKernel(RBFKernel()),
    "columns": lambda: RBFKernel(active_dims=(0,)) * (LinearKernel() + RBFKernel(active_dims=(1,))),
    "tasks": lambda: (
        ScaleKernel(RBFKernel(active_dims=(0,))) * IndexKernel(num_tasks=3, active_dims=(1,))
    ),
    "twice": lambda: (lambda one: one + ScaleKernel(one))(RBFKernel()),
}


def noise_of(kind, dtype):
    if kind == "one":
        return HomoskedasticNoise().to(dtype)
    return torch.linspace(0.2, 0.5, N, dtype=dtype).requires_grad_()


def parts(name="rbf", noise="one", dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    if name == "tasks":
        x[:, 1] = torch.tensor([0.0, 2.0, 1.0]).repeat(3)
    x[5] = x[2]
    kernel = KERNELS[name]().to(dtype)
    for parameter in kernel.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    residual = torch.randn(N, generator=generator).to(dtype).requires_grad_()
    return kernel, x.to(dtype).requires_grad_(), noise_of(noise, dtype), residual


def leaves(kernel, x, noise, residual):
    of_noise = list(noise.parameters()) if isinstance(noise, HomoskedasticNoise) else [noise]
    return [*kernel.parameters(), *of_noise, x, residual]


def counted(monkeypatch):
    calls, density = [], lapack.kernel_density

    def count(*arguments):
        calls.append(arguments)
        return density(*arguments)

    monkeypatch.setattr("gpclml.inference.kernel_covariances.kernel_density", count)
    return calls


def by_halves(monkeypatch):
    """Every matrix is as large as those that are computed by halves, a few rows at a time."""
    monkeypatch.setattr(array_kernels, "_WHOLE_UP_TO", 0)
    monkeypatch.setattr(array_kernels, "_PANEL", 4)
    monkeypatch.setattr(lapack, "_BY_TORCH", 0)


@pytest.mark.parametrize("with_inputs", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("noise", ["one", "each", "large"])
@pytest.mark.parametrize("name", KERNELS)
def test_densities_are_those_of_the_matrix(monkeypatch, name, noise, blocks, with_inputs):
    if noise == "large":
        by_halves(monkeypatch)
    own = parts(name, noise)
    kernel, x, variances, residual = own
    x.requires_grad_(with_inputs)
    calls = counted(monkeypatch)
    covariance = kernel_covariance(kernel(x), *known_parts(kernel(x)), variances)
    value = covariance.held_out_log_density(residual, BLOCKS[blocks])
    assert calls
    wanted = [one for one in leaves(*own) if one.requires_grad]
    ours = torch.autograd.grad(3.0 * value, wanted, retain_graph=True)
    matrix = DenseCovariance(covariance.matrix)
    monkeypatch.setattr(lapack, "LARGEST", {})
    expected = matrix.held_out_log_density(residual, BLOCKS[blocks])
    theirs = torch.autograd.grad(3.0 * expected, wanted)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10 * scale)


@pytest.mark.parametrize("profile", array_kernels.PROFILES)
def test_memory_of_large_matrices_is_used_again(monkeypatch, profile):
    by_halves(monkeypatch)
    points = FixedPoints(torch.rand(9, 2, generator=torch.Generator().manual_seed(0)).numpy())
    power = FixedPoints(torch.tensor([1.5]).numpy())
    points.needed = power.needed = True
    of_power = power if profile == "rational_quadratic" else None
    kernel = RadialArrayKernel(points, array_kernels.PROFILES[profile], None, of_power)
    first = kernel.value()[0].copy()
    kernel.add_gradient(torch.ones(9, 9).triu().numpy().T, 1.0)
    torch.testing.assert_close(torch.tensor(kernel.value()[0]), torch.tensor(first))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", ["rbf", "interval"])
def test_value_and_gradients_at_once(monkeypatch, name, blocks):
    own = parts(name)
    kernel, x, noise, residual = own
    covariance = KernelCovariance(kernel, x, noise)
    calls = counted(monkeypatch)
    value, pairs = covariance.value_and_gradients(residual, covariance.density(BLOCKS[blocks]))
    assert len(calls) == 1
    tensors, gradients = zip(*pairs, strict=True)
    for leaf in leaves(*own):
        leaf.grad = None
    torch.autograd.backward(tensors, gradients)
    ours = [leaf.grad.clone() for leaf in leaves(*own)]
    expected = DenseCovariance(covariance.matrix).held_out_log_density(residual, BLOCKS[blocks])
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-11)
    for one, other in zip(ours, torch.autograd.grad(expected, leaves(*own)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_single_precision_is_computed_in_double(blocks):
    own, double = parts("scaled matern", "each", torch.float32), parts("scaled matern", "each")
    for one, other in zip(leaves(*own), leaves(*double), strict=True):
        other.data.copy_(one.data)
    values, gradients = [], []
    for kernel, x, noise, residual in (own, double):
        value = KernelCovariance(kernel, x, noise).held_out_log_density(residual, BLOCKS[blocks])
        values.append(value)
        gradients.append(torch.autograd.grad(value, leaves(kernel, x, noise, residual)))
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-6, atol=1e-6)
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_what_needs_no_gradient_is_not_asked_for():
    kernel, x, noise, residual = parts()
    for one in (x, residual):
        one.requires_grad_(False)
    covariance = KernelCovariance(kernel, x, noise)
    _, pairs = covariance.value_and_gradients(residual, covariance.density(BLOCKS["all"]))
    assert {id(tensor) for tensor, _ in pairs} == {
        id(kernel.raw_lengthscale), id(noise.raw_noise)
    }  # fmt: skip
    with torch.no_grad():
        assert not covariance.held_out_log_density(residual, BLOCKS["all"]).requires_grad


def test_a_second_derivative_is_refused():
    kernel, x, noise, residual = parts()
    value = KernelCovariance(kernel, x, noise).log_density(residual)
    with pytest.raises(ValueError, match="create_graph=True"):
        torch.autograd.grad(value, kernel.raw_lengthscale, create_graph=True)


def test_gradients_by_finite_differences():
    kernel, x, noise, residual = parts("rq")
    assert torch.autograd.gradcheck(
        lambda x, r: KernelCovariance(kernel, x, noise).held_out_log_density(r, BLOCKS["some"]),
        (x, residual),
    )


def test_a_singular_covariance_is_left_to_pytorch_which_adds_jitter():
    x = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    covariance = KernelCovariance(RBFKernel().double(), x, None)
    with pytest.warns(NumericalWarning, match="singular to rounding"):
        covariance.value_and_gradients(
            torch.ones(4).double(), covariance.density([torch.arange(4).unsqueeze(0)])
        )


def test_values_that_are_not_finite_have_no_density_here():
    kernel, x, noise, residual = parts()
    with torch.no_grad():
        x[1] = torch.nan
    covariance = KernelCovariance(kernel, x, noise)
    density = covariance.density(BLOCKS["all"])
    assert covariance._computed(residual, density, gradients=True) is None


@pytest.mark.parametrize("noise", ["one", "each"])
def test_leave_one_out_is_that_of_the_matrix(noise):
    kernel, x, variances, residual = parts("rq", noise)
    rows = torch.tensor([3, 0, 8])
    with torch.no_grad():
        covariance = kernel_covariance(kernel(x), *known_parts(kernel(x)), variances)
        assert isinstance(covariance, KernelCovariance)
        found = covariance.leave_one_out(residual, rows)
        expected = DenseCovariance(covariance.matrix).leave_one_out(residual, rows)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    mean, _ = covariance.leave_one_out(residual, rows)
    assert mean.requires_grad


def test_a_kernel_that_was_called_without_a_gradient():
    kernel, x, noise, residual = parts()
    with torch.no_grad():
        lazy = kernel(x)
    covariance = kernel_covariance(lazy, *known_parts(lazy), noise)
    wanted = [noise.raw_noise, residual, kernel.raw_lengthscale]
    value = covariance.log_density(residual)
    *found, of_kernel = torch.autograd.grad(value, wanted, allow_unused=True)
    assert of_kernel is None
    value = KernelCovariance(kernel, x, noise).log_density(residual)
    for one, other in zip(found, torch.autograd.grad(value, wanted[:2]), strict=True):
        torch.testing.assert_close(one, other)


class OfTasks(gpytorch.models.ExactGP):
    def __init__(self, x, y, batch):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch))
        self.mean_module = gpytorch.means.ZeroMean()
        data = MaternKernel(2.5, active_dims=(0, 1), batch_shape=batch)
        tasks = IndexKernel(num_tasks=3, rank=2, active_dims=(2,), batch_shape=batch)
        self.covar_module = ScaleKernel(data * tasks, batch_shape=batch) + LinearKernel()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def multi_task(x, y):
    return MultiTaskGP(x, y.unsqueeze(-1), task_feature=-1, outcome_transform=None)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("conditioning", [LastPoints(0), RandomHoldout(0.3, seed=0), LeaveOneOut()])
@pytest.mark.parametrize("kind", ["one", "batch", "botorch"])
def test_tasks_of_points_are_those_of_the_kernel(monkeypatch, kind, conditioning):
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(12, 3, generator=generator, dtype=torch.float64)
    x[:, 2] = torch.arange(12) % 3
    y = torch.sin(5 * x[:, 0]) + x[:, 2]
    torch.manual_seed(0)  # GPyTorch's factors start at random
    if kind == "botorch":
        model = multi_task(x, y).train()
    else:
        batch = torch.Size([2] if kind == "batch" else [])
        model = OfTasks(x, y.expand(*batch, 12), batch).double().train()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)
    wanted = list(model.parameters())

    def objective():
        value = mll(model(x), model.train_targets, x)
        return value, torch.autograd.grad(value.sum(), wanted, allow_unused=True)

    value, ours = objective()
    monkeypatch.setattr(covariances, "known_parts", lambda kernel: None)
    expected, theirs = objective()
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(ours, theirs, strict=True):
        if other is not None:
            scale = max(1e-6, float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8 * scale)


@pytest.mark.parametrize("task", [-1.0, 3.0])
@pytest.mark.parametrize("most", [lapack.LARGEST, {}])
def test_tasks_that_the_kernel_has_not(monkeypatch, task, most):
    kernel, x, noise, residual = parts("tasks")
    x.requires_grad_(False)[0, 1] = task
    monkeypatch.setattr(lapack, "LARGEST", most)
    with pytest.raises(ArgumentError, match=r"task indices.*from 0 to 2"):
        KernelCovariance(kernel, x, noise).log_density(residual)


def test_a_likelihood_with_a_marginal_of_its_own():
    generator = torch.Generator().manual_seed(2)
    x, y = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    tasks = (torch.arange(12) % 3).double()
    model = OfTasks(torch.stack([x, x, tasks], -1), y, torch.Size()).double().train()
    marginal = model.likelihood.marginal
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    values = []
    for change in (0.0, 1.0):

        def shifted(prior, *params, change=change):
            noisy = marginal(prior)
            return type(noisy)(noisy.mean + change, noisy.lazy_covariance_matrix)

        model.likelihood.marginal = shifted
        values.append(mll(model(*model.train_inputs), y + change))
    torch.testing.assert_close(*values)
