"""Distributions of a stack: mixtures, transforms of targets and calibration, against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.models import GPRegression
from gpclml.tables import Calibration, StackedGP, StackedPrediction, fit_calibration
from gpclml.tables.candidates import Warp, choose_warp

WEIGHTS = (0.5, 0.3, 0.2)
DEGREES = (math.inf, 4.0, 3.0)


def drawn(rows=5, seed=0, spread=3.0) -> StackedPrediction:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, rows)
    locations = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    scales = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    double = {"dtype": torch.float64}
    return StackedPrediction(
        torch.tensor(WEIGHTS, **double), locations, scales, torch.tensor(DEGREES, **double)
    )


def components(prediction, row):
    for nu, loc, scale in zip(
        DEGREES, prediction.locations[:, row], prediction.scales[:, row], strict=True
    ):
        kind = stats.norm() if math.isinf(nu) else stats.t(nu)
        yield lambda y, k=kind, m=float(loc), s=float(scale): (
            k.pdf((y - m) / s) / s, k.cdf((y - m) / s)
        )  # fmt: skip


def mixture(prediction, row, y):
    """Density and distribution function, from SciPy's."""
    values = [component(y) for component in components(prediction, row)]
    return tuple(sum(w * v[i] for w, v in zip(WEIGHTS, values, strict=True)) for i in (0, 1))


def cdf(prediction, row, y):
    return mixture(prediction, row, y)[1]


def test_densities_probabilities_and_moments_are_those_of_scipy():
    prediction = drawn()
    y = torch.linspace(-8, 8, 5, dtype=torch.float64)
    inner = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)  # variances: nu / (nu - 2)
    second = prediction.weights @ (inner[:, None] * prediction.scales**2 + prediction.locations**2)
    torch.testing.assert_close(prediction.mean, prediction.weights @ prediction.locations)
    torch.testing.assert_close(prediction.variance, second - prediction.mean**2)
    expected = [mixture(prediction, row, float(y[row])) for row in range(5)]
    densities, probabilities = zip(*expected, strict=True)
    assert prediction.log_density(y).exp().tolist() == pytest.approx(densities, rel=1e-12)
    assert prediction.cdf(y).tolist() == pytest.approx(probabilities, rel=1e-12)


def test_far_tails_do_not_underflow():
    value = drawn(1).log_density(torch.tensor([1e9], dtype=torch.float64))
    nu, scale = DEGREES[2], float(drawn(1).scales[2, 0])
    loc = float(drawn(1).locations[2, 0])
    heaviest = math.log(WEIGHTS[2]) + stats.t(nu, loc, scale).logpdf(1e9)
    assert float(value) == pytest.approx(heaviest, rel=1e-6)
    only = torch.ones(1, 1, dtype=torch.float64)
    normal = StackedPrediction(only[0], only, only, math.inf * only[0])
    assert float(normal.log_density(torch.tensor([101.0]).double())) == pytest.approx(
        stats.norm.logpdf(100.0)
    )


# Where modes are far apart the function is nearly flat between them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "probability"), [(0.0, 0.5), (3.0, 1e-9), (3.0, 0.8), (300.0, 0.5), (300.0, 0.8)]
)
def test_quantiles_are_roots_of_the_distribution_function(probability, spread):
    prediction = drawn(spread=spread)
    quantiles = prediction.quantile(probability)
    for row in range(len(prediction)):
        root = optimize.brentq(
            lambda y, row=row: mixture(prediction, row, y)[1] - probability, -1e6, 1e6,
            xtol=1e-13, rtol=1e-13, maxiter=1000,
        )  # fmt: skip
        assert mixture(prediction, row, float(quantiles[row]))[1] == pytest.approx(
            probability, rel=1e-9
        )
        if 0.01 < probability < 0.99 and spread < 100:
            assert float(quantiles[row]) == pytest.approx(root, rel=1e-9)


def test_a_component_without_weight_has_no_say():
    double = {"dtype": torch.float64}
    two = StackedPrediction(
        torch.tensor([1.0, 0.0], **double), torch.tensor([[0.0], [1e6]], **double),
        torch.ones(2, 1, **double), torch.full((2,), math.inf, **double),
    )  # fmt: skip
    assert float(two.quantile(0.975)) == pytest.approx(stats.norm.ppf(0.975))
    assert torch.isfinite(two.log_density(torch.zeros(1, **double))).all()


