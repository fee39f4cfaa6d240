import warnings

import pytest
import torch
from gpytorch.kernels import GridInterpolationKernel, RBFKernel

from benchmarks.data import load
from benchmarks.uci import cells
from benchmarks.uci.cells import batch_label, most_in_batch, run_cell, run_cells, training_rows
from benchmarks.uci.grid import Product, make_grid
from benchmarks.uci.published import InterpolatedRBFKernel
from benchmarks.uci.training import make_objective, objective_names, train, uses_held_out
from gpclml.conditioning import KFold, RandomHoldout, RandomOrderings
from gpclml.errors import ArgumentError
from gpclml.fit import FitWarning, fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss, fresh_loss
from gpclml.models import GPRegression


def grid(**changes):
    settings = {
        "datasets": ("diabetes",), "sizes": (40,), "seeds": 1, "objectives": ("lml", "clml"),
        "kernels": ("rbf", "deep-bottleneck"), "steps": (5,),
    }  # fmt: skip
    return make_grid([Product(**(settings | changes))])


def small_model():
    data = load("diabetes")
    return GPRegression(data.inputs[:30], data.targets[:30])


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        *grid(objectives=("clml",), kernels=("deep-bottleneck",)),
        *grid(objectives=("loo",), kernels=("deep",)),
        *grid(objectives=("clml",), kernels=("rbf",), sizes=(80,)),
    ],
    ids=lambda cell: cell["kernel"],
)
def test_a_cell_is_the_same_each_time(cell):
    torch.manual_seed(1)
    first = run_cell(cell)
    torch.manual_seed(2)
    second = run_cell(cell)
    assert first.pop("train_seconds") > 0 < second.pop("train_seconds")
    assert second == first


def test_metrics_are_in_units_of_all_targets():
    [cell] = grid(objectives=("lml",), kernels=("rbf",))
    metrics = run_cell(cell)
    data = load("diabetes")
    rows = training_rows(data.num_data, 40, seed=0)
    model = GPRegression(data.inputs[rows.train], data.targets[rows.train], "rbf")
    fit_mll(make_objective("lml", model), progress=False)
    with torch.no_grad():
        prediction = model.predict(data.inputs[rows.test])
    unit = data.targets.std()
    normal = torch.distributions.Normal(prediction.mean / unit, prediction.stddev / unit)
    y = data.targets[rows.test] / unit
    below = normal.cdf(y)
    at = torch.linspace(-12, 12, 20_001).unsqueeze(-1)
    crps = torch.trapezoid((normal.cdf(at) - (y <= at).double()).square(), at, dim=0).mean()
    expected = {
        "rmse": (y - normal.mean).square().mean().sqrt(),
        "nll": -normal.log_prob(y).mean(),
        "coverage_95": ((below >= 0.025) & (below <= 0.975)).double().mean(),
        "noise": model.likelihood.noise,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-9)
    assert metrics["crps"] == pytest.approx(crps.item(), abs=1e-3)


def test_a_warm_start_that_gave_up_counts_as_ended_early(monkeypatch):
    def train(*arguments):
        warnings.warn("The warm start failed and its start is kept.", RuntimeWarning, stacklevel=1)
        return 5, ""

    [cell] = grid(objectives=("lml",), kernels=("deep",))
    monkeypatch.setattr(cells, "train", train)
    assert run_cell(cell)["ended_early"] == 1.0


def test_a_fit_whose_noise_ended_at_its_bound_did_not_end_early():
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = GPRegression(x, (3 * x).sin().sum(-1), "rbf")
    mll = make_objective("lml", model)
    with pytest.warns(FitWarning, match="noise ended at its lower bound"):
        steps, message = train(mll, "lbfgs", None, None)
    assert steps > 5
    assert message == ""


def test_rows_are_shared_nested_and_apart():
    small, large = training_rows(442, 40, seed=3), training_rows(442, 80, seed=3)
    assert torch.equal(large.train[:40], small.train)
    assert torch.equal(large.test, small.test)
    assert not set(large.train.tolist()) & set(large.test.tolist())
    assert not torch.equal(training_rows(442, 40, seed=4).train, small.train)


def test_unused_settings_do_not_tell_cells_apart():
    rbf = grid(kernels=("rbf",))
    assert grid(kernels=("rbf",), steps=(9, 10), lr=0.1) == rbf
    assert [cell["held_out"] for cell in rbf] == [None, 0.1]
    deep = grid(kernels=("deep",))
    assert [(cell["steps"], cell["lr"]) for cell in deep] == [(5, 0.01)] * 2
    assert grid(kernels=("deep",), steps=(9,)) != deep
    cells = grid(objectives=("lml", "clml", "clml-folds"), held_out=(0.1, 0.5), kernels=("rbf",))
    assert [(cell["objective"], cell["held_out"]) for cell in cells] == [
        ("lml", None), ("clml", 0.1), ("clml", 0.5), ("clml-folds", None),
    ]  # fmt: skip
    assert grid(objectives=("lml",), held_out=(0.001,))  # which uses none


