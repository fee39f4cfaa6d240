import math

import pytest
import torch
from gpytorch.kernels import (
    GridInterpolationKernel,
    LinearKernel,
    MaternKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from posterior_cases import (
    LOOSE,
    TIGHT,
    D,
    M,
    N,
    PlainGP,
    data,
    deep,
    exact,
    new_x,
    plain,
)

from gpclml.errors import ShapeError
from gpclml.inference import IterativePosterior
from gpclml.linalg import ConjugateGradients
from gpclml.models import GPRegression

# linear_operator's own, of the sparse matrices of interpolated kernels.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor"),
]

KERNELS = {
    "rbf": lambda: None,
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "linear": LinearKernel,  # of low rank
    "polynomial": lambda: ScaleKernel(PolynomialKernel(power=2) + RBFKernel()),  # non-stationary
    "product": lambda: ScaleKernel(LinearKernel() * RBFKernel()),
    "interpolated": lambda: GridInterpolationKernel(
        ScaleKernel(RBFKernel()), grid_size=16, num_dims=D, grid_bounds=[(-0.2, 1.2)] * D
    ),
}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_mean_variance_and_covariance_are_the_exact_ones(kernel, missing):
    model, x = plain(KERNELS[kernel](), missing=missing), new_x()
    reference = exact(model, x)
    posterior = IterativePosterior(model, TIGHT)
    close = {"rtol": 1e-7, "atol": 1e-8}
    torch.testing.assert_close(posterior.mean(x), reference.mean, **close)
    torch.testing.assert_close(posterior.variance(x, False), reference.variance, **close)
    covariance = posterior.covariance(x, False)
    torch.testing.assert_close(covariance, reference.covariance_matrix, **close)
    assert posterior.report.residual <= 1e-10
    assert posterior.report.mean_error < 1e-6


@pytest.mark.parametrize("rank", [0, 15])
@pytest.mark.parametrize("kernel", ["rbf", "polynomial", "interpolated"])
def test_the_bounds_hold_and_a_variance_is_never_too_small(kernel, rank):
    model, x = plain(KERNELS[kernel](), missing=True), new_x(40)
    reference, prior = exact(model, x), model.covar_module(x).to_dense().diagonal()
    for tolerance in (0.3, 0.05, 0.01):
        solver = ConjugateGradients(tolerance=tolerance, preconditioner_rank=rank)
        posterior = IterativePosterior(model, solver)
        found = posterior.predict(x, observation_noise=False)
        excess = found.distribution.variance - reference.variance
        assert excess.min() > -1e-12
        assert (excess <= found.variance_excess + 1e-12).all()
        error = (found.distribution.mean - reference.mean).abs()
        assert (error <= found.mean_error + 1e-12).all()
        assert (found.mean_error < prior.sqrt() * posterior.report.mean_error).any()
        first = (posterior.mean(x) - reference.mean).abs()
        assert (first <= posterior.report.mean_error * prior.sqrt() + 1e-12).all()
        difference = found.distribution.covariance_matrix - reference.covariance_matrix
        assert torch.linalg.eigvalsh(difference).min() > -1e-10
        assert 0 < found.residual <= tolerance
        assert posterior.report.residual <= tolerance


def test_errors_are_of_second_order():
    model, x = plain(), new_x()
    reference, errors = exact(model, x), []
    for tolerance in (1e-2, 1e-4):
        solver = ConjugateGradients(tolerance=tolerance, preconditioner_rank=0)
        found = IterativePosterior(model, solver).predict(x, observation_noise=False)
        errors.append(
            [
                float((found.distribution.mean - reference.mean).abs().max()),
                float((found.distribution.variance - reference.variance).abs().max()),
            ]
        )
    for before, after in zip(*errors, strict=True):
        assert after < 1e-3 * before  # a first-order error would be a hundredth


@pytest.mark.parametrize("points_at_once", [1, 4, 13])
def test_chunks_of_points_do_not_matter(points_at_once, monkeypatch):
    model, x = plain(missing=True), new_x()
    whole = IterativePosterior(model, TIGHT)
    parts = IterativePosterior(model, TIGHT, points_at_once=points_at_once)
    torch.testing.assert_close(parts.mean(x), whole.mean(x))
    torch.testing.assert_close(parts.variance(x), whole.variance(x))
    torch.testing.assert_close(parts.covariance(x), whole.covariance(x))
    monkeypatch.setattr("gpclml.inference.posterior._NUMBERS_AT_ONCE", 3 * N)
    torch.testing.assert_close(whole.covariance(x), parts.covariance(x))


def test_the_mean_solves_nothing_more():
    model = plain()
    posterior = IterativePosterior(model, TIGHT)
    posterior._given.given = None
    torch.testing.assert_close(posterior.mean(new_x()), exact(model, new_x()).mean)


