"""The line search as an optimizer of BoTorch's fits, and the models that these may meet."""

import copy
import warnings
from functools import partial
from operator import attrgetter

import gpytorch
import pytest
import scipy.optimize
import torch
from botorch.acquisition import qKnowledgeGradient
from botorch.exceptions.warnings import OptimizationWarning
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
from botorch.optim.core import OptimizationStatus
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood, VariationalELBO
from gpytorch.priors import GammaPrior, UniformPrior
from linear_operator.utils.errors import NanError
from sklearn.datasets import load_diabetes

from gpclml import BayesianLinearModel, GPRegression, fit_mll
from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError, ShapeError, UnsupportedError
from gpclml.fit import FitWarning, fit_gpytorch_mll_fused
from gpclml.fit.search import LineSearchEnd
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss, fixed_loss

pytestmark = pytest.mark.filterwarnings(
    "ignore::botorch.exceptions.warnings.InputDataWarning", "ignore::UserWarning:botorch"
)


def model_of(n=30, d=3, seed=0, outputs=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    y = torch.stack([torch.sin(6 * x[:, 0] + k) for k in range(outputs)], -1) + 0.1 * noise
    return SingleTaskGP(x, y, input_transform=Normalize(d))


def objective(kind=ExactMarginalLogLikelihood, **options):
    model = model_of(**options)
    more = () if kind is ExactMarginalLogLikelihood else (LastPoints(m=0),)
    return kind(model.likelihood, model, *more)


def fused(mll):
    return fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_fused)


def lml(mll):
    exact = ExactMarginalLogLikelihood(mll.likelihood, mll.model).train()
    with torch.no_grad():
        return exact(mll.model(*mll.model.train_inputs), mll.model.train_targets).sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 8])
@pytest.mark.parametrize("kind", [ExactMarginalLogLikelihood, ConditionalMarginalLogLikelihood])
def test_a_fit_ends_where_a_search_of_botorch_ends_that_goes_on(kind, d):
    theirs, ours = objective(n=40, d=d), objective(kind, n=40, d=d)
    options = {"ftol": 1e-14, "gtol": 1e-8, "maxiter": 10_000, "maxfun": 20_000}
    fit_gpytorch_mll(theirs, optimizer_kwargs={"options": options})
    assert fused(ours) is ours
    assert not ours.training
    assert lml(ours) == pytest.approx(lml(theirs), abs=1e-6)
    for name in ("likelihood.noise", "model.covar_module.lengthscale"):
        result, expected = (attrgetter(name)(mll) for mll in (ours, theirs))
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=0.0)


def test_outputs_and_lists_of_models():
    several = objective(outputs=2)
    fused(several)
    assert several.model.likelihood.noise.max() < 0.1
    models = ModelListGP(model_of(seed=0), model_of(seed=1))
    both = SumMarginalLogLikelihood(models.likelihood, models)
    fused(both)
    assert all(model.likelihood.noise.max() < 0.1 for model in models.models)
    with pytest.raises(UnsupportedError, match="one objective"):
        fit_gpytorch_mll_fused(both)


def test_steps_callback_and_time_end_a_search_with_its_best_parameters():
    seen = []
    mll = objective().train()
    result = fit_gpytorch_mll_fused(
        mll, options={"maxiter": 3}, callback=lambda parameters, result: seen.append(result)
    )
    assert (result.step, result.status) == (3, OptimizationStatus.STOPPED)
    assert [result.step for result in seen] == [1, 2, 3]
    assert result.fval == seen[-1].fval
    mll = objective().train()
    before = lml(mll)
    result = fit_gpytorch_mll_fused(mll, timeout_sec=0.0)
    assert (result.step, result.status) == (1, OptimizationStatus.STOPPED)
    assert lml(mll) > before


