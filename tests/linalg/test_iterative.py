"""Conjugate gradients: densities, their errors, products by rows, preconditioners."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_operator import to_linear_operator
from linear_operator.utils.warnings import NumericalWarning

import reference
from gpclml.errors import ArgumentError, NonFiniteError, NotConvergedError, UnsupportedError
from gpclml.linalg import (
    ConjugateGradients,
    DenseCovariance,
    IterativeCovariance,
    LowRankPlusDiagonal,
    NotConvergedWarning,
    RowProducts,
)
from gpclml.linalg.iterative import pivoted_cholesky

TIGHT = ConjugateGradients(tolerance=1e-10, preconditioner_rank=5)


def points(n, batch=(), dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return torch.rand(*batch, n, 2, generator=generator, dtype=torch.float64).to(dtype)


def held_out_of(n, b, seed=3):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:b]


def rbf(x, lengthscale, noise, kept_bytes=0, missing=None):
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


@pytest.mark.slow
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
    covariance = rbf(x, lengthscale, noise, kept_bytes=10**9 if kept else 0)
    value, report = density(covariance, r, held_out, solver)
    expected = reference.conditional_log_density(dense(x, lengthscale, noise), r, held_out)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        reference.gradients(value, lengthscale, noise, r),
        reference.gradients(expected, lengthscale, noise, r),
        rtol=1e-6,
        atol=1e-6,
    )
    assert report.residual <= 1e-10


def test_a_missing_point_is_a_standard_normal_of_its_own():
    n = 15
    x, r, held_out = points(n), reference.random_residual(n), torch.tensor([0, 5, 9])
    missing = torch.zeros(n, dtype=torch.bool)
    missing[[5, 7]] = True
    r = r.masked_fill(missing, 0.0)
    covariance = rbf(x, *parameters(), missing=missing)
    value, report = density(covariance, r, held_out, TIGHT)
    seen = ~missing
    expected = DenseCovariance(dense(x[seen], *parameters())).conditional_log_density(
        r[seen], torch.tensor([0, 7])
    )
    torch.testing.assert_close(value, expected - 0.5 * math.log(2 * math.pi), rtol=1e-9, atol=1e-9)
    assert math.isfinite(report.error_bound)


def test_what_is_not_reached_is_an_error_or_a_warning():
    n = 80
    x, r, held_out = points(n), reference.random_residual(n), held_out_of(n, 8)
    covariance = rbf(x, torch.tensor(0.3).double(), torch.tensor(1e-3).double())
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
    single = rbf(x.float(), torch.tensor(0.3), torch.tensor(1e-3))
    with pytest.raises(NotConvergedError, match="float64"):
        density(single, r.float(), held_out, ConjugateGradients(tolerance=1e-9))


def test_blocks_that_are_refused():
    covariance = rbf(points(10), *parameters())
    with pytest.raises(ArgumentError, match="at least one point left"):
        density(covariance, reference.random_residual(10), torch.arange(10))
    with pytest.raises(UnsupportedError, match="points of its own in each batch member"):
        covariance.conditional_log_density(torch.ones(2, 10).double(), torch.tensor([[1], [2]]))


@pytest.mark.parametrize(
    ("where", "value", "dtype"),
    [
        ("scale", torch.nan, torch.float32), ("noise", torch.inf, torch.float64),
        ("one entry", torch.inf, torch.float32), ("residual", torch.nan, torch.float64),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_an_error_whatever_happens_on_failure(where, value, dtype):
    rank = 5
    x, r, held_out = points(30, dtype=dtype), reference.random_residual(30).to(dtype), [4, 9]
    scale, noise = torch.tensor(1.0, dtype=dtype), torch.full((30,), 0.1, dtype=dtype)

    def rows(start, stop, columns):
        block = scale * torch.exp(-(x[start:stop, None] - x[:columns]).square().sum(-1))
        if where == "one entry" and stop - start > 1:  # seen by products alone
            block[20, 3] = value
        return block

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


SETTINGS = {
    "tolerance": 0.0, "max_error": 0.0, "max_iterations": 1, "preconditioner_rank": -1,
    "on_failure": "ignore", "kept_bytes": -1,
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_unusable_settings_are_refused(name):
    with pytest.raises(ArgumentError, match=name):
        ConjugateGradients(**{name: SETTINGS[name]})
    if name != "on_failure":
        with pytest.raises(ArgumentError, match=f"{name}: got nan"):
            ConjugateGradients(**{name: torch.nan})


@pytest.mark.slow
def test_noise_that_is_lost_in_rounding_has_no_bound():
    x, r = points(30, dtype=torch.float32), reference.random_residual(30).float()
    held_out, covariance = held_out_of(30, 3), rbf(x, torch.tensor(0.3), torch.tensor(1e-8))
    solver = ConjugateGradients(preconditioner_rank=0)
    with pytest.raises(NotConvergedError, match="compute in float64"):
        density(covariance, r, held_out, solver)
    unbounded = ConjugateGradients(max_error=None, tolerance=0.1, on_failure="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        # Rounding decides whether the covariance of the held-out points needs jitter.
        warnings.simplefilter("ignore", NumericalWarning)
        _, report = density(covariance, r, held_out, unbounded)
    assert report.error_bound == math.inf


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.3, 1e-3])
def test_errors_are_below_the_largest_that_is_allowed(noise, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(150, 3, generator=generator, dtype=torch.float64)
    r = x.sin().sum(-1) + noise**0.5 * torch.randn(150, generator=generator).double()
    held_out, hyperparameters = held_out_of(150, 10, seed), (torch.tensor(1.5), torch.tensor(noise))
    for max_error in (1e-2, 1e-5):
        # A tolerance that alone is far from enough.
        solver = ConjugateGradients(0.5, max_error=max_error, preconditioner_rank=10)
        value, report = density(rbf(x, *hyperparameters), r, held_out, solver)
        exact = DenseCovariance(dense(x, *hyperparameters)).conditional_log_density(r, held_out)
        assert abs(float(value - exact)) / 10 <= report.error_bound <= max_error


def test_progress_is_shown_where_it_is_asked_for(capsys):
    covariance, r, held_out = rbf(points(40), *parameters()), torch.ones(40).double(), [3]
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
    covariance, evaluations = rbf(points(40), *parameters()), []

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


@pytest.mark.slow
def test_a_residual_is_the_true_one_at_the_limit_of_single_precision():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(800, 2, generator=generator)
    r = torch.randn(800, generator=generator)
    lengthscale, noise = torch.tensor(0.3), torch.tensor(1e-4)
    solver = ConjugateGradients(1e-3, preconditioner_rank=40, on_failure="warn")
    with pytest.warns(NotConvergedWarning, match="relative residual"):
        predictor = replace(rbf(x, lengthscale, noise), settings=solver).predictor(r)
    matrix = dense(x, lengthscale, noise).double()
    solution = predictor.solution
    true = (r - matrix @ solution.values.squeeze(-1).double()).norm() / r.norm()
    # What linear_cg updates by recursion falls on, to less than a hundredth of it.
    assert 0.5 * true < solution.relative < 2 * true


def test_vectors_that_overflow_reach_nothing(monkeypatch):
    overflow = lambda multiply, right, **_: multiply(torch.full_like(right, torch.inf))  # noqa: E731
    monkeypatch.setattr("gpclml.linalg.iterative.linear_cg", overflow)
    covariance, r = rbf(points(20), *parameters()), torch.ones(20).double()
    with pytest.raises(NotConvergedError, match="tolerance: got a relative residual of 1 "):
        density(covariance, r, torch.tensor([3]))


@pytest.mark.parametrize("on_failure", ["error", "warn"])
def test_norms_that_overflow_are_an_error_whatever_happens_on_failure(on_failure):
    x, r = points(20, dtype=torch.float32), 1e30 * torch.ones(20)
    covariance = rbf(x, *parameters(torch.float32))
    with pytest.raises(NonFiniteError, match="relative residual of nan"):
        density(covariance, r, torch.tensor([3]), ConjugateGradients(on_failure=on_failure))


N, M, NOISE = 30, 4, 0.1


def rough(multiply, right, **_):
    """Solutions that are off by a tenth in any direction, not only where CG leaves something."""
    exact = torch.linalg.solve(multiply(torch.eye(N, dtype=right.dtype)), right)
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(right)
    return exact + 0.1 * noise


def known_problem():
    latent = reference.random_covariance(N + M, noise=0.0)
    noise = torch.full((N,), NOISE, dtype=torch.float64)
    covariance = to_linear_operator(latent[:N, :N]), noise
    K = latent[:N, :N] + noise.diag()
    return covariance, K, latent[:N, N:], reference.random_residual(N)


@pytest.mark.parametrize("rank", [0, 10])
def test_the_errors_are_those_of_the_equations(rank, monkeypatch):
    covariance, K, cross, residual = known_problem()
    monkeypatch.setattr("gpclml.linalg.iterative.linear_cg", rough)
    solver = ConjugateGradients(0.99, preconditioner_rank=rank, max_iterations=3)
    given = IterativeCovariance(*covariance, solver).predictor(residual)
    block = given.given(cross, keep=True)
    V, R = block.vectors.values, block.vectors.residuals
    rho = residual - K @ given.solution.values.squeeze(-1)
    torch.testing.assert_close(R, cross - K @ V)
    inverse = torch.linalg.inv(K)
    gain = cross.mT @ inverse
    torch.testing.assert_close(block.shift - gain @ residual, -R.mT @ inverse @ rho)
    excess = R.mT @ inverse @ R
    torch.testing.assert_close(gain @ cross - block.joint_reduction(block), excess)
    torch.testing.assert_close((gain @ cross).diagonal() - block.reduction, excess.diagonal())
    assert (excess.diagonal() <= block.errors.square()).all()
    assert (block.errors.square() <= R.square().sum(0) / NOISE + 1e-12).all()
    assert rho @ inverse @ rho <= given.error.square()
    assert block.residual == pytest.approx(float((R.norm(dim=0) / cross.norm(dim=0)).max()))


@pytest.mark.parametrize("off", [(0.02, 0.0), (0.0, 0.3), (0.01, 0.3), (-0.01, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_error_of_a_density_is_below_its_bound(off, seed, monkeypatch):
    covariance, K, _, _ = known_problem()
    direction = torch.randn(N, 1, generator=torch.Generator().manual_seed(seed)).double()

    def along_one_direction(multiply, right, **_):
        exact = torch.linalg.solve(multiply(torch.eye(N, dtype=right.dtype)), right)
        columns = torch.tensor([off[0]] * (right.shape[-1] - 1) + [off[1]], dtype=right.dtype)
        return exact + columns * direction.index_fill(0, held_out, 0.0)

    held_out, residual = torch.tensor([2, 11, 20]), reference.random_residual(N, seed=seed)
    monkeypatch.setattr("gpclml.linalg.iterative.linear_cg", along_one_direction)
    solver = ConjugateGradients(0.99, max_error=None, max_iterations=3, on_failure="warn")
    iterative = IterativeCovariance(*covariance, solver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        value = iterative.conditional_log_density(residual, held_out)
    error = (
        float((value - DenseCovariance(K).conditional_log_density(residual, held_out)).abs()) / 3
    )
    [report] = iterative.reports
    assert error <= report.error_bound + 1e-12
    assert math.isfinite(report.error_bound)


@pytest.mark.parametrize("noise", [None, 1e-8])
def test_dependent_noise_and_noise_that_is_lost_in_rounding_have_no_bound(noise):
    _, K, cross, residual = (x.float() if torch.is_tensor(x) else x for x in known_problem())
    noise = None if noise is None else torch.full((N,), noise)
    covariance = IterativeCovariance(to_linear_operator(K), noise, ConjugateGradients(1e-4))
    given = covariance.predictor(residual)
    block = given.given(cross, keep=True)
    expected = torch.linalg.solve(K.double(), cross.double()).float()
    torch.testing.assert_close(block.vectors.values, expected, rtol=1e-3, atol=1e-3)
    for errors in (given.error, block.errors):
        assert torch.equal(errors, torch.full_like(errors, math.inf))


CHUNK = "gpclml.linalg.iterative._NUMBERS_AT_ONCE"


class Rows:
    """A symmetric matrix, given by its rows, that remembers what was asked for."""

    def __init__(self, batch, n, seed=0):
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)
        self.matrix = root @ root.mT
        self.asked = []

    def __call__(self, start, stop, columns):
        self.asked.append((start, stop, columns))
        return self.matrix[..., start:stop, :columns]

    def products(self, kept_bytes=0, multiple=1):
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1)
        return RowProducts(self, diagonal, kept_bytes, multiple)


@torch.no_grad()
def without_gradient(products, right):
    return products @ right


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 12),
    k=st.integers(1, 4),
    batch=st.sampled_from([(), (2,), (3, 1)]),
    right_batch=st.sampled_from([(), (2,), (3, 2)]),
    chunk=st.integers(1, 60),
    multiple=st.integers(1, 3),
    kept=st.booleans(),
)
def test_products_are_those_of_the_matrix(n, k, batch, right_batch, chunk, multiple, kept):
    rows = Rows(batch, n * multiple)
    right = torch.randn(*right_batch, n * multiple, k, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHUNK, chunk)
        try:
            expected = rows.matrix @ right
        except RuntimeError:
            return  # batches that do not broadcast
        products = rows.products(10**9 if kept else 0, multiple)
        for _ in range(2):
            torch.testing.assert_close(without_gradient(products, right), expected)
        torch.testing.assert_close(products @ right, expected)
        torch.testing.assert_close(products.row(n - 1), rows.matrix[..., n - 1, :])
    assert all(bound % multiple == 0 for asked in rows.asked for bound in asked)


def rows_of_rbf(n, dtype, variance=1.0):
    """An RBF covariance of n points in the plane, by its rows."""
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = variance * torch.exp(-0.5 * torch.cdist(x, x).square() / 0.3**2).to(dtype)
    return RowProducts(lambda i, j, k: matrix[i:j, :k], matrix.diagonal(), 0), matrix


@pytest.mark.parametrize("variance", [1e-6, 1.0, 1e6])
def test_a_pivoted_cholesky_factor_is_below_the_matrix_and_nears_it(variance):
    latent, matrix = rows_of_rbf(200, torch.float64, variance)
    remaining = []
    for rank in (0, 5, 15, 200):
        factor = pivoted_cholesky(latent.row, latent.diagonal(), rank)
        difference = matrix - factor @ factor.mT
        assert torch.linalg.eigvalsh(difference).min() > -1e-13 * variance
        remaining.append(float(difference.diagonal().sum()) / variance)
    assert remaining[0] == pytest.approx(200)
    assert remaining == sorted(remaining, reverse=True)
    assert remaining[-1] < 1e-12
    assert factor.shape[-1] < 200  # the others are rounding


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("rank", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_preconditioner_is_exact_at_a_small_noise(dtype, rank, missing):
    # Woodbury's identity in single precision has no correct digit here.
    latent, full = rows_of_rbf(100, dtype)
    noise = torch.linspace(1e-6, 2e-6, 100, dtype=dtype)
    gone = torch.arange(100) % 7 == 0 if missing else None
    factor = pivoted_cholesky(latent.row, latent.diagonal(), rank)
    covariance = LowRankPlusDiagonal(factor, noise)
    preconditioner = (covariance.masked(gone) if missing else covariance).weights()
    matrix = factor @ factor.mT + noise.double().diag()
    if gone is not None:
        matrix = matrix.masked_fill(gone | gone.unsqueeze(-1), 0.0) + gone.double().diag()
    right = full[:, :3] if gone is None else full[:, :3].masked_fill(gone.unsqueeze(-1), 0.0)
    expected = torch.linalg.solve(matrix, right.double())
    product, whitened = preconditioner.solve(right), preconditioner.whiten(right)
    assert product.dtype == dtype
    assert (product.double() - expected).norm() < 1e-5 * expected.norm()
    torch.testing.assert_close(
        whitened.mT @ whitened, right.double().mT @ expected, rtol=1e-5, atol=1.0
    )
