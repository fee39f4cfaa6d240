"""Densities by NumPy equal those by PyTorch, whose gradients are tested by finite differences."""

from __future__ import annotations

import pytest
import torch
from linear_operator.utils.warnings import NumericalWarning
from threadpoolctl import ThreadpoolController, threadpool_limits

from gpclml.linalg import PROFILES, DenseCovariance, RadialCovariance, array_kernels, lapack
from gpclml.linalg.closed_forms import inverse_of_factor

BLOCKS = {
    "all": [torch.arange(9).unsqueeze(0)],
    "last": [torch.tensor([[7, 8]])],
    "some": [torch.tensor([[6, 1, 4]])],
    "each": [torch.arange(9).unsqueeze(-1)],
    "folds": [torch.tensor([[0, 3], [8, 1]]), torch.tensor([[2, 4, 5]])],
    "overlapping": [torch.tensor([[0, 3], [3, 1]]), torch.tensor([[1]])],
}


def arguments(profile, form, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        # A cosine of distances in two dimensions takes much noise to be a covariance.
        least = 9.0 if profile == "cosine" and shape in ((1,), (9,)) else 0.3
        values = torch.rand(shape, generator=generator, dtype=torch.float64) + least
        return values.to(dtype).requires_grad_()

    points = draw(9, 2)
    with torch.no_grad():
        points[5] = points[2]
    own = {"power": draw()} if profile == "rational_quadratic" else {}
    if form == "bare":
        return points, {"noise": draw(9), **own}, draw(9)
    isotropic = form == "isotropic"
    own |= {"lengthscale": draw(1, 1 if isotropic else 2), "scale": draw()}
    return points, {"noise": draw(1 if isotropic else 9), **own}, draw(9)


def evaluated(points, own, residual, profile, blocks):
    covariance = RadialCovariance(points, profile, **own)
    value, pairs = covariance.value_and_gradients(residual, covariance.density(blocks))
    return value, {id(tensor): gradient for tensor, gradient in pairs}


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("form", ["bare", "isotropic", "ard"])
@pytest.mark.parametrize("profile", PROFILES)
def test_values_and_gradients_are_those_of_pytorch(monkeypatch, profile, form, blocks):
    points, own, residual = arguments(profile, form)
    tensors = [points, residual, *own.values()]
    covariance = RadialCovariance(points, profile, **own)
    value, ours = evaluated(points, own, residual, profile, BLOCKS[blocks])
    monkeypatch.setattr(lapack, "_BY_TORCH", 0)  # the factor too is SciPy's, as of many points
    many, _ = evaluated(points, own, residual, profile, BLOCKS[blocks])
    torch.testing.assert_close(many, value, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(lapack, "LARGEST", {})
    expected = covariance.held_out_log_density(residual, BLOCKS[blocks])
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    for tensor, gradient in zip(tensors, torch.autograd.grad(expected, tensors), strict=True):
        scale = float(gradient.abs().max())
        torch.testing.assert_close(ours[id(tensor)], gradient, rtol=1e-10, atol=1e-11 * scale)
    also, theirs = evaluated(points, own, residual, profile, BLOCKS[blocks])
    torch.testing.assert_close(also, value, rtol=1e-12, atol=1e-12)
    for tensor in tensors:
        torch.testing.assert_close(theirs[id(tensor)], ours[id(tensor)], rtol=1e-10, atol=1e-10)


def test_distances_in_few_and_in_many_dimensions(monkeypatch):
    z = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e3
    z[7] = z[2]
    expected = -0.5 * (z.unsqueeze(1) - z).square().sum(-1)
    for dimensions in (8, 0):
        monkeypatch.setattr(array_kernels, "_BY_DIFFERENCES", dimensions)
        work = torch.empty(len(z), len(z), dtype=torch.float64).numpy()
        e = torch.from_numpy(array_kernels._half_squared_distances(z.numpy(), work))
        torch.testing.assert_close(e, expected, rtol=1e-8, atol=1e-8)
        assert e[2, 7] == e[7, 2] == 0.0
        assert not bool(e.diagonal().any())


@pytest.mark.parametrize("blocks", BLOCKS)
def test_single_precision_is_computed_in_double(blocks):
    points, own, residual = arguments("matern_32", "ard", torch.float32)
    value, gradients = evaluated(points, own, residual, "matern_32", BLOCKS[blocks])
    double = [one.detach().double().requires_grad_() for one in (points, residual, *own.values())]
    as_double = dict(zip(own, double[2:], strict=True))
    expected, exact = evaluated(double[0], as_double, double[1], "matern_32", BLOCKS[blocks])
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
    for one, other in zip((points, residual, *own.values()), double, strict=True):
        assert gradients[id(one)].dtype == torch.float32
        torch.testing.assert_close(
            gradients[id(one)].double(), exact[id(other)], rtol=1e-5, atol=1e-5
        )


def test_what_needs_no_gradient_is_not_computed():
    points, own, residual = arguments("rbf", "ard")
    for one in (points, residual, own["scale"]):
        one.requires_grad_(False)
    _, gradients = evaluated(points, own, residual, "rbf", BLOCKS["all"])
    assert set(gradients) == {id(own["lengthscale"]), id(own["noise"])}


def test_a_singular_covariance_is_left_to_pytorch_which_adds_jitter():
    x = torch.zeros(4, 1, dtype=torch.float64, requires_grad=True)
    covariance = RadialCovariance(x, "rbf")
    with pytest.warns(NumericalWarning, match="singular to rounding"):
        covariance.value_and_gradients(
            torch.ones(4).double(), covariance.density([torch.arange(4).unsqueeze(0)])
        )


def test_values_that_are_not_finite_have_no_density_here():
    x, one = torch.zeros(3, 1), torch.ones(3)
    x[1] = torch.nan
    points = (x, None, None, one, None)
    found = lapack.density_and_gradients(points, one, PROFILES["rbf"], 3, (True,) * 6)
    assert found is None


@pytest.mark.parametrize("blocks", [name for name in BLOCKS if name != "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_of_a_matrix_are_those_of_pytorch(monkeypatch, dtype, blocks):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(9, 9, generator=generator, dtype=torch.float64)
    matrix = (root @ root.mT + torch.eye(9)).to(dtype).requires_grad_()
    residual = torch.randn(9, generator=generator).to(dtype).requires_grad_()
    covariance = DenseCovariance(matrix)
    calls, by_lapack = [], lapack.lapack.dpotrf

    def counted(*arguments, **options):
        calls.append(arguments)
        return by_lapack(*arguments, **options)

    monkeypatch.setattr(lapack, "_BY_TORCH", 0)
    monkeypatch.setattr(lapack.lapack, "dpotrf", counted)
    density = covariance.density(BLOCKS[blocks])
    value, pairs = covariance.value_and_gradients(residual, density)
    assert len(calls) == 1
    expected = covariance.held_out_log_density(residual, BLOCKS[blocks])
    gradients = torch.autograd.grad(expected, [matrix, residual])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(value, expected.detach(), rtol=tolerance, atol=tolerance)
    for (_, ours), gradient in zip(pairs, gradients, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, gradient, rtol=tolerance, atol=tolerance)
    unchanged = (root @ root.mT + torch.eye(9)).to(dtype)
    assert torch.equal(matrix, unchanged)


@pytest.mark.parametrize("size", [1, 2])
def test_many_points_in_blocks_of_several_are_left_to_pytorch(size):
    n = 130
    x = torch.linspace(0.0, 9.0, n, dtype=torch.float64).unsqueeze(-1)
    residual, noise = torch.sin(x[:, 0]), torch.ones(1, dtype=torch.float64)
    blocks = [torch.arange(n).reshape(-1, size)]
    covariance = RadialCovariance(x, "matern_52", noise=noise)
    for_lapack = covariance.density(blocks).for_lapack
    parts = (x, None, None, noise, None)
    needed = (True, False, False, True, False, True)
    found = lapack.density_and_gradients(parts, residual, PROFILES["matern_52"], for_lapack, needed)
    assert (found is None) == (size > 1)
    value, _ = covariance.value_and_gradients(residual, covariance.density(blocks))
    expected = DenseCovariance(covariance.matrix).block_log_densities(residual, blocks).sum()
    torch.testing.assert_close(value, expected)


def test_many_points_are_left_to_pytorch_where_it_has_several_threads(monkeypatch):
    few, many = torch.ones(200), torch.ones(300)
    assert lapack.applies(few, 10)
    assert lapack.applies(many, 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert lapack.applies(few, 10)
    assert not lapack.applies(many, 10)


def test_few_points_are_computed_by_one_thread_of_each_library():
    def threads():
        return [library["num_threads"] for library in ThreadpoolController().info()
                if library["user_api"] == "blas"]  # fmt: skip

    with threadpool_limits(2, user_api="blas"):
        before = threads()
        with lapack.one_thread(200):
            assert set(threads()) <= {1}
        assert threads() == before
        with lapack.one_thread(300):
            assert threads() == before
        first, second = lapack.one_thread(), lapack.one_thread(200)
        first.__enter__()
        second.__enter__()  # of another thread of Python, say, which ends later
        first.__exit__(None, None, None)
        assert set(threads()) <= {1}
        second.__exit__(None, None, None)
        assert threads() == before


@pytest.mark.parametrize("shape", [(300,), (2, 517)])
def test_an_inverse_is_computed_by_halves(shape):
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    covariance = root @ root.mT / shape[-1] + 0.1 * torch.eye(shape[-1], dtype=torch.float64)
    found = inverse_of_factor(torch.linalg.cholesky(covariance))
    torch.testing.assert_close(found, torch.linalg.inv(covariance), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, found.mT, rtol=0, atol=1e-12)
