import math
import warnings

import pytest
import torch

from benchmarks.data import load
from benchmarks.uci import cells
from benchmarks.uci.cells import run_cell, training_rows
from benchmarks.uci.grid import Product, make_grid
from benchmarks.uci.training import make_objective, optimizer_for, train
from gpclml.conditioning import KFold, RandomHoldout
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit import FitWarning, fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.mlls.fixed_loss import fixed_loss
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


@pytest.mark.parametrize(
    "cell",
    [
        *grid(objectives=("clml",), kernels=("deep-bottleneck",), trace=True),
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


def test_a_trace_leaves_the_fit_as_it_is():
    [plain] = grid(objectives=("clml",), kernels=("deep-bottleneck",), steps=(60,))
    [traced] = grid(objectives=("clml",), kernels=("deep-bottleneck",), steps=(60,), trace=True)
    [half] = grid(objectives=("clml",), kernels=("deep-bottleneck",), steps=(25,))
    metrics, expected = run_cell(traced), run_cell(plain)
    assert metrics.pop("steps_at") == [25, 50, 60]
    at_25, _, at_60 = metrics.pop("rmse_at")
    del metrics["train_seconds"], expected["train_seconds"]
    assert metrics == expected
    assert at_60 == metrics["rmse"]
    assert at_25 == run_cell(half)["rmse"]


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
    error = data.targets[rows.test] - prediction.mean
    normal = torch.distributions.Normal(prediction.mean / unit, prediction.stddev / unit)
    nll = -normal.log_prob(data.targets[rows.test] / unit).mean()
    low, high = normal.icdf(torch.tensor(0.025)), normal.icdf(torch.tensor(0.975))
    inside = (low <= data.targets[rows.test] / unit) & (data.targets[rows.test] / unit <= high)
    assert metrics["rmse"] == pytest.approx(float(error.square().mean().sqrt() / unit), rel=1e-9)
    assert metrics["nll"] == pytest.approx(float(nll), rel=1e-9)
    grid_of_y = torch.linspace(-12, 12, 20_001).unsqueeze(-1)
    distance = normal.cdf(grid_of_y) - (data.targets[rows.test] / unit <= grid_of_y).double()
    crps = torch.trapezoid(distance.square(), grid_of_y, dim=0).mean()
    assert metrics["crps"] == pytest.approx(float(crps), abs=1e-3)
    assert metrics["coverage_95"] == pytest.approx(float(inside.double().mean()))
    assert metrics["noise"] == pytest.approx(model.likelihood.noise.item(), rel=1e-9)


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


def test_lml_is_the_exact_marginal_likelihood():
    model = small_model()
    value = make_objective("lml", model)(model(*model.train_inputs), model.train_targets)
    prior = model.likelihood(model(*model.train_inputs))
    expected = torch.distributions.MultivariateNormal(prior.mean, prior.covariance_matrix)
    assert value.item() == pytest.approx(expected.log_prob(model.train_targets).item() / 30)


@pytest.mark.parametrize(
    ("share", "fresh", "fixed"),
    [
        (0.1, RandomHoldout(0.1), KFold(10)),
        (0.3, RandomHoldout(0.3), RandomHoldout(0.3)),
    ],
)
def test_clml_holds_out_the_share(share, fresh, fixed):
    model = small_model()
    mll = make_objective("clml", model, held_out=share, seed=7)
    output = model(*model.train_inputs)

    def value(conditioning):
        reference = ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning, seed=7)
        return reference(output, model.train_targets)

    assert torch.equal(fixed_loss(mll), -value(fixed))
    assert torch.equal(mll(output, model.train_targets), value(fresh))


def test_networks_are_trained_by_adam_and_others_by_a_line_search():
    assert {kernel: optimizer_for(kernel, "constant") for kernel in ("rbf", "deep")} == {
        "rbf": "lbfgs",
        "deep": "adam",
    }
    assert optimizer_for("rbf", "mlp") == "adam"
    with pytest.raises(UnknownNameError, match="Did you mean 'matern'"):
        optimizer_for("mattern", "constant")
    with pytest.raises(UnknownNameError, match="Did you mean 'constant'"):
        optimizer_for("rbf", "constat")


def test_unused_settings_do_not_tell_cells_apart():
    rbf = grid(kernels=("rbf",))
    assert grid(kernels=("rbf",), steps=(9, 10), lr=0.1, trace=True) == rbf
    assert [cell["held_out"] for cell in rbf] == [None, 0.1]
    deep = grid(kernels=("deep",))
    assert [(cell["steps"], cell["lr"], cell["trace"]) for cell in deep] == [(5, 0.01, False)] * 2
    assert grid(kernels=("deep",), steps=(9,)) != deep


def test_objectives_with_a_share_are_expanded_over_shares():
    cells = grid(objectives=("lml", "clml", "clml-folds"), held_out=(0.1, 0.5), kernels=("rbf",))
    assert [(cell["objective"], cell["held_out"]) for cell in cells] == [
        ("lml", None), ("clml", 0.1), ("clml", 0.5), ("clml-folds", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sizes": (100, 399)}, "n: got 399 for diabetes, expected 2 to 398"),
        ({"sizes": (1,)}, "n: got 1 for diabetes"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"steps": (5, 0)}, "steps: got 0"),
        ({"lr": math.inf}, "lr: got inf"),
        ({"held_out": (0.1, 1.0)}, "held_out: got 1.0, expected shares between 0 and 1"),
        ({"held_out": (0.0,)}, "held_out: got 0.0"),
        ({"held_out": (0.01,)}, "held_out: got 0.01, which holds out 0 of n = 40"),
        ({"held_out": (0.99,)}, "held_out: got 0.99, which holds out 40 of n = 40"),
        ({"datasets": ("boson",)}, "datasets: got 'boson'.*Did you mean 'boston'"),
        ({"objectives": ("cmll",)}, "objectives: got 'cmll'.*Did you mean 'clml'"),
    ],
)
def test_settings_are_checked_before_anything_runs(changes, text):
    with pytest.raises(ArgumentError, match=text):
        grid(**changes)


def test_no_share_is_asked_of_objectives_without_one():
    assert grid(objectives=("lml",), held_out=(0.001,))