@pytest.mark.filterwarnings("ignore::gpclml.fit.FitWarning")  # of so few rows
def test_the_subset_likelihood_is_that_of_its_rows_with_its_gradients():
    model = small_model()
    mll = make_objective("lml-subset", model, held_out=0.2, seed=3)
    value = mll(model(*model.train_inputs), model.train_targets)
    [[rows]] = RandomHoldout(0.8).held_out(30, torch.Generator().manual_seed(3))
    prior = model.likelihood(model(*model.train_inputs))
    covariance = prior.covariance_matrix[rows][:, rows]
    normal = torch.distributions.MultivariateNormal(prior.mean[rows], covariance)
    expected = normal.log_prob(model.train_targets[rows]) / 24
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    gradients = [torch.autograd.grad(v, list(model.parameters())) for v in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)
    start = -mll.compute_custom_loss().item()
    assert start == -mll.compute_custom_loss().item()  # fixed for a line search
    assert fit_mll(mll, progress=False).objective > start


@pytest.mark.parametrize(
    ("name", "share", "conditioning"),
    [
        ("clml", 0.1, RandomHoldout(0.1)),
        ("clml", 0.3, RandomHoldout(0.3)),
        ("clml-fixed", 0.2, RandomHoldout(0.2, seed=7)),
        ("clml-folds", 0.2, KFold(10)),
        ("clml-orderings", 0.2, RandomOrderings(5, 24)),
    ],
)
def test_what_is_held_out(name, share, conditioning):
    model = small_model()
    mll = make_objective(name, model, held_out=share, seed=7)
    output = model(*model.train_inputs)
    reference = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=7)
    for _ in range(2):
        assert torch.equal(mll(output, model.train_targets), reference(output, model.train_targets))
    if name == "clml" and share == 0.1:
        folds = ConditionalMarginalLogLikelihood(model.likelihood, model, KFold(10), seed=7)
        assert torch.equal(fixed_loss(mll), -folds(output, model.train_targets))


@pytest.mark.parametrize("name", objective_names())
def test_only_redrawn_objectives_change_from_call_to_call(name):
    mll = make_objective(name, small_model())
    changes = abs(fresh_loss(mll).item() - fresh_loss(mll).item()) > 1e-12
    assert changes == (name not in ("lml", "loo", "clml-fixed"))
    assert uses_held_out(name) == (name in ("clml", "clml-fixed", "clml-orderings", "lml-subset"))


@pytest.mark.slow
def test_metrics_of_a_batch_are_those_of_the_cells_alone():
    together = grid(kernels=("deep-bottleneck",), seeds=2)
    together.append({**together[0], "n": 10**6})
    *answers, bad = run_cells(together)
    assert isinstance(bad, ArgumentError)
    for cell, answer in zip(together, answers, strict=False):
        alone = run_cell(cell)
        assert answer.keys() == alone.keys()
        for name in alone.keys() - {"train_seconds"}:
            assert answer[name] == pytest.approx(alone[name], rel=1e-6, abs=1e-8), name


def test_only_cells_with_a_fixed_number_of_adam_steps_are_batched():
    cells = grid(kernels=("deep-bottleneck", "deep", "rbf"))
    assert most_in_batch({**cells[0], "objective": "lml-subset"}) == 1
    assert {cell["kernel"] for cell in cells if most_in_batch(cell) > 1} == {"deep-bottleneck"}
    assert {most_in_batch({**cell, "n": 700}) for cell in cells} == {1}
    shares = grid(kernels=("deep-bottleneck",), held_out=(0.1, 0.5), seeds=2)
    assert len({batch_label(cell) for cell in shares}) == 3
    assert len({batch_label({**cell, "device": "cuda"}) for cell in shares}) == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("scales", [[0.5, 0.5], [0.4, 0.7]])
def test_the_published_kernel_is_that_of_gpytorch(scales):
    """Which takes lengthscales from the last column on."""
    x = torch.rand(10, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    kernel = InterpolatedRBFKernel(2, 20).double()
    kernel.lengthscale = torch.tensor([scales])
    base = RBFKernel(ard_num_dims=2)
    theirs = GridInterpolationKernel(base, 20, 2, grid_bounds=[(-1.0, 1.0)] * 2).double()
    base.lengthscale = torch.tensor([scales[::-1]])
    with torch.no_grad():
        for y in (x, x[:3]):
            assert torch.allclose(kernel(x, y).to_dense(), theirs(x, y).to_dense(), atol=1e-6)
        assert torch.allclose(kernel(x, diag=True), theirs(x, diag=True), atol=1e-6)
