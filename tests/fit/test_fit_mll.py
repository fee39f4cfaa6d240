from __future__ import annotations

import warnings

import gpytorch
import pytest
import torch
from botorch.models import ModelListGP, SingleTaskGP
from exact_gps import PlainGP
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from linear_operator.utils.errors import NanError

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, NonFiniteError, UnknownNameError
from gpclml.fit import FitWarning, fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss
from gpclml.models import GPRegression, find_networks


def data(n=30, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(6 * x[:, 0]) + x.sum(-1) + 0.1 * noise


def objective(kernel="rbf", conditioning=None, **options):
    model = GPRegression(*data(), kernel=kernel, **options)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam", torch.optim.SGD])
def test_every_optimizer_improves_the_objective(optimizer):
    mll = objective(conditioning=LastPoints(0) if optimizer == "lbfgs" else None)
    with torch.no_grad():
        before = -float(mll.compute_custom_loss())
    result = fit_mll(mll, optimizer, steps=25, lr=0.05, progress=False)
    assert result.objective > before + 0.05
    assert 0 < len(result.history) <= 26
    assert result.attempts == [result.objective]
    assert result.seconds > 0
    assert not mll.training
    assert all(f"<td>{value}</td>" in result._repr_html_() for value in (result.starts, ""))


@pytest.mark.slow
def test_restarts_redraw_networks_and_keep_the_best(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("all are seeded"))

    def fitted(restarts, seed=0):
        mll = objective("deep_bottleneck", mean="mlp", conditioning=LastPoints(0))
        options = {"restarts": restarts, "seed": seed, "progress": False}
        return mll, fit_mll(mll, "adam", steps=15, lr=0.05, **options)

    state = torch.get_rng_state()
    mll, result = fitted(3)
    assert torch.equal(state, torch.get_rng_state())
    assert len({round(value, 9) for value in result.attempts}) == 4
    assert result.objective == max(result.attempts)
    again, other = fitted(1)[1], fitted(1, seed=4)[1]
    assert again.attempts == result.attempts[:2]
    assert other.attempts[1] != result.attempts[1]
    mll.train()
    with torch.no_grad():
        assert -float(mll.compute_custom_loss()) == pytest.approx(result.objective, abs=1e-12)


def test_frozen_parameters_and_gradients_of_the_caller_stay():
    mll = objective()
    noise = mll.likelihood.noise.item()
    lengthscale = mll.model.covar_module.base_kernel.lengthscale.clone()
    for parameter in mll.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    fit_mll(mll, freeze=["likelihood"], progress=False)
    assert all(bool((parameter.grad == 7.0).all()) for parameter in mll.parameters())
    assert mll.likelihood.noise.item() == noise
    assert not torch.equal(lengthscale, mll.model.covar_module.base_kernel.lengthscale)
    assert all(parameter.requires_grad for parameter in mll.parameters())
    with pytest.raises(UnknownNameError, match="freeze"):
        fit_mll(mll, freeze=["likelyhood"], progress=False)
    for optimizer in ("lbfgs", "adam"):
        with pytest.raises(ArgumentError, match="only frozen parameters"):
            fit_mll(mll, optimizer, freeze=["model", "likelihood"], progress=False)
    assert all(p.requires_grad for p in mll.parameters())


def test_a_network_shared_by_outputs_is_fitted_jointly():
    class Shared(gpytorch.kernels.RBFKernel):
        def __init__(self):
            super().__init__(batch_shape=torch.Size([2]))
            self.network = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)

        def forward(self, x1, x2, **params):
            return super().forward(self.network(x1), self.network(x2), **params)

    x, noise = data(20, 3)[0], torch.randn(20, 2, dtype=torch.float64)
    y = torch.stack([x.sum(-1).sin(), x.sum(-1).cos()], -1) + 0.1 * noise
    kernel = gpytorch.kernels.ScaleKernel(Shared(), batch_shape=torch.Size([2]))
    model = SingleTaskGP(x, y, covar_module=kernel)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    assert fit_mll(mll, steps=200, progress=False).problem == ""
    # An optimum of both outputs together, where each alone would move the network on.
    mll.train()
    fixed_loss(mll).backward()
    assert all(float(p.grad.abs().max()) < 2e-3 for p in mll.parameters() if p.grad is not None)


class OwnKernel(gpytorch.kernels.RBFKernel):
    """A kernel of a caller, of which no closed form is known."""


