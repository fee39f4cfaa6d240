"""The mixture that a stack predicts, against SciPy's distributions, quadrature and root finding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from gpclml.errors import ArgumentError, NonFiniteError, ShapeError
from gpclml.tables import StackedGP, StackedPrediction
from gpclml.tables.warps import Warp

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


def parts(prediction, row):
    for nu, loc, scale in zip(
        DEGREES, prediction.locations[:, row], prediction.scales[:, row], strict=True
    ):
        kind = stats.norm() if math.isinf(nu) else stats.t(nu)
        yield lambda y, k=kind, m=float(loc), s=float(scale): (
            k.pdf((y - m) / s) / s, k.cdf((y - m) / s)
        )  # fmt: skip


def mixture(prediction, row, y):
    """Density and distribution function, from SciPy's."""
    values = [part(y) for part in parts(prediction, row)]
    return tuple(sum(w * v[i] for w, v in zip(WEIGHTS, values, strict=True)) for i in (0, 1))


def cdf(prediction, row, y):
    return mixture(prediction, row, y)[1]


def test_density_and_distribution_function_are_those_of_scipy():
    prediction = drawn()
    y = torch.linspace(-8, 8, 5, dtype=torch.float64)
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


@pytest.mark.parametrize("spread", [0.0, 3.0, 300.0])  # modes far apart: nearly flat between
@pytest.mark.parametrize("probability", [1e-9, 0.025, 0.5, 0.8, 1 - 1e-9])
def test_quantiles_are_roots_of_the_distribution_function(probability, spread):
    prediction = drawn(spread=spread)
    found = prediction.quantile(probability)
    for row in range(len(prediction)):
        root = optimize.brentq(
            lambda y, row=row: mixture(prediction, row, y)[1] - probability, -1e6, 1e6,
            xtol=1e-13, rtol=1e-13, maxiter=1000,
        )  # fmt: skip
        assert mixture(prediction, row, float(found[row]))[1] == pytest.approx(
            probability, rel=1e-9
        )
        if 0.01 < probability < 0.99 and spread < 100:
            assert float(found[row]) == pytest.approx(root, rel=1e-9)


def test_quantiles_of_several_probabilities_and_intervals():
    prediction = drawn()
    several = prediction.quantile([0.1, 0.5, 0.9])
    assert several.shape == (5, 3)
    assert torch.equal(several[:, 1], prediction.quantile(0.5))
    lower, upper = prediction.interval(0.8)
    torch.testing.assert_close(torch.stack([lower, upper], 1), several[:, [0, 2]])
    assert torch.equal(
        prediction.quantile(torch.tensor([0.1], dtype=torch.float64)), several[:, :1]
    )
    assert prediction.quantile([]).shape == (5, 0)


def test_a_component_without_weight_has_no_say():
    double = {"dtype": torch.float64}
    two = StackedPrediction(
        torch.tensor([1.0, 0.0], **double), torch.tensor([[0.0], [1e6]], **double),
        torch.ones(2, 1, **double), torch.full((2,), math.inf, **double),
    )  # fmt: skip
    assert float(two.quantile(0.975)) == pytest.approx(stats.norm.ppf(0.975))
    assert torch.isfinite(two.log_density(torch.zeros(1, **double))).all()


def test_mean_and_variance_by_quadrature():
    prediction = drawn(2)
    for row in range(2):
        moments = [
            integrate.quad(
                lambda y, k=k, row=row: y**k * mixture(prediction, row, y)[0],
                -np.inf, np.inf, limit=500, points=None,
            )[0]
            for k in (1, 2)
        ]  # fmt: skip
        assert float(prediction.mean[row]) == pytest.approx(moments[0], abs=1e-3)
        variance = moments[1] - moments[0] ** 2
        # Tails of three degrees of freedom are cut by the quadrature.
        assert float(prediction.variance[row]) == pytest.approx(variance, rel=0.02)
        assert float(prediction.std[row]) == pytest.approx(math.sqrt(variance), rel=0.01)


def test_the_variance_is_that_of_the_parts_and_between_them():
    prediction = drawn()
    inner = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)  # nu / (nu - 2)
    weights = prediction.weights
    second = weights @ (inner[:, None] * prediction.scales**2 + prediction.locations**2)
    mean = weights @ prediction.locations
    torch.testing.assert_close(prediction.variance, second - mean**2)


