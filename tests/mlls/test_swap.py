"""Our objective in the place of GPyTorch's: what its and BoTorch's users do with it works."""

import subprocess
import sys
from functools import partial

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.robust_relevance_pursuit_model import RobustRelevancePursuitSingleTaskGP
from botorch.optim.closures import get_loss_closure
from exact_gps import PlainGP
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, HadamardGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior, NormalPrior

import gpclml._utils.environment
from gpclml.conditioning import HeldOut, KFold, LastPoints, RandomHoldout, RandomOrderings
from gpclml.errors import ArgumentError, ModelModeError, UnsupportedError
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood, SumMarginalLogLikelihood

MASK = partial(gpytorch.settings.observation_nan_policy, "mask")


def data(n=20, batch=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(*batch, n, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    return x, torch.sin(4 * x.sum(-1)) + 0.2 * noise


def objective(x, y, conditioning=None, likelihood=None, kernel=None, mean=None):
    batch = y.shape[:-1]
    likelihood = likelihood or GaussianLikelihood(batch_shape=batch)
    mean = mean or ConstantMean(batch_shape=batch)
    kernel = kernel or ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch)
    model = PlainGP(x, y, kernel, likelihood, mean).double().train()
    return ConditionalMarginalLogLikelihood(likelihood, model, conditioning)


def step(mll, *params):
    mll.zero_grad()
    value = mll(mll.model(*mll.model.train_inputs), mll.model.train_targets, *params)
    value.sum().backward()
    return value.detach()


# ---------------------------------------------------------------- missing targets of batches

REDRAWN = [None, KFold(4), RandomOrderings(2, m=12), RandomHoldout(0.1, condition_on=8)]


@pytest.mark.parametrize("conditioning", REDRAWN, ids=repr)
def test_every_step_on_a_batch_with_missing_targets_has_a_value(conditioning):
    x, y = data(batch=(5,))
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = torch.nan
    with MASK():
        mll = objective(x, y, conditioning)
        for _ in range(30):
            value = step(mll)
            assert value.shape == (5,)
            assert value.isfinite().all()
            assert all(p.grad.isfinite().all() for p in mll.parameters())


def test_a_member_without_held_out_targets_scores_nothing_in_that_call():
    x, y = data(batch=(2,))
    y[0, :10] = torch.nan
    strategy, generator = RandomHoldout(0.05), torch.Generator().manual_seed(0)  # one row
    rows = [strategy.held_out(20, generator)[0].item() for _ in range(10)]
    assert 0 < sum(row < 10 for row in rows) < 10
    with MASK():
        mll = objective(x, y, strategy)
        lone = objective(x[1], y[1])
        for parameter, single in zip(mll.parameters(), lone.parameters(), strict=True):
            single.data.copy_(parameter.data[1].reshape(single.shape))
        for row in rows:
            lone.conditioning = HeldOut([row])
            value = step(mll)
            torch.testing.assert_close(value[1], step(lone))
            gradients = [(p.grad[0] == 0).all() for p in mll.parameters()]
            assert bool(value[0] == 0) == all(gradients) == any(gradients) == (row < 10)


def test_which_strategies_redraw():
    random = [RandomHoldout(), KFold(), RandomOrderings(2, 1), RandomHoldout(condition_on=2)]
    fixed = [RandomHoldout(seed=0), KFold(seed=1), LastPoints(2), HeldOut([1])]
    assert [strategy.redraws for strategy in random + fixed] == [True] * 4 + [False] * 4


# ---------------------------------------------------------------- several models


def two_models(n=25):
    x, y = data(n)
    first, second = SingleTaskGP(x, y.unsqueeze(-1)), SingleTaskGP(x[:15], y[:15, None].cos())
    return ModelListGP(first, second)


def test_the_loss_of_a_sum_stays_the_same():
    models = two_models()
    mll = SumMarginalLogLikelihood(models.likelihood, models)
    assert isinstance(mll, gpytorch.mlls.SumMarginalLogLikelihood)
    closure = get_loss_closure(mll)
    assert closure() == closure()
    expected = torch.stack([member.compute_custom_loss() for member in mll.mlls]).mean()
    assert closure() == expected


def test_a_sum_of_gpytorchs_objectives_is_theirs():
    models = two_models()
    ours = SumMarginalLogLikelihood(models.likelihood, models, ExactMarginalLogLikelihood)
    theirs = gpytorch.mlls.SumMarginalLogLikelihood(models.likelihood, models)
    torch.testing.assert_close(get_loss_closure(ours)(), get_loss_closure(theirs)())


# ---------------------------------------------------------------- priors of a batch


def prior(shape=(2,)):
    location = torch.tensor([0.2, 1.5], dtype=torch.float64).reshape(shape)
    return NormalPrior(location, torch.ones(shape, dtype=torch.float64))


SHARED = {
    "noise": lambda: {"likelihood": GaussianLikelihood(noise_prior=prior())},
    "constant": lambda: {"mean": ConstantMean(constant_prior=prior())},
    "outputscale": lambda: {"kernel": ScaleKernel(RBFKernel(), outputscale_prior=prior())},
    "lengthscale": lambda: {"kernel": RBFKernel(lengthscale_prior=prior((2, 1, 1)))},
}


@pytest.mark.parametrize("name", SHARED)
def test_a_batched_prior_of_a_shared_parameter_counts_once_a_member(name):
    x, y = data(batch=(2,))
    mll = objective(x, y, LastPoints(0), **SHARED[name]())
    theirs = ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    value = step(mll)
    gradients = [p.grad.clone() for p in mll.parameters()]
    torch.testing.assert_close(value, step(theirs), rtol=1e-8, atol=1e-8)
    for got, wanted in zip(gradients, theirs.parameters(), strict=True):
        torch.testing.assert_close(got, wanted.grad, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- eval mode


@pytest.mark.parametrize("conditioning", [None, LastPoints(3)], ids=repr)
def test_a_validation_step_in_eval_mode_is_gpytorchs(conditioning):
    batch = (3,)
    x, y = data(batch=batch)
    new_x, new_y = data(7, batch, seed=1)
    likelihood = GaussianLikelihood(GammaPrior(1.1, 0.5), batch_shape=torch.Size(batch))
    mll = objective(x, y, conditioning, likelihood)
    theirs = ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    mll.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            mll(mll.model(new_x), new_y), theirs(mll.model(new_x), new_y), rtol=1e-8, atol=1e-8
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # BoTorch's own, of a search that evaluates in eval
def test_botorchs_relevance_pursuit_finds_the_outlier():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(10, 1, generator=generator, dtype=torch.float64)
    y = torch.sin(6 * x)
    y[3] += 3
    model = RobustRelevancePursuitSingleTaskGP(x, y)
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    fit_gpytorch_mll(mll, numbers_of_outliers=[0, 1])
    assert model.likelihood.noise_covar.support == [3]


def test_what_is_refused():
    mll = objective(*data()).eval()
    with pytest.raises(ModelModeError, match=r"model\.train\(\)"):
        mll.compute_custom_loss()
    with pytest.raises(RuntimeError, match="Gaussian likelihood"):  # of the type of GPyTorch's
        ConditionalMarginalLogLikelihood(gpytorch.likelihoods.BernoulliLikelihood(), mll.model)
    for conditioning in (0, "loo", RandomHoldout):
        with pytest.raises(UnsupportedError, match="conditioning"):
            objective(*data(), conditioning)
    models = two_models()
    with pytest.raises(UnsupportedError, match="model: got ModelListGP"):
        ConditionalMarginalLogLikelihood(models.likelihood, models)
    with pytest.raises(UnsupportedError, match="mll_cls: got an object of Linear"):
        SumMarginalLogLikelihood(models.likelihood, models, torch.nn.Linear(2, 1))


# ---------------------------------------------------------------- Hadamard multitask models


class Hadamard(gpytorch.models.ExactGP):
    def __init__(self, inputs, y, likelihood):
        super().__init__(inputs, y, likelihood)
        self.mean_module = ConstantMean()
        self.covar_module = RBFKernel()
        self.task_covar_module = gpytorch.kernels.IndexKernel(num_tasks=2, rank=1)

    def forward(self, x, i):
        covariance = self.covar_module(x) * self.task_covar_module(i)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_the_fixed_loss_of_a_hadamard_model_is_the_objective():
    x, y = data()
    x, i = x[:, :1], torch.arange(20).remainder(2).unsqueeze(-1)
    likelihood = HadamardGaussianLikelihood(num_tasks=2)
    likelihood.noise = torch.tensor([0.1, 0.7])
    model = Hadamard((x, i), y, likelihood).double().train()
    mll = ConditionalMarginalLogLikelihood(likelihood, model, KFold(4, seed=0))
    torch.testing.assert_close(-mll.compute_custom_loss(), mll(model(x, i), y, i))
    for optimizer in ("lbfgs", "adam"):
        before = -mll.train().compute_custom_loss().item()
        result = fit_mll(mll, optimizer, steps=5, progress=False)
        assert result.objective > before


def test_task_indices_that_cannot_be_told_are_asked_for():
    x, y = data()
    i = torch.arange(20).remainder(2).unsqueeze(-1)
    for inputs in ((x, i.double()), (i, i)):
        likelihood = HadamardGaussianLikelihood(num_tasks=2)
        model = Hadamard(inputs, y, likelihood).double().train()
        mll = ConditionalMarginalLogLikelihood(likelihood, model)
        with pytest.raises(ArgumentError, match="task_feature_index"):
            mll.compute_custom_loss()


# ---------------------------------------------------------------- the process around a fit

FIT = """
import gpytorch, linear_operator, torch
from gpclml.fit import fit_batch, fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression
def settings():
    kinds = [v for m in (gpytorch.settings, linear_operator.settings) for v in vars(m).values()]
    names = ("_state", "_default", "_global_value", "_global_float_value", "_global_double_value")
    kinds = [k for k in kinds if isinstance(k, type)]
    return {(k.__name__, n): getattr(k, n, None) for k in kinds for n in names}
def objective():
    x = torch.linspace(0, 1, 12).unsqueeze(-1)
    model = GPRegression(x, x.squeeze(-1).sin())
    return ConditionalMarginalLogLikelihood(model.likelihood, model)
before = settings()
fit_mll(objective(), steps=2, progress=False)
fit_mll(objective(), 'adam', steps=2, progress=False)
fit_batch([objective(), objective()], steps=2, progress=False)
import sys
assert "botorch" in sys.modules
assert settings() == before, [k for k, v in settings().items() if before[k] != v]
"""


@pytest.mark.slow
def test_fits_leave_gpytorchs_settings_as_they_are():
    subprocess.run([sys.executable, "-c", FIT], check=True)


def test_memory_is_known_where_posix_calls_are_not(monkeypatch):
    monkeypatch.delattr("os.sysconf")
    gpclml._utils.environment._memory_of_the_machine.cache_clear()
    assert gpclml._utils.environment.available_memory(torch.device("cpu")) > 2**26
