"""Densities of kernels in closed form equal those of the covariance as a matrix."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpytorch.constraints import Interval, Positive
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
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from linear_operator.utils.warnings import NumericalWarning

from gpclml.gram import closed_form
from gpclml.linalg import DenseCovariance, GramCovariance

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
}


def noise_of(kind, dtype, batch=()):
    if kind == "one":
        return HomoskedasticNoise(batch_shape=torch.Size(batch)).to(dtype)
    return torch.linspace(0.2, 0.5, N, dtype=dtype).expand(*batch, N).clone().requires_grad_()


def problem(name="rbf", noise="one", dtype=torch.float64):
    """Kernel, points, noise and residual."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    x[5] = x[2]
    kernel = KERNELS[name]().to(dtype)
    for parameter in kernel.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    residual = torch.randn(N, generator=generator).to(dtype).requires_grad_()
    return kernel, x.to(dtype).requires_grad_(), noise_of(noise, dtype), residual


def covariance_of(kernel, x, noise, batch=()):
    gram = closed_form(kernel, select=True)
    return GramCovariance(gram, x, noise, torch.Size((*batch, x.shape[-2], x.shape[-2])))


def leaves(kernel, x, noise, residual):
    variances = noise.parameters() if isinstance(noise, HomoskedasticNoise) else [noise]
    return [*kernel.parameters(), *variances, x, residual]


def assert_close(ours, theirs):
    for gradient, other in zip(ours, theirs, strict=True):
        atol = 1e-10 * float(other.abs().max())
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=atol)


CELLS = [
    *itertools.product(KERNELS, ["each"], ["some"]),
    *itertools.product(["rq"], ["one", "each"], BLOCKS),
]


@pytest.mark.parametrize("wants_points", [False, True])
@pytest.mark.parametrize(("name", "noise", "blocks"), CELLS)
def test_densities_are_those_of_the_matrix(name, noise, blocks, wants_points):
    inputs = problem(name, noise)
    inputs[1].requires_grad_(wants_points)
    covariance, residual = covariance_of(*inputs[:3]), inputs[3]
    value = covariance.held_out_log_density(residual, BLOCKS[blocks])
    wanted = [tensor for tensor in leaves(*inputs) if tensor.requires_grad]
    ours = torch.autograd.grad(3.0 * value, wanted)
    matrix = DenseCovariance(covariance_of(*inputs[:3]).matrix)
    expected = matrix.held_out_log_density(residual, BLOCKS[blocks])
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    assert_close(ours, torch.autograd.grad(3.0 * expected, wanted))


@pytest.mark.parametrize("noise", ["one", "each"])
@pytest.mark.parametrize("blocks", ["all", "some", "folds"])
@pytest.mark.parametrize("residuals", [(3, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_members_of_a_batch_are_weighted_each_by_its_own(shared, residuals, blocks, noise):
    batch = torch.Size(() if shared else (2,))
    kernel = ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch).double()
    for parameter in kernel.parameters():
        generator = torch.Generator().manual_seed(0)
        parameter.data += torch.randn(parameter.shape, generator=generator).double()
    _, x, _, _ = problem()
    variances = noise_of(noise, torch.float64, batch)
    generator = torch.Generator().manual_seed(4)
    residual = torch.randn(*residuals, N, generator=generator).double().requires_grad_()
    weights = torch.rand(residuals, generator=generator).double()
    wanted = leaves(kernel, x, variances, residual)

    covariance = covariance_of(kernel, x, variances, batch)
    value = covariance.held_out_log_density(residual, BLOCKS[blocks])
    assert value.shape == residuals
    ours = torch.autograd.grad((value * weights).sum(), wanted)
    matrix = DenseCovariance(covariance_of(kernel, x, variances, batch).matrix)
    each = torch.stack(
        [
            (matrix if shared else matrix[index[-1]])
            .held_out_log_density(residual[index], BLOCKS[blocks])
            .reshape(())
            for index in itertools.product(*map(range, residuals))
        ]
    ).reshape(residuals)
    torch.testing.assert_close(value, each, rtol=1e-11, atol=1e-11)
    assert_close(ours, torch.autograd.grad((each * weights).sum(), wanted))


@pytest.mark.parametrize("blocks", ["all", "some", "folds"])
def test_single_precision_is_computed_in_double(blocks):
    single, double = (problem("rq", "each", dtype) for dtype in (torch.float32, torch.float64))
    for leaf, other in zip(leaves(*single), leaves(*double), strict=True):
        other.data.copy_(leaf.data)
    values, gradients = [], []
    for kernel, x, noise, residual in (single, double):
        value = covariance_of(kernel, x, noise).held_out_log_density(residual, BLOCKS[blocks])
        values.append(value)
        gradients.append(torch.autograd.grad(value, leaves(kernel, x, noise, residual)))
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-6, atol=1e-6)
    for gradient, other in zip(*gradients, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), other, rtol=1e-5, atol=1e-5)


