from __future__ import annotations

import itertools

import gpytorch
import pytest
import torch
from botorch.models import ModelListGP, SingleTaskGP
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood

from gpclml.conditioning import LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, NonFiniteError, UnknownNameError
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def data(n=30, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(6 * x[:, 0]) + x.sum(-1) + 0.1 * noise


def objective(kernel="rbf", conditioning=None, **options):
    model = GPRegression(*data(), kernel=kernel, **options)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam", torch.optim.SGD])
@pytest.mark.parametrize("conditioning", [None, LastPoints(0)], ids=["default", "lml"])
def test_every_optimizer_improves_the_objective(optimizer, conditioning):
    mll = objective(conditioning=conditioning)
    with torch.no_grad():
        before = -float(mll.compute_custom_loss())
    result = fit_mll(mll, optimizer, steps=25, lr=0.05, progress=False)
    assert result.objective > before + 0.05
    assert 0 < len(result.history) <= 26
    assert result.attempts == [result.objective]
    assert result.seconds > 0
    assert not mll.training


def test_line_search_reaches_the_optimum_of_the_marginal_likelihood():
    mll = objective(conditioning=LastPoints(0))
    result = fit_mll(mll, progress=False)
    mll.train()
    loss = mll.compute_custom_loss()
    gradients = torch.autograd.grad(loss, list(mll.parameters()))
    assert max(float(g.abs().max()) for g in gradients) < 1e-3
    assert result.message == ""


def test_a_line_search_evaluates_no_point_twice_in_a_row():
    class Counting(ConditionalMarginalLogLikelihood):
        def compute_custom_loss(self, **kwargs):
            points.append([p.detach().clone() for p in self.parameters()])
            return super().compute_custom_loss(**kwargs)

    points = []
    mll = objective(conditioning=LastPoints(0))
    fit_mll(Counting(mll.likelihood, mll.model), progress=False)
    searched = points[:-1]  # the last is the result's
    assert len(searched) > 10
    for one, other in itertools.pairwise(searched):
        assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_upstream_objective_on_a_plain_exact_gp():
    class Plain(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    x, y = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Plain(x, y, likelihood).double()
    result = fit_mll(ExactMarginalLogLikelihood(likelihood, model), progress=False)
    assert result.history[-1] > result.history[0]


def test_the_same_seed_gives_the_same_fit():
    fits = [
        fit_mll(objective("deep-bottleneck"), "adam", steps=10, restarts=1, seed=3, progress=False)
        for _ in range(2)
    ]
    assert fits[0].history == fits[1].history
    other = fit_mll(
        objective("deep-bottleneck"), "adam", steps=10, restarts=1, seed=4, progress=False
    )
    assert other.attempts[1] != fits[0].attempts[1]


def test_restarts_redraw_networks_and_keep_the_best():
    mll = objective("deep-bottleneck", mean="mlp", conditioning=LastPoints(0))
    state = torch.get_rng_state()
    result = fit_mll(mll, "adam", steps=15, lr=0.05, restarts=3, progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert len(result.attempts) == 4
    assert len({round(value, 9) for value in result.attempts}) == 4
    assert result.objective == max(result.attempts)
    mll.train()
    with torch.no_grad():
        assert -float(mll.compute_custom_loss()) == pytest.approx(result.objective, abs=1e-12)


def test_frozen_parameters_stay():
    mll = objective()
    noise = mll.likelihood.noise.item()
    lengthscale = mll.model.covar_module.base_kernel.lengthscale.clone()
    fit_mll(mll, freeze=["likelihood"], progress=False)
    assert mll.likelihood.noise.item() == noise
    assert not torch.equal(lengthscale, mll.model.covar_module.base_kernel.lengthscale)
    assert all(parameter.requires_grad for parameter in mll.parameters())
    with pytest.raises(UnknownNameError, match="freeze"):
        fit_mll(mll, freeze=["likelyhood"], progress=False)


def test_a_network_shared_by_outputs_is_fitted_jointly():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)

        def forward(self, x):
            return self.linear(x)

    class Shared(gpytorch.kernels.RBFKernel):
        def __init__(self, network):
            super().__init__(batch_shape=torch.Size([2]))
            self.network = network

        def forward(self, x1, x2, **params):
            return super().forward(self.network(x1), self.network(x2), **params)

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    y = torch.stack([x.sum(-1).sin(), x.sum(-1).cos()], -1) + 0.1 * noise
    optima = []
    for seed in range(3):
        torch.manual_seed(seed)
        kernel = gpytorch.kernels.ScaleKernel(Shared(Scaled()), batch_shape=torch.Size([2]))
        model = SingleTaskGP(x, y, covar_module=kernel)
        mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
        optima.append(fit_mll(mll, steps=200, progress=False).objective)
    assert max(optima) - min(optima) < 0.05


def test_model_lists_and_batches_of_botorch():
    x, y = data()
    models = ModelListGP(SingleTaskGP(x, y.unsqueeze(-1)), SingleTaskGP(x, x[:, :1].cos()))
    mll = SumMarginalLogLikelihood(models.likelihood, models, ConditionalMarginalLogLikelihood)
    for optimizer in ("lbfgs", "adam"):
        mll.train()
        result = fit_mll(mll, optimizer, steps=10, progress=False)
        assert result.history[-1] > result.history[0]
    batched = SingleTaskGP(x, torch.stack([y, x[:, 0].cos()], -1))
    result = fit_mll(ConditionalMarginalLogLikelihood(batched.likelihood, batched), progress=False)
    assert torch.isfinite(torch.tensor(result.objective))


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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "adm"}, "Did you mean 'adam'"),
        ({"steps": 0}, "steps"),
        ({"lr": -1.0}, "lr"),
        ({"restarts": -1}, "restarts"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ArgumentError, match=match):
        fit_mll(objective(), progress=False, **options)


def smooth_data(n=60, d=12, seed=0):
    """A function of all inputs that any start of far too short a lengthscale misses."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.mean(-1) * 3) + 0.05 * noise


class Isotropic(gpytorch.models.ExactGP):
    """A user's own model, which starts where GPyTorch has it."""

    def __init__(self, x, y, likelihood, start):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module.base_kernel.lengthscale = start

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def isotropic(x, y, start=0.2, objective=ExactMarginalLogLikelihood):
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Isotropic(x, (y - y.mean()) / y.std(), likelihood, start).double()
    return objective(likelihood, model)