def test_draws_have_the_distribution_and_follow_the_seed():
    prediction = drawn(2)
    draws = prediction.sample(20_000, seed=3)
    assert draws.shape == (20_000, 2)
    assert torch.equal(draws, prediction.sample(20_000, seed=3))
    assert not torch.equal(draws, prediction.sample(20_000, seed=4))
    for row in range(2):
        test = stats.kstest(draws[:, row].numpy(), lambda y, row=row: cdf(prediction, row, y))
        assert test.pvalue > 0.01


@pytest.mark.slow
def test_crps_is_the_integral_of_the_squared_difference():
    prediction = drawn(3)
    y = torch.tensor([0.3, -4.0, 12.0], dtype=torch.float64)
    scores = prediction.crps(y)
    for row in range(3):
        target = float(y[row])
        # A grid that is fine about all centres; tails beyond it hold less than 1e-6.
        z = np.linspace(-200, 200, 400_001)
        square = (cdf(prediction, row, z) - (target <= z)) ** 2
        assert float(scores[row]) == pytest.approx(square.sum() * 1e-3, rel=1e-3)


WARP = Warp(1.0, 2.0, 0.25)


def test_moments_and_draws_of_a_transformed_component():
    location, scale = torch.tensor([0.5, -1.0]).double(), torch.tensor([0.8, 0.3]).double()
    warped = StackedPrediction(
        torch.ones(1).double(), location[None], scale[None], torch.tensor([math.inf]).double(),
        [WARP],
    )  # fmt: skip

    def inverse(value):
        return float(WARP.inverse(value.numpy()))

    for row in range(2):
        moments = [
            integrate.quad(
                lambda z, k=k, row=row: (
                    inverse(location[row] + scale[row] * z) ** k * stats.norm.pdf(z)
                ),
                -12, 12, epsabs=1e-12, points=[float(-location[row] / scale[row])], limit=200,
            )[0]
            for k in (1, 2)
        ]  # fmt: skip
        assert float(warped.mean[row]) == pytest.approx(moments[0], rel=1e-3)
        assert float(warped.variance[row]) == pytest.approx(moments[1] - moments[0] ** 2, rel=1e-2)
    draws = warped.sample(20_000, seed=1)
    for row in range(2):
        transformed = WARP.forward(draws[:, row].numpy())
        expected = stats.norm(float(location[row]), float(scale[row]))
        assert stats.kstest(transformed, expected.cdf).pvalue > 0.01


@pytest.mark.parametrize("power", [0.0, 0.25, 1.0, 2.0])
@pytest.mark.parametrize("ends", [(-math.inf, math.inf), (-5.0, 20.0), (3.0, math.inf)])
def test_a_transform_is_that_of_scipy_with_lines_beyond_its_ends(power, ends):
    warp, y = Warp(1.0, 2.0, power, *ends), np.linspace(-30, 40, 101)
    z, inside, step = warp.forward(y), (y >= ends[0]) & (y <= ends[1]), 1e-6
    expected = stats.yeojohnson((y - 1.0) / 2.0, power)
    np.testing.assert_allclose(z[inside], expected[inside], rtol=1e-12)
    np.testing.assert_allclose(warp.inverse(z), y, rtol=1e-7)
    slope = (warp.forward(y + step) - warp.forward(y - step)) / (2 * step)
    np.testing.assert_allclose(np.exp(warp.log_slope(y)), slope, rtol=1e-4)
    for beyond in (y < ends[0], y > ends[1]):
        assert len(np.unique(warp.log_slope(y[beyond]))) <= 1


def test_of_counts_quantiles_and_draws_are_rounded_and_none_is_negative():
    prediction = drawn()
    cut = StackedPrediction(
        prediction.weights, prediction.locations, prediction.scales, prediction.degrees, counts=True
    )

    def rounded(values):
        return (values - 0.5).ceil().clamp_min(0.0)

    levels = [0.01, 0.9]
    assert torch.equal(cut.quantile(levels), rounded(prediction.quantile(levels)))
    assert torch.equal(cut.sample(9), rounded(prediction.sample(9)))
    y = torch.full((5,), 0.5, dtype=torch.float64)
    draws = prediction.sample(20_000, seed=2).clamp_min(0.0)
    spread = (draws[:10_000] - draws[10_000:]).abs().mean(0)
    expected = (draws - y).abs().mean(0) - 0.5 * spread
    torch.testing.assert_close(cut.crps(y), expected, rtol=0.05, atol=0.02)


