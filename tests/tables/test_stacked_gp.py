"""Stacks of GPs: leave-one-out, weights, distributions against SciPy, transforms and files."""

import dataclasses
import math
import warnings
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate, optimize, stats

from gpclml.errors import (
    ArgumentError,
    DataError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from gpclml.evaluation import stacking_weights
from gpclml.fit import FitWarning
from gpclml.models import GPRegression
from gpclml.tables import (
    CANDIDATES,
    DEFAULT_CANDIDATES,
    Calibration,
    Component,
    StackedGP,
    StackedPrediction,
    candidates,
    fit_calibration,
    stacked,
)
from gpclml.tables.candidates import (
    Residuals,
    Warp,
    choose_warp,
    leave_one_out_predictions,
    with_common_spread,
)

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


def test_errors_of_several_scales():
    shares, values = np.array([0.3, 0.5, 0.2]), np.linspace(-20, 20, 41)
    calibration = Calibration(2.0, 5.0, shares=tuple(shares))
    singles = [stats.t(5.0, scale=scale) for scale in (2 / 3, 2.0, 6.0)]
    density = shares @ [single.pdf(values) for single in singles]
    got = calibration.log_density(torch.from_numpy(values), torch.zeros(41))
    np.testing.assert_allclose(got.exp(), density)
    variance = shares @ [single.var() for single in singles]
    assert 4 * calibration.tail_variance == pytest.approx(variance)


def test_shares_of_scales_show_points_that_are_predicted_far_better_than_others():
    draws = np.random.default_rng(2)

    def errors(n):
        return draws.standard_normal(n) * np.where(draws.random(n) < 0.6, 0.1, 1.0)

    fits = [fit_calibration(errors(1000), mixed=mixed) for mixed in (False, True)]
    new = errors(20_000)
    logs = [fit.log_density(torch.from_numpy(new), torch.zeros(len(new))).mean() for fit in fits]
    assert logs[1] > logs[0] + 0.03
    held = []
    for fit in fits:
        shares, factors = np.array(fit.mixture).T
        scaled = np.abs(new)[:, None] / (fit.scale * factors)
        inside = 2 * stats.t(fit.degrees).cdf(scaled) - 1  # of the interval to the value
        held.append(float((inside @ shares < 0.9).mean()))
    assert abs(held[1] - 0.9) < 0.02 < abs(held[0] - 0.9)
    plain = fit_calibration(draws.standard_normal(1000), mixed=True)
    assert plain.shares[1] > 0.8
    assert plain.scale**2 * plain.tail_variance == pytest.approx(1.0, abs=0.1)


def component_of(errors):
    """One that predicts zeros with deviations of one, but for these errors."""
    residuals = Residuals(errors, -errors, torch.zeros_like(errors))
    model = GPRegression(torch.zeros(2, 1), torch.zeros(2))
    return Component("matern", model, 0.5, fit_calibration(errors), residuals)


def mixed_density(components):
    logs = torch.stack([component.log_densities for component in components])
    weights = torch.tensor([component.weight for component in components], dtype=torch.float64)
    return float(torch.logsumexp(weights.log()[:, None] + logs, 0).mean())


def test_a_mixture_of_models_with_errors_of_their_own_is_made_narrower():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
    single = [component_of(row) for row in errors]
    components = with_common_spread(single)
    factor = components[0].calibration.scale / single[0].calibration.scale
    assert 0.6 < factor < 0.9
    assert components[1].calibration.scale / single[1].calibration.scale == pytest.approx(factor)
    best = mixed_density(components)
    assert best > mixed_density(single) + 0.01
    for other in (0.97, 1.03):
        assert best > mixed_density([c.widened(other) for c in components])
    # Of the same prediction twice nothing is gained.
    alike = with_common_spread([component_of(errors[0])] * 2)
    assert alike[0].calibration.scale == pytest.approx(single[0].calibration.scale, rel=0.02)


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


def table(n=30, d=2, seed=0, noise=0.2):
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = 100 + 10 * x[:, 0].sin() + 3 * x.sum(-1)
    return x, y + noise * torch.randn(n, generator=generator, dtype=torch.float64)


def leave_one_out_residuals(model):
    """In standardized units."""
    mean, deviation = leave_one_out_predictions(model)
    targets = model.target_standardizer.inverse(model.train_targets)
    return (targets - mean) / model.target_scale, deviation / model.target_scale


@pytest.fixture(scope="module")
def fitted() -> StackedGP:
    return StackedGP().fit(*table())


@pytest.mark.slow
def test_leave_one_out_residuals_by_deleting_each_row(fitted):
    x = table()[0]
    for component in fitted.components:
        error, deviation = leave_one_out_residuals(component.model)
        model = component.model.eval()
        with torch.no_grad():
            prior = model.forward(x)
            noise = float(model.likelihood.noise)
            covariance = prior.covariance_matrix + noise * torch.eye(len(x), dtype=torch.float64)
            residual = model.train_targets - prior.mean
        for row in (0, 29):
            others = [i for i in range(len(x)) if i != row]
            inverse = torch.linalg.inv(covariance[others][:, others])
            cross = covariance[row, others]
            mean = cross @ inverse @ residual[others]
            variance = covariance[row, row] - cross @ inverse @ cross
            assert float(error[row]) == pytest.approx(float(residual[row] - mean), abs=1e-6)
            assert float(deviation[row]) == pytest.approx(float(variance.sqrt()), rel=1e-5)


def test_weights_scales_and_scores_are_those_of_the_residuals(fitted):
    logs = []
    for component in fitted.components:
        error, deviation = leave_one_out_residuals(component.model)
        residuals = error / deviation
        count = (
            2
            if component.name == "linear"
            else 5 + ("matern_" in component.name) + (component.name == "rq")
        )
        locations = table()[1] - error * component.model.target_scale
        calibration = fit_calibration(residuals, locations, hyperparameters=count)
        *expected, shares = dataclasses.astuple(component.calibration)
        *numbers, others = dataclasses.astuple(calibration)
        assert numbers == pytest.approx(expected, rel=1e-5)
        assert shares == others == (0.0, 1.0, 0.0)
        unit = deviation * component.model.target_scale
        row = calibration.log_density(residuals, locations) - unit.log()
        logs.append(row)
        assert component.loo == pytest.approx(float(row.mean()), rel=1e-5)
    weights = stacking_weights(torch.stack(logs), pseudo_counts=3.0)
    assert weights.tolist() == pytest.approx(
        [component.weight for component in fitted.components], abs=1e-6
    )
    fitted_weights = [component.weight for component in fitted.components]
    assert fitted_weights == sorted(fitted_weights, reverse=True)


def test_predictions_are_the_mixture_of_the_models(fitted):
    x = table(7, seed=1)[0]
    prediction = fitted.predict(x)
    for k, component in enumerate(fitted.components):
        normal = component.model.predict(x, marginal=True)
        torch.testing.assert_close(prediction.locations[k], normal.mean)
        scales = component.calibration.scales(normal.mean) * normal.stddev
        torch.testing.assert_close(prediction.scales[k], scales)
    assert not prediction.mean.requires_grad


@pytest.mark.slow
def test_units_and_the_order_of_rows_do_not_matter():
    x, y = table()
    names = ["linear", "matern"]
    new = table(6, seed=3)[0]
    first = StackedGP(names).fit(x, y).predict(new)
    other = StackedGP(names).fit(1e3 * x + 7, 1e-6 * y).predict(1e3 * new + 7)
    torch.testing.assert_close(other.mean, 1e-6 * first.mean, rtol=1e-3, atol=0)
    torch.testing.assert_close(other.std, 1e-6 * first.std, rtol=2e-2, atol=0)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    mixed = StackedGP(names).fit(x[order], y[order]).predict(new)
    torch.testing.assert_close(mixed.mean, first.mean, rtol=1e-3, atol=0)


def test_a_file_gives_the_same_predictions_bit_for_bit(fitted, tmp_path):
    fitted.save(tmp_path / "stack.pt")
    loaded = StackedGP.load(tmp_path / "stack.pt")
    new = table(6, seed=3)[0]
    first, second = fitted.predict(new), loaded.predict(new)
    for name in ("mean", "std"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert torch.equal(first.quantile([0.05, 0.95]), second.quantile([0.05, 0.95]))
    assert torch.equal(first.sample(3, seed=1), second.sample(3, seed=1))
    pd.testing.assert_frame_equal(fitted.summary(), loaded.summary())
    assert loaded.candidates == fitted.candidates
    torch.load(tmp_path / "stack.pt", weights_only=True)


def test_damaged_and_foreign_files(fitted, tmp_path):
    path = tmp_path / "stack.pt"
    fitted.save(path)
    content = torch.load(path, weights_only=True)
    with pytest.raises(DataError, match="no file"):
        StackedGP.load(tmp_path / "none.pt")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="damaged"):
        StackedGP.load(path)
    fitted.components[0].model.save(tmp_path / "model.pt")
    with pytest.raises(DataError, match=r"not a gpclml.StackedGP"):
        StackedGP.load(tmp_path / "model.pt")
    from gpclml._utils.files import write_checkpoint

    for change in ({"name": "xyz"}, {"model": {}}, {"warp": 0.5}, {"degrees": 3.0}):
        first, *others = content["components"]
        changed = {**content, "components": [{**first, **change}, *others]}
        write_checkpoint(path, "gpclml.StackedGP", changed)
        with pytest.raises(DataError, match=f"path: {path} cannot be restored"):
            StackedGP.load(path)


def test_a_candidate_that_fails_is_left_out_and_named(monkeypatch, tmp_path):
    def fails(x, y, seed, groups):
        raise RuntimeError("no such luck")

    known = {**CANDIDATES, "matern": candidates.Candidate("fails", fails)}
    monkeypatch.setattr(candidates, "CANDIDATES", known)
    x, y = table()
    with pytest.warns(FitWarning, match=r"Left out of the stack: matern \(RuntimeError: no such"):
        stack = StackedGP(["linear", "matern", "matern_linear"]).fit(x, y)
    assert {component.name for component in stack.components} == {"linear", "matern_linear"}
    assert stack.failures == {"matern": "RuntimeError: no such luck"}
    assert sum(component.weight for component in stack.components) == pytest.approx(1)
    summary = stack.summary()
    assert summary.loc["matern", "weight"] == 0
    assert "no such luck" in summary.loc["matern", "note"]
    stack.save(tmp_path / "stack.pt")
    assert StackedGP.load(tmp_path / "stack.pt").failures == stack.failures
    with pytest.raises(UnsupportedError, match=r"none that could be fitted .*no such luck"):
        StackedGP(["matern"]).fit(x, y)


@pytest.mark.slow
def test_a_spent_time_budget_keeps_the_fastest_candidate():
    with pytest.warns(FitWarning, match="time budget of 0 seconds"):
        stack = StackedGP().fit(*table(), time_budget=0.0)
    assert [component.name for component in stack.components] == ["linear"]
    assert set(stack.failures) == set(DEFAULT_CANDIDATES) - {"linear"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(StackedGP().fit(*table(), time_budget=1e6).components) == 6


@pytest.mark.slow
def test_hyperparameters_of_some_rows_and_predictions_from_all(monkeypatch):
    x, y = table(60)
    names = ["matern", "matern_linear"]
    stack = StackedGP(names, fit_rows=25, seed=3).fit(x, y)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:25].sort().values
    for component in stack.components:
        assert component.model.train_targets.shape == (60,)
    whole = StackedGP(names).fit(x, y)
    some = StackedGP(names).fit(x[rows], y[rows])
    new_x, new_y = table(200, seed=5)
    errors = [
        float((each.predict(new_x).mean - new_y).square().mean()) for each in (whole, stack, some)
    ]
    assert errors[1] < errors[2]
    monkeypatch.setattr(candidates, "_FIT_ROWS", 25)
    default = StackedGP(names, seed=3).fit(x, y)
    torch.testing.assert_close(default.predict(new_x).mean, stack.predict(new_x).mean)


@pytest.mark.slow
def test_types_arrays_and_data_frames(fitted):
    x, y = table()
    new = table(4, seed=1)[0]
    names = ["linear", "matern"]
    expected = StackedGP(names).fit(x, y).predict(new)
    frame = pd.DataFrame(x.numpy(), columns=["a", "b"])
    stack = StackedGP(names).fit(frame, pd.Series(y.numpy()))
    got = stack.predict(pd.DataFrame(new.numpy(), columns=["a", "b"]))
    assert torch.equal(got.mean, expected.mean)
    with pytest.raises(ArgumentError, match="columns b, a"):
        stack.predict(pd.DataFrame(new.numpy(), columns=["b", "a"]))
    single = StackedGP(names).fit(x.float(), y.float())
    assert single.predict(new.float()).mean.dtype == torch.float32
    torch.testing.assert_close(
        single.predict(new.float()).mean.double(), expected.mean, rtol=1e-2, atol=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_column = StackedGP(names).fit(x[:, 0].numpy(), y.numpy())
        assert one_column.predict(np.array([1.0, 2.0])).mean.shape == (2,)


def test_a_fit_that_is_refused_changes_nothing():
    x, y = table()
    frame = pd.DataFrame(x.numpy(), columns=["a", "b"])
    stack = StackedGP(["linear"]).fit(frame, y)
    before = stack.predict(frame).mean
    for bad in ({"time_budget": -1.0}, {"time_budget": math.nan}, {"categories": [[7]]}):
        with pytest.raises(ArgumentError):
            stack.fit(frame.rename(columns={"a": "c"}), y, **bad)
    with pytest.raises(ArgumentError, match="missing"):
        stack.fit(
            frame.rename(columns={"a": "c"}), y.clone().index_fill_(0, torch.tensor(3), math.nan)
        )
    assert torch.equal(stack.predict(frame).mean, before)


def test_points_far_outside_are_moved_to_the_edge_of_what_is_known():
    x, y = table()
    x[:, 1] = 3.0
    names = ["linear", "matern"]
    stack = StackedGP(names).fit(x, y)
    least, most = x[:, 0].min(), x[:, 0].max()
    edge = torch.tensor([[float(most + 2 * (most - least)), 3.0]], dtype=torch.float64)
    far = torch.tensor([[1e9, -7.0]], dtype=torch.float64)
    assert torch.equal(stack.predict(far).mean, stack.predict(edge).mean)
    near = torch.tensor([[float(most + 1), 3.0]], dtype=torch.float64)
    free = StackedGP(names, extrapolation=math.inf).fit(x, y)
    torch.testing.assert_close(stack.predict(near).mean, free.predict(near).mean)
    assert abs(float(free.predict(far).mean)) > 1e6
    with pytest.raises(NonFiniteError):
        stack.predict(torch.tensor([[math.inf, 3.0]], dtype=torch.float64))


def skewed(n=60, seed=0):
    x, y = table(n, seed=seed, noise=1.0)
    return x, ((y - 100) / 8).exp()


@pytest.mark.slow
def test_skewed_targets_are_transformed_and_densities_are_of_the_targets(tmp_path):
    x, y = skewed()
    names = ["linear", "matern", "matern_warped"]
    stack = StackedGP(names).fit(x, y)
    warped = {component.name: component for component in stack.components}["matern_warped"]
    assert warped.warp is not None
    assert warped.warp.power < 1
    assert warped.weight > 0.5
    assert math.isinf(warped.calibration.degrees)
    new_x, new_y = skewed(200, seed=7)
    density = stack.predict(new_x).log_density(new_y).mean()
    plain = StackedGP(names[:2]).fit(x, y).predict(new_x).log_density(new_y).mean()
    assert float(density) > float(plain) + 0.1
    stack.save(tmp_path / "stack.pt")
    loaded = StackedGP.load(tmp_path / "stack.pt")
    assert torch.equal(loaded.predict(x).std, stack.predict(x).std)
    # LOO of the targets themselves: the density of the transform times its slope.
    error, deviation = leave_one_out_residuals(warped.model)
    locations = torch.from_numpy(warped.warp.forward(y.numpy())) - error * warped.model.target_scale
    logs = warped.calibration.log_density(error / deviation, locations)
    logs = logs - (deviation * warped.model.target_scale).log()
    logs = logs + torch.from_numpy(warped.warp.log_slope(y.numpy()))
    assert warped.loo == pytest.approx(float(logs.mean()))
    assert "matern_warped" in stack.summary().index


BAD = {
    "a name": ({"candidates": ["matrn"]}, {}, UnknownNameError, "Did you mean 'matern'"),
    "no name": ({"candidates": []}, {}, ArgumentError, "candidates: got none"),
    "extrapolation": ({"extrapolation": -1.0}, {}, ArgumentError, r"extrapolation: got -1\.0"),
    "fit_rows": ({"fit_rows": 2}, {}, ArgumentError, "fit_rows: got 2"),
    "rows": ({}, {"n": 4}, ArgumentError, r"n_samples = 4.*at least 5 rows"),
    "target": ({}, {"y": math.nan}, ArgumentError, "y: got 1 missing"),
    "input": ({}, {"x": math.inf}, NonFiniteError, "train_x"),
    "batch": ({}, {"batch": 2}, UnsupportedError, "one table"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    arguments, data, error, message = BAD[case]
    x, y = table(data.get("n", 30))
    x[3, 0], y[3] = data.get("x", 1.0), data.get("y", 1.0)
    if "batch" in data:
        x, y = x.expand(2, -1, -1), y.expand(2, -1)
    with pytest.raises(error, match=message):
        StackedGP(**arguments).fit(x, y)


def test_points_that_are_refused(fitted):
    x = table()[0]
    for call in (StackedGP().predict, lambda x: StackedGP().save("nowhere.pt")):
        with pytest.raises(ArgumentError, match="Call fit"):
            call(x)
    with pytest.raises(ShapeError, match="x"):
        fitted.predict(x[:, :1])
    with pytest.raises(ArgumentError, match="meta"):
        fitted.predict(torch.empty(3, 2, device="meta"))


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(candidates, "_MANY_STEPS", 40)


@pytest.mark.slow
def test_many_rows_are_predicted_from_their_neighbours(few_steps, tmp_path):
    x, y = table(400)
    stack = StackedGP(["matern"], exact_rows=300, seed=1).fit(x, y)
    assert stack.components[0].neighbors in (32, 64, 128, 256)
    assert len(stack.components[0].log_densities) == 50  # rows held out
    new, truth = table(300, seed=1)
    prediction = stack.predict(new)
    assert float((prediction.mean - truth).square().mean().sqrt()) < 0.4  # noise has 0.2
    lower, upper = prediction.interval(0.9)
    assert float(((truth > lower) & (truth < upper)).double().mean()) > 0.85
    assert float((upper - lower).mean()) < 2.0  # of noise alone 0.66
    stack.save(tmp_path / "stack.pt")
    again = StackedGP.load(tmp_path / "stack.pt").predict(new)
    torch.testing.assert_close(again.mean, prediction.mean, rtol=0, atol=0)
    torch.testing.assert_close(again.std, prediction.std, rtol=0, atol=0)
    other_units = StackedGP(["matern"], exact_rows=300, seed=1).fit(1e3 * x + 7, 1e-6 * y)
    scaled = other_units.predict(1e3 * new + 7)
    torch.testing.assert_close(1e6 * scaled.mean, prediction.mean, rtol=1e-3, atol=0)


@pytest.mark.slow
def test_tails_of_many_rows_are_those_of_rows_held_out(few_steps):
    x, y = table(400)
    y[torch.randperm(400, generator=torch.Generator().manual_seed(5))[:20]] += 20.0
    calibration = StackedGP(["matern"], exact_rows=300).fit(x, y).components[0].calibration
    assert calibration.degrees < 30


@pytest.mark.slow
def test_what_many_rows_are_not_fitted_by(few_steps):
    x, y = table(60)
    with pytest.warns(FitWarning, match=r"matern_warped \(ArgumentError: candidates: got"):
        stack = StackedGP(["matern", "matern_warped"], exact_rows=50).fit(x, y)
    assert [component.name for component in stack.components] == ["matern"]


@pytest.mark.slow
def test_deep_kernels_of_many_rows_learn_a_function_of_one_direction(monkeypatch):
    monkeypatch.setattr(candidates, "_MANY_NETWORK_STEPS", 400)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 6, generator=generator, dtype=torch.float64)
    y = (3 * (x @ torch.full((6,), 6**-0.5, dtype=torch.float64))).sin()
    y = y + 0.1 * torch.randn(1200, generator=generator, dtype=torch.float64)
    stack = StackedGP(["matern", "deep_joint"], exact_rows=800).fit(x[:900], y[:900])
    error = (stack.predict(x[900:]).mean - y[900:]).square().mean().sqrt()
    plain = next(c for c in stack.components if c.name == "matern").predict(x[900:])[0]
    assert float(error) < 0.5 * float((plain - y[900:]).square().mean().sqrt())


@pytest.mark.slow
def test_many_rows_without_noise_of_which_few_columns_matter():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(700, 8, generator=generator, dtype=torch.float64)
    y = x[:, 0].sin() + x[:, 1]
    stack = StackedGP(["matern"], exact_rows=300).fit(x[:500], y[:500])
    prediction = stack.predict(x[500:])
    assert float((prediction.mean - y[500:]).abs().median()) < 1e-3
    assert float(prediction.std.median()) < 3e-3  # GPyTorch's least noise has .01
    # Targets that float32 does not tell apart, like times of a day in milliseconds since 1970.
    stack = StackedGP(["matern"], exact_rows=300).fit(x[:500], 1e6 * y[:500] + 1.7e12)
    shifted = stack.predict(x[500:])
    error = (shifted.mean - 1.7e12) / 1e6 - y[500:]
    assert float(error.abs().median()) < 1e-3
    lower, upper = shifted.interval(0.9)
    inside = (lower <= 1e6 * y[500:] + 1.7e12) & (1e6 * y[500:] + 1.7e12 <= upper)
    assert float(inside.double().mean()) > 0.8


@pytest.mark.slow
def test_further_starts_of_many_rows_are_networks_of_their_own(few_steps, monkeypatch, tmp_path):
    monkeypatch.setattr(candidates, "_MANY_NETWORK_STEPS", 20)
    x, y = table(100)
    stack = StackedGP(["matern", "deep_joint"], exact_rows=80, restarts=1).fit(x, y)
    components = {component.name: component for component in stack.components}
    starts = ["deep_joint", "deep_joint 2", "deep_joint 3"]  # two without any, and one further
    assert components.keys() == {"matern", *starts}
    means = [components[name].predict(x[:9])[0] for name in starts]
    for first, second in combinations(means, 2):
        assert float((first - second).abs().max()) > 1e-3
    stack.save(tmp_path / "stack.pt")
    again = StackedGP.load(tmp_path / "stack.pt").predict(x)
    torch.testing.assert_close(again.mean, stack.predict(x).mean, rtol=0, atol=0)


@pytest.fixture
def thousands(few_steps, monkeypatch):
    """A stack of 90 rows is fitted as one of thousands, in few steps."""
    monkeypatch.setattr(candidates, "_MANY_NETWORK_STEPS", 20)
    monkeypatch.setattr(stacked, "THOUSANDS", 80)


@pytest.mark.slow
def test_thousands_of_rows_are_predicted_from_all_and_judged_by_those_held_out(thousands, tmp_path):
    x, y = table(90)
    stack = StackedGP(restarts=1).fit(x, y)
    names = {component.name for component in stack.components}
    assert {"matern", "rbf", "rq", "matern_rq", "deep_joint", "deep", "deep 2"} <= names
    held_out = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:11]
    for component in stack.components:
        assert component.neighbors is None
        assert component.held_out
        assert len(component.residuals.values) == len(held_out)
    # Residuals are errors given all other rows.
    matern = next(c for c in stack.components if c.name == "matern")
    model = GPRegression(x, y, "matern")
    model.load_state_dict(matern.model.state_dict(), strict=False)
    first = int(held_out[0])
    kept = torch.arange(90) != first
    model.set_train_data(x[kept], model.train_targets[kept], strict=False)
    predicted = model.eval().predict(x[first : first + 1])
    residual = (y[first] - predicted.mean) / predicted.stddev
    torch.testing.assert_close(matern.residuals.values[:1], residual.double(), rtol=1e-6, atol=0)
    new, truth = table(200, seed=1)
    prediction = stack.predict(new)
    assert float((prediction.mean - truth).square().mean().sqrt()) < 0.6
    stack.save(tmp_path / "stack.pt")
    again = StackedGP.load(tmp_path / "stack.pt").predict(new)
    torch.testing.assert_close(again.mean, prediction.mean, rtol=0, atol=0)
    torch.testing.assert_close(again.std, prediction.std, rtol=0, atol=0)


@pytest.mark.slow
def test_networks_of_thousands_of_rows_do_not_see_those_held_out(thousands):
    x, y = table(90)
    held_out = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:11]
    changed = y.clone()
    changed[held_out] = y[held_out].flip(0)
    stacks = [StackedGP().fit(x, targets) for targets in (y, changed)]
    deep = [next(c for c in stack.components if c.name == "deep").model for stack in stacks]
    for ours, theirs in zip(*(model.parameters() for model in deep), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_named_candidates_of_thousands_of_rows_are_those_of_fewer(thousands):
    x, y = table(90)
    stack = StackedGP(["linear", "rbf"]).fit(x, y)
    assert {component.name for component in stack.components} == {"linear", "rbf"}
    assert not any(component.held_out for component in stack.components)
    several = StackedGP().fit(x, y, n_jobs=2)
    assert {"rbf", "matern_rq", "deep"} <= {component.name for component in several.components}
