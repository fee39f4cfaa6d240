"""The objective of points given their nearest neighbours, and predictions given neighbours."""

from __future__ import annotations

from functools import partial
from itertools import cycle

import gpytorch
import pytest
import torch
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from exact_gps import MultitaskGP
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, MultitaskGaussianLikelihood

from gpclml import ConditionalMarginalLogLikelihood, LastPoints, LeaveOneOut, fit_mll
from gpclml.conditioning import NearestNeighbors, Split
from gpclml.errors import NonFiniteError, UnsupportedError
from gpclml.inference.neighbours import conditional_log_densities
from gpclml.inference.observations import training_observations
from gpclml.mlls.fixed_loss import fresh_loss
from gpclml.models import GPRegression
from gpclml.models.botorch import DeepKernelGP


class OwnKernel(gpytorch.kernels.RBFKernel):
    """A subclass, which is not known in closed form."""


def data(n: int = 30, d: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, (4 * x).sin().sum(-1) + 0.1 * noise


def fixed_noise(x, y):
    noise = torch.linspace(0.01, 0.1, len(y), dtype=torch.float64)
    return GPRegression(x, y, likelihood=FixedNoiseGaussianLikelihood(noise))


def copied(sites: int, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in any order, of which each is there many times, and their targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(sites, 2, generator=generator, dtype=torch.float64)
    x = x.repeat_interleave(copies, 0)[torch.randperm(sites * copies, generator=generator)]
    noise = torch.randn(len(x), generator=generator, dtype=torch.float64)
    return x, (6 * x[:, 0]).sin() + (5 * x[:, 1]).cos() + 0.1 * noise


def objective(model, conditioning=None, **options):
    conditioning = conditioning or NearestNeighbors(**options)
    return ConditionalMarginalLogLikelihood(model.likelihood, model.train(), conditioning)


def value_of(mll):
    inputs = mll.model.train_inputs
    return mll(mll.model(*inputs), mll.model.train_targets, *inputs)


kernels = gpytorch.kernels
MODELS = {
    "matern": GPRegression,
    **{
        name: partial(GPRegression, kernel=name)
        for name in ("deep", "deep_bottleneck", "deep_joint", "spectral_mixture")
    },
    "network mean": partial(GPRegression, mean="mlp"),
    "linear": lambda x, y: GPRegression(x, y, kernels.LinearKernel()),
    "sum": lambda x, y: GPRegression(
        x, y, kernels.ScaleKernel(kernels.RBFKernel(active_dims=[0])) + kernels.LinearKernel()
    ),
    "product": lambda x, y: GPRegression(x, y, kernels.RBFKernel() * kernels.PeriodicKernel()),
    "own": lambda x, y: GPRegression(x, y, OwnKernel()),
    "fixed noise": fixed_noise,
    "botorch": lambda x, y: SingleTaskGP(x, y.unsqueeze(-1)),
    "copies": lambda x, y: GPRegression(*copied(4, 8)),
}


ORDERS = ("previous", "all", "joint")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_with_all_others_as_neighbours_it_is_the_exact_objective(name, order):
    exact = LeaveOneOut() if order == "all" else LastPoints(m=0)
    values = []
    for conditioning in (exact, None):
        model = MODELS[name](*data()).double()
        k = len(model.train_targets) - 1
        value = value_of(objective(model, conditioning, k=k, batch=None, order=order))
        gradients = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
        values.append([value.detach(), *(g for g in gradients if g is not None)])
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", ["previous", "all"])
def test_each_density_is_that_of_a_gaussian(order):
    x, y = data()
    model = GPRegression(x, y)
    observations = training_observations(model.train())
    strategy = NearestNeighbors(k=4, batch=None, order=order)
    split = strategy.split(len(y), points=observations.metric())
    values = conditional_log_densities(observations, split)
    with torch.no_grad():
        prior = model.likelihood(model(x))
        K, mean = prior.covariance_matrix, prior.mean
    for i, given in enumerate(split.conditioned_on):
        rows = given[given >= 0]
        weights = torch.linalg.solve(K[rows][:, rows], K[rows, i])
        error = model.train_targets[i] - mean[i] - weights @ (model.train_targets - mean)[rows]
        variance = K[i, i] - weights @ K[rows, i]
        expected = torch.distributions.Normal(0.0, variance.sqrt()).log_prob(error)
        assert values[i].item() == pytest.approx(expected.item(), abs=1e-10)


def test_a_joint_density_is_that_of_a_point_and_its_neighbours():
    x, y = data()
    model = GPRegression(x, y, standardize=False)
    strategy = NearestNeighbors(k=4, batch=None, order="joint")
    value = value_of(objective(model, strategy))
    with torch.no_grad():
        prior = model.likelihood(model(x))
        K, error = prior.covariance_matrix, model.train_targets - prior.mean
        near = torch.cdist(x, x).topk(5, largest=False).indices
    blocks = [
        torch.distributions.MultivariateNormal(torch.zeros(5).double(), K[rows][:, rows])
        for rows in near
    ]
    logs = [block.log_prob(error[rows]) / 5 for block, rows in zip(blocks, near, strict=True)]
    assert value.item() == pytest.approx(torch.stack(logs).mean().item(), abs=1e-10)


@pytest.mark.parametrize("order", ["all", "joint"])
def test_batches_add_up_to_all_points(order):
    x, y = data()
    observations = training_observations(GPRegression(x, y, "deep").train())
    strategy = NearestNeighbors(k=5, batch=None, order=order)
    split = strategy.split(len(y), points=observations.metric())
    densities = [
        conditional_log_densities(
            observations, Split([split.held_out[0][rows]], split.conditioned_on[rows])
        ).mean()
        for rows in torch.randperm(30, generator=torch.Generator().manual_seed(0)).split(6)
    ]
    every = conditional_log_densities(observations, split).mean()
    torch.testing.assert_close(torch.stack(densities).mean(), every, rtol=0, atol=1e-10)


@pytest.mark.parametrize("order", ["all", "joint"])
@pytest.mark.parametrize("kernel", ["matern", "deep", "deep_bottleneck", "deep_joint"])
def test_gradients_are_those_of_finite_differences(kernel, order):
    x, y = data()
    model = GPRegression(x, y, kernel)
    mll = objective(model, k=4, batch=None, order=order, refresh=10**6)
    value_of(mll).backward()
    for parameter in model.parameters():
        direction = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        with torch.no_grad():
            parameter += 1e-5 * direction
            above = value_of(mll)
            parameter -= 2e-5 * direction
            below = value_of(mll)
            parameter += 1e-5 * direction
        slope = (parameter.grad * direction).sum().item()
        assert slope == pytest.approx(((above - below) / 2e-5).item(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("order", ORDERS)
def test_missing_targets_are_left_out(order):
    x, y = data()
    kept = torch.arange(30) % 4 != 1
    values = []
    with gpytorch.settings.observation_nan_policy("mask"):
        for points, targets in ((x, y.masked_fill(~kept, torch.nan)), (x[kept], y[kept])):
            model = GPRegression(points, targets, standardize=False)
            values.append(value_of(objective(model, k=5, batch=None, order=order)))
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)


def test_float32_agrees_with_float64():
    x, y = data(200)
    values = []
    for dtype in (torch.float32, torch.float64):
        model = GPRegression(x.to(dtype), y.to(dtype))
        value = value_of(objective(model, k=16, batch=None))
        gradients = torch.autograd.grad(value, list(model.parameters()))
        values.append([value.detach(), *gradients])
    for single, double in zip(*values, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["matern", "deep", "linear", "own"])
def test_predictions_given_all_points_are_the_exact_ones(name):
    x, y = data()
    model = MODELS[name](x, y)
    new = torch.rand(11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for noise in (True, False):
        exact = model.predict(new, noise, marginal=True)
        ours = model.predict(new, noise, neighbors=100)
        torch.testing.assert_close(ours.mean, exact.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.variance, exact.variance, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_fit_finds_what_made_the_data(optimizer, order):
    x, y = data(600, 2)
    model = GPRegression(x, y)
    mll = objective(model, k=12, batch=200, order=order)
    options = {"steps": 60, "lr": 0.1} if optimizer == "adam" else {}
    result = fit_mll(mll, optimizer, progress=False, **options)
    assert not result.problem
    assert "Cholesky factors of 13 points each" in result.road.way
    deviation = (model.likelihood.noise.sqrt() * model.target_scale).item()
    assert deviation == pytest.approx(0.1, rel=0.25)
    new, _ = data(700, 2)
    truth = (4 * new[600:]).sin().sum(-1)
    predicted = model.predict(new[600:], neighbors=40)
    assert (predicted.mean - truth).square().mean().sqrt() < 0.06


def test_steps_are_taken_in_logarithms():
    x, y = data(120, 4)
    model, other = (GPRegression(x, y, "rq") for _ in range(2))
    mlls = [objective(each, k=8, batch=40) for each in (model, other)]
    fit_mll(mlls[0], "adam", steps=30, lr=0.1, progress=False)
    # The same by hand: each positive hyperparameter is the exponential of a leaf.
    kernel = "covar_module.base_kernel"
    places = [
        ("likelihood.noise_covar", "noise"),
        ("covar_module", "outputscale"),
        (kernel, "lengthscale"),
        (kernel, "alpha"),
    ]
    modules = [(other.get_submodule(path), name) for path, name in places]
    leaves = [torch.nn.Parameter(getattr(module, name).log()) for module, name in modules]
    constant = other.mean_module.raw_constant
    optimizer = torch.optim.Adam([constant, *leaves], lr=0.1)
    for _ in range(30):
        values = [getattr(module, name) for module, name in modules]
        raw = [getattr(module, f"raw_{name}") for module, name in modules]
        constant.grad, *slopes = torch.autograd.grad(fresh_loss(mlls[1]), [constant, *raw])
        for leaf, value, parameter, slope in zip(leaves, values, raw, slopes, strict=True):
            (by_raw,) = torch.autograd.grad(value.sum(), parameter)
            leaf.grad = slope / by_raw * value.detach()
        optimizer.step()
        for (module, name), leaf in zip(modules, leaves, strict=True):
            setattr(module, name, leaf.detach().exp())
    for (path, name), leaf in zip(places, leaves, strict=True):
        fitted = getattr(model.get_submodule(path), name)
        torch.testing.assert_close(fitted, leaf.exp(), rtol=1e-8, atol=0)


def test_columns_that_do_not_matter_have_long_lengthscales():
    x, _ = data(400, 5)
    model = GPRegression(x, (6 * x[:, 0]).sin())
    fit_mll(objective(model, k=12), "adam", steps=200, lr=0.1, progress=False)
    lengthscales = model.covar_module.base_kernel.lengthscale.detach().flatten()
    assert lengthscales[0] < 10
    assert (lengthscales[1:] > 100).all()
    assert model.likelihood.noise.item() == pytest.approx(1.01e-4, rel=0.2)


def test_steps_from_where_a_softplus_is_flat_stay_finite():
    x, y = data(60)
    model = GPRegression(x.float(), y.float())
    with torch.no_grad():
        model.covar_module.raw_outputscale.fill_(-120.0)
        model.covar_module.base_kernel.raw_lengthscale.fill_(-120.0)
    fit_mll(objective(model, k=8), "adam", steps=3, lr=0.1, progress=False)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.predict(x.float(), neighbors=8).mean.isfinite().all()


def test_one_strategy_serves_two_objectives():
    strategy, values = NearestNeighbors(k=5, batch=None, refresh=5), []
    for n in (30, 40, 30):
        values.append(value_of(objective(GPRegression(*data(n)), strategy)).item())
    assert values[0] == values[2]


def test_models_without_neighbours_are_refused_by_name():
    x, y = data()
    several = MultitaskGP(x, torch.stack([y, y], -1), MultitaskGaussianLikelihood(2)).double()
    with pytest.raises(UnsupportedError, match="a kernel of points"):
        value_of(objective(several, k=3))
    batch = GPRegression(torch.stack([x, x]), torch.stack([y, y]))
    with pytest.raises(Exception, match="one model"):
        value_of(objective(batch, k=3))


def assert_same_draws(model, strategy, look=lambda: None):
    """Losses of fits are those of the objective at all points; gives what is seen after each."""
    losses, seen = [], []
    for evaluate in (fresh_loss, lambda mll: -value_of(mll)):
        mll = objective(model, strategy)
        losses.append(torch.stack([evaluate(mll) for _ in range(5)]))
        seen.append(look())
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(each.sum(), trained, allow_unused=True) for each in losses]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    return seen


@pytest.mark.parametrize("name", ["matern", "deep", "network mean", "sum"])
def test_a_fit_draws_what_the_objective_draws(name):
    x, y = data(60)
    with gpytorch.settings.observation_nan_policy("mask"):
        model = MODELS[name](x, y.where(torch.arange(60) % 7 != 0, torch.nan))
        for order in ORDERS:
            strategy = NearestNeighbors(k=5, batch=20, order=order, refresh=2)
            assert_same_draws(model, strategy)


@pytest.mark.parametrize(
    ("kernel", "normalized"),
    [(None, True), (None, False), ("deep", True), ("deep_bottleneck", False), ("deep_joint", True)],
)
def test_a_step_of_botorch_models_takes_few_rows_of_the_full_objective(kernel, normalized):
    x, y = data(300)
    rows, x = [], 5 * x + 2 if normalized else x
    transform = Normalize(3) if normalized else None
    if kernel is None:
        model = SingleTaskGP(x, y.unsqueeze(-1), input_transform=transform)
    else:
        model = DeepKernelGP(x, y.unsqueeze(-1), kernel=kernel, input_transform=transform)
    forward = model.forward
    model.forward = lambda x: rows.append(len(x)) or forward(x)
    strategy = NearestNeighbors(k=5, batch=10, refresh=3)
    sizes, _ = assert_same_draws(model, strategy, lambda: sorted(rows))
    # All rows are asked for only where neighbours are looked up.
    assert sizes[len(sizes) // 2] <= 60 < sizes[-1] == 300


@pytest.mark.slow
@pytest.mark.parametrize("order", ["previous", "all"])
def test_copies_leave_room_for_other_neighbours(order):
    x, y = copied(40, 100)
    model = GPRegression(x, y)
    strategy = NearestNeighbors(k=16, batch=200, order=order)
    split = strategy.split(len(y), torch.Generator().manual_seed(0), points=x)
    points = x[split.conditioned_on]
    first_copies = (points == points[:, :1]).all(-1) & (split.conditioned_on >= 0)
    complete = (split.conditioned_on >= 0).all(-1)
    assert complete.float().mean() > 0.9
    assert (first_copies.sum(-1)[complete] <= 4).all()
    assert not (split.conditioned_on == split.held_out[0]).any()
    mll = objective(model, strategy)
    fit_mll(mll, "adam", steps=80, lr=0.1, final_lr=1e-3, progress=False)
    new = torch.rand(300, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    predicted = model.predict(new, neighbors=64)
    truth = (6 * new[:, 0]).sin() + (5 * new[:, 1]).cos()
    assert (predicted.mean - truth).square().mean().sqrt() < 0.12


@pytest.mark.parametrize("missing", [False, True])
def test_predictions_of_copies_are_the_exact_ones(missing):
    x, y = copied(6, 20)
    if missing:
        y = y.where(torch.arange(len(y)) % 5 != 0, torch.nan)
    model = GPRegression(x, y)
    new = torch.rand(9, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact, ours = model.predict(new, marginal=True), model.predict(new, neighbors=6)
    torch.testing.assert_close(ours.mean, exact.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.variance, exact.variance, rtol=1e-9, atol=1e-9)


def test_a_gradient_of_predictions_from_neighbours_is_refused():
    x, y = data()
    with pytest.raises(UnsupportedError, match="points that require a gradient"):
        GPRegression(x, y).predict(x[:2].requires_grad_(), neighbors=5)


def bad_inputs():
    """Inputs, targets and kernels that are hard to find neighbours in."""
    x, y = data(200)
    many = x[:3].repeat(500, 1), y[:3].repeat(500) + 0.1 * data(1500)[1]
    index = (torch.arange(200) % 3).unsqueeze(-1).double()
    return {
        "few points": (x[:8], y[:8], "matern"),
        "a constant column": (torch.cat([x, torch.ones_like(x[:, :1])], -1), y, "matern"),
        "copied columns": (torch.cat([x, x], -1), y, "matern"),
        "copies in hundreds": (*many, "matern"),
        "one point many times": (x[:1].repeat(200, 1), y, "matern"),
        "200 columns": (data(200, 200)[0], y, "matern"),
        "linear": (x, y, kernels.ScaleKernel(kernels.LinearKernel())),
        "polynomial": (x, y, kernels.PolynomialKernel(2)),
        "constant": (x, y, kernels.ConstantKernel()),
        "index": (index, y, kernels.IndexKernel(3)),
        "single precision": (x.float(), (x[:, 0] * x[:, 1] + x[:, 2]).float(), "matern"),
    }


BAD = list(zip(bad_inputs(), cycle(ORDERS), strict=False))


@pytest.mark.parametrize(("name", "order"), BAD)
def test_bad_input_is_fitted_and_predicted(name, order):
    x, y, kernel = bad_inputs()[name]
    model = GPRegression(x, y, kernel, standardize=name != "index")
    mll = objective(model, k=12, batch=32, order=order)
    result = fit_mll(mll, "adam", steps=15, lr=0.1, progress=False)
    assert not result.problem
    predicted = model.predict(x[:20], neighbors=16)
    assert predicted.mean.isfinite().all()
    assert (predicted.variance > 0).all()
    # No worse than the mean of the targets, up to their noise.
    error = (predicted.mean - y[:20]).square().mean()
    assert error < 1.2 * (y[:20] - y.mean()).square().mean() + 0.1


def test_one_row_and_two():
    x, y = data(2)
    for n in (1, 2):
        model = GPRegression(x[:n], y[:n])
        assert not fit_mll(objective(model), "adam", steps=3, progress=False).problem
        assert model.predict(x, neighbors=5).variance.isfinite().all()


def test_a_kernel_without_a_metric_and_missing_targets_are_refused_by_name():
    class Inner(kernels.Kernel):
        def forward(self, x1, x2, diag=False, **params):
            products = x1 @ x2.mT + 1.0
            return products.diagonal(dim1=-2, dim2=-1) if diag else products

    x, y = data()
    with pytest.raises(UnsupportedError, match="one with lengthscales"):
        fit_mll(objective(GPRegression(x, y, Inner())), "adam", steps=2, progress=False)
    model = GPRegression(x, y.where(torch.arange(30) % 4 > 0, torch.nan))
    with pytest.raises(NonFiniteError, match="target"):
        fit_mll(objective(model), "adam", steps=2, progress=False)


def test_an_interrupted_fit_keeps_its_last_parameters(monkeypatch):
    x, y = data(60)
    model = GPRegression(x, y)
    mll = objective(model, batch=16)
    drawn, states = mll.redrawn_objective, []

    def interrupted():
        states.append(model.likelihood.noise.item())
        if len(states) == 8:
            raise KeyboardInterrupt
        return drawn()

    monkeypatch.setattr(mll, "redrawn_objective", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_mll(mll, "adam", steps=20, lr=0.1, progress=False)
    assert model.likelihood.noise.item() == states[-1] < states[0]
    assert model.predict(x, neighbors=8).mean.isfinite().all()
