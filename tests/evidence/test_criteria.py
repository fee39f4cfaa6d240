"""Information criteria: against closed forms of a conjugate linear model and by definition."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpclml.errors import ArgumentError, NonFiniteError, ShapeError, UnsupportedError
from gpclml.evidence.criteria import aic, bic, psis_loo, waic

HAS_ARVIZ = importlib.util.find_spec("arviz_stats") is not None
CRITERIA = [waic, psis_loo] if HAS_ARVIZ else [waic]
needs_arviz = pytest.mark.skipif(not HAS_ARVIZ, reason="arviz-stats is not installed")
NOISE = 0.3  # variance
DRAWS = 3000


class LinearModel:
    """y = x w + noise, w standard normal: posterior, LOO and WAIC in closed form."""

    def __init__(self, n=40, d=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(d, generator=generator, dtype=torch.float64)
        self.x = torch.randn(n, d, generator=generator, dtype=torch.float64)
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        self.y = self.x @ w + math.sqrt(NOISE) * noise
        eye = torch.eye(d, dtype=torch.float64)
        self.covariance = torch.linalg.inv(self.x.T @ self.x / NOISE + eye)
        self.mean = self.covariance @ self.x.T @ self.y / NOISE

    def log_likelihoods(self, draws=DRAWS, seed=1):
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(draws, len(self.mean), generator=generator, dtype=torch.float64)
        w = self.mean + normal @ torch.linalg.cholesky(self.covariance).T
        return self.log_density(self.y, w @ self.x.T, NOISE)

    @staticmethod
    def log_density(y, mean, variance):
        variance = torch.as_tensor(variance, dtype=torch.float64)
        return -0.5 * ((y - mean).square() / variance + torch.log(2 * math.pi * variance))

    def exact_loo(self):
        n = len(self.y)
        K = self.x @ self.x.T + NOISE * torch.eye(n, dtype=torch.float64)
        points = [torch.tensor([i]) for i in range(n)]
        return torch.stack([reference.conditional_log_density(K, self.y, i) for i in points])

    def exact_waic(self):
        """With all draws there are: the fit less the variance, of a square of a normal."""
        f, v = self.x @ self.mean, (self.x @ self.covariance * self.x).sum(-1)
        fit = self.log_density(self.y, f, v + NOISE)
        variance = (2 * v**2 + 4 * v * (self.y - f) ** 2) / (4 * NOISE**2)
        return fit - variance, variance


def over_seeds(criterion, model, repeats=8):
    """Terms of the criterion from several sets of draws, ``(repeats, N)``."""
    sets = [model.log_likelihoods(seed=100 + i) for i in range(repeats)]
    return torch.stack([criterion(draws).pointwise for draws in sets])


def check_mean(values, expected, bias=0.0):
    """The mean over sets of draws is as expected, to 4 standard errors and the bias stated."""
    error = values.std(0) / math.sqrt(len(values))
    assert ((values.mean(0) - expected).abs() <= 4 * error + bias).all()


def test_waic_of_a_linear_model_is_its_closed_form():
    model = LinearModel()
    pointwise, variance = model.exact_waic()
    values = over_seeds(waic, model)
    # The logarithm of a mean of S densities is too small by their relative variance over 2 S.
    check_mean(values.sum(-1), pointwise.sum(), bias=float(variance.sum()) / DRAWS)
    # One set of draws has a standard error of .07.
    result = waic(model.log_likelihoods())
    torch.testing.assert_close(result.value, pointwise.sum(), rtol=0, atol=0.3)
    torch.testing.assert_close(result.pointwise, pointwise, rtol=0, atol=0.15)
    torch.testing.assert_close(result.effective_parameters, variance.sum(), rtol=0, atol=0.3)


@needs_arviz
def test_psis_loo_of_a_linear_model_is_its_leave_one_out_density():
    model = LinearModel()
    exact = model.exact_loo()
    check_mean(over_seeds(psis_loo, model).sum(-1), exact.sum(), bias=0.02)
    result = psis_loo(model.log_likelihoods())
    torch.testing.assert_close(result.value, exact.sum(), rtol=0, atol=0.3)
    torch.testing.assert_close(result.pointwise, exact, rtol=0, atol=0.15)
    assert not result.unreliable.any()
    fit = model.log_likelihoods().logsumexp(0).sum() - len(exact) * math.log(DRAWS)
    torch.testing.assert_close(result.effective_parameters, fit - result.value)


@pytest.mark.parametrize(("n", "tolerance"), [(40, 0.1), (160, 0.02)])
def test_waic_nears_the_leave_one_out_density_as_points_grow(n, tolerance):
    model = LinearModel(n)
    difference = float(model.exact_waic()[0].sum() - model.exact_loo().sum())
    assert abs(difference) < tolerance
    check_mean(over_seeds(waic, model, 4).sum(-1), model.exact_loo().sum(), bias=tolerance)


def brute_force_waic(log_likelihoods):
    terms = []
    for i in range(log_likelihoods.shape[1]):
        of_point = [float(v) for v in log_likelihoods[:, i]]
        mean = sum(of_point) / len(of_point)
        variance = sum((v - mean) ** 2 for v in of_point) / (len(of_point) - 1)
        terms.append((math.log(sum(map(math.exp, of_point)) / len(of_point)), variance))
    return terms


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 1000), st.floats(0.1, 2.0))
def test_waic_by_definition(draws, n, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    values = spread * torch.randn(draws, n, generator=generator, dtype=torch.float64) - 1
    terms = brute_force_waic(values)
    result = waic(values)
    expected = [fit - variance for fit, variance in terms]
    assert result.pointwise.tolist() == pytest.approx(expected)
    assert float(result.value) == pytest.approx(sum(expected))
    assert float(result.effective_parameters) == pytest.approx(sum(v for _, v in terms))
    assert result.diagnostic.tolist() == pytest.approx([v for _, v in terms])
    assert result.unreliable.tolist() == [v > 0.4 for _, v in terms]
    if n > 1:
        error = math.sqrt(n * np.var(expected, ddof=1))
        assert float(result.standard_error) == pytest.approx(error)
    else:
        assert result.standard_error.isnan()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(CRITERIA), st.integers(30, 60), st.integers(2, 4), st.integers(0, 99))
def test_orders_and_offsets(criterion, draws, n, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(draws, n, generator=generator, dtype=torch.float64)
    result = criterion(values)
    points = torch.randperm(n, generator=generator)
    other = criterion(values[torch.randperm(draws, generator=generator)][:, points])
    torch.testing.assert_close(other.pointwise, result.pointwise[points])
    torch.testing.assert_close(other.value, result.value)
    # A change of units moves the terms and nothing else.
    offset = torch.randn(n, generator=generator, dtype=torch.float64)
    moved = criterion(values + offset)
    torch.testing.assert_close(moved.pointwise, result.pointwise + offset)
    torch.testing.assert_close(moved.effective_parameters, result.effective_parameters)
    torch.testing.assert_close(moved.diagnostic, result.diagnostic)
    assert (result.pointwise <= values.logsumexp(0) - math.log(draws) + 1e-12).all()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_equal_draws_are_their_log_likelihood(criterion):
    of_points = torch.tensor([-1.0, -0.2, 0.7], dtype=torch.float64)
    result = criterion(of_points.expand(40, 3))
    torch.testing.assert_close(result.pointwise, of_points)
    torch.testing.assert_close(result.value, of_points.sum())
    assert abs(float(result.effective_parameters)) < 1e-12
    assert not result.unreliable.any()
    torch.testing.assert_close(result.standard_error, math.sqrt(3) * of_points.std())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_scales_dtypes_and_devices(criterion, device):
    values = LinearModel(n=6).log_likelihoods(200).to(device)
    log, deviance = criterion(values), criterion(values, scale="deviance")
    torch.testing.assert_close(deviance.value, -2 * log.value)
    torch.testing.assert_close(deviance.pointwise, -2 * log.pointwise)
    torch.testing.assert_close(deviance.standard_error, 2 * log.standard_error)
    torch.testing.assert_close(deviance.effective_parameters, log.effective_parameters)
    assert (log.scale, deviance.scale) == ("log", "deviance")
    assert log.pointwise.device.type == device.type
    single = criterion(values.float())
    assert single.value.dtype == torch.float32
    torch.testing.assert_close(single.pointwise.double(), log.pointwise, rtol=1e-4, atol=1e-4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        log.value = log.value + 1


def test_waic_has_a_gradient():
    values = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: waic(v).value, values)


@needs_arviz
def test_weights_of_few_draws_are_reported():
    generator = torch.Generator().manual_seed(0)
    heavy = 4 * torch.randn(1000, 3, generator=generator, dtype=torch.float64)
    light = 0.1 * torch.randn(1000, 3, generator=generator, dtype=torch.float64)
    result = psis_loo(torch.cat([heavy, light], dim=1))
    assert result.unreliable.tolist() == 3 * [True] + 3 * [False]
    assert (result.diagnostic[:3] > 0.7).all()
    assert waic(torch.cat([heavy, light], dim=1)).unreliable.tolist() == 3 * [True] + 3 * [False]
    # Few draws have a lower limit, 1 - 1 / log10(100).
    shapes = psis_loo(0.9 * torch.randn(100, 400, generator=generator, dtype=torch.float64))
    assert torch.equal(shapes.unreliable, shapes.diagnostic > 0.5)
    assert shapes.unreliable.any()
    assert not shapes.unreliable.all()


@needs_arviz
def test_weights_that_no_pareto_distribution_fits_stay_as_they_are():
    generator = torch.Generator().manual_seed(0)
    ties = torch.tensor([0.0, -50.0], dtype=torch.float64).repeat(50)
    beyond = 1000 * torch.randn(100, generator=generator, dtype=torch.float64)
    values = torch.stack([ties, beyond], dim=1)
    result = psis_loo(values)
    assert result.unreliable.all()
    assert result.diagnostic.isposinf().all()
    raw = math.log(100) - (-values).logsumexp(0)  # the harmonic mean
    torch.testing.assert_close(result.pointwise, raw)


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(UnsupportedError, match=r"arviz-stats.*pip install 'gpclml\[criteria\]'"):
        psis_loo(torch.randn(30, 2))
    assert torch.isfinite(waic(torch.randn(30, 2)).value)


def test_aic_and_bic():
    assert float(aic(-120.0, 3)) == -123.0
    assert float(aic(-120.0, 3, scale="deviance")) == 246.0
    assert float(bic(-120.0, 3, 50)) == pytest.approx(-120 - 1.5 * math.log(50))
    assert float(bic(-120.0, 3, 50, scale="deviance")) == pytest.approx(240 + 3 * math.log(50))
    assert float(bic(-120.0, 3, 1)) == float(aic(-120.0, 0)) == -120.0
    several = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert torch.equal(aic(several, 2), torch.tensor([-3.0, -4.0]))
    (gradient,) = torch.autograd.grad(bic(several, 2, 9, scale="deviance").sum(), several)
    assert torch.equal(gradient, torch.tensor([-2.0, -2.0]))


def test_bic_is_the_evidence_up_to_a_bounded_term_and_aic_is_not():
    differences = {"bic": [], "aic": []}
    for n in (100, 1000, 10_000):
        model = LinearModel(n)
        residual = model.y - model.x @ torch.linalg.lstsq(model.x, model.y).solution
        largest = model.log_density(residual, 0.0, NOISE).sum()
        # log p(y) = log p(y | w) + log p(w) - log p(w | y) at any w, here the posterior's mean.
        fit = model.log_density(model.y, model.x @ model.mean, NOISE).sum()
        prior = model.log_density(model.mean, 0.0, 1.0).sum()
        posterior = -0.5 * torch.logdet(2 * math.pi * model.covariance)
        evidence = fit + prior - posterior
        differences["bic"].append(float(bic(largest, 4, n) - evidence))
        differences["aic"].append(float(aic(largest, 4) - evidence))
    assert np.ptp(differences["bic"]) < 1
    assert np.diff(differences["aic"]).tolist() == pytest.approx(2 * [2 * math.log(10)], abs=0.5)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_bad_draws(criterion):
    fewest = 2 if criterion is waic else 25
    with pytest.raises(ShapeError, match=rf"log_likelihoods: got \(1, 3\).*at least {fewest}"):
        criterion(torch.zeros(1, 3))
    for shape in ((30,), (30, 2, 2), (30, 0)):
        with pytest.raises(ShapeError, match=r"log_likelihoods.*\(S, N\)"):
            criterion(torch.zeros(shape))
    values = torch.randn(30, 2)
    with pytest.raises(ArgumentError, match="scale: got 'nats', expected one of deviance, log"):
        criterion(values, scale="nats")
    for bad in (math.nan, -math.inf):
        values[3, 1] = bad
        with pytest.raises(NonFiniteError, match=r"log_likelihoods: got 1 of 60 values not finite"):
            criterion(values)


def test_bad_counts():
    with pytest.raises(ArgumentError, match=r"num_parameters: got -1.*at least 0"):
        aic(-3.0, -1)
    with pytest.raises(ArgumentError, match=r"num_parameters: got 2\.5"):
        bic(-3.0, 2.5, 10)
    with pytest.raises(ArgumentError, match=r"num_data: got 0.*at least 1"):
        bic(-3.0, 2, 0)
    with pytest.raises(ArgumentError, match="scale"):
        aic(-3.0, 2, scale="Log")
    for criterion in (lambda value: aic(value, 2), lambda value: bic(value, 2, 10)):
        with pytest.raises(NonFiniteError, match="log_likelihood"):
            criterion(math.nan)