def test_draws_have_the_distribution_and_follow_the_seed():
    prediction = drawn(2)
    draws = prediction.sample(20_000, seed=3)
    assert draws.shape == (20_000, 2)
    assert torch.equal(draws, prediction.sample(20_000, seed=3))
    assert not torch.equal(draws, prediction.sample(20_000, seed=4))
    for row in range(2):
        test = stats.kstest(draws[:, row].numpy(), lambda y, row=row: cdf(prediction, row, y))
        assert test.pvalue > 0.01


def test_crps_is_the_integral_of_the_squared_difference():
    prediction = drawn(3)
    y = torch.tensor([0.3, -4.0, 12.0], dtype=torch.float64)
    found = prediction.crps(y)
    for row in range(3):
        target = float(y[row])
        # A grid that is fine about all centres; tails beyond it hold less than 1e-6.
        z = np.linspace(-200, 200, 400_001)
        square = (cdf(prediction, row, z) - (target <= z)) ** 2
        assert float(found[row]) == pytest.approx(square.sum() * 1e-3, rel=1e-3)


def test_crps_of_a_normal_in_closed_form():
    only = torch.ones(1, 1, dtype=torch.float64)
    normal = StackedPrediction(only[0], 0 * only, only, math.inf * only[0])
    y = 0.7
    closed = y * (2 * stats.norm.cdf(y) - 1) + 2 * stats.norm.pdf(y) - 1 / math.sqrt(math.pi)
    assert float(normal.crps(torch.tensor([y]).double())) == pytest.approx(closed, rel=1e-7)


WARP = Warp(1.0, 2.0, 0.25)


def warped(rows=4) -> StackedPrediction:
    prediction = drawn(rows)
    return StackedPrediction(
        prediction.weights, prediction.locations, prediction.scales, prediction.degrees,
        [WARP, None, None],
    )  # fmt: skip


def test_a_transformed_component_by_quadrature_and_differences():
    prediction = warped()
    y = torch.tensor([-3.0, 0.2, 2.0, 30.0], dtype=torch.float64)
    step = 1e-5
    slope = (prediction.cdf(y + step) - prediction.cdf(y - step)) / (2 * step)
    torch.testing.assert_close(prediction.log_density(y).exp(), slope, rtol=1e-5, atol=1e-9)
    for probability in (1e-6, 0.3, 0.99):
        found = prediction.cdf(prediction.quantile(probability))
        torch.testing.assert_close(found, torch.full_like(found, probability))
    assert float(prediction.cdf(torch.full((4,), 1e9, dtype=torch.float64)).min()) > 1 - 1e-9


def test_moments_and_draws_of_a_transformed_component():
    location, scale = torch.tensor([0.5, -1.0]).double(), torch.tensor([0.8, 0.3]).double()
    one = StackedPrediction(
        torch.ones(1).double(), location[None], scale[None], torch.tensor([math.inf]).double(),
        [WARP],
    )  # fmt: skip
    for row in range(2):
        moments = [
            integrate.quad(
                lambda z, k=k, row=row: (
                    float(WARP.inverse(location[row] + scale[row] * z)) ** k * stats.norm.pdf(z)
                ),
                -12, 12, epsabs=1e-12, points=[float(-location[row] / scale[row])], limit=200,
            )[0]
            for k in (1, 2)
        ]  # fmt: skip
        assert float(one.mean[row]) == pytest.approx(moments[0], rel=1e-3)
        assert float(one.variance[row]) == pytest.approx(moments[1] - moments[0] ** 2, rel=1e-2)
    draws = one.sample(20_000, seed=1)
    for row in range(2):
        transformed = WARP.forward(draws[:, row]).numpy()
        expected = stats.norm(float(location[row]), float(scale[row]))
        assert stats.kstest(transformed, expected.cdf).pvalue > 0.01


