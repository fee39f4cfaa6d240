"""Functions of distance: value by definition, gradients by finite differences, hard inputs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpclml.errors import UnsupportedError
from gpclml.gram import PROFILES, kernels, matrix_node
from gpclml.gram.kernels import RadialGram, inner_product

DEFINITIONS = {
    "rbf": lambda r, a: torch.exp(-(r**2) / 2),
    "matern_12": lambda r, a: torch.exp(-r),
    "matern_32": lambda r, a: (1 + math.sqrt(3) * r) * torch.exp(-math.sqrt(3) * r),
    "matern_52": lambda r, a: (
        (1 + math.sqrt(5) * r + 5 * r**2 / 3) * torch.exp(-math.sqrt(5) * r)
    ),
    "rational_quadratic": lambda r, a: (1 + r**2 / (2 * a)) ** -a,
    "cosine": lambda r, a: torch.cos(math.pi * r),
}  # fmt: skip


def radial(points, profile, power=None, lengthscale=None):
    """A kernel in closed form, with hyperparameters that are tensors, at points."""
    ones = torch.ones(1, 1, dtype=points.dtype)
    kernel = SimpleNamespace(
        ard_num_dims=None, lengthscale=ones if lengthscale is None else lengthscale,
        alpha=None if power is None else power.unsqueeze(-1),
    )  # fmt: skip
    return RadialGram(kernel, profile, power="" if power is None else "alpha")(points)


def matrix(points, *arguments):
    return matrix_node(radial(points, *arguments), points.dtype)


def defined(points, profile, power=None):
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return DEFINITIONS[profile](distances, None if power is None else power[..., None, None])


def problem(profile, batch=(), lengthscale=(1, 3), power=(), d=3):
    """Points, power (of the rational quadratic alone) and lengthscales, differentiable."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    x = draw(*batch, 6, d).mul_(2.0).requires_grad_()
    a = (draw(*power) + 0.3).requires_grad_() if profile == "rational_quadratic" else None
    return x, a, (draw(*lengthscale) + 0.4).requires_grad_()


BATCHES = [((), (1, 3), ()), ((), (1, 1), (2,)), ((2, 1), (3, 1, 3), (3,)), ((3,), (1, 3), ())]


@pytest.mark.parametrize(("batch", "lengthscale", "power"), BATCHES)
@pytest.mark.parametrize("profile", PROFILES)
def test_values_and_gradients(profile, batch, lengthscale, power):
    x, a, length = problem(profile, batch, lengthscale, power)
    expected = defined(x / length, profile, a)
    value = matrix(x, profile, a, length)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, a, l: matrix(x, profile, a, l), (x, a, length))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="longdouble is float64 here")
