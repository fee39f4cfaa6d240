import gpytorch
import pytest
import torch
from exact_gps import MultitaskGP, PlainGP

import gpclml._utils.environment
from gpclml.conditioning import HeldOut, KFold, LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, NotConvergedError, UnknownNameError, UnsupportedError
from gpclml.fit import fit_batch
from gpclml.inference import SolverWarning
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

TIGHT = ConjugateGradients(tolerance=1e-9, preconditioner_rank=20)


def data(n=60, d=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x.sum(-1)) + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, y


def interpolated():
    base = gpytorch.kernels.RBFKernel()
    return gpytorch.kernels.ScaleKernel(
        gpytorch.kernels.GridInterpolationKernel(
            base, grid_size=30, num_dims=2, grid_bounds=[(-0.1, 1.1)] * 2
        )
    )


KERNELS = {
    "rbf": lambda: gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)),
    "sum": lambda: gpytorch.kernels.RBFKernel() + gpytorch.kernels.MaternKernel(nu=1.5),
    "linear": lambda: gpytorch.kernels.LinearKernel(),
    "interpolated": interpolated,
    "columns": lambda: gpytorch.kernels.RBFKernel(active_dims=[1]),
}


def objective(solver, kernel="rbf", conditioning=None, likelihood=None, xy=None):
    x, y = xy or data()
    torch.manual_seed(0)
    likelihood = (likelihood or gpytorch.likelihoods.GaussianLikelihood)().double()
    model = PlainGP(x, y, KERNELS[kernel](), likelihood).double()
    conditioning = conditioning or RandomHoldout(0.15)
    return ConditionalMarginalLogLikelihood(likelihood, model, conditioning, solver=solver)


def value_and_gradient(mll):
    model = mll.model
    value = mll(model(*model.train_inputs), model.train_targets)
    value.sum().backward()
    gradients = [p.grad.flatten() for p in mll.parameters() if p.grad is not None]
    return value.detach(), torch.cat(gradients)


def assert_same(ours, other):
    torch.testing.assert_close(
        value_and_gradient(ours), value_and_gradient(other), rtol=1e-6, atol=1e-6
    )


# torch warns of the sparse matrices that linear_operator interpolates with
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kernel", KERNELS)
def test_conjugate_gradients_give_what_cholesky_gives(kernel):
    iterative = objective(TIGHT, kernel)
    assert_same(iterative, objective("cholesky", kernel))
    [report] = iterative.last_solve
    assert report.residual <= 1e-9
    assert report.error_bound < 1e-6


@pytest.mark.parametrize(
    "conditioning", [KFold(4), LastPoints(40), HeldOut([1, 2], [7, 30, 8])], ids=repr
)
def test_every_strategy_is_served(conditioning):
    iterative = objective(TIGHT, conditioning=conditioning)
    assert_same(iterative, objective("cholesky", conditioning=conditioning))
    assert len(iterative.last_solve) == sum(
        len(group) for group in conditioning.held_out(60, torch.Generator())
    )


class SumGP(PlainGP):
    """A sum of covariances that the model makes, not its kernel."""

    def forward(self, x):
        first, second = self.covar_module.kernels
        covariance = first(x) + self.weight * second(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_a_sum_that_the_model_makes(weight, monkeypatch):
    monkeypatch.setattr("gpclml.linalg.iterative._NUMBERS_AT_ONCE", 60 * 7)  # some rows at a time
    objectives = []
    for solver in (TIGHT, "cholesky"):
        model = SumGP(*data(), KERNELS["sum"]()).double()
        model.weight = weight
        conditioning = RandomHoldout(0.15, seed=0)
        objectives.append(
            ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, solver=solver)
        )
    assert_same(*objectives)


def keops():
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.keops.RBFKernel(ard_num_dims=2))


