"""The line search as an optimizer of BoTorch's fits."""

from operator import attrgetter

import pytest
import scipy.optimize
import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.optim.core import OptimizationStatus
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from linear_operator.utils.errors import NanError
from sklearn.datasets import load_diabetes

from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError, UnsupportedError
from gpclml.fit import fit_gpytorch_mll_fused, fit_mll
from gpclml.fit.search import LineSearchEnd
from gpclml.mlls import ConditionalMarginalLogLikelihood


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


def lml(mll):
    exact = ExactMarginalLogLikelihood(mll.likelihood, mll.model).train()
    with torch.no_grad():
        return exact(mll.model(*mll.model.train_inputs), mll.model.train_targets).sum().item()


@pytest.mark.parametrize("kind", [ExactMarginalLogLikelihood, ConditionalMarginalLogLikelihood])
@pytest.mark.parametrize("seed", range(3))
def test_a_fit_of_botorch_ends_at_the_same_optimum_or_above(kind, seed):
    theirs, ours = objective(seed=seed), objective(kind, seed=seed)
    fit_gpytorch_mll(theirs)
    assert fit_gpytorch_mll(ours, optimizer=fit_gpytorch_mll_fused) is ours
    assert not ours.training
    assert lml(ours) > lml(theirs) - 1e-6


@pytest.mark.parametrize("d", [2, 8])
@pytest.mark.parametrize("seed", range(2))
def test_a_search_of_botorch_that_goes_on_ends_at_the_same_hyperparameters(d, seed):
    theirs, ours = objective(n=40, d=d, seed=seed), objective(n=40, d=d, seed=seed)
    options = {"ftol": 1e-14, "gtol": 1e-8, "maxiter": 10_000, "maxfun": 20_000}
    fit_gpytorch_mll(theirs, optimizer_kwargs={"options": options})
    fit_mll(ours, progress=False)
    assert lml(ours) == pytest.approx(lml(theirs), abs=1e-6)
    for of in ("likelihood.noise", "model.covar_module.lengthscale"):
        one, other = (attrgetter(of)(mll) for mll in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=0.0)


def test_it_is_the_search_of_fit_mll():
    first, second = objective(), objective()
    fit_gpytorch_mll(first, optimizer=fit_gpytorch_mll_fused)
    fit_mll(second, progress=False)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


def test_outputs_and_lists_of_models():
    several = objective(outputs=2)
    fit_gpytorch_mll(several, optimizer=fit_gpytorch_mll_fused)
    assert several.model.likelihood.noise.max() < 0.1
    models = ModelListGP(model_of(seed=0), model_of(seed=1))
    both = SumMarginalLogLikelihood(models.likelihood, models)
    fit_gpytorch_mll(both, optimizer=fit_gpytorch_mll_fused)
    assert all(model.likelihood.noise.max() < 0.1 for model in models.models)
    with pytest.raises(UnsupportedError, match="one objective"):
        fit_gpytorch_mll_fused(both)


def test_steps_callback_and_time_end_a_search_with_its_best_parameters():
    seen = []
    mll = objective().train()
    found = fit_gpytorch_mll_fused(
        mll, options={"maxiter": 3}, callback=lambda parameters, result: seen.append(result)
    )
    assert (found.step, found.status) == (3, OptimizationStatus.STOPPED)
    assert [one.step for one in seen] == [1, 2, 3]
    assert found.fval == seen[-1].fval
    mll = objective().train()
    before = lml(mll)
    mll.train()
    found = fit_gpytorch_mll_fused(mll, timeout_sec=0.0)
    assert (found.step, found.status) == (1, OptimizationStatus.STOPPED)
    assert lml(mll) > before


def test_what_it_cannot_use_is_refused():
    mll = objective().train()
    with pytest.raises(UnsupportedError, match="closure"):
        fit_gpytorch_mll_fused(mll, closure=lambda: None)
    with pytest.raises(ArgumentError, match="tolerance"):
        fit_gpytorch_mll_fused(mll, options={"tolerance": 1e-3})
    for steps in (0, torch.ones(2)):
        with pytest.raises(ArgumentError, match="maxiter"):
            fit_gpytorch_mll_fused(mll, options={"maxiter": steps})
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
        fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_fused)
    assert next(ends, None) is None


def patients():
    return map(torch.tensor, load_diabetes(return_X_y=True, scaled=False))


def model_of_patients(*rows, **options):
    """SingleTaskGP of some rows of the diabetes data, a batch member for each slice."""
    x, y = (torch.stack([whole[some] for some in rows]) for whole in patients())
    x, y = (one[0] if len(rows) == 1 else one for one in (x, y.unsqueeze(-1)))
    transform = Normalize(10, batch_shape=x.shape[:-2])
    return SingleTaskGP(x, y, input_transform=transform, **options)


def errors_of_patients(kind, model, **options):
    fit_gpytorch_mll(kind(model.likelihood, model), **options)
    x, y = patients()
    with torch.no_grad():
        mean = model.posterior(x[300:]).mean.squeeze(-1)
    return (mean - y[300:]).square().mean(-1).sqrt()


@pytest.mark.parametrize("kind", [ExactMarginalLogLikelihood, ConditionalMarginalLogLikelihood])
@pytest.mark.parametrize("rows", [slice(100), slice(200, 300), slice(150)])
def test_it_predicts_as_well_as_the_fit_of_botorch(kind, rows):
    theirs = errors_of_patients(kind, model_of_patients(rows))
    ours = errors_of_patients(kind, model_of_patients(rows), optimizer=fit_gpytorch_mll_fused)
    assert ours < 1.01 * theirs


def test_members_of_a_batch_predict_as_each_does_alone():
    every, kind = (slice(100), slice(200, 300)), ExactMarginalLogLikelihood
    options = {"optimizer": fit_gpytorch_mll_fused}
    together = errors_of_patients(kind, model_of_patients(*every), **options)
    for rows, error in zip(every, together, strict=True):
        alone = errors_of_patients(kind, model_of_patients(rows), **options)
        torch.testing.assert_close(error, alone, rtol=1e-4, atol=0.0)


def test_a_search_that_ends_on_a_steep_slope_goes_on(monkeypatch):
    theirs, ours = objective(), objective()
    fit_gpytorch_mll(theirs, optimizer=fit_gpytorch_mll_fused)

    def lazy(*args, options, **others):  # it says that it has converged after three steps
        found = minimize(
            *args, options={**options, "maxiter": min(options["maxiter"], 3)}, **others
        )
        found.status = 0
        return found

    minimize, calls = scipy.optimize.minimize, []
    monkeypatch.setattr(
        scipy.optimize, "minimize", lambda *a, **k: calls.append(1) or lazy(*a, **k)
    )
    fit_gpytorch_mll_fused(ours.train(), options={"maxiter": 100})
    assert len(calls) > 3
    assert lml(ours) > lml(theirs) - 0.02
