"""Functions of distance: value by definition, gradients by finite differences, hard inputs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpclml.errors import UnsupportedError
from gpclml.gram import PROFILES, as_matrix, kernels
from gpclml.gram.kernels import RadialGram, inner_product

BY_DEFINITION = {
    "rbf": lambda r, a: torch.exp(-(r**2) / 2),
    "matern_12": lambda r, a: torch.exp(-r),
    "matern_32": lambda r, a: (1 + math.sqrt(3) * r) * torch.exp(-math.sqrt(3) * r),
    "matern_52": lambda r, a: (
        (1 + math.sqrt(5) * r + 5 * r**2 / 3) * torch.exp(-math.sqrt(5) * r)
    ),
    "rational_quadratic": lambda r, a: (1 + r**2 / (2 * a)) ** -a,
    "cosine": lambda r, a: torch.cos(math.pi * r),
}  # fmt: skip


def radial(points, profile, lengthscale=None, power=None):
    """A kernel in closed form, with hyperparameters that are tensors, at points."""
    ones = torch.ones(1, 1, dtype=points.dtype)
    kernel = SimpleNamespace(
        ard_num_dims=None, lengthscale=ones if lengthscale is None else lengthscale,
        alpha=None if power is None else power.unsqueeze(-1),
    )  # fmt: skip
    return RadialGram(kernel, profile, power="" if power is None else "alpha")(points)


def radial_covariance(points, profile, *, lengthscale=None, scale=None, noise=None, power=None):
    covariance = as_matrix(radial(points, profile, lengthscale, power), points.dtype)
    if scale is not None:
        covariance = covariance * scale[..., None, None]
    if noise is not None:
        covariance = covariance + torch.diag_embed(noise)
    return covariance


def distances(points):
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def arguments(profile, batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    points, scale, noise, power = batch

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return (
        draw(*points, 6, 3).mul_(2.0).requires_grad_(),
        (draw(*scale) + 0.5).requires_grad_(),
        draw(*noise, 6).requires_grad_(),
        (draw(*power) + 0.3).requires_grad_() if profile == "rational_quadratic" else None,
    )


BATCHES = [((), (), (), ()), ((2, 1), (3,), (), (3,)), ((), (2,), (3, 2), ()), ((3,), (), (3,), ())]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("profile", PROFILES)
def test_values_and_gradients(profile, batch):
    points, scale, noise, power = arguments(profile, batch)

    def covariance(points, scale, noise, power):
        return radial_covariance(points, profile, scale=scale, noise=noise, power=power)

    a = None if power is None else power[..., None, None]
    expected = scale[..., None, None] * BY_DEFINITION[profile](distances(points), a)
    expected = expected + torch.diag_embed(noise)
    value = covariance(points, scale, noise, power)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(covariance, (points, scale, noise, power))


@pytest.mark.parametrize("shape", [(1, 3), (1, 1), (4, 1, 3)])
@pytest.mark.parametrize("profile", PROFILES)
def test_gradients_with_respect_to_lengthscales(profile, shape):
    points, scale, _, power = arguments(profile, BATCHES[0])
    generator = torch.Generator().manual_seed(3)
    lengthscale = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.4

    def covariance(points, lengthscale, scale, power):
        return radial_covariance(points, profile, lengthscale=lengthscale, scale=scale, power=power)

    a = None if power is None else power[..., None, None]
    expected = scale * BY_DEFINITION[profile](distances(points / lengthscale), a)
    torch.testing.assert_close(
        covariance(points, lengthscale, scale, power), expected, rtol=1e-12, atol=1e-12
    )
    assert torch.autograd.gradcheck(
        covariance, (points, lengthscale.requires_grad_(), scale, power)
    )


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("batch", BATCHES[:2])
@pytest.mark.parametrize("profile", PROFILES)
def test_gradients_some_rows_at_a_time(monkeypatch, profile, batch, dims):
    given = [one if one is None else one.detach() for one in arguments(profile, batch)]
    given[0] = given[0][..., :dims]
    weights = torch.rand(radial_covariance(
        given[0], profile, scale=given[1], noise=given[2], power=given[3]
    ).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # fmt: skip

    def gradients():
        leaves = [None if one is None else one.clone().requires_grad_() for one in given]
        points, scale, noise, power = leaves
        K = radial_covariance(points, profile, scale=scale, noise=noise, power=power)
        return torch.autograd.grad((K * weights).sum(), [one for one in leaves if one is not None])

    whole = gradients()
    monkeypatch.setitem(kernels._AT_A_TIME, "cpu", 4 * 6)
    for one, other in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps == np.finfo(np.float64).eps, reason="longdouble is float64 here"
)
def test_differences_on_a_line_do_not_cancel():
    """Neighbours are much closer to each other than to the origin; weights have both signs."""
    generator = torch.Generator().manual_seed(0)
    x = 1e3 * torch.rand(100, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x + 1e-2])
    weights = torch.randn(200, 200, generator=generator, dtype=torch.float64)
    weights = weights + weights.mT
    covariance = radial(x.requires_grad_(), "rbf")
    ((_, found),) = covariance.vjp(weights)
    centered = x.detach()[:, 0] - x.detach().mean()
    z, W, k = (one.numpy().astype(np.longdouble) for one in (centered, weights, covariance.value))
    expected = 2 * (W * k * (z - z[:, None])).sum(-1)
    assert abs(found[:, 0].numpy() - expected).max() < 1e-15 * abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_products_are_sums_of_sums(dtype):
    a, b = torch.full((600, 600), 0.1, dtype=dtype), torch.ones(600, 600, dtype=dtype)
    expected = 600 * 600 * a[0, 0].double().item()
    found = inner_product(a, b).item()
    assert found == pytest.approx(expected, rel=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("profile", PROFILES)
def test_without_scale_and_noise(profile):
    points, _, _, power = arguments(profile, BATCHES[0])
    assert torch.autograd.gradcheck(
        lambda points, power: radial_covariance(points, profile, power=power), (points, power)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("profile", PROFILES)
def test_equal_points_far_from_the_origin(profile, dtype):
    """Their covariance is the variance, and they do not pull at each other."""
    points = torch.tensor([[1e3, 0.1], [1e3, 0.1], [1e3 + 1, 0.3]], dtype=dtype)
    points.requires_grad_()
    power = torch.ones((), dtype=dtype) if profile == "rational_quadratic" else None
    K = radial_covariance(points, profile, power=power)
    assert K[0, 1].item() == pytest.approx(1.0, abs=4 * torch.finfo(dtype).eps)
    (gradient,) = torch.autograd.grad(K[0, 1], points, retain_graph=True)
    assert gradient.abs().max() < 1e-3
    assert torch.isfinite(torch.autograd.grad(K.sum(), points)[0]).all()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("lengthscale", [1e-6, 1e6])
def test_extreme_lengthscales(profile, lengthscale):
    points, _, _, power = arguments(profile, BATCHES[0])
    scaled = (points.detach() / lengthscale).requires_grad_()
    K = radial_covariance(scaled, profile, power=power)
    a = None if power is None else power[..., None, None]
    expected = BY_DEFINITION[profile](distances(scaled.detach()), a)
    # The angle of a cosine is then known to a few roundings of a million only.
    atol = 1e-6 if profile == "cosine" and lengthscale < 1 else 1e-10
    torch.testing.assert_close(K, expected, rtol=1e-9, atol=atol)
    K.sum().backward()
    assert torch.isfinite(scaled.grad).all()


@pytest.mark.parametrize("profile", PROFILES)
def test_one_point(profile):
    points = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    power = torch.ones((), dtype=torch.float64) if profile == "rational_quadratic" else None
    K = radial_covariance(points, profile, power=power)
    K.sum().backward()
    assert K.item() == 1.0
    assert points.grad.abs().max() == 0.0


def test_second_derivatives_are_refused():
    points = torch.zeros(2, 1, requires_grad=True)
    with pytest.raises(UnsupportedError, match="first derivative"):
        torch.autograd.grad(radial_covariance(points, "rbf").sum(), points, create_graph=True)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("profile", PROFILES)
def test_many_points_in_single_precision(monkeypatch, profile, batch):
    """Distances are made in double precision, some rows at a time; all else is in single."""
    monkeypatch.setattr(kernels, "DOUBLE_UP_TO", 4)
    monkeypatch.setitem(kernels._AT_A_TIME, "cpu", 3 * 8)
    points = 1e3 * torch.rand(*batch, 8, 2, generator=torch.Generator().manual_seed(0))
    points[..., 5:, :] = points[..., :3, :]  # duplicates, and neighbours
    points[..., 4, :] = points[..., 3, :] + 0.25
    points.requires_grad_()
    power = torch.tensor(0.7) if profile == "rational_quadratic" else None
    K = radial_covariance(points, profile, power=power)
    a = None if power is None else power.double()
    double = points.detach().double().requires_grad_()
    expected = BY_DEFINITION[profile](distances(double), a)
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
    K = radial_covariance(points, "matern_12")
    assert K[0, 1].item() == pytest.approx(math.exp(-1e-3), abs=1e-6)
    assert K[0, 2].item() == 1.0
    assert K[0, -1].item() == 0.0


def test_the_rational_quadratic_has_all_digits_at_every_power():
    mpmath = pytest.importorskip("mpmath")
    profile = PROFILES["rational_quadratic"]
    squares = [1e-8, 1e-3, 0.3, 2.0, 30.0]
    with mpmath.workdps(120):
        for power in (1e-2, 0.7, 20.0, 1e4, 1e7, 1e9, 1e11, 1e13, 1e17):
            e = torch.tensor([-0.5 * square for square in squares], dtype=torch.float64)
            k, *kept = profile.value(e, torch.tensor(power, dtype=torch.float64))
            slope, power_slope = profile.slope(k, *kept), profile.power_slope(k, *kept)
            for index, square in enumerate(squares):
                t, a = mpmath.mpf(-0.5 * square) / -mpmath.mpf(power), mpmath.mpf(power)
                value = (1 + t) ** -a
                by_power = -value * (mpmath.log(1 + t) - t / (1 + t))
                expected = [float(value), float(value / (1 + t)), float(by_power)]
                found = [float(numbers[index]) for numbers in (k, slope, power_slope)]
                np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_large_power_is_the_rbf_kernel():
    points = torch.linspace(0, 1, 4, dtype=torch.float64).unsqueeze(-1)
    lengthscale = torch.full((1, 1), 0.4, dtype=torch.float64)
    rbf = radial_covariance(points, "rbf", lengthscale=lengthscale)
    for power in (1e7, 1e9, 1e11, 1e13, 1e17):
        power = torch.tensor(power, dtype=torch.float64, requires_grad=True)
        found = radial_covariance(
            points, "rational_quadratic", lengthscale=lengthscale, power=power
        )
        torch.testing.assert_close(found, rbf, rtol=0, atol=1 / power.item() + 1e-15)
        (slope,) = torch.autograd.grad(found.sum(), power)
        fourth = (distances(points) / 0.4) ** 4  # k = rbf (1 + r^4 / 8 alpha + ...)
        torch.testing.assert_close(
            slope, -(rbf * fourth).sum() / (8 * power.detach() ** 2), rtol=1e-5, atol=0
        )
