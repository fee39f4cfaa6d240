"""Line searches of objectives that do not score first points keep scale and mean."""

from __future__ import annotations

import math
import warnings

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood
from gpytorch.priors import LogNormalPrior, NormalPrior
from sklearn.datasets import load_diabetes

from gpclml import GPRegression, fit_mll
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.fit import FitWarning, fit_gpytorch_mll_fused
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss

pytestmark = pytest.mark.filterwarnings("ignore:The noise ended:gpclml.fit.FitWarning")


def patients(n=30, first=0):
    x, y = map(torch.tensor, load_diabetes(return_X_y=True, scaled=False))
    return x[first : first + n], y[first : first + n]


def clml(model, conditioning=None):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


OBJECTIVES = {
    "ten folds": clml,
    "leave-one-out": lambda model: clml(model, LeaveOneOut()),
    "a fixed half": lambda model: clml(model, RandomHoldout(0.5, seed=0)),
    "three folds": lambda model: clml(model, KFold(3)),
    "GPyTorch's": lambda model: LeaveOneOutPseudoLikelihood(model.likelihood, model),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kernel", ["matern", "rbf", "rq"])
@pytest.mark.parametrize("first", [0, 100, 300])
def test_scale_and_mean_of_a_regression_stay(name, kernel, first):
    model = GPRegression(*patients(first=first), kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        result = fit_mll(OBJECTIVES[name](model), progress=False)
    assert result.problem != "runaway"
    assert model.covar_module.outputscale.item() < 100
    assert abs(model.mean_module.constant.item()) < 5
    assert not list(model.named_priors())


def test_the_objective_of_a_fit_leaves_the_weak_priors_out():
    mll = clml(GPRegression(*patients()))
    result = fit_mll(mll, progress=False)
    assert result.objective == pytest.approx(-fixed_loss(mll.train()).item(), rel=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kernel", ["matern", "rq"])
def test_so_do_they_in_the_search_of_botorch(name, kernel):
    model = GPRegression(*patients(), kernel)
    fit_gpytorch_mll(OBJECTIVES[name](model))
    assert model.covar_module.outputscale.item() < 100
    assert abs(model.mean_module.constant.item()) < 5
    assert not list(model.named_priors())


def test_the_loss_of_a_search_is_the_objective_and_its_weak_priors():
    model = GPRegression(*patients())
    mll = clml(model)
    scale, mean = model.covar_module.outputscale, model.mean_module.constant
    lengthscale = model.covar_module.base_kernel.lengthscale
    around = 0.5 * math.log(model.train_inputs[0].shape[-1])
    priors = (
        LogNormalPrior(0.0, 1.5).log_prob(scale)
        + NormalPrior(0.0, 1.0).log_prob(mean)
        + LogNormalPrior(around, 1.0).log_prob(lengthscale).sum()
    )
    expected = fixed_loss(mll) - priors / len(model.train_targets)
    torch.testing.assert_close(mll.compute_custom_loss(), expected)
    of_mll = clml(model, LastPoints(m=0))
    torch.testing.assert_close(of_mll.compute_custom_loss(), fixed_loss(of_mll))


def test_priors_of_the_caller_stand():
    model = GPRegression(*patients())
    prior = gpytorch.priors.LogNormalPrior(3.0, 0.01)
    model.covar_module.register_prior("outputscale_prior", prior, "outputscale")
    fit_mll(clml(model, LeaveOneOut()), progress=False)
    assert model.covar_module.outputscale.item() == pytest.approx(20.0, rel=0.1)
    assert [entry[2] for entry in model.named_priors()] == [prior]


def test_the_marginal_likelihood_has_no_weak_priors():
    ours, theirs = GPRegression(*patients()), GPRegression(*patients())
    fit_mll(clml(ours, LastPoints(m=0)), progress=False)
    fit_mll(ExactMarginalLogLikelihood(theirs.likelihood, theirs), progress=False)
    values = [
        -clml(model.train(), LastPoints(m=0)).compute_custom_loss() for model in (ours, theirs)
    ]
    torch.testing.assert_close(*values, rtol=0.0, atol=1e-4)


def runaway(first=0):
    """A model of a caller, whose targets have no noise and follow a line."""
    generator = torch.Generator().manual_seed(first)
    x = torch.rand(30, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([3.0, -2.0, 1.0, 0.5], dtype=torch.float64) + 40.0 * x[:, 0] ** 2
    kernel = ScaleKernel(RBFKernel(ard_num_dims=4) * MaternKernel(ard_num_dims=4))
    return SingleTaskGP(x, y.unsqueeze(-1), covar_module=kernel, input_transform=Normalize(4))


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_of_the_caller_that_runs_away_says_so_and_what_to_do(fused):
    def fit():
        if fused:
            return fit_gpytorch_mll(clml(runaway()), optimizer=fit_gpytorch_mll_fused)
        return fit_mll(clml(runaway()), progress=False)

    with pytest.warns(FitWarning, match=r"does not score first points.*LogNormalPrior"):
        result = fit()
    assert fused or result.problem == "runaway"


def test_the_marginal_likelihood_may_take_a_large_scale():
    model = runaway()
    result = fit_mll(ExactMarginalLogLikelihood(model.likelihood, model), progress=False)
    assert result.problem != "runaway"
