"""Several tasks at the same points: their densities in models, and what is refused."""

import itertools

import gpytorch
import pytest
import torch
from exact_gps import MultitaskGP
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood

import reference
from gpclml.conditioning import KFold, LastPoints, LeaveOneOut, RandomHoldout
from gpclml.errors import NonFiniteError
from gpclml.linalg import DenseCovariance, KroneckerCovariance
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import FixedLoss

N, T = 12, 3


def test_equal_tasks_have_gradients():
    """Where eigenvalues are equal, their vectors have none."""
    points = reference.random_covariance(7, noise=0.0)
    tasks = torch.eye(T, dtype=torch.float64).requires_grad_()
    noise = torch.full((T,), 0.3, dtype=torch.float64).requires_grad_()
    residual = reference.random_residual(7 * T)
    blocks = [torch.arange(7 * T).view(7, T)]
    covariance = KroneckerCovariance(points, tasks, noise)
    pair = covariance, DenseCovariance(covariance.matrix)
    values = (K.held_out_log_density(residual, blocks) for K in pair)
    ours, theirs = (torch.autograd.grad(value, (tasks, noise)) for value in values)
    torch.testing.assert_close(ours, theirs)


def multitask(kernel, **options):
    def make(x, y):
        batch = x.shape[:-2]
        likelihood = MultitaskGaussianLikelihood(T, batch_shape=batch, **options)
        return MultitaskGP(x, y, likelihood, kernel(batch_shape=batch), rank=2)

    return make


MODELS = {
    "matern": multitask(MaternKernel),
    "batch": multitask(MaternKernel),
    "missing": multitask(MaternKernel),
    "linear": multitask(LinearKernel),
    "one noise": multitask(RBFKernel, has_task_noise=False),
    "noise of tasks": multitask(RBFKernel, has_global_noise=False),
    "correlated noise": multitask(RBFKernel, rank=1),
}
CONDITIONINGS = {
    "lml": LastPoints(0), "folds": KFold(4, seed=1),
    "loo": LeaveOneOut(), "some": RandomHoldout(0.3, condition_on=5, seed=0),
}  # fmt: skip
CELLS = [*itertools.product(MODELS, ["lml", "folds"]), ("matern", "loo"), ("missing", "some")]


def expected_value(model, split, y):
    """By the matrix of all observed targets of the points that take part."""
    output = model.likelihood(model(*model.train_inputs))
    rows = torch.arange(N)
    if split.conditioned_on is not None:
        held_out = [row for group in split.held_out for row in group.flatten()]
        rows = torch.cat([split.conditioned_on, torch.stack(held_out)])
    flat = (rows.unsqueeze(-1) * T + torch.arange(T)).flatten()
    flat = flat[~y.flatten()[flat].isnan()]
    K = output.covariance_matrix[flat][:, flat]
    residual = (y - output.mean).flatten()[flat]
    values, count = [], 0
    for block in (block for group in split.held_out for block in group):
        held_out = torch.isin(flat // T, block).nonzero().squeeze(-1)
        values.append(reference.conditional_log_density(K, residual, held_out))
        count += len(held_out)
    return torch.stack(values).sum() / count


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "conditioning"), CELLS)
def test_objectives_are_those_of_the_whole_matrix(name, conditioning):
    batch = (2,) if name == "batch" else ()
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(*batch, N, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(torch.arange(1, T + 1) * 3 * x.sum(-1, keepdim=True))
    torch.manual_seed(0)  # GPyTorch's factors start at random
    model = MODELS[name](x, y).double().train()
    if name == "missing":
        y[4, 1] = torch.nan
        y[7] = torch.nan
    strategy = CONDITIONINGS[conditioning]
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, strategy)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with gpytorch.settings.observation_nan_policy("mask"):
        value = mll(model(x), y)
    ours = torch.autograd.grad(value.sum(), wanted, allow_unused=True)
    if name not in ("missing", "batch"):
        loss = FixedLoss(mll)
        model.zero_grad()
        assert loss() == pytest.approx(-value.sum().item(), rel=1e-10)
        for parameter, gradient in zip(wanted, ours, strict=True):
            torch.testing.assert_close(parameter.grad, -gradient, rtol=1e-8, atol=1e-9)
    if name == "batch":  # which is a stack of singles, as test_covariance.py says
        return
    split = strategy.split(N, observed=~y.isnan().all(-1))
    expected = expected_value(model, split, y)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    theirs = torch.autograd.grad(expected, wanted, allow_unused=True)
    for gradient, other in zip(ours, theirs, strict=True):
        scale = max(1e-6, float(other.abs().max()))
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-8 * scale)


def test_tasks_that_are_not_finite_are_refused():
    x = torch.rand(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = multitask(RBFKernel)(x, torch.cat([x, x[:, :1]], 1)).double().train()
    model.covar_module.task_covar_module.covar_factor.data[0, 0] = torch.nan
    mll = ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(0))
    with pytest.raises(NonFiniteError, match="covariance"):
        mll(model(x), model.train_targets)