def test_what_it_cannot_use_is_refused():
    mll = objective().train()
    for options, error, match in (
        ({"closure": lambda: None}, UnsupportedError, "closure"),
        *(({name: {}}, UnsupportedError, name) for name in ("parameters", "bounds", "method")),
        ({"options": {"tolerance": 1e-3}}, ArgumentError, "tolerance"),
        ({"options": {"maxiter": 0}}, ArgumentError, "maxiter"),
        ({"options": {"maxiter": torch.ones(2)}}, ArgumentError, "maxiter"),
    ):
        with pytest.raises(error, match=match):
            fit_gpytorch_mll_fused(mll, **options)
    more = {"ftol": 1e-3, "gtol": 1e-3, "maxls": 20, "maxcor": 20, "maxfun": 20}
    assert fit_gpytorch_mll_fused(mll, options=more, parameters=None, bounds=None).fval < 1.0
    mll.model.mean_module.raw_constant.data.fill_(torch.nan)
    with pytest.raises(NanError):
        fit_gpytorch_mll_fused(mll)


def test_botorch_tries_again_where_a_search_ends_abnormally(monkeypatch):
    mll = objective()
    ends = iter(["abnormal", "converged"])

    def line_search(*_):
        reason = next(ends)
        return LineSearchEnd(1.0, reason, "no better point" * (reason == "abnormal"))

    monkeypatch.setattr("gpclml.fit.botorch.line_search", line_search)
    with pytest.warns(OptimizationWarning, match="no better point"):
        fused(mll)
    assert next(ends, None) is None


def patients():
    return map(torch.tensor, load_diabetes(return_X_y=True, scaled=False))


def errors_of_patients(*rows, **options):
    """Errors of new rows after fits to some, a batch member for each slice."""
    x, y = (torch.stack([whole[index] for index in rows]) for whole in patients())
    x, y = (values[0] if len(rows) == 1 else values for values in (x, y.unsqueeze(-1)))
    model = SingleTaskGP(x, y, input_transform=Normalize(10, batch_shape=x.shape[:-2]))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **options)
    x, y = patients()
    with torch.no_grad():
        mean = model.posterior(x[300:]).mean.squeeze(-1)
    return (mean - y[300:]).square().mean(-1).sqrt()


@pytest.mark.slow
def test_it_predicts_as_well_as_the_fit_of_botorch_also_in_a_batch():
    slices, options = (slice(100), slice(200, 300)), {"optimizer": fit_gpytorch_mll_fused}
    together = errors_of_patients(*slices, **options)
    for rows, error in zip(slices, together, strict=True):
        alone = errors_of_patients(rows, **options)
        assert alone < 1.01 * errors_of_patients(rows)
        torch.testing.assert_close(error, alone, rtol=1e-4, atol=0.0)


def test_a_search_that_ends_on_a_steep_slope_goes_on(monkeypatch):
    theirs, ours = objective(), objective()
    fused(theirs)

    def lazy(*args, options, **others):  # it says that it has converged after three steps
        result = minimize(
            *args, options={**options, "maxiter": min(options["maxiter"], 3)}, **others
        )
        result.status = 0
        return result

    minimize = scipy.optimize.minimize
    monkeypatch.setattr(scipy.optimize, "minimize", lazy)
    fit_gpytorch_mll_fused(ours.train(), options={"maxiter": 100})
    assert lml(ours) > lml(theirs) - 0.02


# ------------------------------------------------------------------ models and what a fit may meet


def rows(n=25, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(4 * x[:, 0]) + x[:, -1] + 0.1 * noise


def whole_lml(model):
    return ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))


@pytest.mark.slow
@pytest.mark.parametrize("fit", [fused, partial(fit_mll, progress=False)])
def test_a_model_with_a_fit_of_its_own_is_fitted_by_that(fit):
    x, y = rows(30)
    y[::6] += 5.0
    model = RobustRelevancePursuitSingleTaskGP(x, y.unsqueeze(-1))
    fit(ExactMarginalLogLikelihood(model.likelihood, model))
    x, y = rows(200, seed=1)
    with torch.no_grad():
        error = (model.posterior(x).mean[:, 0] - y).square().mean().sqrt()
    assert error < 0.35  # with outliers taken for noise it is above one half


@pytest.mark.slow
def test_comparisons_and_variational_models():
    comparisons = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]])
    pairwise = PairwiseGP(rows(12)[0], comparisons)
    fused(PairwiseLaplaceMarginalLogLikelihood(pairwise.likelihood, pairwise))
    x, y = rows()
    model = SingleTaskVariationalGP(x, y.unsqueeze(-1), inducing_points=5)
    fused(VariationalELBO(model.likelihood, model.model, num_data=len(y)))