@pytest.mark.parametrize("kind", [OwnKernel, gpytorch.kernels.RBFKernel])
def test_outputs_in_a_batch_end_no_lower_than_alone(kind):
    x, y = data()
    both = torch.stack([y, x[:, 0].cos() + 0.1 * y], -1)

    def fitted(targets):
        shape = torch.Size([targets.shape[-1]] if targets.shape[-1] > 1 else [])
        kernel = gpytorch.kernels.ScaleKernel(kind(batch_shape=shape), batch_shape=shape)
        model = SingleTaskGP(x, targets, covar_module=kernel)
        result = fit_mll(ExactMarginalLogLikelihood(model.likelihood, model), progress=False)
        assert result.problem in ("", "noise")
        return result.objective

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        assert fitted(both) > fitted(both[:, :1]) + fitted(both[:, 1:]) - 1e-4


def test_model_lists_of_botorch():
    x, y = data()
    models = ModelListGP(SingleTaskGP(x, y.unsqueeze(-1)), SingleTaskGP(x, x[:, :1].cos()))
    mll = SumMarginalLogLikelihood(models.likelihood, models, ConditionalMarginalLogLikelihood)
    start = -fixed_loss(mll.train()).item()
    assert fit_mll(mll, "adam", steps=10, progress=False).objective > start


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_a_diverging_fit_keeps_its_last_good_parameters():
    mll = objective(conditioning=RandomHoldout(0.2))
    with pytest.warns(RuntimeWarning, match="keeps its best parameters"):
        result = fit_mll(mll, torch.optim.SGD, steps=50, lr=1e308, progress=False)
    assert result.message
    assert all(torch.isfinite(parameter).all() for parameter in mll.parameters())


def test_a_start_that_cannot_be_evaluated_raises():
    mll = objective()
    mll.model.mean_module.initialize(constant=float("nan"))
    for optimizer in ("adam", "lbfgs"):
        with pytest.raises(NonFiniteError, match="mean"):
            fit_mll(mll, optimizer, progress=False)


def test_progress_is_shown_on_request(capsys):
    fit_mll(objective(), "adam", steps=3, progress=True)
    assert "3/3" in capsys.readouterr().err
    fit_mll(objective(), "adam", steps=3, progress=False)
    assert capsys.readouterr().err == ""


def test_bad_options():
    numbers = {"steps": 0, "lr": -1.0, "restarts": -1, "retries": -1, "final_lr": 0.0}
    numbers |= {"network_lr": 0.0, "network_decay": -0.1}
    for name, value, match in (
        ("optimizer", "adm", "Did you mean 'adam'"),
        ("optimizer", torch.nn.Linear(1, 1), "optimizer: got Linear"),
        ("optimizer", lambda parameters, lr: None, "made no optimizer"),
        *((name, value, name) for name, value in numbers.items()),
    ):
        with pytest.raises(ArgumentError, match=match):
            fit_mll(objective(), progress=False, **{name: value})


