"""Kernels in closed form are those of GPyTorch: values, gradients, other points, both types."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gram_kernels import (
    KERNELS,
    kernel_named,
    network,
    points,
    randomized,
    tasks,
)

from gpclml.errors import ArgumentError
from gpclml.gram import Gram, closed_form, matrix_node, precomputed
from gpclml.kernels import DeepKernel


def gram_of(kernel) -> Gram:
    gram = closed_form(kernel, select=True)
    assert isinstance(gram, Gram)
    return gram


def gradients(value, wanted, *, diagonal=True):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    if not diagonal:
        weights.diagonal(dim1=-2, dim2=-1).zero_()
    return torch.autograd.grad((value * weights).sum(), wanted, allow_unused=True)


def assert_gradients_close(got, expected):
    for gradient, other in zip(got, expected, strict=True):
        if other is None:
            assert gradient is None or not gradient.any()
            continue
        scale = max(1e-4, float(other.abs().max()))
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-8 * scale)


def expected_matrix(kernel, x, other=None):
    """GPyTorch's. Distances of equal points are a rounding of zero where it takes gradients."""
    with gpytorch.settings.lazily_evaluate_kernels(False):
        with torch.no_grad():
            exact = kernel(x, other).to_dense()
        return exact, kernel(x, other).to_dense()


@pytest.mark.parametrize("batch", [(), (3, 1)])
@pytest.mark.parametrize("name", KERNELS)
def test_matrices_and_gradients_are_gpytorchs(name, batch):
    kernel = kernel_named(name)
    gram = gram_of(kernel)
    for wants_points in (False, True):
        x = points(*batch).requires_grad_(wants_points)
        value = matrix_node(gram(x), x.dtype)
        exact, differentiable = expected_matrix(kernel, x)
        torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
        if wants_points and "matern-1/2" in name:
            # GPyTorch's gradient at equal points is infinite there: finite differences are not.
            assert torch.autograd.gradcheck(lambda x: matrix_node(gram(x), x.dtype), x)
            continue
        wanted = [*kernel.parameters(), *([x] if wants_points else [])]
        # A distance of zero is 1e-15 to GPyTorch, and the slope of a Matern-1/2 kernel not zero.
        diagonal = "matern-1/2" not in name
        assert_gradients_close(
            gradients(value, wanted, diagonal=diagonal),
            gradients(differentiable, wanted, diagonal=diagonal),
        )


@pytest.mark.parametrize("name", KERNELS)
def test_other_points_in_the_columns(name):
    kernel = kernel_named(name)
    gram = gram_of(kernel)
    x, other = points().requires_grad_(), points(n=4, seed=5).requires_grad_()
    value = precomputed(gram(x, other))
    exact, differentiable = expected_matrix(kernel, x, other)
    torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
    wanted = [*kernel.parameters(), x, other]
    assert_gradients_close(gradients(value, wanted), gradients(differentiable, wanted))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tasks_of_points(batch):
    torch.manual_seed(0)  # GPyTorch's factors start at random
    kernel = randomized(tasks(torch.Size(batch)))
    x = points()
    x[:, 2] = torch.arange(7) % 3
    value = matrix_node(gram_of(kernel)(x), x.dtype)
    exact, differentiable = expected_matrix(kernel, x)
    torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10)
    wanted = list(kernel.parameters())
    assert_gradients_close(gradients(value, wanted), gradients(differentiable, wanted))


@pytest.mark.parametrize("task", [-1.0, 3.0])
def test_tasks_that_the_kernel_has_not(task):
    x = points()
    x[:, 2] = task
    with pytest.raises(ArgumentError, match=r"task indices.*from 0 to 2"):
        gram_of(tasks().double())(x)


@pytest.mark.parametrize(
    "name", ["scaled rbf ard", "matern-1/2", "scaled rq ard", "polynomial", "rbf*rq", "periodic"]
)
@pytest.mark.parametrize("columns", [slice(0, 3), slice(0, 1)])
def test_many_points_are_computed_some_rows_at_a_time(name, columns):
    """What a row of few points is, it is among many; so are gradients."""
    gram, (few, many) = gram_of(kernel_named(name)), (points(n=300), points(n=300))
    if "ard" in name or "*" in name:
        columns = slice(0, 3)
    few, many = few[:5, columns].requires_grad_(), many[:, columns].requires_grad_()
    block, whole = precomputed(gram(few, many.detach())), precomputed(gram(many))
    torch.testing.assert_close(block, whole[:5], rtol=1e-12, atol=1e-12)
    # With a weight of these rows alone, of the symmetric matrix, each pair counts once.
    weights = torch.randn(5, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symmetric = torch.zeros(300, 300, dtype=torch.float64)
    symmetric[:5] = weights
    value = (matrix_node(gram(many), torch.float64) * symmetric).sum()
    left, right = many[:5], many
    expected = (precomputed(gram(left, right)) * weights).sum()
    ours, theirs = torch.autograd.grad(value, many), torch.autograd.grad(expected, many)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["scaled rbf ard", "matern-5/2", "scaled rq", "linear+rbf"])
@pytest.mark.parametrize("n", [40, 600])
def test_single_precision(name, n):
    """Few points are computed in double precision, many with distances in double precision."""
    kernel = kernel_named(name).float().double()  # numbers that both types have
    x = points(n=n).float()
    double = matrix_node(gram_of(kernel)(x.double()), torch.float64)
    weights = torch.rand(n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((double * weights).sum(), list(kernel.parameters()))
    single = matrix_node(gram_of(kernel.float())(x), torch.float32)
    assert gram_of(kernel)(x).value.dtype == (torch.float64 if n < 512 else torch.float32)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=2e-6)
    gradients_ = torch.autograd.grad((single * weights.float()).sum(), list(kernel.parameters()))
    for gradient, other in zip(gradients_, expected, strict=True):
        assert gradient.dtype == torch.float32
        scale = float(other.abs().max())
        torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=1e-4 * scale)


def test_a_network_runs_once_for_all_rows_of_a_kernel_on_its_features():
    runs = []
    extractor = network().double()
    extractor.register_forward_hook(lambda module, args, output: runs.append(len(args[0])))
    kernel = ScaleKernel(DeepKernel(extractor, RBFKernel())).double()
    gram, x = gram_of(kernel), points()
    expected = gram(x).value
    runs.clear()
    inner, features = gram.on_features(x)
    assert not inner.has_features
    rows = torch.cat([inner(features[i : i + 1], features).value for i in range(7)])
    assert runs == [7]
    torch.testing.assert_close(rows, expected)


def test_a_rank_is_known_where_it_is_finite():
    ranks = {"linear": 3, "constant": 1, "polynomial": float("inf"), "linear+rbf": float("inf")}
    assert {name: gram_of(kernel_named(name)).rank(3) for name in ranks} == ranks
    assert gram_of(tasks()).rank(3) == float("inf")


@pytest.mark.parametrize("make", [RBFKernel, RQKernel, lambda: MaternKernel(0.5)])
def test_gradients_by_finite_differences_where_points_are_equal(make):
    gram, x = gram_of(randomized(ScaleKernel(make()))), points()
    x[5] = x[2]
    other = points(n=3, seed=2)
    assert torch.autograd.gradcheck(
        lambda other: precomputed(gram(x, other)), other.requires_grad_()
    )
