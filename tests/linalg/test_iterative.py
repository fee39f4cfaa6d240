from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator.utils.warnings import NumericalWarning

import reference
from gpclml.errors import ArgumentError, NonFiniteError, NotConvergedError
from gpclml.linalg import (
    ConjugateGradients,
    DenseCovariance,
    IterativeCovariance,
    NotConvergedWarning,
    RowProducts,
)

TIGHT = ConjugateGradients(tolerance=1e-10, preconditioner_rank=5)


def points(n, batch=(), dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return torch.rand(*batch, n, 2, generator=generator, dtype=torch.float64).to(dtype)


def held_out_of(n, b, seed=3):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:b]


def by_rows(x, lengthscale, noise, kept_bytes=0, missing=None):
    """An RBF covariance by its rows, ``noise`` one variance or one a point."""

    def rows(start, stop, columns):
        difference = (x[..., start:stop, None, :] - x[..., None, :columns, :]) / lengthscale
        return torch.exp(-0.5 * difference.square().sum(-1))

    n = x.shape[-2]
    latent = RowProducts(rows, torch.ones_like(x[..., 0]), kept_bytes)
    return IterativeCovariance(latent, noise.expand(n), ConjugateGradients(), missing)


def dense(x, lengthscale, noise):
    difference = (x[..., :, None, :] - x[..., None, :, :]) / lengthscale
    n = x.shape[-2]
    return torch.exp(-0.5 * difference.square().sum(-1)) + torch.diag_embed(noise.expand(n))


def density(covariance, residual, held_out, solver=None):
    """The log density, and the report of its solve."""
    iterative = replace(covariance, settings=solver or ConjugateGradients())
    value = iterative.conditional_log_density(residual, held_out)
    return value, iterative.reports[0]


