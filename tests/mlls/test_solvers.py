import gpytorch
import pytest
import torch
from exact_gps import MultitaskGP, PlainGP
from gpytorch import kernels
from gpytorch.likelihoods import MultitaskGaussianLikelihood

import gpclml._utils.environment
from gpclml.conditioning import HeldOut, KFold, LastPoints, RandomHoldout
from gpclml.errors import ArgumentError, NotConvergedError, UnknownNameError
from gpclml.inference import SolverWarning
from gpclml.linalg import ConjugateGradients
from gpclml.mlls import ConditionalMarginalLogLikelihood

TIGHT = ConjugateGradients(tolerance=1e-9, preconditioner_rank=20)


def data(n=60, d=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x.sum(-1)) + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, y


class SumGP(PlainGP):
    """A sum of covariances that the model makes, not its kernel."""

    weight = 1.0

    def forward(self, x):
        first, second = self.covar_module.kernels
        covariance = first(x) + self.weight * second(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)


class HalfSumGP(SumGP):
    weight = 0.5


def both():
    return kernels.RBFKernel() + kernels.MaternKernel(nu=1.5)


def plain(kernel, xy=None):
    return PlainGP(*(xy or data()), kernel)


def missing():
    x, y = data()
    y[[3, 17, 40]] = torch.nan
    return plain(None, (x, y))


def tasks():
    x, y = data(20)
    return MultitaskGP(x, torch.stack([y, 2 * y + 1], -1), MultitaskGaussianLikelihood(2))


grid = {"grid_size": 30, "num_dims": 2, "grid_bounds": [(-0.1, 1.1)] * 2}
MODELS = {
    "rbf": lambda: plain(kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2))),
    "sum": lambda: plain(both()),
    "linear": lambda: plain(kernels.LinearKernel()),
    "interpolated": lambda: plain(
        kernels.ScaleKernel(kernels.GridInterpolationKernel(kernels.RBFKernel(), **grid))
    ),
    "columns": lambda: plain(kernels.RBFKernel(active_dims=[1])),
    "keops": lambda: plain(kernels.ScaleKernel(kernels.keops.RBFKernel(ard_num_dims=2))),
    "made by the model": lambda: SumGP(*data(), both()),
    "a multiple made by the model": lambda: HalfSumGP(*data(), both()),
    "missing targets": missing,
    "tasks": tasks,
}


def objective(solver, model="rbf", conditioning=None):
    torch.manual_seed(0)
    model = (MODELS[model]() if isinstance(model, str) else model).double()
    conditioning = conditioning or RandomHoldout(0.15)
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, solver=solver)


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


# torch warns of the sparse matrices that linear_operator interpolates with; without KeOps its
# kernels fall back to matrices, and say so
@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:KeOps is not installed")
@pytest.mark.parametrize("name", MODELS)
def test_conjugate_gradients_give_what_cholesky_gives(name, monkeypatch):
    if "made by" in name:  # some rows at a time
        monkeypatch.setattr("gpclml.linalg.iterative._NUMBERS_AT_ONCE", 60 * 7)
    iterative = objective(TIGHT, name)
    exact = objective("cholesky", "rbf" if name == "keops" else name)
    policy = "mask" if name == "missing targets" else "ignore"
    with gpytorch.settings.observation_nan_policy(policy):
        assert_same(iterative, exact)
    [report] = iterative.last_solve
    assert report.residual <= 1e-9
    assert name == "tasks" or report.error_bound < 1e-6  # there is none of dependent noise


@pytest.mark.parametrize(
    "conditioning", [KFold(4), LastPoints(40), HeldOut([1, 2], [7, 30, 8])], ids=repr
)
def test_every_strategy_is_served(conditioning):
    iterative = objective(TIGHT, conditioning=conditioning)
    assert_same(iterative, objective("cholesky", conditioning=conditioning))
    assert len(iterative.last_solve) == sum(
        len(group) for group in conditioning.held_out(60, torch.Generator())
    )


@pytest.mark.parametrize("solver", ["cholesky", TIGHT])
@pytest.mark.parametrize("missing", [False, True])
def test_a_conditioning_subset_is_the_objective_of_its_points(solver, missing):
    x, y = data()
    if missing:
        y[[2, 9]] = torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        subset = RandomHoldout(0.1, seed=4, condition_on=25)
        mll = objective(solver, plain(None, (x, y)), subset)
        split = mll.conditioning.split(60, observed=~y.isnan())
        rows = torch.cat([split.conditioned_on, split.held_out[0][0]])
        assert len(rows) == 31
        assert len(rows.unique()) == len(rows)
        alone = plain(None, (x[rows], y[rows]))
        assert_same(mll, objective("cholesky", alone, LastPoints(25)))


def test_too_little_memory_is_said_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(gpclml._utils.environment, "available_memory", lambda device: 150_000)
    monkeypatch.setattr(gpclml.inference.observations, "SMALL", 0)
    with pytest.raises(ArgumentError, match=r"'cholesky' at n = 60, which needs .* GiB"):
        value_and_gradient(objective("cholesky"))
    with pytest.warns(SolverWarning, match="n = 60: a Cholesky factor needs"):
        value, _ = value_and_gradient(objective("auto"))
    torch.testing.assert_close(value, value_and_gradient(objective(TIGHT))[0], rtol=1e-4, atol=1e-4)
    value_and_gradient(objective("auto", "linear"))  # exact by its parts
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