def test_the_type_is_that_of_the_parts_and_arrays_are_taken():
    double = drawn()
    single = StackedPrediction(
        double.weights.float(), double.locations.float(), double.scales.float(),
        double.degrees.float(),
    )  # fmt: skip
    y = torch.zeros(5)
    for value in (single.mean, single.std, single.quantile(0.3), single.log_density(y),
                  single.cdf(y), single.sample(2), single.crps(y)):  # fmt: skip
        assert value.dtype == torch.float32
    torch.testing.assert_close(
        double.log_density(np.zeros(5)), double.log_density(y.double()), rtol=0, atol=0
    )


def test_a_stack_of_counts_predicts_whole_numbers_from_zero():
    draws = np.random.default_rng(0)
    x = torch.from_numpy(draws.uniform(0, 3, (80, 2)))
    y = torch.from_numpy(draws.poisson(np.exp(x[:, 0].numpy() - 1)).astype(float))
    stack = StackedGP(["linear", "matern"]).fit(x, y)
    assert stack.counts
    prediction = stack.predict(x)
    # A quantile is the least whole number up to which, rounded, enough probability lies.
    least = prediction.quantile(0.3)
    assert bool((prediction.cdf(least + 0.5) >= 0.3).all())
    assert bool((prediction.cdf(least - 0.5) < 0.3).all())
    assert prediction.cdf(torch.full((80,), -0.1, dtype=torch.float64)).tolist() == [0.0] * 80
    assert not StackedGP(["linear"]).fit(x, y + 0.5).counts


