"""Densities of several tasks by matrices of the points equal those of the whole matrix."""

from __future__ import annotations

import itertools

import gpytorch
import pytest
import torch
from botorch.models import KroneckerMultiTaskGP

from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import NonFiniteError
from gpclml.inference import observations
from gpclml.linalg import DenseCovariance, KroneckerCovariance
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss

N, T = 7, 3
ROWS = {
    "all": [torch.arange(N).unsqueeze(0)],
    "in another order": [torch.arange(N).flip(0).unsqueeze(0)],
    "some": [torch.tensor([[6, 1, 4]])],
    "each": [torch.arange(N).unsqueeze(-1)],
    "folds": [torch.tensor([[0, 3], [6, 1]]), torch.tensor([[2, 4, 5]])],
    "overlapping": [torch.tensor([[0, 3], [3, 1]]), torch.tensor([[1]])],
}
BATCHES = {
    "none": ((), (), ()), "all": ((2,), (2,), (2,)), "tasks": ((), (2,), (2, 1)),
    "residuals": ((), (), (4,)),
}  # fmt: skip


def flat(rows):
    return [(group.unsqueeze(-1) * T + torch.arange(T)).flatten(-2) for group in rows]


def problem(batches=((), (), ()), rank=T, dtype=torch.float64):
    points_batch, tasks_batch, residual_batch = batches
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(*points_batch, N, 2, generator=generator, dtype=torch.float64)
    x[..., 5, :] = x[..., 2, :]
    points = torch.exp(-3.0 * torch.cdist(x, x).square())
    factor = torch.randn(*tasks_batch, T, rank, generator=generator, dtype=torch.float64)
    noise = torch.rand(*tasks_batch, T, generator=generator, dtype=torch.float64) + 0.05
    residual = torch.randn(*residual_batch, N * T, generator=generator, dtype=torch.float64)
    made = points, factor @ factor.mT, noise, residual
    return [values.to(dtype).requires_grad_() for values in made]


def symmetric(gradients):
    """What a gradient by a matrix is by a symmetric one."""
    return [0.5 * (G + G.mT) for G in gradients[:2]] + list(gradients[2:])


def weighted(value):
    return (value * torch.linspace(1.0, 2.0, value.numel()).reshape(value.shape).to(value)).sum()


@pytest.mark.parametrize("rank", [1, T])
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("rows", ROWS)
def test_densities_and_gradients_are_those_of_the_matrix(rows, batches, rank):
    inputs = problem(BATCHES[batches], rank)
    *arguments, residual = inputs
    covariance, blocks = KroneckerCovariance(*arguments), flat(ROWS[rows])
    value = covariance.held_out_log_density(residual, blocks)
    expected = DenseCovariance(covariance.matrix).held_out_log_density(residual, blocks)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    ours = symmetric(torch.autograd.grad(weighted(value), inputs))
    theirs = symmetric(torch.autograd.grad(weighted(expected), inputs))
    for gradient, other in zip(ours, theirs, strict=True):
        atol = 1e-10 * float(other.abs().max())
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=atol)


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_by_finite_differences(rows):
    points, tasks, noise, residual = problem()
    root = torch.linalg.cholesky(points.detach() + 0.1 * torch.eye(N)).requires_grad_()

    def value(root, tasks, noise, residual):
        covariance = KroneckerCovariance(root @ root.mT, tasks @ tasks.mT, noise)
        return covariance.held_out_log_density(residual, flat(ROWS[rows]))

    assert torch.autograd.gradcheck(value, (root, tasks, noise, residual))


