"""Bayesian optimization: small runs end to end, what they are made of, and what is refused."""

import math
import shlex

import pandas
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.bo.cells import run_cell
from benchmarks.bo.study import STUDY, make_grid
from benchmarks.bo.surrogates import FUNCTIONS, feature_share, fitted, initial_points, make_problem
from benchmarks.bo.tables import LEAST_REGRET, labelled
from benchmarks.runner import load_results
from gpclml.errors import ArgumentError, UnknownNameError

SWEEP = "run --functions branin --objectives lml,clml --seeds 2 --iterations 1 --steps 2"
OPTIMA = {
    "branin": [(math.pi + 5) / 15, 2.275 / 15],
    "hartmann-6": [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573],
    "ackley-10": [0.5] * 10,
    "levy-10": [0.55] * 10,
}


def invoke(line, *more):
    return CliRunner().invoke(STUDY.make_app(), [*shlex.split(line), *map(str, more)])


def cell(**changes):
    usual = {
        "function": "branin", "surrogate": "deep", "objective": "clml", "seed": 3,
        "iterations": 1, "steps": 2,
    }  # fmt: skip
    return usual | changes


@pytest.fixture
def points():
    """Branin's function at six points."""
    x = initial_points(2, 0)
    return x, make_problem("branin").values(x)


