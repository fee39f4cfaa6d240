import re

import pytest
import torch

import gpclml._utils.environment
from gpclml.errors import ArgumentError, UnknownNameError, UnsupportedError
from gpclml.inference import SolverWarning
from gpclml.linalg import ConjugateGradients
from gpclml.models import GPRegression

N, M = 90, 13


def data(missing=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N + M, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, generator=generator, dtype=torch.float64)
    y = 1000 + 40 * (torch.sin(4 * x[:N].sum(-1)) + 0.2 * noise)
    if missing:
        y[::6] = torch.nan
    return x[:N], y, x[N:]


def available(monkeypatch, numbers):
    monkeypatch.setattr(gpclml._utils.environment, "available_memory", lambda device: 8 * numbers)


def test_where_it_fits_the_result_is_that_of_the_factorization_bit_for_bit():
    x, y, points = data(missing=True)
    model = GPRegression(x, y)
    default = model.predict(points)
    for same in (model.predict(points, solver=solver) for solver in ("cholesky", "auto")):
        assert torch.equal(same.mean, default.mean)
        assert torch.equal(same.covariance_matrix, default.covariance_matrix)
    assert not default.mean.requires_grad
    assert model.predict(points, grad=True).mean.requires_grad
    assert model.predict(points.requires_grad_()).mean.requires_grad
    with torch.no_grad():
        assert not model.predict(points, grad=True).mean.requires_grad


@pytest.mark.parametrize("marginal", [False, True])
@pytest.mark.parametrize("observation_noise", [False, True])
@pytest.mark.parametrize("solver", ["cg", ConjugateGradients(1e-10, preconditioner_rank=20)])
def test_conjugate_gradients_predict_the_same(solver, observation_noise, marginal):
    x, y, points = data(missing=True)
    model = GPRegression(x, y)
    ours = model.predict(points, observation_noise, marginal, solver=solver)
    with torch.no_grad():
        theirs = model.predict(points, observation_noise, marginal)
    torch.testing.assert_close(ours.mean, theirs.mean)
    torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix)
    assert model.training


def test_conjugate_gradients_where_the_factor_does_not_fit(monkeypatch):
    x, y, points = data()
    model = GPRegression(x, y)
    with torch.no_grad():
        reference = model.predict(points, marginal=True)
        available(monkeypatch, 5 * N * N)
        assert torch.equal(model.predict(points, marginal=True).variance, reference.variance)
        available(monkeypatch, 5 * N * N - 1)
        with pytest.warns(SolverWarning, match="n = 90, m = 13: a Cholesky factor needs") as seen:
            normal = model.predict(points, marginal=True)
        assert seen[0].filename == __file__
        torch.testing.assert_close(normal.mean, reference.mean)
        torch.testing.assert_close(normal.variance, reference.variance)
        with pytest.raises(ArgumentError, match=re.escape("'cholesky' at n = 90, m = 13")):
            model.predict(points, marginal=True, solver="cholesky")
    available(monkeypatch, 11 * N * N - 1)  # with a gradient it takes more
    with pytest.warns(SolverWarning, match="without a gradient"):
        assert not model.predict(points, marginal=True).mean.requires_grad


def test_what_is_refused(monkeypatch):
    x, y, points = data()
    model = GPRegression(x, y)
    with pytest.raises(UnknownNameError, match="cholesky"):
        model.predict(points, solver="choleski")
    with pytest.raises(UnsupportedError, match="gradient"):
        model.predict(points.clone().requires_grad_(), solver="cg")
    available(monkeypatch, 11 * N * N - 1)
    for solver in ("auto", "cg"):
        with pytest.raises(ArgumentError, match=r"x: got 2600 points jointly, .* GiB, expected"):
            model.predict(points.repeat(200, 1), solver=solver)
