"""What an iterative posterior refuses, and what it leaves of the model."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import (
    GridInterpolationKernel,
    MultitaskKernel,
    PolynomialKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import (
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.models import ExactGP
from posterior_cases import (
    LOOSE,
    TIGHT,
    D,
    M,
    N,
    PlainGP,
    data,
    exact,
    new_x,
    plain,
)

import gpclml._utils.environment
from gpclml.errors import (
    ArgumentError,
    NonFiniteError,
    NotConvergedError,
    ShapeError,
    UnsupportedError,
)
from gpclml.evaluation import learning_curve
from gpclml.inference import IterativePosterior
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


def _new_lengthscale(model):
    model.covar_module.base_kernel.lengthscale = 3.0  # GPyTorch writes through .data


def _new_step(model):
    with torch.no_grad():
        model.likelihood.noise_covar.raw_noise.add_(1.0)


def _new_data(model):
    x, y = data(20)
    model.set_train_data(x, y, strict=False)


def _new_targets(model):
    model.set_train_data(targets=model.train_targets + 1.0)


@pytest.mark.parametrize("change", [_new_lengthscale, _new_step, _new_data, _new_targets])
def test_a_changed_model_is_refused(change):
    model = plain(missing=True)
    posterior = IterativePosterior(model, TIGHT)
    posterior.mean(new_x())
    change(model)
    for ask in (posterior.mean, posterior.variance, posterior.covariance, posterior.sample):
        with pytest.raises(ArgumentError, match=r"model: got a changed .* Make a new"):
            ask(new_x())


def test_a_grid_that_the_points_move_is_refused():
    kernel = GridInterpolationKernel(ScaleKernel(RBFKernel()), grid_size=16, num_dims=D)
    posterior = IterativePosterior(plain(kernel), TIGHT)
    posterior.mean(0.5 * new_x() + 0.25)
    with pytest.raises(ArgumentError, match="grid"):
        posterior.mean(new_x() + 5)


def test_bad_points():
    posterior = IterativePosterior(plain(), TIGHT)
    with pytest.raises(ShapeError, match=r"x: got \(13, 1\)"):
        posterior.mean(new_x()[:, :1])
    with pytest.raises(ShapeError, match="m >= 1"):
        posterior.variance(new_x()[:0])
    with pytest.raises(ArgumentError, match=r"torch.float32 on cpu, expected torch.float64 on cpu"):
        posterior.covariance(new_x().float())
    with pytest.raises(ArgumentError, match="meta"):
        posterior.mean(new_x().to("meta"))
    unknown = new_x()
    unknown[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"1 of .* not finite"):
        posterior.sample(unknown)
    with pytest.raises(UnsupportedError, match="gradient"):
        posterior.mean(new_x().requires_grad_())
    with pytest.raises(ArgumentError, match="num_samples"):
        posterior.sample(new_x(), 0)
    with pytest.raises(ArgumentError, match="as_tensor"):
        posterior.mean([[1.0, 2.0]])
    batch = IterativePosterior(plain(batch=(2,)), TIGHT)
    with pytest.raises(ShapeError, match="broadcasts with"):
        batch.mean(new_x(batch=(3,)))


def test_bad_models():
    with pytest.raises(UnsupportedError, match="Linear"):
        IterativePosterior(torch.nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="training data"):
        IterativePosterior(PlainGP(None, None, RBFKernel(), GaussianLikelihood().double()))
    with pytest.raises(ArgumentError, match="points_at_once"):
        IterativePosterior(plain(), points_at_once=0)
    infinite = plain()
    infinite.train_targets[0] = torch.inf
    with pytest.raises(NonFiniteError, match="target"):
        IterativePosterior(infinite)


@pytest.mark.parametrize("rank", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("parameter", ["outputscale", "noise", "constant"])
def test_hyperparameters_that_are_not_finite_are_an_error(parameter, value, dtype, rank):
    model = plain(dtype=dtype)
    named = {
        "outputscale": model.covar_module.raw_outputscale,
        "noise": model.likelihood.noise_covar.raw_noise,
        "constant": model.mean_module.constant,
    }
    named[parameter].data.fill_(value)
    solver = ConjugateGradients(preconditioner_rank=rank, on_failure="warn")
    with pytest.raises(NonFiniteError, match="finite"):
        IterativePosterior(model, solver)


def test_a_kernel_that_overflows_at_new_points_is_an_error():
    model = plain(PolynomialKernel(power=4), dtype=torch.float32, noise=1.0)
    posterior = IterativePosterior(model, LOOSE)
    for predict in (posterior.mean, posterior.variance, posterior.covariance):
        with pytest.raises(NonFiniteError, match="covariance"):
            predict(torch.full((3, D), 1e12))


def test_several_tasks_are_refused():
    class Multitask(ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = MultitaskMean(ConstantMean(), num_tasks=2)
            self.covar_module = MultitaskKernel(RBFKernel(), num_tasks=2)

        def forward(self, x):
            return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    x, y = data(10)
    model = Multitask(x, torch.stack([y, -y], -1), MultitaskGaussianLikelihood(2)).double()
    with pytest.raises(UnsupportedError, match="2 tasks"):
        IterativePosterior(model)


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
        found = posterior.predict(x, observation_noise=False)
    assert found.residual > 1e-8
    excess = found.distribution.variance - exact(model, x).variance
    assert excess.min() > 0  # an over-estimate all the same, and the bound says how much
    assert (excess <= found.variance_excess).all()


def available(monkeypatch, numbers):
    monkeypatch.setattr(gpclml._utils.environment, "available_memory", lambda device: 8 * numbers)


def test_what_memory_does_not_hold_is_refused_beforehand(monkeypatch):
    model = plain()
    solver = ConjugateGradients(preconditioner_rank=5, kept_bytes=0)
    available(monkeypatch, N * (3 * 5 + 16) - 1)
    with pytest.raises(ArgumentError, match=r"model: got 90 training points, which needs .* GiB"):
        IterativePosterior(model, solver)
    available(monkeypatch, N * (3 * 5 + 16 * 2))
    posterior = IterativePosterior(model, solver, points_at_once=2)
    monkeypatch.setattr(posterior._given, "given", None)  # nothing is solved for
    with pytest.raises(ArgumentError, match=r"x: got 13 points jointly, which needs .* GiB"):
        posterior.covariance(new_x())
    posterior = IterativePosterior(model, solver, points_at_once=2)
    assert posterior.variance(new_x()).shape == (M,)
    wide = IterativePosterior(model, solver, points_at_once=3)
    with pytest.raises(ArgumentError, match="Lower points_at_once"):
        wide.variance(new_x())


def test_a_covariance_that_is_evaluated_without_a_choice_is_refused_too(monkeypatch):
    n = 1100
    x = torch.rand(n, 2, dtype=torch.float64)
    model = GPRegression(x, x.sum(-1))
    available(monkeypatch, 2 * n * n - 1)
    with pytest.raises(ArgumentError, match=r"model: got a dense covariance .* needs 0.0 GiB"):
        learning_curve(model)
    features = GPRegression(x, x.sum(-1), kernel=gpytorch.kernels.LinearKernel())
    assert torch.isfinite(learning_curve(features)).all()  # which needs no matrix
