"""The speed benchmark compares equal quantities, in turn, and measures memory that is used."""

from __future__ import annotations

import gpytorch
import pandas as pd
import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from benchmarks.speed.__main__ import main, measure
from benchmarks.speed.fits import fit_seeds, measure_fits
from benchmarks.speed.loops import measure_loops
from benchmarks.speed.memory import peak_memory
from benchmarks.speed.methods import (
    BASE,
    DENSE_METHODS,
    METHODS,
    OF_TASKS,
    Problem,
    gradient_step,
    sampled_data,
)
from benchmarks.speed.peers import peer_steps
from benchmarks.speed.predictions import compared_fits, summary
from benchmarks.speed.runs import interleaved_times, ratios
from benchmarks.speed.searches import measure_searches
from benchmarks.speed.tasks import measure_tasks
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def _loss_and_gradient(method: str, tasks: int = 1, missing: float = 0.0, network: bool = False):
    problem = Problem(60, tasks=tasks, missing=missing, network=network)
    loss = gradient_step(method, problem)()
    gradient = [p.grad.flatten() for p in problem.model.parameters()]
    return torch.cat([loss.flatten(), *gradient])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("LastPoints(m=0)", "gpytorch LML"),
        ("LeaveOneOut()", "gpytorch LOO"),
        ("LastPoints(m=n/2)", "textbook m=n/2"),
    ],
)
def test_compared_methods_compute_the_same(ours, theirs):
    torch.testing.assert_close(
        _loss_and_gradient(ours), _loss_and_gradient(theirs), rtol=1e-8, atol=1e-10
    )


def test_steps_of_several_tasks_compute_the_same():
    values = [_loss_and_gradient(method, tasks=3) for method in ("LastPoints(m=0)", BASE)]
    torch.testing.assert_close(*values, rtol=1e-8, atol=1e-10)