def test_restarts_with_a_prior_that_nothing_can_set_keep_the_best_attempt():
    model = GPRegression(*rows())
    model.covar_module.register_prior(
        "scale", GammaPrior(2.0, 0.5), lambda kernel: kernel.outputscale
    )
    result = fit_mll(whole_lml(model), restarts=2, progress=False)
    assert result.objective == max(result.attempts)
    assert len(result.attempts) == 3


def test_a_step_out_of_the_support_of_a_prior_is_too_long():
    model = GPRegression(*rows())
    kernel = model.covar_module.base_kernel
    kernel.register_prior("prior", UniformPrior(0.01, 30.0), "lengthscale")
    mll = whole_lml(model)
    start = -fixed_loss(mll.train()).item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)  # the slope at the edge may be steep
        result = fit_mll(mll, progress=False)
    assert result.objective > start
    assert kernel.lengthscale.max() <= 30.0


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_data_that_require_a_gradient_are_fitted_as_others(optimizer):
    plain = rows()
    tracked = [values.clone().requires_grad_() for values in plain]
    models = GPRegression(*tracked), GPRegression(*plain)
    result = [fit_mll(whole_lml(model), optimizer, steps=10, progress=False) for model in models]
    assert result[0].objective == pytest.approx(result[1].objective, rel=1e-9)
    assert all(values.grad is None for values in tracked)
    assert models[0].train_inputs[0].requires_grad


def test_a_block_whose_covariance_has_no_factor_is_left_to_other_formulas():
    values = []
    for seed in range(12):
        x, _ = rows(50, 1 + seed % 3, seed)
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


def test_look_ahead_acquisition_functions_have_values_and_gradients():
    acquisition = qKnowledgeGradient(GPRegression(*rows()), num_fantasies=2)
    points = torch.rand(4, 3, 3, dtype=torch.float64, requires_grad=True)
    values = acquisition(points)
    (gradient,) = torch.autograd.grad(values.sum(), points)
    assert values.shape == (4,)
    assert gradient.isfinite().all()
    assert (gradient[:, 0] != 0).any()


def test_a_fantasy_is_the_model_of_the_points_and_the_draws():
    (x, y), new_x = rows(), torch.rand(2, 3, dtype=torch.float64)
    model, test_x = GPRegression(x, 100 + 30 * y), torch.rand(6, 3, dtype=torch.float64)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    fantasies = model.fantasize(new_x, sampler)
    draws = sampler(model.posterior(new_x, observation_noise=True))
    assert fantasies.batch_shape == (4,)
    assert model.train_inputs[0].shape == x.shape
    result = fantasies.posterior(test_x)
    for index, draw in enumerate(draws):
        whole = copy.deepcopy(model)
        targets = model.target_standardizer.transform(draw.squeeze(-1))
        whole.set_train_data(
            torch.cat([x, new_x]), torch.cat([model.train_targets, targets]), strict=False
        )
        expected = whole.posterior(test_x)
        torch.testing.assert_close(result.mean[index], expected.mean)
        torch.testing.assert_close(result.variance[index], expected.variance)


def test_conditioning_asks_for_points_and_targets_that_fit():
    model, x = GPRegression(*rows()), torch.rand(2, 3, dtype=torch.float64)
    with pytest.raises(ShapeError, match="X"):
        model.condition_on_observations(x[:, :2], x[:, :1])
    with pytest.raises(ShapeError, match="Y"):
        model.condition_on_observations(x, x)
    fixed = GPRegression(
        *rows(), likelihood=FixedNoiseGaussianLikelihood(torch.ones(len(rows()[0])).double())
    )
    with pytest.raises(UnsupportedError, match="fixed noise"):
        fixed.condition_on_observations(x, x[:, :1])
    linear = BayesianLinearModel(*rows())
    with pytest.raises(UnsupportedError, match=r"fantasize.*SingleTaskGP"):
        linear.fantasize(x, None)
