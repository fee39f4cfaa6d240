"""Posteriors by conjugate gradients: exact ones, their bounds, and what is refused."""

import math

import gpytorch
import pytest
import torch
from exact_gps import MultitaskGP, PlainGP
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
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import gpclml._utils.environment
from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    NotConvergedError,
    ShapeError,
    UnsupportedError,
)
from gpclml.evaluation import learning_curve
from gpclml.inference import IterativePosterior, evaluating, exact_posterior
from gpclml.kernels import DeepKernel
from gpclml.kernels.networks import MLP
from gpclml.linalg import ConjugateGradients, NotConvergedWarning
from gpclml.models import GPRegression

# linear_operator's own, of the sparse matrices of interpolated kernels.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor"),
]

N, M, D = 90, 13, 2
TIGHT = ConjugateGradients(tolerance=1e-10, preconditioner_rank=20)
LOOSE = ConjugateGradients(tolerance=1e-2, preconditioner_rank=5)


def data(n=N, batch=(), d=D, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(*batch, n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    return x.to(dtype), (torch.sin(4 * x.sum(-1)) + 0.2 * noise).to(dtype)


def plain_gp(x, y, kernel=None, likelihood=None):
    model = PlainGP(x, y, kernel, (likelihood or GaussianLikelihood()).to(x)).to(x)
    model.mean_module.constant.data.fill_(0.3)
    return model


def plain(kernel=None, noise=0.05, missing=False, **options):
    x, y = data(**options)
    if missing:
        y[..., ::5] = torch.nan
    model = plain_gp(x, y, kernel or ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1])))
    model.likelihood.noise = noise
    for name, parameter in model.named_parameters():
        if name.endswith("raw_lengthscale"):
            parameter.data.fill_(-1.0)
    return model


def exact(model, x, marginal=False):
    with torch.no_grad(), evaluating(model):
        return exact_posterior(model, x, marginal)


def new_x(m=M, batch=(), seed=1, dtype=torch.float64):
    return data(m, batch, dtype=dtype, seed=seed)[0]


def deep():
    network = MLP([D, 6, 2], generator=torch.Generator().manual_seed(0))
    return ScaleKernel(DeepKernel(network, RBFKernel(), False))


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


@pytest.mark.parametrize(("kernel", "rank"), [("rbf", 0), ("polynomial", 15), ("interpolated", 15)])
def test_the_bounds_hold_and_a_variance_is_never_too_small(kernel, rank):
    model, x = plain(KERNELS[kernel](), missing=True), new_x(40)
    reference, prior = exact(model, x), model.covar_module(x).to_dense().diagonal()
    for tolerance in (0.3, 0.05, 0.01):
        solver = ConjugateGradients(tolerance=tolerance, preconditioner_rank=rank)
        posterior = IterativePosterior(model, solver)
        prediction = posterior.predict(x, observation_noise=False)
        excess = prediction.distribution.variance - reference.variance
        assert excess.min() > -1e-12
        assert (excess <= prediction.variance_excess + 1e-12).all()
        error = (prediction.distribution.mean - reference.mean).abs()
        assert (error <= prediction.mean_error + 1e-12).all()
        assert (prediction.mean_error < prior.sqrt() * posterior.report.mean_error).any()
        first = (posterior.mean(x) - reference.mean).abs()
        assert (first <= posterior.report.mean_error * prior.sqrt() + 1e-12).all()
        difference = prediction.distribution.covariance_matrix - reference.covariance_matrix
        assert torch.linalg.eigvalsh(difference).min() > -1e-10
        assert 0 < prediction.residual <= tolerance
        assert posterior.report.residual <= tolerance


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


