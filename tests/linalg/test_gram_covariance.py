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


def parts(name="rbf", noise="one", dtype=torch.float64):
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
    of_noise = list(noise.parameters()) if isinstance(noise, HomoskedasticNoise) else [noise]
    return [*kernel.parameters(), *of_noise, x, residual]


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("with_inputs", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("noise", ["one", "each"])
@pytest.mark.parametrize("name", KERNELS)
def test_densities_are_those_of_the_matrix(name, noise, blocks, with_inputs):
    own = parts(name, noise)
    own[1].requires_grad_(with_inputs)
    covariance, residual = covariance_of(*own[:3]), own[3]
    value = covariance.held_out_log_density(residual, BLOCKS[blocks])
    wanted = [one for one in leaves(*own) if one.requires_grad]
    ours = torch.autograd.grad(3.0 * value, wanted)
    matrix = DenseCovariance(covariance_of(*own[:3]).matrix)
    expected = matrix.held_out_log_density(residual, BLOCKS[blocks])
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    assert_close(ours, torch.autograd.grad(3.0 * expected, wanted))


@pytest.mark.parametrize("noise", ["one", "each"])
@pytest.mark.parametrize("blocks", ["all", "some", "folds"])
@pytest.mark.parametrize("residuals", [(2,), (3, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_members_of_a_batch_are_weighted_each_by_its_own(shared, residuals, blocks, noise):
    batch = torch.Size(() if shared else (2,))
    kernel = ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch).double()
    for parameter in kernel.parameters():
        generator = torch.Generator().manual_seed(0)
        parameter.data += torch.randn(parameter.shape, generator=generator).double()
    _, x, _, _ = parts()
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


@pytest.mark.parametrize("blocks", BLOCKS)
def test_value_and_vector_jacobian_product(blocks):
    own = parts("interval")
    residual, covariance = own[3], covariance_of(*own[:3])
    value, tensors, vjp, _ = covariance.log_density_and_vjp(
        residual, covariance.density(BLOCKS[blocks])
    )
    assert not value.requires_grad
    pairs = vjp(torch.ones_like(value))
    assert {id(tensor) for tensor, _ in pairs} == {id(tensor) for tensor in tensors}
    for leaf in leaves(*own):
        leaf.grad = None
    torch.autograd.backward(*zip(*pairs, strict=True))
    ours = [leaf.grad.clone() for leaf in leaves(*own)]
    expected = DenseCovariance(covariance.matrix).held_out_log_density(residual, BLOCKS[blocks])
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-11)
    assert_close(ours, torch.autograd.grad(expected, leaves(*own)))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_single_precision_is_computed_in_double(blocks):
    own, double = parts("scaled matern", "each", torch.float32), parts("scaled matern", "each")
    for one, other in zip(leaves(*own), leaves(*double), strict=True):
        other.data.copy_(one.data)
    values, gradients = [], []
    for kernel, x, noise, residual in (own, double):
        value = covariance_of(kernel, x, noise).held_out_log_density(residual, BLOCKS[blocks])
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
    own = parts("rq")
    value = covariance_of(*own[:3]).held_out_log_density(own[3], BLOCKS[blocks])
    first = torch.autograd.grad(value, leaves(*own), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(value, leaves(*own)), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_changed_before_the_backward_pass_is_found_out():
    kernel, x, noise, residual = parts()
    value = covariance_of(kernel, x, noise).log_density(residual)
    with torch.no_grad():
        kernel.raw_lengthscale += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_second_derivative_is_refused():
    kernel, x, noise, residual = parts()
    value = covariance_of(kernel, x, noise).log_density(residual)
    with pytest.raises(ValueError, match="create_graph=True"):
        torch.autograd.grad(value, kernel.raw_lengthscale, create_graph=True)


def test_gradients_by_finite_differences():
    kernel, x, noise, residual = parts("rq")
    assert torch.autograd.gradcheck(
        lambda x, r: covariance_of(kernel, x, noise).held_out_log_density(r, BLOCKS["some"]),
        (x, residual),
    )


@pytest.mark.parametrize("noise", ["one", "each"])
def test_leave_one_out_is_that_of_the_matrix(noise):
    kernel, x, variances, residual = parts("rq", noise)
    rows = torch.tensor([3, 0, 8])
    covariance = covariance_of(kernel, x, variances)
    found = covariance.leave_one_out(residual, rows)
    expected = DenseCovariance(covariance.matrix.detach()).leave_one_out(residual, rows)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        assert one.requires_grad


def test_a_singular_covariance_takes_jitter():
    x = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    covariance = covariance_of(RBFKernel().double(), x, None)
    with pytest.warns(NumericalWarning, match="singular to rounding"):
        covariance.log_density_and_vjp(
            torch.ones(4).double(), covariance.density([torch.arange(4).unsqueeze(0)])
        )