def parameters(dtype=torch.float64, noise=0.05):
    return [torch.tensor(value, dtype=dtype, requires_grad=True) for value in (0.4, noise)]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 40),
    share=st.floats(0.0, 1.0),
    kept=st.booleans(),
    rank=st.sampled_from([0, 1, 7, 50]),
)
def test_value_and_gradient_are_those_of_the_dense_density(n, share, kept, rank):
    b = min(n - 1, 1 + int(share * n))
    x, r = points(n), reference.random_residual(n).requires_grad_()
    lengthscale, noise = parameters()
    held_out = held_out_of(n, b)
    solver = ConjugateGradients(tolerance=1e-10, preconditioner_rank=rank)
    covariance = by_rows(x, lengthscale, noise, kept_bytes=10**9 if kept else 0)
    value, report = density(covariance, r, held_out, solver)
    expected = reference.conditional_log_density(dense(x, lengthscale, noise), r, held_out)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    for got, wanted in zip(
        reference.gradients(value, lengthscale, noise, r),
        reference.gradients(expected, lengthscale, noise, r),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert report.residual <= 1e-10


def test_gradcheck():
    x, r = points(12), reference.random_residual(12).requires_grad_()

    def function(lengthscale, noise, residual):
        covariance = by_rows(x, lengthscale, noise)
        solver = ConjugateGradients(tolerance=1e-13, preconditioner_rank=6)
        return density(covariance, residual, held_out_of(12, 4), solver)[0]

    assert torch.autograd.gradcheck(function, (*parameters(), r), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_make_no_difference(chunk, monkeypatch):
    n = 40
    x, r, held_out = points(n), reference.random_residual(n), held_out_of(n, 6)

    def value_and_gradients():
        hyperparameters = parameters()
        covariance = by_rows(x, *hyperparameters)
        value, _ = density(covariance, r, held_out, TIGHT)
        return value, *reference.gradients(value, *hyperparameters)

    whole = value_and_gradients()
    monkeypatch.setattr("gpclml.linalg.iterative._NUMBERS_AT_ONCE", chunk * n)
    assert len(by_rows(x, *parameters()).latent._chunks) == math.ceil(n / chunk)
    for one, other in zip(value_and_gradients(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("noise", [0.3, 0.01, 1e-3])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3, 1e-5])
def test_the_error_bound_holds(noise, tolerance):
    n, b = 120, 15
    x, r, held_out = points(n), reference.random_residual(n), held_out_of(n, b)
    lengthscale, noise = torch.tensor(0.3, dtype=torch.float64), torch.tensor(noise).double()
    solver = ConjugateGradients(tolerance=tolerance, preconditioner_rank=15, max_error=None)
    value, report = density(by_rows(x, lengthscale, noise), r, held_out, solver)
    exact = DenseCovariance(dense(x, lengthscale, noise)).conditional_log_density(r, held_out)
    assert abs(float(value - exact)) / b <= report.error_bound + 1e-10
    if tolerance <= 1e-5:
        assert report.error_bound < 1e-2
    demanding = ConjugateGradients(tolerance=tolerance, preconditioner_rank=15, max_error=1e-6)
    value, report = density(by_rows(x, lengthscale, noise), r, held_out, demanding)
    assert report.error_bound <= 1e-6
    assert abs(float(value - exact)) / b <= 1e-6


def test_the_error_is_of_second_order_in_the_residuals():
    n, b = 200, 20
    x, r, held_out = points(n), reference.random_residual(n), held_out_of(n, b)
    lengthscale, noise = torch.tensor(0.3).double(), torch.tensor(0.05).double()
    exact = DenseCovariance(dense(x, lengthscale, noise)).conditional_log_density(r, held_out)
    covariance = by_rows(x, lengthscale, noise)
    logs = []
    for tolerance in (1e-2, 1e-4):
        solver = ConjugateGradients(tolerance, preconditioner_rank=0, max_error=None)
        value, report = density(covariance, r, held_out, solver)
        logs.append((math.log(report.residual), math.log(abs(float(value - exact)))))
    slope = (logs[0][1] - logs[1][1]) / (logs[0][0] - logs[1][0])
    assert 1.6 < slope < 2.4


@pytest.mark.parametrize(("of_x", "of_r"), [((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (3,))])
def test_a_batch_is_a_stack_of_singles(of_x, of_r):
    n, b = 20, 4
    x, r, held_out = points(n, of_x), reference.random_residual(n, of_r), held_out_of(n, b)
    lengthscale, noise = parameters()
    value, _ = density(by_rows(x, lengthscale, noise), r, held_out, TIGHT)
    batch = torch.broadcast_shapes(of_x, of_r)
    assert value.shape == batch
    every_x = x.expand(*batch, n, 2).reshape(-1, n, 2)
    every_r = r.expand(*batch, n).reshape(-1, n)
    alone = torch.stack(
        [
            density(by_rows(one, lengthscale, noise), rest, held_out, TIGHT)[0]
            for one, rest in zip(every_x, every_r, strict=True)
        ]
    )
    torch.testing.assert_close(value.flatten(), alone, rtol=1e-8, atol=1e-8)
    for one, other in zip(
        reference.gradients(value, lengthscale, noise),
        reference.gradients(alone, lengthscale, noise),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_missing_point_is_a_standard_normal_of_its_own():
    n = 15
    x, r, held_out = points(n), reference.random_residual(n), torch.tensor([0, 5, 9])
    missing = torch.zeros(n, dtype=torch.bool)
    missing[[5, 7]] = True
    r = r.masked_fill(missing, 0.0)
    covariance = by_rows(x, *parameters(), missing=missing)
    value, report = density(covariance, r, held_out, TIGHT)
    seen = ~missing
    expected = DenseCovariance(dense(x[seen], *parameters())).conditional_log_density(
        r[seen], torch.tensor([0, 7])
    )
    torch.testing.assert_close(value, expected - 0.5 * math.log(2 * math.pi), rtol=1e-9, atol=1e-9)
    assert math.isfinite(report.error_bound)


def test_single_precision_against_double():
    n, b = 300, 30
    held_out, r = held_out_of(n, b), reference.random_residual(n)
    found = []
    for dtype in (torch.float32, torch.float64):
        hyperparameters = parameters(dtype)
        covariance = by_rows(points(n, dtype=dtype), *hyperparameters)
        value, _ = density(covariance, r.to(dtype), held_out)
        assert value.dtype == dtype
        gradients = torch.stack(reference.gradients(value, *hyperparameters)).double()
        found.append((float(value.detach()) / b, gradients))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-3)
    assert (found[0][1] - found[1][1]).norm() < 0.01 * found[1][1].norm()


def test_what_is_not_reached_is_an_error_or_a_warning():
    n = 80
    x, r, held_out = points(n), reference.random_residual(n), held_out_of(n, 8)
    covariance = by_rows(x, torch.tensor(0.3).double(), torch.tensor(1e-3).double())
    few = {"max_iterations": 3, "preconditioner_rank": 0}
    with pytest.raises(NotConvergedError, match=r"residual of .* after 3 iterations"):
        density(covariance, r, held_out, ConjugateGradients(**few))
    with pytest.warns(NotConvergedWarning, match="preconditioner_rank"):
        _, report = density(covariance, r, held_out, ConjugateGradients(**few, on_failure="warn"))
    assert report.residual > 1e-3
    assert report.iterations == 3
    beyond_rounding = ConjugateGradients(max_error=1e-40, preconditioner_rank=20)
    with pytest.raises(NotConvergedError, match="max_error: got an error of up to"):
        density(covariance, r, held_out, beyond_rounding)
    # float32 cannot solve this system to 1e-7: it says so, and does not go on for ever
    single = by_rows(x.float(), torch.tensor(0.3), torch.tensor(1e-3))
    with pytest.raises(NotConvergedError, match="float64"):
        density(single, r.float(), held_out, ConjugateGradients(tolerance=1e-9))


def test_a_block_of_all_points_is_refused():
    covariance = by_rows(points(10), *parameters())
    with pytest.raises(ArgumentError, match="at least one point left"):
        density(covariance, reference.random_residual(10), torch.arange(10))


def test_a_covariance_that_is_not_finite_is_said_to_be():
    covariance = by_rows(points(10), torch.tensor(torch.nan).double(), torch.tensor(0.1).double())
    with pytest.raises(NonFiniteError, match="covariance"):
        density(covariance, reference.random_residual(10), torch.tensor([0]))


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["scale", "noise", "one entry", "residual"])
def test_what_is_not_finite_is_an_error_whatever_happens_on_failure(where, value, dtype, rank):
    x, r, held_out = points(30, dtype=dtype), reference.random_residual(30).to(dtype), [4, 9]
    scale, noise = torch.tensor(1.0, dtype=dtype), torch.full((30,), 0.1, dtype=dtype)
    evaluated = 0

    def rows(start, stop, columns):
        nonlocal evaluated
        evaluated += 1
        part = scale * torch.exp(-(x[start:stop, None] - x[:columns]).square().sum(-1))
        if where == "one entry" and stop - start > 1:  # seen by products alone
            part[20, 3] = value
        return part

    if where == "scale":
        scale = scale * value
    if where == "noise":
        noise[7] = value
    if where == "residual":
        r[7] = value
    latent = RowProducts(rows, scale.expand(30), 0)
    solver = ConjugateGradients(preconditioner_rank=rank, on_failure="warn")
    with pytest.raises(NonFiniteError, match="finite"):
        density(IterativeCovariance(latent, noise, solver), r, torch.tensor(held_out), solver)
    assert evaluated <= 2 + rank  # not one for each of a thousand iterations


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"max_error": 0.0}, "max_error"),
        ({"max_iterations": 1}, "max_iterations"),
        ({"preconditioner_rank": -1}, "preconditioner_rank"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"kept_bytes": -1}, "kept_bytes"),
    ],
)
def test_unusable_settings_are_refused(values, message):
    with pytest.raises(ArgumentError, match=message):
        ConjugateGradients(**values)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    n, held_out = 200, held_out_of(200, 20)
    r = reference.random_residual(n)
    found = []
    for device in ("cpu", "cuda"):
        hyperparameters = [p.detach().to(device).requires_grad_() for p in parameters()]
        covariance = by_rows(points(n).to(device), *hyperparameters)
        value, _ = density(covariance, r.to(device), held_out, TIGHT)
        assert value.device.type == device
        found.append(
            [value.cpu(), *(g.cpu() for g in reference.gradients(value, *hyperparameters))]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def counted(covariance):
    """The covariance, and a list that grows by one with each evaluation of its rows."""
    evaluations = []

    def counting(*bounds):
        evaluations.append(bounds)
        return covariance.latent._rows(*bounds)

    latent = RowProducts(counting, covariance.latent.diagonal(), 0)
    return replace(covariance, latent=latent), evaluations


def test_noise_that_is_lost_in_rounding_is_refused_before_anything_is_solved():
    x, r = points(30, dtype=torch.float32), reference.random_residual(30).float()
    held_out, lost = held_out_of(30, 3), torch.tensor(1e-8)
    covariance, evaluations = counted(by_rows(x, torch.tensor(0.3), lost))
    solver = ConjugateGradients(preconditioner_rank=0)
    with pytest.raises(NotConvergedError, match=r"max_error: got noise variances below .*float32"):
        density(covariance, r, held_out, solver)
    assert len(evaluations) == 1  # the covariance with the held-out points
    unbounded = ConjugateGradients(max_error=None, tolerance=0.1, on_failure="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        # Rounding decides whether the covariance of the held-out points needs jitter.
        warnings.simplefilter("ignore", NumericalWarning)
        _, report = density(covariance, r, held_out, unbounded)
    assert report.error_bound == math.inf


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.3, 1e-2, 1e-4])
def test_errors_are_below_the_largest_that_is_allowed(noise, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(150, 3, generator=generator, dtype=torch.float64)
    r = x.sin().sum(-1) + noise**0.5 * torch.randn(150, generator=generator).double()
    held_out, hyperparameters = held_out_of(150, 10, seed), (torch.tensor(1.5), torch.tensor(noise))
    for max_error in (1e-2, 1e-5):
        # A tolerance that alone is far from enough.
        solver = ConjugateGradients(0.5, max_error=max_error, preconditioner_rank=10)
        value, report = density(by_rows(x, *hyperparameters), r, held_out, solver)
        exact = DenseCovariance(dense(x, *hyperparameters)).conditional_log_density(r, held_out)
        assert abs(float(value - exact)) / 10 <= report.error_bound <= max_error


def test_progress_is_shown_where_it_is_asked_for(capsys):
    covariance, r, held_out = by_rows(points(40), *parameters()), torch.ones(40).double(), [3]
    values = []
    for progress in (False, True):
        assert capsys.readouterr() == ("", "")
        solver = ConjugateGradients(1e-8, progress=progress)
        values.append(density(covariance, r, torch.tensor(held_out), solver)[0])
    out, err = capsys.readouterr()
    assert out == ""
    assert "products" in err
    assert "of 1.0e-08" in err
    assert torch.equal(*values)


def test_an_interrupt_passes_through(capsys):
    covariance, evaluations = by_rows(points(40), *parameters()), []

    def interrupted(*bounds):
        evaluations.append(bounds)
        if len(evaluations) == 4:
            raise KeyboardInterrupt
        return covariance.latent._rows(*bounds)

    latent = RowProducts(interrupted, covariance.latent.diagonal(), 0)
    solver = ConjugateGradients(1e-8, preconditioner_rank=0, progress=True)
    interruptible = replace(covariance, latent=latent)
    with pytest.raises(KeyboardInterrupt):
        density(interruptible, torch.ones(40).double(), torch.tensor([3]), solver)
    assert capsys.readouterr().err.endswith(" \r")  # the bar is gone


def test_a_residual_is_the_true_one_at_the_limit_of_single_precision():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(800, 2, generator=generator)
    r = torch.randn(800, generator=generator)
    lengthscale, noise = torch.tensor(0.3), torch.tensor(1e-4)
    solver = ConjugateGradients(1e-3, preconditioner_rank=40, on_failure="warn")
    with pytest.warns(NotConvergedWarning, match="relative residual"):
        predictor = replace(by_rows(x, lengthscale, noise), settings=solver).predictor(r)
    matrix = dense(x, lengthscale, noise).double()
    solution = predictor.solution
    true = (r - matrix @ solution.values.squeeze(-1).double()).norm() / r.norm()
    # What linear_cg updates by recursion falls on, to less than a hundredth of it.
    assert 0.5 * true < solution.relative < 2 * true


def test_vectors_that_overflow_reach_nothing(monkeypatch):
    overflow = lambda multiply, right, **_: multiply(torch.full_like(right, torch.inf))  # noqa: E731
    monkeypatch.setattr("gpclml.linalg.iterative.linear_cg", overflow)
    covariance, r = by_rows(points(20), *parameters()), torch.ones(20).double()
    with pytest.raises(NotConvergedError, match="tolerance: got a relative residual of 1 "):
        density(covariance, r, torch.tensor([3]))


@pytest.mark.parametrize("on_failure", ["error", "warn"])
def test_norms_that_overflow_are_an_error_whatever_happens_on_failure(on_failure):
    x, r = points(20, dtype=torch.float32), 1e30 * torch.ones(20)
    covariance = by_rows(x, *parameters(torch.float32))
    with pytest.raises(NonFiniteError, match="relative residual of nan"):
        density(covariance, r, torch.tensor([3]), ConjugateGradients(on_failure=on_failure))


@pytest.mark.parametrize(
    "name", ["tolerance", "max_error", "max_iterations", "preconditioner_rank", "kept_bytes"]
)
def test_settings_that_are_no_numbers_are_refused(name):
    with pytest.raises(ArgumentError, match=f"{name}: got nan"):
        ConjugateGradients(**{name: torch.nan})