def test_points_with_a_batch_of_their_own():
    model, x = plain(KERNELS["interpolated"](), missing=True), new_x(4, (3,))
    posterior = IterativePosterior(model, TIGHT)
    mean, covariance = posterior.mean(x), posterior.covariance(x)
    for i in range(3):
        torch.testing.assert_close(mean[i], posterior.mean(x[i]))
        torch.testing.assert_close(covariance[i], posterior.covariance(x[i]))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 30),
    m=st.integers(1, 12),
    d=st.integers(1, 3),
    batch=st.sampled_from([(), (2,), (1, 2)]),
    numbers_at_once=st.integers(1, 400),
    share_missing=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n, m, d, batch, numbers_at_once, share_missing, seed):
    x, y = data(n, batch, d, seed=seed)
    gone = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < share_missing
    gone[..., 0] = False
    model = GPRegression(x, y.masked_fill(gone, torch.nan), standardize=n > 2)
    points = data(m, d=d, seed=seed + 1)[0]
    posterior = IterativePosterior(model, TIGHT)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpclml.inference.posterior._NUMBERS_AT_ONCE", numbers_at_once)
        prediction, reference = posterior.predict(points), model.predict(points)
    assert prediction.distribution.mean.shape == prediction.mean_error.shape == (*batch, m)
    assert prediction.variance_excess.shape == (*batch, m)
    close = {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(prediction.distribution.mean, reference.mean, **close)
    torch.testing.assert_close(
        prediction.distribution.covariance_matrix, reference.covariance_matrix, **close
    )
    torch.testing.assert_close(posterior.variance(points), reference.variance, **close)
    torch.testing.assert_close(posterior.covariance(points), reference.covariance_matrix, **close)


def test_single_precision_agrees_with_double():
    double = plain(deep(), n=300, missing=True)
    single = plain(deep(), n=300, missing=True, dtype=torch.float32)
    x = new_x(dtype=torch.float32)
    posterior, reference = IterativePosterior(single), exact(double, x.double())
    prediction = posterior.predict(x, observation_noise=False)
    assert prediction.distribution.mean.dtype == torch.float32
    deviation = reference.variance.sqrt()
    for mean in (posterior.mean(x), prediction.distribution.mean):
        assert ((mean.double() - reference.mean).abs() / deviation).max() < 1e-2
    variance = prediction.distribution.variance.double()
    torch.testing.assert_close(variance, reference.variance, rtol=2e-2, atol=1e-5)


def test_predictions_and_bounds_are_in_the_units_of_the_targets():
    (x, y), points = data(), new_x()
    small, large = (
        IterativePosterior(GPRegression(x, targets), LOOSE).predict(points)
        for targets in (y, 40 * y + 1000)
    )
    torch.testing.assert_close(large.distribution.mean, 40 * small.distribution.mean + 1000)
    torch.testing.assert_close(large.mean_error, 40 * small.mean_error)
    torch.testing.assert_close(large.variance_excess, 1600 * small.variance_excess)


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
    posterior = IterativePosterior(model, TIGHT)
    with torch.no_grad():
        noise = (model.likelihood.noise * model.target_scale**2).item()
        noisy, latent = model.predict(points), model.predict(points, observation_noise=False)
    torch.testing.assert_close(noisy.variance - latent.variance, torch.full_like(y[:M], noise))
    torch.testing.assert_close(posterior.predict(points).distribution.variance, noisy.variance)
    torch.testing.assert_close(posterior.variance(points), noisy.variance)
    torch.testing.assert_close(posterior.covariance(points), noisy.covariance_matrix)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    draws = posterior.sample(points, 3, generators[0])
    assert torch.equal(draws, posterior.sample(points, 3, generators[1], observation_noise=True))
    assert (latent.variance / noisy.variance).max() < 0.5  # what the other default would give


def test_fixed_noise_of_each_point():
    x, y = data()
    noise = torch.linspace(0.01, 0.5, N, dtype=torch.float64)
    y[3:6] = torch.nan
    model = plain_gp(x, y, None, FixedNoiseGaussianLikelihood(noise))
    reference = exact(model, new_x())
    prediction = IterativePosterior(model, LOOSE).predict(new_x(), observation_noise=False)
    excess = prediction.distribution.variance - reference.variance
    assert excess.min() > -1e-12
    assert (excess <= prediction.variance_excess + 1e-12).all()


def test_the_model_is_left_as_it_was():
    network = torch.nn.Sequential(MLP([D, 4]), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))
    model = plain(ScaleKernel(DeepKernel(network, RBFKernel(), False)))
    model.likelihood.eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    posterior = IterativePosterior(model, TIGHT)
    with gpytorch.settings.lazily_evaluate_kernels(False), gpytorch.settings.max_cholesky_size(1):
        mean = posterior.mean(new_x())
        variance = posterior.variance(new_x(), False)
    reference = exact(model, new_x())
    torch.testing.assert_close(mean, reference.mean)
    torch.testing.assert_close(variance, reference.variance)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert gpytorch.settings.observation_nan_policy.value() == "ignore"
    assert not mean.requires_grad


