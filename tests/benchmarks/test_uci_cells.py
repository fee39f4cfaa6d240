import math

import pytest
import torch

from benchmarks.uci.cells import run_cell, training_rows
from benchmarks.uci.grid import make_grid
from benchmarks.uci.objectives import make_objective
from benchmarks.uci.training import optimizer_for
from gpclml import datasets
from gpclml.conditioning import KFold, RandomHoldout
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def grid(**changes):
    arguments = {
        "names": ["diabetes"], "sizes": [40], "seeds": 1, "objectives": ["lml", "clml"],
        "kernels": ["rbf", "deep-bottleneck"], "steps": 5,
    }  # fmt: skip
    return make_grid(**(arguments | changes))


def small_model():
    data = datasets.load("diabetes")
    return GPRegression(data.inputs[:30], data.targets[:30])


@pytest.mark.parametrize(
    "cell",
    [
        *grid(objectives=["clml"], kernels=["deep-bottleneck"]),
        *grid(objectives=["loo"], kernels=["deep"]),
        *grid(objectives=["clml"], kernels=["rbf"], sizes=[80]),
    ],
    ids=lambda cell: cell["kernel"],
)
def test_a_cell_is_the_same_each_time(cell):
    torch.manual_seed(1)
    first = run_cell(cell)
    torch.manual_seed(2)
    assert run_cell(cell) == first
    assert all(type(value) is float for value in first.values())


def test_metrics_are_in_units_of_all_targets():
    [cell] = grid(objectives=["lml"], kernels=["rbf"])
    metrics = run_cell(cell)
    data = datasets.load("diabetes")
    rows = training_rows(data, 40, seed=0)
    model = GPRegression(data.inputs[rows.train], data.targets[rows.train])
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
    assert metrics["coverage_95"] == pytest.approx(float(inside.double().mean()))
    assert metrics["noise"] == pytest.approx(model.likelihood.noise.item(), rel=1e-9)


def test_rows_are_shared_nested_and_apart():
    data = datasets.load("diabetes")
    small, large = training_rows(data, 40, seed=3), training_rows(data, 80, seed=3)
    assert torch.equal(large.train[:40], small.train)
    assert torch.equal(large.test, small.test)
    assert not set(large.train.tolist()) & set(large.test.tolist())
    assert not torch.equal(training_rows(data, 40, seed=4).train, small.train)


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

    assert torch.equal(mll.compute_custom_loss(), -value(fixed))
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
    rbf = grid(kernels=["rbf"])
    assert grid(kernels=["rbf"], steps=9, lr=0.1) == rbf
    assert [cell["held_out"] for cell in rbf] == [None, 0.1]
    deep = grid(kernels=["deep"])
    assert [(cell["steps"], cell["lr"]) for cell in deep] == [(5, 0.01)] * 2
    assert grid(kernels=["deep"], steps=9) != deep


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sizes": [100, 399]}, "n: got 399 for diabetes, expected 2 to 398"),
        ({"sizes": [1]}, "n: got 1 for diabetes"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"steps": 0}, "steps: got 0"),
        ({"lr": math.inf}, "lr: got inf"),
        ({"held_out": 1.0}, "held_out: got 1.0"),
        ({"device": "gpu"}, "device: got 'gpu'"),
    ],
)
def test_numbers_are_checked_before_anything_runs(changes, text):
    with pytest.raises(ArgumentError, match=text):
        grid(**changes)
