"""Models and objectives of BoTorch whose fits differ from a plain one, and what a fit may meet."""

from __future__ import annotations

import warnings

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import (
    ModelListGP,
    PairwiseGP,
    PairwiseLaplaceMarginalLogLikelihood,
    SingleTaskGP,
    SingleTaskVariationalGP,
)
from botorch.models.robust_relevance_pursuit_model import RobustRelevancePursuitSingleTaskGP
from botorch.models.transforms import Normalize
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.priors import GammaPrior, UniformPrior

from gpclml import BayesianLinearModel, GPRegression, fit_mll
from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit import FitWarning, fit_gpytorch_mll_fused
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss

pytestmark = pytest.mark.filterwarnings(
    "ignore::botorch.exceptions.warnings.InputDataWarning", "ignore::UserWarning:botorch"
)


def data(n=25, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(4 * x[:, 0]) + x[:, -1] + 0.1 * noise


def lml(model):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))


def fused(mll, **options):
    return fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_fused, **options)


def robust():
    x, y = data(30)
    y[::6] += 5.0
    model = RobustRelevancePursuitSingleTaskGP(x, y.unsqueeze(-1))
    return ExactMarginalLogLikelihood(model.likelihood, model)


@pytest.mark.parametrize("way", ["fused", "fit_mll"])
def test_a_model_with_a_fit_of_its_own_is_fitted_by_that(way):
    mll = robust()
    if way == "fused":
        fused(mll)
    else:
        fit_mll(mll, progress=False)
    x, y = data(200, seed=1)
    with torch.no_grad():
        error = (mll.model.posterior(x).mean[:, 0] - y).square().mean().sqrt()
    assert error < 0.35  # with outliers taken for noise it is above one half


@pytest.mark.parametrize("name", ["ftol", "gtol", "maxls", "maxcor", "maxfun"])
def test_options_of_botorch_are_passed_on(name):
    x, y = data()
    model = SingleTaskGP(x, y.unsqueeze(-1))
    value = 1e-3 if name.endswith("tol") else 20
    fused(
        ExactMarginalLogLikelihood(model.likelihood, model),
        optimizer_kwargs={"options": {name: value}},
    )
    with pytest.raises(ArgumentError, match="step_limit"):
        fit_gpytorch_mll_fused(lml(model), options={"step_limit": 3})


@pytest.mark.parametrize("name", ["parameters", "bounds", "method"])
def test_what_a_search_cannot_take_is_refused_by_name(name):
    x, y = data()
    model = SingleTaskGP(x, y.unsqueeze(-1))
    with pytest.raises(UnsupportedError, match=name):
        fit_gpytorch_mll_fused(lml(model).train(), **{name: {}})
    fit_gpytorch_mll_fused(lml(model).train(), **{name: None})


def test_comparisons_and_variational_models():
    x, _ = data(12)
    comparisons = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]])
    pairwise = PairwiseGP(x, comparisons)
    mll = PairwiseLaplaceMarginalLogLikelihood(pairwise.likelihood, pairwise)
    fused(mll)
    x, y = data()
    model = SingleTaskVariationalGP(x, y.unsqueeze(-1), inducing_points=5)
    mll = VariationalELBO(model.likelihood, model.model, num_data=len(y))
    fused(mll)


def test_restarts_with_a_prior_that_nothing_can_set_keep_the_best_attempt():
    model = GPRegression(*data())
    model.covar_module.register_prior(
        "scale", GammaPrior(2.0, 0.5), lambda kernel: kernel.outputscale
    )
    found = fit_mll(lml(model), restarts=2, progress=False)
    assert found.objective == max(found.attempts)
    assert len(found.attempts) == 3


def test_a_step_out_of_the_support_of_a_prior_is_too_long():
    model = GPRegression(*data())
    kernel = model.covar_module.base_kernel
    kernel.register_prior("prior", UniformPrior(0.01, 30.0), "lengthscale")
    mll = lml(model)
    start = -fixed_loss(mll.train()).item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # the slope at the edge may be steep
        found = fit_mll(mll, progress=False)
    assert found.objective > start
    assert kernel.lengthscale.max() <= 30.0


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_data_that_require_a_gradient_are_fitted_as_others(which, optimizer):
    x, y = data()
    own = {"inputs": x, "targets": y}
    own[which] = own[which].clone().requires_grad_()
    ours, plain = GPRegression(own["inputs"], own["targets"]), GPRegression(x, y)
    found = [fit_mll(lml(model), optimizer, steps=10, progress=False) for model in (ours, plain)]
    assert found[0].objective == pytest.approx(found[1].objective, rel=1e-9)
    assert own[which].grad is None
    assert ours.train_inputs[0].requires_grad == (which == "inputs")


def test_a_transform_of_inputs_that_require_a_gradient():
    x, y = data()
    model = SingleTaskGP(x.clone().requires_grad_(), y.unsqueeze(-1), input_transform=Normalize(3))
    fused(ExactMarginalLogLikelihood(model.likelihood, model))
    assert model.likelihood.noise.item() < 0.1


def test_a_block_whose_covariance_has_no_factor_is_left_to_other_formulas():
    values = []
    for seed in range(12):
        x, _ = data(50, 1 + seed % 3, seed)
        model = GPRegression(x, x.sum(-1).sin(), "rbf")
        bound = gpytorch.constraints.GreaterThan(1e-12)
        model.likelihood.noise_covar.register_constraint("raw_noise", bound)
        model.likelihood.noise, model.covar_module.outputscale = 1.5e-10, 100.0
        model.covar_module.base_kernel.lengthscale = 5.0
        model.mean_module.constant = 1e9  # residuals beside which all else is rounding
        values.append(
            FixedLoss(ConditionalMarginalLogLikelihood(model.likelihood, model).train())()
        )
    assert torch.tensor(values).isfinite().all()


def test_a_list_of_models_is_refused_by_the_name_of_the_objective_that_takes_it():
    x, y = data()
    models = ModelListGP(SingleTaskGP(x, y.unsqueeze(-1)), SingleTaskGP(x, -y.unsqueeze(-1)))
    with pytest.raises(UnsupportedError, match="SumMarginalLogLikelihood"):
        ConditionalMarginalLogLikelihood(models.likelihood, models)


@pytest.mark.parametrize("kind", [BayesianLinearModel, GPRegression])
def test_look_ahead_acquisition_functions_are_told_what_to_take(kind):
    with pytest.raises(UnsupportedError, match=r"fantasize.*SingleTaskGP, or DeepKernelGP"):
        kind(*data()).fantasize(torch.rand(2, 3).double(), None)