def test_what_needs_no_gradient_is_not_asked_for():
    kernel, x, noise, residual = problem()
    for tensor in (x, residual):
        tensor.requires_grad_(False)
    covariance = covariance_of(kernel, x, noise)
    value, tensors, vjp, _ = covariance.log_density_and_vjp(
        residual, covariance.density(BLOCKS["all"])
    )
    needed = {id(kernel.raw_lengthscale), id(noise.raw_noise)}
    assert {id(tensor) for tensor in tensors} == needed
    assert {id(tensor) for tensor, _ in vjp(torch.ones_like(value))} == needed
    with torch.no_grad():
        assert not covariance.held_out_log_density(residual, BLOCKS["all"]).requires_grad


@pytest.mark.parametrize("blocks", ["all", "some", "folds"])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(blocks):
    inputs = problem("rq")
    value = covariance_of(*inputs[:3]).held_out_log_density(inputs[3], BLOCKS[blocks])
    first = torch.autograd.grad(value, leaves(*inputs), retain_graph=True)
    second = torch.autograd.grad(value, leaves(*inputs))
    assert all(map(torch.equal, first, second))


def test_a_parameter_that_changed_before_the_backward_pass_is_found_out():
    kernel, x, noise, residual = problem()
    value = covariance_of(kernel, x, noise).log_density(residual)
    with torch.no_grad():
        kernel.raw_lengthscale += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("noise", [None, torch.zeros(1).double()])
def test_a_singular_covariance_takes_jitter(noise):
    """Also where its memory was taken for the factor that failed."""
    x = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    covariance = covariance_of(RBFKernel().double(), x, noise)
    residual = torch.ones(4, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match="singular to rounding"):
        value = covariance.held_out_log_density(residual, [torch.arange(4).unsqueeze(0)])
    with pytest.warns(NumericalWarning, match="singular to rounding"):
        expected = DenseCovariance(covariance.matrix.detach()).log_density(residual)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("noise", ["one", "each"])
def test_members_with_held_out_points_of_their_own(noise):
    kernel, x, variances, _ = problem("scaled matern", noise)
    residual = torch.randn(2, N, generator=torch.Generator().manual_seed(4)).double()
    residual.requires_grad_()
    held_out, wanted = torch.tensor([[6, 1, 4], [0, 8, 2]]), leaves(kernel, x, variances, residual)
    value = covariance_of(kernel, x, variances).conditional_log_density(residual, held_out)
    matrix = DenseCovariance(covariance_of(kernel, x, variances).matrix)
    expected = torch.stack(
        [matrix.conditional_log_density(residual[i], held_out[i]) for i in range(2)]
    )
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    ours = torch.autograd.grad((value * weights).sum(), wanted)
    assert_close(ours, torch.autograd.grad((expected * weights).sum(), wanted))