def numbers_of(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("seconds")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bo") / "results.sqlite"
    answer = invoke(SWEEP, "--quiet", "--results", path)
    assert (answer.exit_code, answer.output) == (0, "")
    return path


@pytest.mark.parametrize("name", FUNCTIONS)
def test_regrets_are_those_of_the_functions(name):
    problem = make_problem(name)
    best = torch.tensor([OPTIMA[name]], dtype=torch.float64)
    assert float(problem.regrets(best)) < 5e-6
    x = initial_points(problem.dim, 0)
    assert x.shape == (2 * (problem.dim + 1), problem.dim)
    assert ((x >= 0) & (x <= 1)).all()
    assert torch.equal(problem.regrets(x), problem.optimum - problem.values(x)[:, 0])
    assert (problem.regrets(x) > 1e-3).all()
    assert torch.equal(x, initial_points(problem.dim, 0))
    assert not torch.equal(x, initial_points(problem.dim, 1))


@pytest.mark.slow
def test_a_cell_is_a_function_of_its_configuration():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    metrics = run_cell(cell())
    assert torch.equal(torch.rand(2), expected)  # it leaves the global generator alone
    assert numbers_of(run_cell(cell())) == numbers_of(metrics)
    network = cell(surrogate="laplace", objective="lml", steps=None)
    assert numbers_of(run_cell(network)) == numbers_of(run_cell(network))
    others = [cell(surrogate="single-task", steps=None), cell(objective="lml"), network]
    for other in others:
        assert numbers_of(run_cell(other)) != numbers_of(metrics)


@pytest.mark.slow
def test_metrics_of_a_cell():
    changes = {"surrogate": "single-task", "objective": "lml", "steps": None, "seed": 5}
    metrics = run_cell(cell(**changes, iterations=8))
    simple = metrics["simple_regret_at"]
    assert len(simple) == 9
    assert simple == sorted(simple, reverse=True)
    assert metrics["simple_regret"] == simple[-1] < 0.5 * simple[0]
    assert simple[0] == float(make_problem("branin").regrets(initial_points(2, 5)).min())
    assert metrics["inference_at"] == [0.0, 5.0, 8.0]
    assert len(metrics["inference_regret_at"]) == 3
    assert metrics["inference_regret"] == metrics["inference_regret_at"][-1]
    assert metrics["feature_share"] == metrics["failed_fits"] == 0.0
    assert metrics["fit_seconds"] > 0
    assert metrics["acquisition_seconds"] > 0


@pytest.mark.slow
def test_a_refit_goes_on_from_the_fit_before(points):
    x, y = points
    options = {"steps": 1, "seed": 0}
    first = fitted("deep", "clml", x[:-1], y[:-1], **options)
    for anew in (False, True):
        again = fitted("deep", "clml", x, y, before=first, anew=anew, **options)
        weights = [
            model.covar_module.base_kernel.feature_extractor.mixing for model in (first, again)
        ]
        for before, after in ((torch.zeros(2, 2), weights[0]), weights):  # one step of Adam each
            moved = (after - before).detach().abs()
            assert torch.allclose(moved, torch.full((2, 2), 0.01).double(), atol=1e-4)
        assert again.train_targets.shape == (6,)
        assert 0 < feature_share(again) < 1
        assert not again.training


@pytest.mark.slow
def test_a_network_with_a_laplace_posterior_knows_what_it_has_seen(points):
    x, y = points
    model = fitted("laplace", "lml", x, y, steps=None, seed=0)
    seen, new = model.posterior(x), model.posterior(initial_points(2, 1))
    assert seen.mean.shape == (6, 1)
    assert torch.allclose(seen.mean, y, atol=0.1 * float(y.std()))
    assert seen.variance.max() < 0.05 * new.variance.max() < y.var()


def test_hyperparameters_anew_do_not_depend_on_the_fit_before(points):
    x, y = points
    options = {"steps": None, "seed": 0}
    before = fitted("single-task", "lml", x[:3], y[:3], **options)
    fresh, anew, further = (
        fitted("single-task", "lml", x, y, **options, **more)
        for more in ({}, {"before": before}, {"before": before, "anew": False})
    )
    for parameter, other in zip(fresh.parameters(), anew.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert not torch.equal(fresh.likelihood.noise, further.likelihood.noise)


@pytest.mark.slow
def test_the_sweep_is_complete_and_resumes_with_nothing_to_do(path):
    cells = load_results(path)
    assert len(cells) == 8
    for _, seed in cells.groupby("seed"):
        starts = {values[0] for values in seed["simple_regret_at"]}
        assert len(starts) == 1  # the same initial points
    answer = invoke(SWEEP, "--results", path)
    assert answer.exit_code == 0
    assert answer.stdout.startswith("8 of 8 cells done: ")


@pytest.mark.slow
def test_rows_and_figure(path, tmp_path):
    rows, figure = tmp_path / "rows.csv.gz", tmp_path / "a.png"
    answer = invoke("report", "--results", path, "--csv", rows, "--figure", figure)
    assert answer.exit_code == 0
    assert "![Regret against evaluations](a.png)" in answer.stdout
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert figure.stat().st_size > 20_000
    table = pandas.read_csv(rows, comment="#")
    assert table["simple_regret"].tolist() == pytest.approx(
        load_results(path)["simple_regret"].tolist(), rel=1e-5
    )


def test_tiny_regrets_count_as_the_least():
    done = pandas.DataFrame(
        {"function": "branin", "surrogate": "deep", "objective": "lml",
         "iterations": 2, "simple_regret": [0.0, 0.1], "inference_regret": 1.0}
    )  # fmt: skip
    cells = labelled(done)
    assert cells["log_simple_regret"].tolist() == pytest.approx([math.log10(LEAST_REGRET), -1])


def test_grids():
    cells = make_grid()
    assert len(cells) == 480
    assert {cell["steps"] for cell in cells if cell["surrogate"] == "single-task"} == {None}
    for name, unknown in (
        ("functions", "hartman-6"),
        ("surrogates", "depe"),
        ("objectives", "elbo"),
    ):
        with pytest.raises(UnknownNameError, match=f"{name}: got '{unknown}'"):
            make_grid(**{name: (unknown,)})
    assert {cell["objective"] for cell in make_grid(surrogates=("laplace",))} == {"lml"}
    for name in ("seeds", "iterations", "steps"):
        with pytest.raises(ArgumentError, match=name):
            make_grid(**{name: 0})