# without KeOps its kernels fall back to matrices, and say so
@pytest.mark.filterwarnings("ignore:KeOps is not installed")
def test_keops_kernels(monkeypatch):
    monkeypatch.setitem(KERNELS, "keops", keops)
    assert_same(objective(TIGHT, "keops"), objective("cholesky", "rbf"))


def test_missing_targets():
    x, y = data()
    y[[3, 17, 40]] = torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        assert_same(objective(TIGHT, xy=(x, y)), objective("cholesky", xy=(x, y)))


def test_several_tasks():
    x, y = data(20)
    y = torch.stack([y, 2 * y + 1], dim=-1)

    objectives = []
    for solver in (TIGHT, "cholesky"):
        torch.manual_seed(1)
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2).double()
        model = MultitaskGP(x, y, likelihood).double()
        objectives.append(ConditionalMarginalLogLikelihood(likelihood, model, solver=solver))
    assert_same(*objectives)


@pytest.mark.parametrize("solver", ["cholesky", TIGHT])
@pytest.mark.parametrize("missing", [False, True])
def test_a_conditioning_subset_is_the_objective_of_its_points(solver, missing):
    x, y = data()
    if missing:
        y[[2, 9]] = torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        mll = objective(solver, conditioning=RandomHoldout(0.1, seed=4, condition_on=25), xy=(x, y))
        split = mll.conditioning.split(60, observed=~y.isnan())
        rows = torch.cat([split.conditioned_on, split.held_out[0][0]])
        assert len(rows) == 31
        assert len(rows.unique()) == len(rows)
        alone = objective("cholesky", conditioning=LastPoints(25), xy=(x[rows], y[rows]))
        assert_same(mll, alone)


def test_too_little_memory_is_said_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(gpclml._utils.environment, "available_memory", lambda device: 150_000)
    monkeypatch.setattr(gpclml.inference.observations, "SMALL", 0)
    with pytest.raises(ArgumentError, match=r"'cholesky' at n = 60, which needs .* GiB"):
        value_and_gradient(objective("cholesky"))
    with pytest.warns(SolverWarning, match="n = 60: a Cholesky factor needs"):
        value, _ = value_and_gradient(objective("auto"))
    torch.testing.assert_close(value, value_and_gradient(objective(TIGHT))[0], rtol=1e-4, atol=1e-4)
    value_and_gradient(objective("auto", kernel="linear"))  # exact by its parts
    with pytest.raises(ArgumentError, match="a block of 48 held-out points"):
        value_and_gradient(objective("cg", conditioning=RandomHoldout(0.8)))


def test_what_is_refused():
    with pytest.raises(UnknownNameError, match="solver: got 'choleski'"):
        objective("choleski")
    with pytest.raises(ArgumentError, match="condition_on: got 55, expected at most 54"):
        value_and_gradient(objective("auto", conditioning=RandomHoldout(0.1, condition_on=55)))
    few = ConjugateGradients(max_iterations=3, preconditioner_rank=0, tolerance=1e-6)
    with pytest.raises(NotConvergedError, match="preconditioner_rank"):
        value_and_gradient(objective(few))
    mlls = []
    for model in (GPRegression(*data()), GPRegression(*data())):
        subset = RandomHoldout(0.1, condition_on=20)
        mlls.append(ConditionalMarginalLogLikelihood(model.likelihood, model, subset))
    with pytest.raises(UnsupportedError, match="fit_mll"):
        fit_batch(mlls, steps=2)


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_a_block_that_cannot_be_solved_for_ends_with_an_error():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(50, 2, generator=generator).repeat(4, 1)
    y = 100 * torch.randn(200, generator=generator)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = PlainGP(x, y, likelihood=likelihood)
    likelihood.noise, model.covar_module.outputscale = 1e-4, 2e4
    mll = ConditionalMarginalLogLikelihood(
        likelihood, model.train(), HeldOut(range(5)), solver=ConjugateGradients(max_iterations=50)
    )
    with pytest.raises(NotConvergedError):
        mll(model(x), y)