def test_rows_that_are_not_kept_give_the_same():
    model, x = plain(), new_x()
    anew = ConjugateGradients(tolerance=1e-10, preconditioner_rank=20, kept_bytes=0)
    torch.testing.assert_close(
        IterativePosterior(model, anew).covariance(x),
        IterativePosterior(model, TIGHT).covariance(x),
    )


@pytest.mark.parametrize("observation_noise", [False, True])
def test_samples_have_the_moments_of_the_posterior(observation_noise):
    model, x = plain(missing=True), new_x(5)
    posterior, count = IterativePosterior(model, TIGHT), 20_000
    draws = posterior.sample(x, count, torch.Generator().manual_seed(0), observation_noise)
    assert draws.shape == (count, 5)
    reference = exact(model, x)
    covariance = reference.covariance_matrix
    if observation_noise:
        covariance = covariance + model.likelihood.noise.detach() * torch.eye(5)
    deviation = covariance.diagonal().sqrt()
    standard = (draws - reference.mean) / deviation
    assert standard.mean(0).abs().max() < 5 / math.sqrt(count)
    correlation = covariance / deviation.unsqueeze(-1) / deviation
    assert (standard.mT @ standard / count - correlation).abs().max() < 5 * math.sqrt(2 / count)
    again = posterior.sample(x, count, torch.Generator().manual_seed(0), observation_noise)
    other = posterior.sample(x, count, torch.Generator().manual_seed(1), observation_noise)
    assert torch.equal(draws, again)
    assert not torch.equal(draws, other)


def test_samples_of_a_batch():
    model, x = plain(batch=(2,)), new_x(3)
    draws = IterativePosterior(model, TIGHT).sample(x, 4000, torch.Generator().manual_seed(0))
    assert draws.shape == (4000, 2, 3)
    reference = exact(model, x)
    standard = (draws - reference.mean) / (reference.variance + 0.05).sqrt()
    assert standard.mean(0).abs().max() < 5 / math.sqrt(4000)


def test_a_batch_is_the_stack_of_its_members():
    x, y = data(40, (3,))
    y[1, 4:9] = torch.nan
    model = GPRegression(x, y)
    model.covar_module.base_kernel.lengthscale = torch.tensor([0.3, 0.6, 1.0])[:, None, None].to(x)
    points = new_x()
    posterior = IterativePosterior(model, TIGHT)
    mean, covariance = posterior.mean(points), posterior.covariance(points)
    found = posterior.predict(points, marginal=True)
    assert found.mean_error.shape == found.variance_excess.shape == (3, M)
    for i in range(3):
        member = GPRegression(x[i], y[i])
        state = model.state_dict()
        member.load_state_dict({k: v[i] if v.ndim else v for k, v in state.items()})
        alone = IterativePosterior(member, TIGHT)
        torch.testing.assert_close(mean[i], alone.mean(points))
        torch.testing.assert_close(covariance[i], alone.covariance(points))