def smooth_data(n=60, d=12, seed=0):
    """A function of all inputs that any start of far too short a lengthscale misses."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.mean(-1) * 3) + 0.05 * noise


def isotropic(x, y, start=0.2):
    model = PlainGP(x, (y - y.mean()) / y.std()).double()  # a user's, with a start of its own
    model.covar_module.base_kernel.lengthscale = start
    return ExactMarginalLogLikelihood(model.likelihood, model)


def test_a_fit_that_returns_the_mean_starts_again():
    x, y = smooth_data()
    alone = isotropic(x, y)
    with pytest.warns(FitWarning, match="explains nothing"):
        lost = fit_mll(alone, retries=0, progress=False)
    assert (lost.problem, lost.converged, lost.starts) == ("constant", False, 1)
    assert "start from other lengthscales" in lost.message
    mll = isotropic(x, y)
    result = fit_mll(mll, progress=False)
    assert (result.converged, result.message, result.starts) == (True, "", 2)
    assert result.objective > lost.objective + 0.9
    assert result.history[-1] == pytest.approx(result.objective, abs=1e-9)
    prediction = mll.model(x + 1e-6).mean
    assert torch.corrcoef(torch.stack([prediction, y]))[0, 1] > 0.98
    # From a start that does well there is one search.
    assert fit_mll(isotropic(x, y, start=3.0), progress=False).starts == 1


def test_where_there_is_nothing_to_find_the_other_starts_end_no_better():
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(40, 3, generator=generator, dtype=torch.float64)
    mll = isotropic(x, torch.randn(40, generator=generator, dtype=torch.float64))
    with pytest.warns(FitWarning, match="other starts ended no better"):
        result = fit_mll(mll, progress=False)
    assert result.problem == "constant"
    assert result.starts == 3
    assert result.objective == max(result.history)


def test_each_member_of_a_sum_starts_again_by_itself():
    x, y = smooth_data()
    lost, well = isotropic(x, y).model, isotropic(x, y, start=3.0).model
    models = gpytorch.models.IndependentModelList(lost, well)
    likelihoods = gpytorch.likelihoods.LikelihoodList(lost.likelihood, well.likelihood)
    result = fit_mll(SumMarginalLogLikelihood(likelihoods, models), progress=False)
    assert result.converged
    assert result.starts == 2
    for model in (lost, well):
        assert torch.corrcoef(torch.stack([model(x + 1e-6).mean, y]))[0, 1] > 0.98


def test_a_limit_of_steps_holds_over_resumed_searches_and_is_in_the_result():
    class Failing(ConditionalMarginalLogLikelihood):
        """Every eleventh point cannot be evaluated, after which a search is resumed."""

        asked = 0

        def compute_custom_loss(self, **kwargs):
            self.asked += 1
            if self.asked % 11 == 0:
                raise NanError("no value here")
            return super().compute_custom_loss(**kwargs)

    mll = objective(conditioning=LastPoints(0))
    for kind in (Failing, ConditionalMarginalLogLikelihood):
        result = fit_mll(kind(mll.likelihood, mll.model), steps=9, progress=False)
        assert len(result.history) == 9
        assert result.problem == "limit"
        assert result.message.startswith("The fit was stopped after 9 steps, before it converged.")


def test_a_step_too_far_does_not_leave_the_noise_where_its_gradient_is_nothing():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 2, generator=generator, dtype=torch.float64)
    model = GPRegression(x, torch.sin(3 * x.sum(-1)))  # without noise
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    assert fit_mll(mll, progress=False).converged
    noise = model.likelihood.noise.item()
    assert 1.009e-4 < noise < 1.2e-4  # the constraint's bound is 1e-4
    raw = model.likelihood.noise_covar.raw_noise
    mll.train()
    (gradient,) = torch.autograd.grad(mll.compute_custom_loss(), raw)
    assert gradient > 0


def test_a_fit_ends_where_twenty_steps_gain_next_to_nothing():
    x, y = smooth_data(40, 4)
    model = GPRegression(x, y, kernel="rq")
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    history = torch.tensor(fit_mll(mll, progress=False).history)
    gains = 40 * (history[20:] - history[:-20])
    assert len(gains) > 1
    assert (gains[:-1] >= 0.002).all()


def test_a_search_that_is_interrupted_keeps_its_best_parameters():
    values = []

    class Interrupted(ConditionalMarginalLogLikelihood):
        def compute_custom_loss(self, **kwargs):
            if len(values) == 9:
                raise KeyboardInterrupt
            loss = super().compute_custom_loss(**kwargs)
            values.append(float(loss.detach()))
            return loss

    mll = objective(conditioning=LastPoints(0))
    with pytest.raises(KeyboardInterrupt):
        fit_mll(Interrupted(mll.likelihood, mll.model, mll.conditioning), progress=False)
    assert fixed_loss(mll.train()).item() == pytest.approx(min(values), rel=1e-9)


def test_rates_of_networks_are_apart_and_fall():
    rates: list[list[float]] = []

    class Observed(torch.optim.SGD):
        def step(self, closure=None):
            rates.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    model = GPRegression(*data(20), "deep_bottleneck")
    network = [p.detach().clone() for p in find_networks(model)[0].parameters()]
    lengthscale = model.covar_module.base_kernel.base_kernel.lengthscale.detach().clone()
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
    options = {"lr": 1e-2, "final_lr": 1e-4, "network_lr": 1e-9, "progress": False}
    fit_mll(mll, Observed, steps=5, **options)
    plain, networks = zip(*rates, strict=True)
    assert plain == pytest.approx([1e-2, 8.55017857e-3, 5.05e-3, 1.54982143e-3, 1e-4])
    assert networks == pytest.approx([1e-7 * rate for rate in plain])
    assert not torch.equal(model.covar_module.base_kernel.base_kernel.lengthscale, lengthscale)
    for before, after in zip(network, find_networks(model)[0].parameters(), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-7)


def test_weights_of_networks_alone_decay():
    ends = {}
    for decay in (None, 10.0):
        model = GPRegression(*data(20), "deep_bottleneck")
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0))
        options = {"lr": 1e-2, "network_decay": decay, "progress": False}
        fit_mll(mll, torch.optim.SGD, steps=1, **options)
        networks = {id(p) for p in find_networks(model)[0].parameters()}
        ends[decay] = [(id(p) in networks, p.detach()) for p in mll.parameters()]
    for (is_network, free), (_, decayed) in zip(*ends.values(), strict=True):
        torch.testing.assert_close(decayed, 0.9 * free if is_network else free)