@pytest.mark.parametrize("power", [0.0, 0.25, 1.0, 1.75, 2.0])
def test_a_transform_is_that_of_scipy_and_has_an_inverse(power):
    warp = Warp(1.0, 2.0, power)
    y = torch.linspace(-30, 40, 101, dtype=torch.float64, requires_grad=True)
    v = (y.detach().numpy() - 1.0) / 2.0
    np.testing.assert_allclose(warp.forward(y).detach(), stats.yeojohnson(v, power), rtol=1e-12)
    torch.testing.assert_close(warp.inverse(warp.forward(y)), y)
    (slope,) = torch.autograd.grad(warp.forward(y).sum(), y)
    torch.testing.assert_close(warp.log_slope(y.detach()), slope.log())


@pytest.mark.parametrize("power", [0.0, 0.75, 2.0])
@pytest.mark.parametrize("ends", [(-5.0, 20.0), (3.0, math.inf), (-math.inf, 0.5)])
def test_a_transform_goes_on_as_lines_beyond_its_ends(power, ends):
    curve, warp = Warp(1.0, 2.0, power), Warp(1.0, 2.0, power, *ends)
    y = torch.linspace(-30, 40, 101, dtype=torch.float64, requires_grad=True)
    z, inside = warp.forward(y), (y >= ends[0]) & (y <= ends[1])
    torch.testing.assert_close(z[inside], curve.forward(y)[inside])
    torch.testing.assert_close(warp.inverse(z), y)
    (slope,) = torch.autograd.grad(z.sum(), y)
    torch.testing.assert_close(warp.log_slope(y.detach()), slope.log())
    assert slope[y < ends[0]].unique().numel() <= 1
    assert slope[y > ends[1]].unique().numel() <= 1


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
    by_draws = (draws - y).abs().mean(0) - 0.5 * spread
    torch.testing.assert_close(cut.crps(y), by_draws, rtol=0.05, atol=0.02)


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


def test_bad_input():
    prediction = drawn()
    with pytest.raises(ArgumentError, match=r"probability: got 1\.5"):
        prediction.quantile(1.5)
    with pytest.raises(ArgumentError, match="probability: got 0"):
        prediction.quantile([0.5, 0.0])
    with pytest.raises(ArgumentError, match=r"level: got 95\.0"):
        prediction.interval(95.0)
    with pytest.raises(ArgumentError, match="count: got 0"):
        prediction.sample(0)
    with pytest.raises(ShapeError, match=r"y: got \(4,\)"):
        prediction.log_density(torch.zeros(4))
    with pytest.raises(NonFiniteError, match="y: got 1 of 5"):
        prediction.cdf(torch.tensor([0, 0, 0, 0, math.nan]))
    one = torch.ones(1, 1)
    with pytest.raises(ArgumentError, match=r"degrees: got 4\.0, expected infinity"):
        StackedPrediction(one[0], one, one, 4 * one[0], [WARP])
    with pytest.raises(ArgumentError, match="warps: got 2, expected 1"):
        StackedPrediction(one[0], one, one, 4 * one[0], [None, None])
    with pytest.raises(ArgumentError, match=r"degrees: got 2\.0"):
        StackedPrediction(one[0], one, one, 2 * one[0])


def test_quantiles_of_counts_are_whole_numbers_from_zero():
    draws = np.random.default_rng(0)
    x = torch.from_numpy(draws.uniform(0, 3, (80, 2)))
    y = torch.from_numpy(draws.poisson(np.exp(x[:, 0].numpy() - 1)).astype(float))
    stack = StackedGP().fit(x, y)
    assert stack.counts
    prediction = stack.predict(x)
    lower, upper = prediction.interval(0.9)
    for values in (lower, upper, prediction.sample(50)):
        assert torch.equal(values, values.round())
        assert float(values.min()) >= 0.0
    # A quantile is the least whole number up to which, rounded, enough probability lies.
    least = prediction.quantile(0.3)
    assert bool((prediction.cdf(least + 0.5) >= 0.3).all())
    assert bool((prediction.cdf(least - 0.5) < 0.3).all())
    assert prediction.cdf(torch.full((80,), -0.1, dtype=torch.float64)).tolist() == [0.0] * 80
    assert 0.8 < float(((lower <= y) & (y <= upper)).double().mean()) <= 1.0
    assert not StackedGP(["linear"]).fit(x, y + 0.5).counts
