"""Densities of kernels in closed form: what autograd asks of them, and where there is no factor."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, RQKernel, ScaleKernel
from linear_operator.utils.warnings import NumericalWarning

from gpclml.gram import closed_form
from gpclml.linalg import DenseCovariance, GramCovariance

BLOCKS = {
    "all": [torch.arange(9).unsqueeze(0)],
    "some": [torch.tensor([[6, 1, 4]])],
    "folds": [torch.tensor([[0, 3], [8, 1]]), torch.tensor([[2, 4, 5]])],
}


def numbers(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def covariance_of(kernel, x, noise):
    gram = closed_form(kernel, select=True)
    return GramCovariance(gram, x, noise, torch.Size((len(x), len(x))))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_graph_that_is_kept_gives_the_same_gradient_again(blocks):
    kernel = ScaleKernel(RQKernel()).double()
    x, noise, residual = numbers(9, 2).requires_grad_(), 0.2 + numbers(9), numbers(9)
    value = covariance_of(kernel, x, noise).held_out_log_density(residual, BLOCKS[blocks])
    leaves = [*kernel.parameters(), x]
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(value, leaves)))


def test_what_needs_no_gradient_has_none():
    kernel, x = RBFKernel().double(), numbers(9, 2)
    covariance = covariance_of(kernel, x, numbers(9))
    assert covariance.log_density(numbers(9)).requires_grad
    with torch.no_grad():
        assert not covariance.log_density(numbers(9)).requires_grad
    kernel.requires_grad_(False)
    assert not covariance_of(kernel, x, numbers(9)).log_density(numbers(9)).requires_grad


def test_a_parameter_that_changed_before_the_backward_pass_is_found_out():
    kernel = RBFKernel().double()
    value = covariance_of(kernel, numbers(9, 2), numbers(9)).log_density(numbers(9))
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