CHANGES = {
    # GPyTorch writes through .data.
    "lengthscale": lambda model: setattr(model.covar_module.base_kernel, "lengthscale", 3.0),
    "step": lambda model: model.likelihood.noise_covar.raw_noise.data.add_(1.0),
    "data": lambda model: model.set_train_data(*data(20), strict=False),
    "targets": lambda model: model.set_train_data(targets=model.train_targets + 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused(change):
    model = plain(missing=True)
    posterior = IterativePosterior(model, TIGHT)
    posterior.mean(new_x())
    CHANGES[change](model)
    for ask in (posterior.mean, posterior.variance, posterior.covariance, posterior.sample):
        with pytest.raises(ArgumentError, match=r"model: got a changed .* Make a new"):
            ask(new_x())


def test_a_grid_that_the_points_move_is_refused():
    kernel = GridInterpolationKernel(ScaleKernel(RBFKernel()), grid_size=16, num_dims=D)
    posterior = IterativePosterior(plain(kernel), TIGHT)
    posterior.mean(0.5 * new_x() + 0.25)
    with pytest.raises(ArgumentError, match="grid"):
        posterior.mean(new_x() + 5)


@pytest.mark.parametrize(
    ("ask", "error", "match"),
    [
        (lambda p: p.mean(new_x()[:, :1]), ShapeError, r"x: got \(13, 1\)"),
        (lambda p: p.variance(new_x()[:0]), ShapeError, "m >= 1"),
        (lambda p: p.covariance(new_x().float()), ArgumentError, "torch.float32 .* torch.float64"),
        (lambda p: p.mean(new_x().to("meta")), ArgumentError, "meta"),
        (lambda p: p.sample(new_x() / torch.tensor([0, 1])), NonFiniteError, "13 of .* not finite"),
        (lambda p: p.mean(new_x().requires_grad_()), UnsupportedError, "gradient"),
        (lambda p: p.sample(new_x(), 0), ArgumentError, "num_samples"),
        (lambda p: p.mean([[1.0, 2.0]]), ArgumentError, "as_tensor"),
    ],
)
def test_bad_points(ask, error, match):
    with pytest.raises(error, match=match):
        ask(IterativePosterior(plain(), TIGHT))


def test_points_of_another_batch():
    with pytest.raises(ShapeError, match="broadcasts with"):
        IterativePosterior(plain(batch=(2,))).mean(new_x(batch=(3,)))


def test_bad_models():
    with pytest.raises(UnsupportedError, match="Linear"):
        IterativePosterior(torch.nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="training data"):
        IterativePosterior(PlainGP(None, None, likelihood=GaussianLikelihood().double()))
    x, y = data(10)
    tasks = MultitaskGP(x, torch.stack([y, -y], -1), MultitaskGaussianLikelihood(2)).double()
    with pytest.raises(UnsupportedError, match="2 tasks"):
        IterativePosterior(tasks)
    infinite = plain()
    infinite.train_targets[0] = torch.inf
    with pytest.raises(NonFiniteError, match="target"):
        IterativePosterior(infinite)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("covar_module.raw_outputscale", torch.inf),
        ("likelihood.noise_covar.raw_noise", torch.nan),
        ("mean_module.constant", torch.inf),
    ],
)
def test_hyperparameters_that_are_not_finite_are_an_error(parameter, value):
    model = plain()
    model.get_parameter(parameter).data.fill_(value)
    solver = ConjugateGradients(preconditioner_rank=20, on_failure="warn")
    with pytest.raises(NonFiniteError, match="finite"):
        IterativePosterior(model, solver)


def test_a_kernel_that_overflows_at_new_points_is_an_error():
    model = plain(PolynomialKernel(power=4), dtype=torch.float32, noise=1.0)
    posterior = IterativePosterior(model, LOOSE)
    for predict in (posterior.mean, posterior.variance, posterior.covariance):
        with pytest.raises(NonFiniteError, match="covariance"):
            predict(torch.full((3, D), 1e12))


def test_a_tolerance_that_is_not_reached():
    model, x = plain(noise=1e-3), new_x()
    strict = ConjugateGradients(tolerance=1e-8, preconditioner_rank=0, max_iterations=3)
    with pytest.raises(NotConvergedError, match="relative residual"):
        IterativePosterior(model, strict)
    lax = ConjugateGradients(
        tolerance=1e-8, preconditioner_rank=0, max_iterations=3, on_failure="warn"
    )
    with pytest.warns(NotConvergedWarning, match="after 3 iterations"):
        posterior = IterativePosterior(model, lax)
    assert posterior.report.residual > 1e-8
    with pytest.warns(NotConvergedWarning):
        prediction = posterior.predict(x, observation_noise=False)
    assert prediction.residual > 1e-8
    excess = prediction.distribution.variance - exact(model, x).variance
    assert excess.min() > 0  # an over-estimate all the same, and the bound says how much
    assert (excess <= prediction.variance_excess).all()


def available(monkeypatch, numbers):
    monkeypatch.setattr(gpclml._utils.environment, "available_memory", lambda device: 8 * numbers)


def test_what_memory_does_not_hold_is_refused_beforehand(monkeypatch):
    model = plain()
    solver = ConjugateGradients(preconditioner_rank=5, kept_bytes=0)
    available(monkeypatch, N * (3 * 5 + 16) - 1)
    with pytest.raises(ArgumentError, match=r"model: got 90 training points, which needs .* GiB"):
        IterativePosterior(model, solver)
    available(monkeypatch, N * (3 * 5 + 16 * 2))
    posterior = IterativePosterior(model, solver)
    with pytest.raises(ArgumentError, match=r"x: got 13 points jointly, which needs .* GiB"):
        posterior.covariance(new_x())
    assert posterior.variance(new_x()).shape == (M,)
    available(monkeypatch, N * (3 * 5 + 16) - 1)
    with pytest.raises(ArgumentError, match="x: got one point, which needs"):
        posterior.variance(new_x())


def test_a_covariance_that_is_evaluated_without_a_choice_is_refused_too(monkeypatch):
    n = 1100
    x = torch.rand(n, 2, dtype=torch.float64)
    model = GPRegression(x, x.sum(-1))
    available(monkeypatch, 2 * n * n - 1)
    with pytest.raises(ArgumentError, match=r"model: got a dense covariance .* needs 0.0 GiB"):
        learning_curve(model)
    features = GPRegression(x, x.sum(-1), kernel=gpytorch.kernels.LinearKernel())
    assert torch.isfinite(learning_curve(features)).all()  # which needs no matrix
