"""The study of timings compares equal quantities, in turn, and measures memory that is used."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import gpytorch
import pandas as pd
import pytest
import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from typer.testing import CliRunner

from benchmarks.evidence.training import network as make_network
from benchmarks.speed import fits, neighbours, networks, steps
from benchmarks.speed.accuracy import measure_accuracy
from benchmarks.speed.study import STUDY, make_grid
from benchmarks.speed.timing import interleaved_times, ratios, step_memory, timed
from gpclml.curvature import FunctionSpace, GaussianWeightPrior, Kronecker
from gpclml.errors import ArgumentError, UnknownNameError
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork


def loss_and_gradient(method, **settings):
    problem = steps.Problem(60, **settings)
    loss = steps.gradient_step(method, problem)()
    gradient = [p.grad.flatten() for p in problem.model.parameters()]
    return torch.cat([loss.flatten(), *gradient])


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        ("LastPoints(m=0)", steps.BASE, {}),
        ("LeaveOneOut()", "gpytorch LOO", {}),
        ("LastPoints(m=n/2)", "textbook m=n/2", {}),
        ("LastPoints(m=0)", steps.BASE, {"tasks": 3}),
        ("LastPoints(m=0)", steps.BASE, {"network": True}),
        ("LastPoints(m=0)", steps.BASE, {"missing": 0.3}),
        ("LastPoints(m=0)", steps.BASE, {"missing": 0.3, "tasks": 2}),
    ],
)
def test_compared_methods_compute_the_same(ours, theirs, settings):
    """GPyTorch divides by all targets, we by the observed ones."""
    observed = 1.0 - steps.Problem(60, **settings).y.isnan().double().mean()
    assert (observed < 0.9) == ("missing" in settings)
    torch.testing.assert_close(
        loss_and_gradient(ours, **settings) * observed, loss_and_gradient(theirs, **settings),
        rtol=1e-8, atol=1e-9,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["LastPoints(m=0), dense", "RandomHoldout(0.1), dense"])
def test_a_kernel_that_gpytorch_evaluates_gives_the_same(method, monkeypatch):
    evaluated = []
    forward = gpytorch.kernels.RBFKernel.forward
    monkeypatch.setattr(
        gpytorch.kernels.RBFKernel, "forward",
        lambda self, *args, **kwargs: evaluated.append(1) or forward(self, *args, **kwargs),
    )  # fmt: skip
    fused = steps.gradient_step(method.removesuffix(", dense"), steps.Problem(30))()
    assert not evaluated
    torch.testing.assert_close(steps.gradient_step(method, steps.Problem(30))(), fused)
    assert evaluated


def test_base_is_exact_above_gpytorchs_cholesky_size():
    # GPyTorch turns to random estimates above 800 points unless told otherwise.
    problem = steps.Problem(801)
    losses = {float(steps.gradient_step(steps.BASE, problem)()) for _ in range(2)}
    assert len(losses) == 1
    ours = float(steps.gradient_step("LastPoints(m=0)", problem)())
    assert losses.pop() == pytest.approx(ours, rel=1e-9)


@pytest.mark.parametrize("method", [name for name in steps.METHODS if "dense" not in name])
def test_repeated_steps_do_not_accumulate_gradients(method):
    problem = steps.Problem(30, torch.float32)
    step = steps.gradient_step(method, problem)
    step()
    first = problem.model.mean_module.raw_constant.grad.abs().item()
    for _ in range(20):
        step()
    assert problem.model.mean_module.raw_constant.grad.abs().item() < 10 * first + 0.1


def test_steps_are_taken_in_turn_in_rotated_order_and_ratios_formed_within_a_round():
    calls: list[str] = []
    appending = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleaved_times(appending, rounds=3)
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert times.shape == (3, 3)
    assert (times >= 0).all(axis=None)
    times = pd.DataFrame({"base": [1.0, 10.0, 100.0], "twice": [2.0, 20.0, 300.0]})
    assert ratios(times, "base").loc["twice"].tolist() == [2.0, 2.0, 2.5]


def failing():
    raise RuntimeError("CUDA out of memory.\nTried to allocate")


def test_steps_that_fail_leave_the_others_their_times():
    calls = []
    first, second = timed({"a": lambda: calls.append("a"), "b": failing}, "cpu", 0.0, base="a")
    assert (first["ratio"], first["rounds"], len(calls)) == (1.0, 1, 2)
    assert second == {"method": "b", "error": "RuntimeError: CUDA out of memory."}
    _, second = timed({"a": failing, "b": lambda: None}, "cpu", 1e-3, base="a")
    assert "ratio" not in second
    assert 1 <= second["rounds"] <= 41


@pytest.mark.slow
def test_peak_memory_counts_matrices():
    n = 1200
    peak = step_memory(steps.warm_step, "LastPoints(m=0)", n, "float64", 8) * 2**30
    assert 1.5 < peak / (n * n * 8) < 12  # of some matrices one half is used


def test_methods_that_do_not_fit_are_left_out(monkeypatch):
    assert len(steps.methods_of("scale", 60, torch.float32, "cpu")) == 4
    monkeypatch.setattr("benchmarks.speed.steps.available_memory", lambda device: 10 * 5000**2 * 4)
    assert steps.methods_of("scale", 5000, torch.float32, "cpu") == [
        "CLML of 256, cg", "CLML of 256 given 4000",
    ]  # fmt: skip


def test_bad_arguments_are_named():
    for match, call in {
        "methods": lambda: steps.measure_steps(20, methods="some"),
        "study": lambda: make_grid(study=("step",)),
        "set: got 'size'": lambda: make_grid(set=("size=3",)),
    }.items():
        with pytest.raises(UnknownNameError, match=match):
            call()
    for match, call in {
        "peers": lambda: steps.measure_steps(20, methods="peers", tasks=2),
        "NAME=VALUE": lambda: make_grid(set=("n",)),
        "architecture": lambda: networks.measure_evidence("cn"),
        "cuda:99": lambda: make_grid(device="cuda:99"),
    }.items():
        with pytest.raises(ArgumentError, match=match):
            call()


def test_settings_replace_the_usual_ones_where_they_are_taken():
    cells = make_grid(study=("steps", "few-shot"), set=("n=20+30", "kernel=rbf", "memory=true"))
    assert [(c["study"], c.get("n"), c.get("kernel")) for c in cells] == [
        ("steps", 20, None), ("steps", 20, None), ("steps", 30, None), ("steps", 30, None),
        ("few-shot", None, "rbf"),
    ]  # fmt: skip
    assert cells[0]["memory"] is True
    assert {cell["study"] for cell in make_grid(study=("gpu",))} >= {"rates", "large-fits"}


@pytest.mark.slow
def test_small_cells_are_measured_kept_and_reported(tmp_path):
    """All that a machine with a GPU is asked, at tiny sizes on the CPU."""
    results, rows = tmp_path / "a.sqlite", tmp_path / "rows.csv"

    def invoke(*words):
        done = CliRunner().invoke(STUDY.make_app(), [*words, "--results", str(results)])
        assert done.exit_code == 0, done.output
        return done.output

    for _ in range(2):
        told = invoke("run", "--study", "small", "--seconds", "0")
    assert "10 of 10 cells done:" in told  # none is measured again
    page = invoke("report", "--csv", str(rows))
    for heading in ("Rates", "Gradient steps", "Whole fits", "Many models", "Exact fits"):
        assert f"## {heading}" in page
    table = pd.read_csv(rows, comment="#")
    assert "error" not in table
    step_rows = table[table["study"] == "steps"].set_index("method")
    assert (step_rows["ms"] > 0).all()
    assert step_rows.loc[steps.BASE, "ratio"] == 1.0
    ours, theirs = table[table["study"] == "large-fits"].sort_values("method")["LML a point"]
    assert ours == pytest.approx(theirs, abs=1e-3)  # GPyTorch's objective ends at the same fit
    classes = table[table["study"] == "class-fits"].set_index("method")
    assert (classes["predict s"] > 0).all()
    evidence = classes["evidence"].reindex(list(fits.CLASS_FITS)[:2])
    assert evidence.iloc[1] >= evidence.iloc[0] - 1e-4


def test_devices_are_compared():
    common = {"study": "steps", "machine": "a", "threads": 1, "dtype": "float64", "time": 0.0}
    cells = [
        common | {"device": device, "n": n, "rows": [{"method": "LML", "ms": ms * n**3}]}
        for device, ms in (("cuda", 1.0), ("cpu", 4.0)) for n in (10, 20)
    ]  # fmt: skip
    done = STUDY.prepare(pd.DataFrame(cells))
    text = "\n".join(STUDY.tables(done))
    assert "## Where a card begins to pay" in text
    assert "| steps | float64 | 10 | LML | 1000 | 4000 | 4 |" in text


def test_every_way_of_fitting_ends_at_the_same_models():
    alone, together = (
        torch.stack(
            [mll.likelihood.noise for mll in fits.fit_models(15, "clml", 3, size, 4, "cpu")]
        )
        for size in (1, 2)
    )
    torch.testing.assert_close(together, alone)


@pytest.mark.slow
def test_searches_that_maximize_the_same_end_at_the_same_value():
    rows = fits.measure_searches(n=40, dimensions=2, exact=True, seconds=0.0)
    table = pd.DataFrame(rows).set_index("method")
    compared = table.filter(regex="m=0|LML|fused", axis=0)
    assert len(compared) == 3
    assert float(compared["gain"].abs().max()) < 1e-8
    assert float(compared["apart"].max()) < 1e-3
    assert table["gain"].isna().sum() == 4  # of other objectives, or other models
    assert table.loc[fits.SEARCH_BASE, "ratio"] == 1.0
    assert fits.search_data(5, 2, 0, outputs=2)[1].shape == (5, 2)


def test_peers_compute_the_same_value_and_gradient():
    problem = steps.Problem(40, dimensions=3)
    ours = float(steps.gradient_step("LastPoints(m=0)", problem)())
    noise, kernel = problem.model.likelihood.noise_covar, problem.model.covar_module
    gradients = []
    for module, name in (
        (kernel, "outputscale"), (kernel.base_kernel, "lengthscale"), (noise, "noise")
    ):  # fmt: skip
        raw, value = getattr(module, f"raw_{name}"), getattr(module, name)
        slope = torch.autograd.grad(value.sum(), raw)[0]
        gradients.append((-raw.grad / slope * value.detach()).flatten())
    expected = torch.cat(gradients).numpy()
    value, gradient = steps.peer_steps(problem)["scikit-learn LML"]()
    assert -value == pytest.approx(ours, rel=1e-8)
    assert gradient == pytest.approx(expected, rel=1e-6, abs=1e-10)


@pytest.mark.slow
def test_loops_end_at_about_the_same_regret_by_either_search():
    rows = fits.measure_loops("branin", evaluations=3, restarts=2, raw_samples=16)
    for row in rows:
        assert row["total"] == pytest.approx(row["fits"] + row["acquisition"])
        assert row["regret"] < 25
    assert rows[0]["ratio"] == 1.0


def test_posteriors_of_all_models_are_timed_against_botorchs():
    rows = fits.measure_acquisitions(20, points=3, seconds=0.0)
    assert [row["method"] for row in rows[:3]] == [
        "SingleTaskGP", "GPRegression", "GPClassification",
    ]  # fmt: skip
    assert rows[0]["ratio"] == 1.0
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.slow
def test_fits_are_compared_on_the_same_rows_from_the_same_start():
    assert fits.measure_predictions("diabetes", 430) == []  # 12 rows are too few to test on
    [row] = fits.measure_predictions("diabetes", 20)
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
    table = fits.summarize_predictions(rows)
    assert table["fits"].tolist() == [4, 2, 2, 2, 2]
    assert table.loc["chosen on", ["worse", "better"]].tolist() == [1, 0]
    assert table.loc["all", ["worse", "better"]].tolist() == [1, 2]
    means = table.loc["all", ["nll", "p", "rmse", "time"]].astype(float).tolist()
    assert means == pytest.approx([-0.0225, 1.0, 1.0, 0.25])


@pytest.mark.parametrize("structure", [Kronecker(), FunctionSpace()])
def test_evidence_in_single_precision_is_within_two_hundredths_of_a_nat(structure):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 28, 28, generator=generator)
    y = torch.randint(10, (60,), generator=generator)
    network = make_network("cnn-8x2", 1, 28, 10, seed=0)
    totals = []
    for dtype in (torch.float64, torch.float32):
        model = LinearizedNetwork(network.to(dtype), GaussianWeightPrior(network, "parameter"))
        likelihood = SoftmaxLikelihood(num_classes=10, mixing_weights=False)
        mll = LaplaceMarginalLogLikelihood(likelihood, model, 60, structure)
        totals.append(60 * float(mll.evidence_of(x.to(dtype), y)().detach()))
    assert totals[0] == pytest.approx(totals[1], abs=0.02)


@pytest.mark.slow
def test_training_steps_of_the_published_way_and_ours_are_timed():
    rows = networks.measure_training_steps("linear", images=16, seconds=0.0)
    assert [row["method"] for row in rows][2:] == ["ours, LML", "ours, CLML"]
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.slow
def test_errors_of_conjugate_gradients_are_within_their_bound():
    [row] = measure_accuracy("diabetes", 300, 0.1, True, block=30, rank=50)
    assert row["value error"] <= row["bound"] <= 1e-3
    assert row["gradient error"] < 0.01
    assert row["LML gradient error"] < 1e-6  # below n = 800 GPyTorch's default is Cholesky too


PROGRAM = """
import resource, sys
import torch
from benchmarks._process import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for turn in range(60):
    if turn == 40:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    covariance = torch.ones(4, 300, 300, dtype=torch.float64)
    del covariance
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc's malloc")
def test_workers_do_not_fault_the_same_pages_in_again_and_again():
    def faults(how):
        # An allocator that gives back whatever it can, not only when its heuristics say so.
        variables = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
        command = [sys.executable, "-c", PROGRAM, how]
        return float(subprocess.check_output(command, env=os.environ | variables))

    left = faults("leave")
    assert left > 600  # these numbers have 703 pages
    assert faults("keep") < left / 10


def test_a_drawn_function_is_learned_from_neighbours():
    x, f, y = neighbours.drawn_function(3000, 3)
    assert float((y - f).std()) == pytest.approx(0.1, rel=0.1)
    assert float(x.abs().max()) <= 2
    [row] = neighbours.measure_neighbors(1000, 2, steps=30, new=100)
    assert row["RMSE"] < 0.1  # of one observation
    assert row["ms"] > 0
    assert row["lookup ms"] > 0


def test_more_steps_and_neighbours_predict_better():
    def scores(**settings):
        [row] = neighbours.measure_accuracy_given("diabetes", **settings)
        return row["RMSE"], row["NLL"]

    poor, good = scores(steps=1, given=1), scores(steps=100)
    assert good[0] < poor[0]
    assert good[1] < poor[1]
    assert scores(steps=1, given=1) == poor
    assert scores(steps=1, given=1, order="previous") == pytest.approx(poor, rel=0.05)
