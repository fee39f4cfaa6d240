"""Information criteria: by definition, and against the LOO of a linear model."""

import importlib.util
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpclml.errors import NonFiniteError, ShapeError, UnsupportedError
from gpclml.evidence import psis_loo, waic
from linear_evidence import LinearEvidence, drawn

HAS_ARVIZ = importlib.util.find_spec("arviz_stats") is not None
CRITERIA = [waic, psis_loo] if HAS_ARVIZ else [waic]
needs_arviz = pytest.mark.skipif(not HAS_ARVIZ, reason="arviz-stats is not installed")
NOISE = 0.3  # variance
DRAWS = 3000


def linear_model(n=40, d=4):
    """A linear model of which the posterior and leave-one-out densities are known."""
    return LinearEvidence(n, d, NOISE)


def log_likelihoods(model, draws=DRAWS, seed=1):
    """Of each point at draws of the posterior, ``(draws, n)``."""
    normal = model.posterior()
    noise = drawn(draws, len(normal.loc), seed=seed)
    outputs = (normal.loc + noise @ normal.scale_tril.mT) @ model.X.mT
    return torch.distributions.Normal(outputs, math.sqrt(NOISE)).log_prob(model.y)


def exact_loo(model):
    n = len(model.y)
    K = model.X @ model.X.mT + NOISE * torch.eye(n, dtype=torch.float64)
    points = [torch.tensor([i]) for i in range(n)]
    return torch.stack([reference.conditional_log_density(K, model.y, i) for i in points])


@needs_arviz
def test_psis_loo_of_a_linear_model_is_its_leave_one_out_density():
    model = linear_model()
    exact = exact_loo(model)
    values = torch.stack([psis_loo(log_likelihoods(model, seed=100 + i)).value for i in range(8)])
    assert abs(values.mean() - exact.sum()) <= 4 * values.std() / math.sqrt(8) + 0.02
    result = psis_loo(log_likelihoods(model))
    torch.testing.assert_close(result.value, exact.sum(), rtol=0, atol=0.3)
    torch.testing.assert_close(result.pointwise, exact, rtol=0, atol=0.15)
    assert not result.unreliable.any()
    fit = log_likelihoods(model).logsumexp(0).sum() - len(exact) * math.log(DRAWS)
    torch.testing.assert_close(result.effective_parameters, fit - result.value)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 1000), st.floats(0.1, 2.0))
def test_waic_by_definition(draws, n, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    values = spread * torch.randn(draws, n, generator=generator, dtype=torch.float64) - 1
    variances = np.var(values.numpy(), axis=0, ddof=1)
    expected = np.log(np.exp(values.numpy()).mean(0)) - variances
    result = waic(values)
    assert result.pointwise.tolist() == pytest.approx(expected.tolist())
    assert float(result.value) == pytest.approx(expected.sum())
    assert float(result.effective_parameters) == pytest.approx(variances.sum())
    assert result.diagnostic.tolist() == pytest.approx(variances.tolist())
    assert result.unreliable.tolist() == (variances > 0.4).tolist()
    if n > 1:
        error = math.sqrt(n * np.var(expected, ddof=1))
        assert float(result.standard_error) == pytest.approx(error)
    else:
        assert result.standard_error.isnan()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_equal_draws_are_their_log_likelihood(criterion):
    log_likelihoods = torch.tensor([-1.0, -0.2, 0.7], dtype=torch.float64)
    result = criterion(log_likelihoods.expand(40, 3))
    torch.testing.assert_close(result.pointwise, log_likelihoods)
    torch.testing.assert_close(result.value, log_likelihoods.sum())
    assert abs(float(result.effective_parameters)) < 1e-12
    assert not result.unreliable.any()
    torch.testing.assert_close(result.standard_error, math.sqrt(3) * log_likelihoods.std())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_dtypes_and_devices(criterion, device):
    values = log_likelihoods(linear_model(n=6), 200).to(device)
    log = criterion(values)
    assert log.pointwise.device.type == device.type
    single = criterion(values.float())
    assert single.value.dtype == torch.float32
    torch.testing.assert_close(single.pointwise.double(), log.pointwise, rtol=1e-4, atol=1e-4)
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


@pytest.mark.parametrize("criterion", CRITERIA)
def test_bad_draws(criterion):
    fewest = 2 if criterion is waic else 25
    with pytest.raises(ShapeError, match=rf"log_likelihoods: got \(1, 3\).*at least {fewest}"):
        criterion(torch.zeros(1, 3))
    for shape in ((30,), (30, 2, 2), (30, 0)):
        with pytest.raises(ShapeError, match=r"log_likelihoods.*\(S, N\)"):
            criterion(torch.zeros(shape))
    values = torch.randn(30, 2)
    for bad in (math.nan, -math.inf):
        values[3, 1] = bad
        with pytest.raises(NonFiniteError, match=r"log_likelihoods: got 1 of 60 values not finite"):
            criterion(values)