def test_intervals_and_bad_input():
    prediction, ones = drawn(), torch.ones(1, 1)
    lower, upper = prediction.interval(0.8)
    torch.testing.assert_close(torch.stack([lower, upper], 1), prediction.quantile([0.1, 0.9]))
    assert prediction.quantile([]).shape == (5, 0)
    for call, error, message in (
        (lambda: prediction.quantile(1.5), ArgumentError, r"probability: got 1\.5"),
        (lambda: prediction.quantile([0.5, 0.0]), ArgumentError, "probability: got 0"),
        (lambda: prediction.interval(95.0), ArgumentError, r"level: got 95\.0"),
        (lambda: prediction.sample(0), ArgumentError, "count: got 0"),
        (lambda: prediction.log_density(torch.zeros(4)), ShapeError, r"y: got \(4,\)"),
        (lambda: prediction.cdf(torch.full((5,), math.nan)), NonFiniteError, "y: got 5 of 5"),
        (lambda: StackedPrediction(ones[0], ones, ones, 4 * ones[0], [WARP]), ArgumentError,
         r"degrees: got 4\.0, expected infinity"),
        (lambda: StackedPrediction(ones[0], ones, ones, 4 * ones[0], [None, None]), ArgumentError,
         "warps: got 2, expected 1"),
        (lambda: StackedPrediction(ones[0], ones, ones, 2 * ones[0]), ArgumentError,
         r"degrees: got 2\.0"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def fitted_matern(x, y) -> GPRegression:
    return StackedGP(["matern"]).fit(x, y).components[0].model


def sine(n=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, (2 * x[:, 0]).sin() + 0.2 * noise


def profile(model, y, warp):
    """The log density of the targets of the best scale, up to a constant, by a dense normal."""
    z = y.numpy() if warp is None else warp.forward(y.numpy())
    slopes = 0.0 if warp is None else float(warp.log_slope(y.numpy()).sum())
    with torch.no_grad():
        prior = model.forward(model.train_inputs[0])
        noise = float(model.likelihood.noise) * torch.eye(len(y), dtype=torch.float64)
        covariance = (prior.covariance_matrix + noise).numpy()
        mean = prior.mean.numpy()
    centred, spread = z - z.mean(), z.std(ddof=1)
    factor = np.linalg.inv(np.linalg.cholesky(covariance)) @ (centred / spread - mean)
    best = spread**2 * np.mean(factor**2)
    density = stats.multivariate_normal(z.mean() + spread * mean, best * covariance)
    return density.logpdf(z) + slopes


@pytest.mark.parametrize("transform", [torch.exp, lambda y: (y + 4).square(), lambda y: -y.exp()])
def test_no_transform_of_the_grid_is_more_likely(transform):
    x, y = sine()
    y = transform(y)
    model = fitted_matern(x, y)
    chosen = choose_warp(model, y)
    assert chosen is not None
    powers = [k / 4 for k in range(9)]
    units = [share * float(y.mean()) for share in (0.01, 0.1, 1.0)]
    if float(y.min()) < 0:
        units = [float(y.std())]
    offset = 0.0 if float(y.min()) >= 0 else float(y.median())
    grid = [profile(model, y, Warp(offset, unit, power)) for unit in units for power in powers]
    assert profile(model, y, chosen) == pytest.approx(max(grid), abs=1e-6)
    assert max(grid) > profile(model, y, None) + 1


def test_the_logarithm_is_found_again_and_what_is_normal_stays():
    x, y = sine(200)
    chosen = choose_warp(fitted_matern(x, (3 * y).exp()), (3 * y).exp())
    assert chosen is not None
    assert chosen.power == 0.0
    assert chosen.unit < 0.05 * float((3 * y).exp().mean())
    assert choose_warp(fitted_matern(x, y), y) is None


def test_zeros_and_constant_targets():
    x, y = sine(60)
    counts = (2 * y.exp()).floor()
    assert float(counts.min()) == 0.0
    chosen = choose_warp(fitted_matern(x, counts), counts)
    assert chosen is None or (chosen.offset == 0.0 and chosen.unit >= 0.1 * float(counts.mean()))
    constant = torch.full((60,), 3.0, dtype=torch.float64)
    assert choose_warp(fitted_matern(x, constant), constant) is None


def test_targets_near_an_upper_end_have_predictions_among_them():
    # Their squares are normal, and zero is 2.4 deviations of these away from their mean.
    x, y = sine()
    y = (2 + y).clamp_min(0.3).sqrt()
    chosen = choose_warp(fitted_matern(x, y), y)
    assert chosen is not None
    assert chosen.power > 1
    assert chosen.lowest == float(y.min())
    stack = StackedGP(["matern_warped"]).fit(x, y)
    assert stack.components[0].warp == chosen
    far = stack.predict(torch.tensor([[1.5], [50.0]], dtype=torch.float64))
    assert float(y.min()) < float(far.mean.min()) <= float(far.mean.max()) < float(y.max())
    assert float(far.std.max()) < 2 * float(y.std())


def heavy(n, nu, scale, seed=0):
    return scale * stats.t(nu).rvs(n, random_state=np.random.default_rng(seed))


def penalty(log_scale, inverse, expected):
    return 2.5 * log_scale**2 + 0.5 * ((inverse - expected) / 0.1) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 400])
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
    calibration = fit_calibration(torch.from_numpy(residuals), hyperparameters=hyperparameters)
    inverse = 0.0 if math.isinf(calibration.degrees) else 1 / calibration.degrees
    best = objective(math.log(calibration.scale), inverse)
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


@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.5])
def test_noise_that_grows_with_the_prediction(slope):
    draws = np.random.default_rng(1)
    locations = 3 + 2 * draws.standard_normal(4000)
    z = (locations - locations.mean()) / locations.std()
    residuals = 1.5 * np.exp(slope * z.clip(-2, 2)) * draws.standard_normal(4000)
    calibration = fit_calibration(residuals, locations)
    assert calibration.slope == pytest.approx(slope, abs=0.04)
    assert calibration.scale == pytest.approx(1.5, rel=0.05)
    assert (calibration.center, calibration.width) == pytest.approx(
        (locations.mean(), locations.std())
    )
    few = fit_calibration(residuals[:12], locations[:12])
    assert abs(few.slope) < 0.5
    other = fit_calibration(residuals, 100 - 7 * locations)  # in other units
    assert other.slope == pytest.approx(-calibration.slope, abs=1e-4)
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


@pytest.mark.parametrize(
    ("values", "locations", "more", "error", "message"),
    [
        ([1.0, math.inf], None, {}, NonFiniteError, "residuals"),
        ([], None, {}, ShapeError, "residuals"),
        ([0.0] * 3, [0.0] * 4, {}, ShapeError, "locations"),
        ([0.0] * 2, [0.0, math.nan], {}, NonFiniteError, "locations"),
        ([0.0] * 3, None, {"hyperparameters": -1}, ArgumentError, "hyperparameters: got -1"),
    ],
)
def test_residuals_that_are_refused(values, locations, more, error, message):
    locations = None if locations is None else torch.tensor(locations)
    with pytest.raises(error, match=message):
        fit_calibration(torch.tensor(values), locations, **more)