def test_steps_of_a_deep_kernel_compute_the_same():
    values = [_loss_and_gradient(one, network=True) for one in ("LastPoints(m=0)", BASE)]
    torch.testing.assert_close(*values, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("tasks", [1, 2])
def test_steps_with_missing_targets_compute_the_same(tasks):
    """GPyTorch divides by all targets, we by the observed ones."""
    ours, theirs = [_loss_and_gradient(one, tasks, 0.3) for one in ("LastPoints(m=0)", BASE)]
    observed = 1.0 - Problem(60, tasks=tasks, missing=0.3).y.isnan().double().mean()
    assert 0.5 < observed < 0.9
    torch.testing.assert_close(ours * observed, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", DENSE_METHODS)
def test_a_kernel_that_gpytorch_evaluates_gives_the_same(method, monkeypatch):
    evaluated = []
    forward = gpytorch.kernels.RBFKernel.forward
    monkeypatch.setattr(
        gpytorch.kernels.RBFKernel, "forward",
        lambda self, *args, **kwargs: evaluated.append(1) or forward(self, *args, **kwargs),
    )  # fmt: skip
    fused = gradient_step(method.removesuffix(", dense"), Problem(30))()
    assert not evaluated
    torch.testing.assert_close(gradient_step(method, Problem(30))(), fused)
    assert evaluated


def test_base_is_exact_above_gpytorchs_cholesky_size():
    # GPyTorch turns to random estimates above 800 points unless told otherwise.
    problem = Problem(801)
    losses = {float(gradient_step(BASE, problem)()) for _ in range(2)}
    assert len(losses) == 1
    ours = float(gradient_step("LastPoints(m=0)", problem)())
    assert losses.pop() == pytest.approx(ours, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_repeated_steps_do_not_accumulate_gradients(method):
    problem = Problem(30, torch.float32)
    step = gradient_step(method, problem)
    step()
    first = problem.model.mean_module.raw_constant.grad.abs().item()
    for _ in range(20):
        step()
    assert problem.model.mean_module.raw_constant.grad.abs().item() < 10 * first + 0.1


def test_steps_are_taken_in_turn_in_rotated_order():
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleaved_times(steps, rounds=3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert times.shape == (3, 3)
    assert (times >= 0).all(axis=None)


def test_ratio_is_formed_within_each_round():
    times = pd.DataFrame({"base": [1.0, 10.0, 100.0], "twice": [2.0, 20.0, 300.0]})
    table = ratios(times, "base")
    assert table.loc["base"].tolist() == [1.0, 1.0, 1.0]
    assert table.loc["twice"].tolist() == [2.0, 2.0, 2.5]


def test_peak_memory_counts_matrices():
    n = 1200
    matrix = n * n * 8
    peak = peak_memory("LastPoints(m=0)", n, torch.float64, threads=1)
    assert 1.5 * matrix < peak < 12 * matrix  # of some of them one half is used


def test_bad_arguments_are_named():
    with pytest.raises(UnknownNameError, match="LeaveOneOut"):
        gradient_step("LeaveOneOut", Problem(5))
    with pytest.raises(UnknownNameError, match="method"):
        peak_memory("nothing", 100)
    with pytest.raises(ArgumentError, match="rounds"):
        interleaved_times({}, rounds=0)
    with pytest.raises(UnknownNameError, match="base"):
        ratios(pd.DataFrame({"a": [1.0]}), "b")


@pytest.mark.parametrize(("tasks", "methods"), [(1, METHODS), (2, OF_TASKS)])
def test_command_writes_table_with_header(tmp_path, tasks, methods):
    app = Typer()
    app.command()(main)
    file = tmp_path / "speed.csv"
    arguments = ["--n", "20", "--dtype", "float32", "--rounds", "2", "--no-memory"]
    arguments += ["--tasks", str(tasks)]
    result = CliRunner().invoke(app, [*arguments, "--csv", str(file)])
    assert result.exit_code == 0, result.output
    assert "torch" in file.read_text().splitlines()[1]
    table = pd.read_csv(file, comment="#")
    assert table["method"].tolist() == list(methods)
    assert (table["rounds"] == 2).all()
    assert table.set_index("method").loc[BASE, "ratio"] == 1.0


def test_every_way_of_fitting_ends_at_the_same_models():
    def fitted(size):
        mlls = []
        for seed in range(3):
            x, y = sampled_data(15, torch.float64, "cpu", seed)
            model = GPRegression(x, y, "deep-bottleneck", seed=seed)
            mlls.append(ConditionalMarginalLogLikelihood(model.likelihood, model, seed=seed))
        fit_seeds(mlls, size, steps=4)
        return torch.stack([mll.likelihood.noise.detach() for mll in mlls])

    torch.testing.assert_close(fitted(2), fitted(1))


def test_fits_are_timed_one_by_one_in_a_batch_and_as_chosen():
    table = measure_fits(20, "lml", seeds=2, steps=2, rounds=1).set_index("way")
    assert list(table["size"]) == [1, 2, 2]
    assert table.loc["lone", "ratio"] == 1.0
    assert (table["fits_per_second"] > 0).all()
    speed = table["fits_per_second"] / table.loc["lone", "fits_per_second"]
    pd.testing.assert_series_equal(table["ratio"], speed, check_names=False)


def test_the_gp_part_of_a_few_shot_step_is_timed_beside_the_plain_way():
    table = measure_tasks("cosine", ways=2, images=3, tasks=2, rounds=1).set_index("step")
    assert list(table.index) == ["plain, LML", "ours, LML", "ours, CLML", "Conv4"]
    assert (table["milliseconds"] > 0).all()
    speedup = table.loc["plain, LML", "milliseconds"] / table["milliseconds"]
    assert table["speedup"].tolist() == pytest.approx(speedup.tolist())


def test_searches_that_maximize_the_same_end_at_the_same_value():
    table = measure_searches(n=40, dimensions=2, seeds=1, rounds=1, exact=True).set_index("way")
    compared = table.filter(regex="m=0|LML|fused", axis=0)
    assert len(compared) == 3
    assert float(compared.worst.min()) > -1e-8
    assert float(compared.best.max()) < 1e-8
    assert float(compared.apart.max()) < 1e-3
    assert table.worst.isna().sum() == 4  # of other objectives, or other models
    assert (table.ms > 0).all()
    assert table.ratio[table.index[0]] == 1.0


def test_peers_compute_the_same_value_and_gradient():
    problem = Problem(40, dimensions=3)
    gradient_step(BASE, problem)()
    ours = float(gradient_step("LastPoints(m=0)", problem)())
    noise, kernel = problem.model.likelihood.noise_covar, problem.model.covar_module
    by_logarithms = []
    for module, name in (
        (kernel, "outputscale"), (noise, "noise"), (kernel.base_kernel, "lengthscale")
    ):  # fmt: skip
        raw, value = getattr(module, f"raw_{name}"), getattr(module, name)
        of_raw = torch.autograd.grad(value.sum(), raw)[0]
        by_logarithms.append((-raw.grad / of_raw * value.detach()).flatten())
    expected = torch.cat(by_logarithms).numpy()
    steps = peer_steps(problem)
    assert "scikit-learn LML" in steps
    for step in steps.values():
        value, gradient = step()
        assert -value == pytest.approx(ours, rel=1e-8)
        assert gradient[-5:] == pytest.approx(expected, rel=1e-6, abs=1e-10)


def test_steps_beside_those_of_peers():
    table = measure(20, rounds=1, dimensions=2, peers=True)
    assert {"gpytorch LML, its default", "scikit-learn LML"} < set(table.method)
    assert set(table.dimensions) == {2}
    with pytest.raises(ArgumentError, match="peers"):
        measure(20, rounds=1, tasks=2, peers=True)


def test_a_search_is_left_out_by_its_name():
    table = measure_searches(
        n=10, dimensions=2, seeds=1, rounds=1, warm_up=False, leave_out=["scikit-learn"]
    )
    assert "scikit-learn" not in set(table.way)
    with pytest.raises(UnknownNameError, match="leave_out: got 'BoTorch'"):
        measure_searches(n=10, leave_out=["BoTorch"])


def test_loops_end_at_about_the_same_regret_by_either_search():
    table = measure_loops("branin", evaluations=3, seeds=1, restarts=2, raw_samples=16)
    assert table.total.tolist() == pytest.approx((table.fits + table.acquisition).tolist())
    assert table.ratio[0] == 1.0
    assert table.regret.max() < 25


def test_fits_are_compared_on_the_same_rows_from_the_same_start():
    rows = pd.DataFrame(compared_fits(["diabetes"], sizes=[20, 430], subsets=1))
    assert rows.n.tolist() == [20]  # 12 rows are too few to test on
    [row] = rows.to_dict("records")
    assert 0.5 < row["rmse_botorch"] < 2
    assert row["rmse_fused"] == pytest.approx(row["rmse_botorch"], rel=0.2)
    assert row["nll_fused"] == pytest.approx(row["nll_botorch"], abs=0.5)


def test_a_summary_counts_clear_differences():
    names = ["autompg", "autompg", "autos", "autos"]  # the first of each half
    rows = pd.DataFrame(
        {
            "table": names, "n": [20, 50, 20, 50], "subset": 0, "nll_botorch": 1.0,
            "nll_fused": [1.01, 1.5, 0.9, 0.5], "rmse_botorch": 2.0, "rmse_fused": 2.0,
            "seconds_botorch": 1.0, "seconds_fused": [0.1, 0.2, 0.3, 0.4],
        }
    )  # fmt: skip
    table = summary(rows).set_index("of")
    assert table.fits.tolist() == [4, 2, 2, 2, 2]
    assert table.loc["all", ["worse", "better"]].tolist() == [1, 2]
    assert table.loc["chosen on", ["worse", "better"]].tolist() == [1, 0]
    assert table.loc["all", "nll"] == pytest.approx(-0.0225)
    assert table.loc["all", "p"] == pytest.approx(1.0)
    assert table.loc["all", "rmse"] == pytest.approx(1.0)
    assert table.loc["all", "time"] == pytest.approx(0.25)
