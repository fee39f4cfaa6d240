"""Line searches: the vector that they move in, where they end, and what they say of it."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from exact_gps import PlainGP
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import LogNormalPrior, NormalPrior
from sklearn.datasets import load_diabetes

from gpclml import ConditionalMarginalLogLikelihood, GPRegression, fit_mll
from gpclml.conditioning import LastPoints, LeaveOneOut, RandomHoldout
from gpclml.fit import FitWarning, fit_gpytorch_mll_fused
from gpclml.fit.diagnosis import predicts_in_its_type, ran_away
from gpclml.fit.search import Vector, bounds_of
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss

SOFTPLUS = torch.nn.Softplus(beta=3.0)
# With lengthscales to begin at.
CONSTRAINTS = {
    "softplus": (Positive(), 25.0),
    "bounded softplus": (GreaterThan(0.05), 0.06),
    "another softplus": (
        Positive(transform=SOFTPLUS, inv_transform=lambda v: torch.expm1(3.0 * v).log() / 3.0), 2.0
    ),
    "no transform": (GreaterThan(0.05, transform=None), 0.06),
    "exponential": (Positive(transform=torch.exp, inv_transform=torch.log), 2.0),
    "interval": (Interval(0.01, 30.0), 25.0),
    "from above": (LessThan(30.0), 2.0),
}  # fmt: skip


def data(n=30, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + x.sum(-1) + 0.1 * noise
    return x, (y - y.mean()) / y.std()


def lml(model):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))


def objective(constraint, lengthscale=2.0):
    kernel = RQKernel(ard_num_dims=3, lengthscale_constraint=constraint)
    model = PlainGP(*data(), ScaleKernel(kernel)).double()
    kernel.lengthscale = lengthscale
    return lml(model).train()


def begun(mll, logarithmic=True):
    vector = Vector(mll, bounds_of(mll), FixedLoss(mll))
    vector.evaluate(vector.best)
    if logarithmic:
        vector.take_logarithms()
    return vector


# ------------------------------------------------------------------ the vector


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_value_and_slope_are_those_of_the_objective(name, logarithmic):
    mll = objective(*CONSTRAINTS[name])
    before = {key: value.clone() for key, value in mll.state_dict().items()}
    expected = fixed_loss(mll).item()
    with begun(mll, logarithmic) as vector:
        point = vector.best
        value, slope = vector(point.copy())
        assert value == pytest.approx(expected, rel=1e-12)
        for index in range(len(point)):
            step = 1e-5 * np.eye(len(point))[index]
            (above, _), (below, _) = vector(point + step), vector(point - step)
            assert slope[index] == pytest.approx((above - below) / 2e-5, rel=1e-5, abs=1e-9)
        vector.best = point
    for key, value in mll.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=1e-12, atol=1e-12)


def test_bounds_are_reached_and_not_passed_and_a_flat_direction_stays_finite():
    mll = objective(GreaterThan(0.05, transform=None))
    lower = torch.tensor(0.05).double()
    with begun(mll) as vector:
        for side in (0, 1):
            vector(np.where(np.isfinite(vector.box[side]), vector.box[side], vector.best))
            assert all(torch.isfinite(p).all() for p in mll.parameters())
            if side == 0:
                raw = mll.model.covar_module.base_kernel.raw_lengthscale.detach()
                torch.testing.assert_close(raw, lower.expand(1, 3), rtol=1e-14, atol=0.0)
                assert bool((raw >= lower).all())


def test_the_end_is_an_optimum_of_gpytorch_s_objective():
    x, y = data(40, 4)
    model = SingleTaskGP(x, y.unsqueeze(-1))
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    assert fit_mll(mll, progress=False).problem == ""
    mll.train()
    mll(model(*model.train_inputs), model.train_targets).backward()
    bounds = bounds_of(mll)
    for name, parameter in mll.named_parameters():
        slope = parameter.grad * parameter.detach().abs()  # by its logarithm
        lower = bounds.get(name, (None,))[0]
        free = parameter > (-np.inf if lower is None else lower)
        assert float(slope[free].abs().max()) < 1e-4


# ------------------------------------------------------------------ single precision


def function(x):
    return x.sum(-1, keepdim=True) ** 2


def smooth(seed=0, noise=0.01):
    generator = torch.Generator().manual_seed(seed)
    x, new_x = torch.rand(50, 2, generator=generator), torch.rand(100, 2, generator=generator)
    return x, function(x) + noise * torch.randn(50, 1, generator=generator), new_x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # BoTorch's of float32; of a scale that runs away
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (MaternKernel, ExactMarginalLogLikelihood), (RQKernel, ExactMarginalLogLikelihood),
        (RBFKernel, ConditionalMarginalLogLikelihood),
    ],
)  # fmt: skip
def test_a_fitted_float32_model_of_botorch_predicts_a_smooth_function(kernel, kind):
    x, y, new_x = smooth()
    model = SingleTaskGP(x, y, covar_module=ScaleKernel(kernel(ard_num_dims=2)))
    fit_gpytorch_mll(kind(model.likelihood, model), optimizer=fit_gpytorch_mll_fused)
    double = copy.deepcopy(model).double()
    double.set_train_data(x.double(), model.train_targets.double(), strict=False)
    with torch.no_grad():
        posterior, expected = model.posterior(new_x), double.posterior(new_x.double())
        error = (posterior.mean - function(new_x)).square().mean().sqrt()
    assert error < 0.02  # the targets range over 3.5
    off = (posterior.mean - expected.mean).abs() / (expected.variance.sqrt() + 0.01)
    assert off.max() < 0.5
    assert not list(model.added_loss_terms())


@pytest.mark.filterwarnings("ignore")
def test_predictions_without_digits_and_a_mean_beside_the_targets_are_told():
    x, y, _ = smooth()
    model = SingleTaskGP(x, y, covar_module=ScaleKernel(MaternKernel(ard_num_dims=2)))
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    model.likelihood.noise, model.covar_module.outputscale = 1e-3, 1.0
    assert predicts_in_its_type(mll)
    model.covar_module.outputscale = 1e5
    model.covar_module.base_kernel.lengthscale = 30.0
    assert not predicts_in_its_type(mll)
    model.covar_module.outputscale, model.mean_module.constant = 1.0, 50.0
    assert "the mean 51 deviations" in ran_away(clml(model))


@pytest.mark.filterwarnings("ignore")
def test_a_shape_that_is_no_longer_a_parameter_stays_finite():
    x, y, _ = smooth(1)
    model = GPRegression(x, y.squeeze(-1), "rq")
    fit_mll(lml(model), progress=False)
    assert model.covar_module.base_kernel.alpha <= 1.001e5


# ------------------------------------------------------------------ noise at its lower bound


def drawn(n, d, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = torch.sin(3 * x[:, :3]).sum(-1)
    return x, y + noise * torch.randn(n, generator=generator, dtype=torch.float64)


def fitted(x, y, prior=None):
    model = GPRegression(x, y, "matern")
    if prior is not None:
        model.likelihood.noise_covar.register_prior("noise_prior", prior, "noise")
    return model, fit_mll(lml(model), progress=False)


@pytest.mark.parametrize("seed", [1, 2])
def test_few_points_with_noise_that_the_fit_takes_for_exact(seed):
    x, y = drawn(530, 10, 0.5, seed)
    with pytest.warns(FitWarning, match="noise ended at its lower bound"):
        model, result = fitted(x[:30], y[:30])
    assert result.problem == "noise"
    assert not result.converged
    assert model.likelihood.noise.item() < 1.1e-4
    predicted = model.predict(x[30:], marginal=True)
    inside = (y[30:] - predicted.mean).abs() < 1.96 * predicted.stddev
    assert float(inside.double().mean()) < 0.85  # of what should be .95


@pytest.mark.parametrize(
    ("n", "d", "noise", "prior"),
    [
        (30, 2, 0.0, None), (150, 2, 0.0, None), (60, 3, 0.3, None),
        (30, 10, 0.5, LogNormalPrior(-12.0, 0.1)),
    ],
)  # fmt: skip
def test_noise_at_its_bound_that_targets_or_a_prior_support(n, d, noise, prior):
    model, result = fitted(*drawn(n, d, noise, 1), prior)
    assert result.problem == ""
    assert (model.likelihood.noise.item() < 1.1e-4) == (noise == 0 or prior is not None)


# ------------------------------------------------------------------ scale and mean that are open


def patients(n=30, first=0):
    x, y = map(torch.tensor, load_diabetes(return_X_y=True, scaled=False))
    return x[first : first + n], y[first : first + n]


def clml(model, conditioning=None):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


OBJECTIVES = {
    "ten folds": clml,
    "leave-one-out": lambda model: clml(model, LeaveOneOut()),
    "a fixed half": lambda model: clml(model, RandomHoldout(0.5, seed=0)),
    "GPyTorch's": lambda model: LeaveOneOutPseudoLikelihood(model.likelihood, model),
}


@pytest.mark.parametrize(
    ("name", "kernel", "first", "fit"),
    [
        ("ten folds", "matern", 0, fit_gpytorch_mll), ("leave-one-out", "rq", 100, fit_mll),
        ("a fixed half", "rbf", 300, fit_mll), ("GPyTorch's", "matern", 100, fit_gpytorch_mll),
    ],
)  # fmt: skip
def test_scale_and_mean_of_a_regression_stay(name, kernel, first, fit):
    model = GPRegression(*patients(first=first), kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        result = fit(OBJECTIVES[name](model))
    assert getattr(result, "problem", "") != "runaway"
    assert model.covar_module.outputscale.item() < 100
    assert abs(model.mean_module.constant.item()) < 5
    assert not list(model.named_priors())


@pytest.mark.filterwarnings("ignore:The noise ended:gpclml.fit.FitWarning")
def test_the_loss_of_a_search_is_the_objective_and_its_weak_priors():
    model = GPRegression(*patients())
    mll = clml(model)
    scale, mean = model.covar_module.outputscale, model.mean_module.constant
    around = 0.5 * math.log(model.train_inputs[0].shape[-1])
    priors = (
        LogNormalPrior(0.0, 1.5).log_prob(scale)
        + NormalPrior(0.0, 1.0).log_prob(mean)
        + LogNormalPrior(around, 1.0).log_prob(model.covar_module.base_kernel.lengthscale).sum()
    )
    expected = fixed_loss(mll) - priors / len(model.train_targets)
    torch.testing.assert_close(mll.compute_custom_loss(), expected)
    torch.testing.assert_close(lml(model).compute_custom_loss(), fixed_loss(lml(model)))
    result = fit_mll(mll, progress=False)
    assert result.objective == pytest.approx(-fixed_loss(mll.train()).item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore:The noise ended:gpclml.fit.FitWarning")
def test_priors_of_the_caller_stand():
    model = GPRegression(*patients())
    prior = LogNormalPrior(3.0, 0.01)
    model.covar_module.register_prior("outputscale_prior", prior, "outputscale")
    fit_mll(clml(model, LeaveOneOut()), progress=False)
    assert model.covar_module.outputscale.item() == pytest.approx(20.0, rel=0.1)
    assert [entry[2] for entry in model.named_priors()] == [prior]


def runaway():
    """A model of a caller, whose targets have no noise and follow a line."""
    x = data(d=4)[0]
    y = x @ torch.tensor([3.0, -2.0, 1.0, 0.5], dtype=torch.float64) + 40.0 * x[:, 0] ** 2
    kernel = ScaleKernel(RBFKernel(ard_num_dims=4) * MaternKernel(ard_num_dims=4))
    return SingleTaskGP(x, y.unsqueeze(-1), covar_module=kernel, input_transform=Normalize(4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The noise ended:gpclml.fit.FitWarning")
def test_a_model_of_the_caller_that_runs_away_says_so_and_what_to_do():
    match = r"does not score first points.*LogNormalPrior"
    with pytest.warns(FitWarning, match=match):
        fit_gpytorch_mll(clml(runaway()), optimizer=fit_gpytorch_mll_fused)
    with pytest.warns(FitWarning, match=match):
        assert fit_mll(clml(runaway()), progress=False).problem == "runaway"
    model = runaway()  # the marginal likelihood may take a large scale
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    assert fit_mll(mll, progress=False).problem != "runaway"