@pytest.mark.parametrize("kernel", ["rbf", "interpolated"])
def test_points_with_a_batch_of_their_own(kernel):
    model, x = plain(KERNELS[kernel](), missing=True), new_x(4, (3,))
    posterior = IterativePosterior(model, TIGHT)
    mean, covariance = posterior.mean(x), posterior.covariance(x)
    for i in range(3):
        torch.testing.assert_close(mean[i], posterior.mean(x[i]))
        torch.testing.assert_close(covariance[i], posterior.covariance(x[i]))


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 30),
    m=st.integers(1, 12),
    d=st.integers(1, 3),
    batch=st.sampled_from([(), (2,), (1, 2)]),
    points_at_once=st.integers(1, 12),
    share_missing=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n, m, d, batch, points_at_once, share_missing, seed):
    x, y = data(n, batch, d, seed=seed)
    gone = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < share_missing
    gone[..., 0] = False
    model = GPRegression(x, y.masked_fill(gone, torch.nan), standardize=n > 2)
    points = data(m, d=d, seed=seed + 1)[0]
    found = IterativePosterior(model, TIGHT, points_at_once=points_at_once).predict(points)
    with torch.no_grad():
        reference = model.predict(points)
    assert found.distribution.mean.shape == (*batch, m)
    close = {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(found.distribution.mean, reference.mean, **close)
    torch.testing.assert_close(
        found.distribution.covariance_matrix, reference.covariance_matrix, **close
    )


def test_single_precision_agrees_with_double():
    double = plain(deep(), n=300, missing=True)
    single = plain(deep(), n=300, missing=True, dtype=torch.float32)
    x = new_x(dtype=torch.float32)
    posterior, reference = IterativePosterior(single), exact(double, x.double())
    found = posterior.predict(x, observation_noise=False)
    assert found.distribution.mean.dtype == torch.float32
    deviation = reference.variance.sqrt()
    for mean in (posterior.mean(x), found.distribution.mean):
        assert ((mean.double() - reference.mean).abs() / deviation).max() < 1e-2
    variance = found.distribution.variance.double()
    torch.testing.assert_close(variance, reference.variance, rtol=2e-2, atol=1e-5)


def test_original_and_training_units():
    x, y = data()
    model, points = GPRegression(x, 40 * y + 1000), new_x()
    original = IterativePosterior(model, TIGHT).predict(points)
    training = IterativePosterior(model, TIGHT, units="training").predict(points)
    reference = model.predict(points)
    torch.testing.assert_close(original.distribution.mean, reference.mean.detach())
    torch.testing.assert_close(
        original.distribution.covariance_matrix, reference.covariance_matrix.detach()
    )
    inside, scale = training.distribution, model.target_scale
    units = model.target_standardizer
    torch.testing.assert_close(units.inverse(inside.mean), original.distribution.mean)
    torch.testing.assert_close(original.mean_error, training.mean_error * scale)
    torch.testing.assert_close(original.variance_excess, training.variance_excess * scale**2)


def test_botorch_models_are_read_as_botorch_reads_them():
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Normalize, Standardize

    x, y = data()
    model = SingleTaskGP(
        3 * x, (40 * y + 1000).unsqueeze(-1), input_transform=Normalize(D),
        outcome_transform=Standardize(1),
    )  # fmt: skip
    points = 3 * new_x()
    posterior = IterativePosterior(model, TIGHT)
    assert model.training
    reference = model.posterior(points).distribution
    torch.testing.assert_close(posterior.mean(points), reference.mean)
    torch.testing.assert_close(posterior.covariance(points, False), reference.covariance_matrix)
    noisy = model.posterior(points, observation_noise=True).distribution
    torch.testing.assert_close(posterior.covariance(points), noisy.covariance_matrix)


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
def test_an_input_transform_may_change_the_columns():
    from botorch.models import SingleTaskGP
    from botorch.models.transforms.input import OneHotToNumeric

    x, y = data(20)
    kinds = torch.nn.functional.one_hot(torch.arange(20) % 3, 3).to(x)
    x = torch.cat([x, kinds], dim=-1)
    transform = OneHotToNumeric(dim=D + 3, categorical_features={D: 3})
    model = SingleTaskGP(x, y.unsqueeze(-1), input_transform=transform)
    mean = IterativePosterior(model, TIGHT).mean(x[:4])
    torch.testing.assert_close(mean, model.posterior(x[:4]).mean.squeeze(-1).detach())
    with pytest.raises(ShapeError, match=r"x: got \(4, 3\), expected \(\*batch, m, 5\)"):
        IterativePosterior(model, TIGHT).mean(x[:4, :3])


def test_every_prediction_includes_the_noise_unless_asked_otherwise():
    x, y = data()
    model, points = GPRegression(x, 40 * y + 1000), new_x()
    posterior, count = IterativePosterior(model, TIGHT), 20000
    with torch.no_grad():
        noise = (model.likelihood.noise * model.target_scale**2).item()
        noisy, latent = model.predict(points), model.predict(points, observation_noise=False)
    torch.testing.assert_close(noisy.variance - latent.variance, torch.full_like(y[:M], noise))
    torch.testing.assert_close(posterior.predict(points).distribution.variance, noisy.variance)
    torch.testing.assert_close(posterior.variance(points), noisy.variance)
    torch.testing.assert_close(posterior.covariance(points), noisy.covariance_matrix)
    draws = posterior.sample(points, count, torch.Generator().manual_seed(0))
    shares = draws.var(0) / noisy.variance
    assert (shares - 1).abs().max() < 5 * math.sqrt(2 / count)
    assert (latent.variance / noisy.variance).max() < 0.5  # what the other default would give


def test_fixed_noise_of_each_point():
    x, y = data()
    noise = torch.linspace(0.01, 0.5, N, dtype=torch.float64)
    y[3:6] = torch.nan
    model = PlainGP(x, y, ScaleKernel(RBFKernel()), FixedNoiseGaussianLikelihood(noise))
    reference = exact(model, new_x())
    found = IterativePosterior(model, LOOSE).predict(new_x(), observation_noise=False)
    excess = found.distribution.variance - reference.variance
    assert excess.min() > -1e-12
    assert (excess <= found.variance_excess + 1e-12).all()


def test_a_point_far_from_all_has_its_prior():
    model = plain()
    found = IterativePosterior(model, TIGHT).predict(torch.full((2, D), 1e3).double(), False)
    prior = model.covar_module.outputscale.detach()
    torch.testing.assert_close(found.distribution.variance, prior.expand(2))
    torch.testing.assert_close(found.distribution.mean, torch.full((2,), 0.3).double())
    assert found.variance_excess.max() < 1e-12