def test_differences_on_a_line_do_not_cancel():
    """Neighbours are much closer to each other than to the origin; weights have both signs."""
    generator = torch.Generator().manual_seed(0)
    x = 1e3 * torch.rand(100, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x + 1e-2])
    weights = torch.randn(200, 200, generator=generator, dtype=torch.float64)
    weights = weights + weights.mT
    covariance = radial(x.requires_grad_(), "rbf")
    ((_, gradient),) = covariance.vjp(weights)
    centered = x.detach()[:, 0] - x.detach().mean()
    z, W, k = (
        values.numpy().astype(np.longdouble) for values in (centered, weights, covariance.value)
    )
    expected = 2 * (W * k * (z - z[:, None])).sum(-1)
    assert abs(gradient[:, 0].numpy() - expected).max() < 1e-15 * abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_products_are_sums_of_sums(dtype):
    a, b = torch.full((600, 600), 0.1, dtype=dtype), torch.ones(600, 600, dtype=dtype)
    expected = 600 * 600 * a[0, 0].double().item()
    rounding = 8 * torch.finfo(dtype).eps
    assert inner_product(a, b).item() == pytest.approx(expected, rel=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("profile", PROFILES)
def test_equal_points_far_from_the_origin(profile, dtype):
    """Their covariance is the variance, and they do not pull at each other."""
    points = torch.tensor([[1e3, 0.1], [1e3, 0.1], [1e3 + 1, 0.3]], dtype=dtype)
    points.requires_grad_()
    power = torch.ones((), dtype=dtype) if profile == "rational_quadratic" else None
    K = matrix(points, profile, power)
    assert K[0, 1].item() == pytest.approx(1.0, abs=4 * torch.finfo(dtype).eps)
    (gradient,) = torch.autograd.grad(K[0, 1], points, retain_graph=True)
    assert gradient.abs().max() < 1e-3
    assert torch.isfinite(torch.autograd.grad(K.sum(), points)[0]).all()
    single = matrix(points[:1], profile, power)
    assert single.item() == 1.0
    assert torch.autograd.grad(single.sum(), points)[0].abs().max() == 0.0


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("lengthscale", [1e-6, 1e6])
def test_extreme_lengthscales(profile, lengthscale):
    points, power, _ = problem(profile)
    scaled = (points.detach() / lengthscale).requires_grad_()
    K = matrix(scaled, profile, power)
    # The angle of a cosine is then known to a few roundings of a million only.
    atol = 1e-6 if profile == "cosine" and lengthscale < 1 else 1e-10
    expected = defined(scaled.detach(), profile, power)
    torch.testing.assert_close(K, expected, rtol=1e-9, atol=atol)
    K.sum().backward()
    assert torch.isfinite(scaled.grad).all()


def test_a_point_does_not_pull_at_itself():
    x, _, _ = problem("rbf")
    weights = torch.ones(6, 6, dtype=torch.float64)
    kernel = radial(x, "rbf")
    ((_, expected),) = kernel.vjp(weights)
    ((_, gradient),) = kernel.vjp(weights + 1e16 * torch.eye(6))
    torch.testing.assert_close(gradient, expected)


def test_equal_points_have_the_variance_exactly():
    x = torch.rand(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    K = matrix(torch.cat([x, x]), "matern_12")  # which moves by the root of a rounding
    assert (K[:50, 50:].diagonal() == 1.0).all()


def test_second_derivatives_are_refused():
    points = torch.zeros(2, 1, requires_grad=True)
    with pytest.raises(UnsupportedError, match="first derivative"):
        torch.autograd.grad(matrix(points, "rbf").sum(), points, create_graph=True)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("profile", ["rbf", "matern_12", "rational_quadratic", "cosine"])
def test_many_points_in_single_precision(monkeypatch, profile, batch):
    """Distances are made in double precision, some rows at a time; all else is in single."""
    monkeypatch.setattr(kernels, "DOUBLE_UP_TO", 4)
    monkeypatch.setitem(kernels._AT_A_TIME, "cpu", 3 * 8)
    points = 1e3 * torch.rand(*batch, 8, 2, generator=torch.Generator().manual_seed(0))
    points[..., 5:, :] = points[..., :3, :]  # duplicates, and neighbours
    points[..., 4, :] = points[..., 3, :] + 0.25
    points.requires_grad_()
    power = torch.tensor(0.7) if profile == "rational_quadratic" else None
    K = matrix(points, profile, power)
    double = points.detach().double().requires_grad_()
    expected = defined(double, profile, None if power is None else power.double())
    assert K.dtype == torch.float32
    # The angle of a cosine is rounded to single precision.
    atol = 1e-3 if profile == "cosine" else 1e-6
    torch.testing.assert_close(K.double(), expected, rtol=1e-5, atol=atol)
    if profile != "cosine":
        (gradient,) = torch.autograd.grad(K[..., 3, 4].sum(), points)
        (expected,) = torch.autograd.grad(expected[..., 3, 4].sum(), double)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-6)


def test_a_point_far_away_does_not_make_neighbours_equal():
    points = torch.zeros(100, 1, dtype=torch.float64)
    points[1], points[-1] = 1e-3, 1e5
    K = matrix(points, "matern_12")
    assert K[0, 1].item() == pytest.approx(math.exp(-1e-3), abs=1e-6)
    assert K[0, 2].item() == 1.0
    assert K[0, -1].item() == 0.0


def test_the_rational_quadratic_has_all_digits_at_every_power():
    mpmath = pytest.importorskip("mpmath")
    profile = PROFILES["rational_quadratic"]
    squares = [1e-8, 1e-3, 0.3, 1.2, 2.0, 30.0]
    with mpmath.workdps(120):
        for power in (1e-2, 0.7, 20.0, 1e4, 1e7, 1e9, 1e11, 1e13, 1e17):
            e = torch.tensor([-0.5 * square for square in squares], dtype=torch.float64)
            k, *kept = profile.value(e, torch.tensor(power, dtype=torch.float64))
            slope, power_slope = profile.slope(k, *kept), profile.power_slope(k, *kept)
            for index, square in enumerate(squares):
                t, a = mpmath.mpf(-0.5 * square) / -mpmath.mpf(power), mpmath.mpf(power)
                value = (1 + t) ** -a
                expected_slope = -value * (mpmath.log(1 + t) - t / (1 + t))
                expected = [float(value), float(value / (1 + t)), float(expected_slope)]
                values = [float(numbers[index]) for numbers in (k, slope, power_slope)]
                np.testing.assert_allclose(values, expected, rtol=1e-12)