def test_equal_tasks_have_gradients():
    """Where eigenvalues are equal, their vectors have none."""
    points, _, _, residual = problem()
    tasks = torch.eye(T, dtype=torch.float64).requires_grad_()
    noise = torch.full((T,), 0.3, dtype=torch.float64).requires_grad_()
    covariance = KroneckerCovariance(points, tasks, noise)
    pair = covariance, DenseCovariance(covariance.matrix)
    values = (K.held_out_log_density(residual, flat(ROWS["folds"])) for K in pair)
    ours, theirs = (torch.autograd.grad(value, (tasks, noise)) for value in values)
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_single_precision_is_computed_in_double():
    single, double = problem(dtype=torch.float32), problem()
    for values, other in zip(single, double, strict=True):
        other.data.copy_(values.data)
    values, gradients = [], []
    for *arguments, residual in (single, double):
        value = KroneckerCovariance(*arguments).held_out_log_density(residual, flat(ROWS["some"]))
        values.append(value)
        gradients.append(torch.autograd.grad(value, [*arguments, residual]))
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-5, atol=1e-5)
    for gradient, other in zip(*gradients, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("held_out", [[0, 1], [1, 2, 3], [0, 2, 1], [3, 4, 5, 7]])
def test_points_without_some_of_their_tasks_go_by_the_matrix(held_out):
    *arguments, residual = problem()
    covariance = KroneckerCovariance(*arguments)
    rows = torch.tensor(held_out)
    expected = DenseCovariance(covariance.matrix).conditional_log_density(residual, rows)
    torch.testing.assert_close(covariance.conditional_log_density(residual, rows), expected)


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel, **likelihood):
        batch = x.shape[:-2]
        tasks = gpytorch.likelihoods.MultitaskGaussianLikelihood(T, batch_shape=batch, **likelihood)
        super().__init__(x, y, tasks)
        mean = gpytorch.means.ConstantMean(batch_shape=batch)
        self.mean_module = gpytorch.means.MultitaskMean(mean, T)
        # GPyTorch repeats the covariance of tasks for each member of the inputs' batch.
        self.covar_module = gpytorch.kernels.MultitaskKernel(kernel(batch_shape=batch), T, rank=2)

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)


MODELS = {
    "matern": lambda x, y: Model(x, y, gpytorch.kernels.MaternKernel),
    "batch": lambda x, y: Model(x, y, gpytorch.kernels.MaternKernel),
    "missing": lambda x, y: Model(x, y, gpytorch.kernels.MaternKernel),
    "linear": lambda x, y: Model(x, y, gpytorch.kernels.LinearKernel),
    "one noise": lambda x, y: Model(x, y, gpytorch.kernels.RBFKernel, has_task_noise=False),
    "noise of tasks": lambda x, y: Model(x, y, gpytorch.kernels.RBFKernel, has_global_noise=False),
    "correlated noise": lambda x, y: Model(x, y, gpytorch.kernels.RBFKernel, rank=1),
    "botorch": KroneckerMultiTaskGP,
}  # fmt: skip
CONDITIONINGS = {
    "lml": LastPoints(0), "folds": KFold(4, seed=1),
    "loo": LeaveOneOut(), "some": RandomHoldout(0.3, condition_on=5, seed=0),
}  # fmt: skip


CELLS = [*itertools.product(MODELS, ["lml", "folds"]), ("matern", "loo"), ("missing", "some")]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "conditioning"), CELLS)
def test_objectives_are_those_by_the_matrix(monkeypatch, name, conditioning):
    batch = (2,) if "batch" in name else ()
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(*batch, 12, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(torch.arange(1, T + 1) * 3 * x.sum(-1, keepdim=True))
    torch.manual_seed(0)  # GPyTorch's factors start at random
    model = MODELS[name](x, y).double().train()
    if name == "missing":
        y[..., 4, 1] = torch.nan
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, CONDITIONINGS[conditioning])
    wanted = list(model.parameters())
    factored = []
    known = observations.kronecker_covariance

    def counted(latent):
        factored.append(known(latent))
        return factored[-1]

    def objective():
        with gpytorch.settings.observation_nan_policy("mask"):
            value = mll(model(x), y)
        return value, torch.autograd.grad(value.sum(), wanted, allow_unused=True)

    monkeypatch.setattr(observations, "kronecker_covariance", counted)
    value, ours = objective()
    if name != "missing" and conditioning != "some":
        assert (factored[0] is not None) == (name != "correlated noise")
        loss = FixedLoss(mll)
        assert loss() == pytest.approx(-value.sum().item(), rel=1e-10)
        for parameter, gradient in zip(wanted, ours, strict=True):
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, -gradient, rtol=1e-8, atol=1e-9)
    monkeypatch.setattr(observations, "kronecker_covariance", lambda latent: None)
    expected, theirs = objective()
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    for gradient, other in zip(ours, theirs, strict=True):
        if other is not None:
            scale = max(1e-6, float(other.abs().max()))
            torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-8 * scale)


def test_tasks_that_are_not_finite_are_refused():
    x = torch.rand(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Model(x, torch.cat([x, x[:, :1]], 1), gpytorch.kernels.RBFKernel).double().train()
    model.covar_module.task_covar_module.covar_factor.data[0, 0] = torch.nan
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    with pytest.raises(NonFiniteError, match="covariance"):
        mll(model(x), model.train_targets)
