"""Scale and tails of leave-one-out residuals, against SciPy's maximum likelihood."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.tables import Calibration, fit_calibration


def heavy(n, nu, scale, seed=0):
    return scale * stats.t(nu).rvs(n, random_state=np.random.default_rng(seed))


@pytest.mark.parametrize(("nu", "scale"), [(4.0, 1.5), (8.0, 0.6)])
def test_of_many_residuals_it_is_the_maximum_of_the_likelihood(nu, scale):
    """Penalties of a few nats do not count beside 50,000 residuals."""
    residuals = heavy(50_000, nu, scale)
    degrees, _, found = stats.t.fit(residuals, floc=0.0)
    calibration = fit_calibration(torch.from_numpy(residuals))
    assert calibration.scale == pytest.approx(found, rel=2e-3)
    assert calibration.degrees == pytest.approx(degrees, rel=2e-2)


def penalty(log_scale, inverse, expected):
    return 2.5 * log_scale**2 + 0.5 * ((inverse - expected) / 0.1) ** 2


@pytest.mark.parametrize("n", [20, 60, 400])
@pytest.mark.parametrize(("nu", "hyperparameters"), [(3.5, 0), (30.0, 3), (30.0, 40)])
def test_no_point_of_a_grid_has_a_larger_penalized_likelihood(n, nu, hyperparameters):
    residuals = heavy(n, nu, 1.3, seed=n)

    def objective(log_scale, inverse):
        degrees = 1 / inverse if inverse > 1e-4 else math.inf
        kind = stats.norm if math.isinf(degrees) else stats.t(degrees)
        scaled = residuals * math.exp(-log_scale)
        logs = kind.logpdf(scaled) - log_scale
        return float(logs.sum()) - penalty(log_scale, inverse, expected)

    expected = min(1 / 3, 0.05 + hyperparameters / n)
    found = fit_calibration(torch.from_numpy(residuals), hyperparameters=hyperparameters)
    inverse = 0.0 if math.isinf(found.degrees) else 1 / found.degrees
    best = objective(math.log(found.scale), inverse)
    grid = [
        objective(s, u) for s in np.linspace(-0.7, 0.9, 41) for u in np.linspace(0.0, 1 / 3, 22)
    ]
    assert best >= max(grid) - 1e-6


def test_normal_residuals_give_nearly_a_normal():
    quantiles = torch.from_numpy(stats.norm.ppf((np.arange(5000) + 0.5) / 5000))
    calibration = fit_calibration(1.2 * quantiles)
    assert calibration.degrees > 50
    assert calibration.scale == pytest.approx(1.2, rel=0.02)
    # Tails lighter than those of a normal give the normal itself.
    uniform = torch.linspace(-1.7, 1.7, 400, dtype=torch.float64)
    light = fit_calibration(uniform)
    assert math.isinf(light.degrees)
    best = optimize.minimize_scalar(
        lambda s: 400 * s + 0.5 * float(uniform.square().sum()) * math.exp(-2 * s) + 2.5 * s**2,
        bounds=(-1, 1), method="bounded", options={"xatol": 1e-10},
    )  # fmt: skip
    assert light.scale == pytest.approx(math.exp(best.x), rel=1e-4)


def test_more_hyperparameters_make_heavier_tails():
    residuals = torch.from_numpy(heavy(40, 30.0, 1.0))
    degrees = [fit_calibration(residuals, hyperparameters=count).degrees for count in (0, 5, 20)]
    assert degrees == sorted(degrees, reverse=True)
    assert degrees[0] > degrees[-1]


def test_few_residuals_say_little():
    outlier = torch.zeros(20, dtype=torch.float64)
    outlier[:19] = torch.from_numpy(stats.norm.ppf((np.arange(19) + 0.5) / 19))
    outlier[19] = 4.0
    calibration = fit_calibration(outlier)
    free = stats.t.fit(outlier.numpy(), floc=0.0)[0]
    assert calibration.degrees > free
    perfect = fit_calibration(torch.zeros(5, dtype=torch.float64))
    assert 0.05 < perfect.scale < 1
    assert fit_calibration(torch.full((5,), 1e6, dtype=torch.float64)).scale < 1e6


def test_the_sign_and_order_of_residuals_do_not_matter():
    residuals = torch.from_numpy(heavy(50, 4.0, 1.0))
    same = fit_calibration(-residuals.flip(0))
    assert same.scale == pytest.approx(fit_calibration(residuals).scale, rel=1e-6)


@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.5])
def test_noise_that_grows_with_the_prediction(slope):
    draws = np.random.default_rng(1)
    locations = 3 + 2 * draws.standard_normal(4000)
    z = (locations - locations.mean()) / locations.std()
    residuals = 1.5 * np.exp(slope * z.clip(-2, 2)) * draws.standard_normal(4000)
    found = fit_calibration(residuals, locations)
    assert found.slope == pytest.approx(slope, abs=0.04)
    assert found.scale == pytest.approx(1.5, rel=0.05)
    assert (found.center, found.width) == pytest.approx((locations.mean(), locations.std()))
    few = fit_calibration(residuals[:12], locations[:12])
    assert abs(few.slope) < 0.5
    other = fit_calibration(residuals, 100 - 7 * locations)  # in other units
    assert other.slope == pytest.approx(-found.slope, abs=1e-4)
    same = fit_calibration(residuals[:20], np.full(20, 3.0))
    assert (same.slope, same.center, same.width) == (0.0, 0.0, 1.0)


def test_scales_and_density():
    calibration = Calibration(2.0, 4.0, 0.5, center=1.0, width=3.0)
    assert calibration.tail_variance == pytest.approx(stats.t(4.0).var())
    assert Calibration(3.0).tail_variance == 1.0
    locations = torch.tensor([1.0, 4.0, -99.0, 99.0], dtype=torch.float64)
    values = torch.tensor([-1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    scales = 2.0 * np.exp([0.0, 0.5, -1.0, 1.0])  # the last two as of two widths
    np.testing.assert_allclose(calibration.scales(locations), scales)
    np.testing.assert_allclose(
        calibration.log_density(values, locations), stats.t(4.0, scale=scales).logpdf(values)
    )


def test_bad_input():
    with pytest.raises(NonFiniteError, match="residuals"):
        fit_calibration(torch.tensor([1.0, math.inf]))
    with pytest.raises(ShapeError, match="residuals"):
        fit_calibration(torch.zeros(0))
    with pytest.raises(ShapeError, match="locations"):
        fit_calibration(torch.zeros(3), torch.zeros(4))
    with pytest.raises(NonFiniteError, match="locations"):
        fit_calibration(torch.zeros(2), torch.tensor([0.0, math.nan]))
    with pytest.raises(ArgumentError, match="hyperparameters: got -1"):
        fit_calibration(torch.zeros(3), hyperparameters=-1)
