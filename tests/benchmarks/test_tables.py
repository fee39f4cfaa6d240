"""Tables: small runs end to end, scores beside draws, and what the report makes of cells."""

import shlex

import gpytorch
import numpy as np
import pandas
import pytest
from table_files import register, smooth_rows, write_table
from typer.testing import CliRunner

from benchmarks.data import names
from benchmarks.runner import load_results
from benchmarks.tables import candidates, report
from benchmarks.tables import cells as cells_module
from benchmarks.tables.candidates import FOLDS, STACKED
from benchmarks.tables.cells import (
    DEVELOPMENT,
    JUDGED,
    METHODS,
    run_cell,
    run_cells,
    sizes_of,
    table_rows,
)
from benchmarks.tables.counts import coverage
from benchmarks.tables.peers import PEERS, Peer, missing
from benchmarks.tables.report import corrected_error, regrets, standing, win_table
from benchmarks.tables.scores import METRICS, normal, score
from benchmarks.tables.study import STUDY, make_grid
from gpclml import StackedGP
from gpclml.errors import ArgumentError, NonFiniteError, UnknownNameError

FEW = "mean,ridge,linear,rbf,matern,rq,deep,loo-stack,stack"
TABLES = {*names()} - {"diabetes"}
ABOUT_ROWS = ("num_test", "num_data", "num_features")


@pytest.fixture(autouse=True)
def _tables(tmp_path, monkeypatch):
    """Small tables in place of two registered ones."""
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    sources = [
        write_table(tmp_path, "yacht", smooth_rows(60, 6)),
        write_table(tmp_path, "servo", smooth_rows(40, 4)),
    ]
    register(monkeypatch, sources)


def cell(method, **changes):
    return {"table": "yacht", "n": 20, "split": 1, "method": method, "most_test": 10} | changes


def numbers_of(metrics):
    return {name: value for name, value in metrics.items() if name != "seconds"}


def invoke(line, *more):
    return CliRunner().invoke(STUDY.make_app(), [*shlex.split(line), *map(str, more)])


def test_scores_have_no_unit():
    prediction = normal(np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.0, 2.0]))
    scaled = normal(10 * np.array([1.0, 2.0, 3.0]), 10 * np.array([0.5, 1.0, 2.0]))
    y = np.array([1.2, 3.9, 9.0])
    scores = score(prediction, y, 2.0)
    assert scores == pytest.approx(score(scaled, 10 * y, 20.0), rel=1e-12)
    assert (scores["coverage_50"], scores["coverage_95"]) == (1 / 3, 2 / 3)
    assert scores["rmse"] == pytest.approx(np.sqrt((0.04 + 3.61 + 36) / 3) / 2)
    # In units of 2 the density of 1.2 under N(1, .5²) is that of .6 under N(.5, .25²).
    alone = score(normal(np.array([1.0]), 0.5), np.array([1.2]), 2.0)
    assert alone["nll"] == pytest.approx(np.log(0.25 * np.sqrt(2 * np.pi)) + 0.08)


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(NonFiniteError, match="rmse: got nan"):
        score(normal(np.array([np.nan]), 1.0), np.ones(1), 1.0)


def test_halves_are_all_uci_tables():
    assert sorted((*DEVELOPMENT, *JUDGED)) == sorted(TABLES)
    assert sorted(DEVELOPMENT) == sorted(TABLES)[::2]


@pytest.mark.parametrize(
    ("num_data", "expected"),
    [(23, [18]), (60, [48]), (100, [50, 80]), (260, [50, 100, 200]), (5000, [50, 100, 200])],
)
def test_sizes_of_a_table(num_data, expected):
    assert sizes_of(num_data, (50, 100, 200)) == expected


def test_rows_of_a_cell():
    small, large = table_rows("yacht", 10, 3, 5), table_rows("yacht", 30, 3, 1000)
    assert (small.x.shape, small.test_x.shape) == ((10, 6), (5, 6))
    assert large.test_x.shape == (12, 6)
    assert (large.x[:10] == small.x).all()
    assert (large.test_y[:5] == small.test_y).all()
    assert not np.isin(large.y.numpy(), large.test_y.numpy()).any()
    assert small.unit == pytest.approx(float(small.y.numpy().std(ddof=1)))
    assert (table_rows("yacht", 10, 4, 5).y != small.y).any()


@pytest.mark.slow
def test_cells_together_are_cells_alone():
    together = run_cells([cell(name) for name in ("linear", "rbf", STACKED)])
    alone = [run_cell(cell(name)) for name in ("linear", "rbf")]
    assert [numbers_of(row) for row in together[:2]] == [numbers_of(row) for row in alone]
    assert {"lml", "bic", "loo", "clml_50", "clml_80", "clml_90", "problem"} <= set(together[0])
    assert together[1]["lml"] - together[1]["bic"] == pytest.approx(0.5 * 9 * np.log(20))
    assert together[2]["nll"] < max(row["nll"] for row in alone)


def test_the_choice_by_folds(monkeypatch):
    scores = {"linear": 2.0, "rbf": 3.0}
    monkeypatch.setattr(candidates, "CANDIDATES", tuple(scores))
    monkeypatch.setattr(candidates.Candidates, "_refitted", lambda self, name: scores[name])
    linear, rbf, chosen = run_cells([cell(name) for name in ("linear", "rbf", FOLDS)])
    assert chosen["chosen"] == "rbf"
    assert chosen["nll"] == rbf["nll"] != linear["nll"]
    assert chosen["seconds"] > linear["seconds"] + rbf["seconds"]


def test_refits_leave_each_row_out_once(monkeypatch):
    rows, scored = table_rows("yacht", 20, 0, 5), []

    def remember(model, x, y):
        (trained_on,) = model.train_inputs
        assert trained_on.shape == (16, 6)
        assert not (trained_on[:, None] == x).all(-1).any()
        scored.extend(y.tolist())
        return y.new_ones(len(y))

    monkeypatch.setattr(candidates, "marginal_log_predictive", remember)
    assert candidates.Candidates(rows, 0)._refitted("linear") == 20.0
    assert sorted(scored) == sorted(rows.y.tolist())


@pytest.mark.slow
def test_the_stack():
    row = run_cell(cell("stack", n=48))
    assert row["failure"] == ""
    assert set(row) == {*METRICS, *ABOUT_ROWS, "seconds", "weights", "failure"}
    stack = StackedGP(seed=1)
    rows = table_rows("yacht", 48, 1, 10)
    prediction = stack.fit(rows.x, rows.y, progress=False).predict(rows.test_x)
    assert score(prediction, rows.test_y.numpy(), rows.unit) == pytest.approx(
        {name: row[name] for name in METRICS}
    )
    weights = dict(text.split() for text in row["weights"].split(", "))
    assert {name: float(weight) for name, weight in weights.items()} == {
        component.name: pytest.approx(component.weight, abs=0.006) for component in stack.components
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peers_predict(name):
    if missing({name: PEERS[name].package}):
        pytest.skip(f"{PEERS[name].package} is not installed")
    row, plain = run_cell(cell(name, n=48)), run_cell(cell("mean", n=48))
    assert row["failure"] == ""
    assert row == pytest.approx(run_cell(cell(name, n=48)) | {"seconds": row["seconds"]})
    # LightGBM's leaves have twenty rows or more.
    if name not in ("mean", "hist-gb", "lightgbm"):
        assert row["rmse"] < 0.9 * plain["rmse"]
        assert row["nll"] < plain["nll"]
        assert row["crps"] < plain["crps"]
    assert row["coverage_95"] >= 0.6


@pytest.mark.slow
def test_botorch_predicts_under_its_own_settings():
    x = np.random.default_rng(0).normal(size=(40, 2))
    y, predict = np.sin(2 * x).sum(1), PEERS["botorch"].predict
    means = []
    for fast in (True, False):
        with gpytorch.settings.fast_computations(fast, fast, fast):
            means.append(predict(x[:30], y[:30], x[30:], 0).mean)
    assert np.array_equal(*means)


def test_a_method_that_fails_is_a_result(monkeypatch):
    def fail(*_):
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(cells_module, "PEERS", {"mean": Peer("fails", fail)})
    row = run_cell(cell("mean"))
    assert row["failure"] == "ValueError: no such thing"
    assert "nll" not in row
    assert row["num_test"] == 10


def test_a_missing_package(monkeypatch, capsys):
    absent = Peer("of a package that nobody has", PEERS["mean"].predict, "no_such_one")
    monkeypatch.setattr("benchmarks.tables.study.PEERS", {"absent": absent})
    grid = make_grid(tables=("yacht",), n=(20,), splits=1)
    assert {cell["method"] for cell in grid} == set(METHODS)
    assert "absent is left out: install no_such_one to have it." in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="Install no_such_one first"):
        make_grid(tables=("yacht",), n=(20,), methods=("absent", "mean"))


@pytest.mark.slow
def test_a_run_and_its_reports(tmp_path):
    path, rows, figure = tmp_path / "a.sqlite", tmp_path / "a.csv", tmp_path / "a.png"
    line = f"run --tables yacht --n 20 --splits 1 --most-test 8 --methods {FEW} --quiet"
    answer = invoke(line, "--results", path)
    assert (answer.exit_code, answer.output) == (0, "")
    line = "run --tables servo --n 20 --splits 2 --methods mean,ridge --quiet"
    assert invoke(line, "--results", path).exit_code == 0
    done = load_results(path)
    assert len(done) == 9 + 4
    assert (done["failure"] == "").all()
    answer = invoke("report", "--results", path, "--csv", rows, "--figure", figure)
    assert answer.exit_code == 0
    of = "1 tables that choices may be tuned on (development half): yacht. 1 cases, 1 splits"
    assert of in answer.output
    assert "Not run, or not installed: by-folds, botorch" in answer.output
    assert "Left out: 2 splits that some methods have not been run on." in answer.output
    for heading in ("Standing", "Wins in NLL", "Choosing one model"):
        assert f"## {heading}\n" in answer.output
    assert figure.stat().st_size > 1000
    assert len(pandas.read_csv(rows, comment="#")) == len(done)
    judged = invoke("report --half judged --without mean", "--results", path).output
    assert "1 tables set apart for judging (judged half): servo." in judged
    assert "| ridge |" in judged
    assert "| mean |" not in judged
    assert "Choosing one model" not in judged  # the candidates are not there
    refused = invoke("report --half judged", "--results", path, "--figure", figure)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("Error: The figure needs cells of deep, linear, matern")


def made_cells(scores, **columns):
    """Cells of one case: a list of NLLs, one a split, for each method."""
    rows = [
        {
            "table": "yacht", "n": 20, "split": split, "method": method, "nll": nll,
            "num_test": 20, "num_data": 100, "failure": "" if nll == nll else "E: e",
            "seconds": 1.0, "problem": "",
            **{metric: nll for metric in METRICS if metric != "nll"},
            **{name: values[method][split] for name, values in columns.items() if method in values},
        }
        for method, values in scores.items()
        for split, nll in enumerate(values)
    ]  # fmt: skip
    return pandas.DataFrame(rows)


def test_errors_of_splits_that_share_rows():
    assert corrected_error([0.0, 2.0], 0.2) == pytest.approx(np.sqrt((1 / 2 + 1 / 4) * 2))
    assert corrected_error([0.0, 2.0], 0.0) == pytest.approx(1.0)
    assert corrected_error([1.0], 0.2) == np.inf


def test_wins_are_beyond_two_errors():
    low, high = [1.0, 1.1, 0.9, 1.0], [2.0, 2.2, 1.9, 2.0]
    near = [1.0, 1.3, 0.6, 1.2]
    wins = win_table(made_cells({"rbf": low, "matern": near, "mean": high}), "nll")
    assert wins.loc["rbf", "mean"] == wins.loc["matern", "mean"] == 1
    assert wins.loc["mean"].sum() == 0
    assert wins.loc["rbf", "matern"] == wins.loc["matern", "rbf"] == 0
    alone = win_table(made_cells({"rbf": low[:1], "mean": high[:1]}), "nll")
    assert alone.to_numpy().sum() == 0


def test_a_method_that_failed_is_last():
    table = standing(made_cells({"rbf": [1.0, np.nan], "matern": [2.0, 2.0], "mean": [3.0, 3.0]}))
    assert table["rank NLL"].to_dict() == {"matern": 1.0, "mean": 2.0, "rbf": 3.0}
    assert table["failures"].to_dict() == {"matern": 0, "mean": 0, "rbf": 1}


def test_regret_of_a_choice():
    scores = {
        "linear": [3.0, 3.0], "rbf": [1.0, 2.0], "matern": [2.0, 1.0], "rq": [1.5, np.nan],
        "deep": [1.0, 2.0], STACKED: [0.5, 1.5],
    }  # fmt: skip
    lml = {"linear": [0, 0], "rbf": [5, 4], "matern": [4, 5], "rq": [6, 9], "deep": [1, 1]}
    table = regrets(made_cells(scores, lml=lml))
    assert table["by lml"].tolist() == [0.5, 0.0]  # rq, which has no prediction of the second
    assert table["always rbf"].tolist() == [0.0, 1.0]
    assert table[STACKED].tolist() == [-0.5, 0.5]


def test_sizes_are_grouped_by_the_next():
    sizes = (18, 50, 51, 246, 400, 1000)
    assert [report.size_of(n) for n in sizes] == [50, 50, 100, 400, 400, 1000]


def test_a_grid_may_start_at_a_later_split():
    settings = {"tables": ("yacht",), "n": (20,), "methods": ("mean", "rbf")}
    whole = make_grid(**settings, splits=4)
    assert make_grid(**settings, splits=4, first_split=2) == whole[4:]
    with pytest.raises(ArgumentError, match="0 to 1, one of the splits"):
        make_grid(**settings, splits=2, first_split=2)
    with pytest.raises(UnknownNameError, match="matern"):
        make_grid(tables=("yacht",), methods=("mattern",))
    assert make_grid(**settings, splits=2) + make_grid(**settings, splits=4, first_split=2) == whole


@pytest.mark.slow
@pytest.mark.data
def test_the_grid_of_all_tables(data_folder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    grid = make_grid(splits=2, methods=("mean", "rbf"))
    assert {cell["table"] for cell in grid} == {*DEVELOPMENT, *JUDGED}
    assert max(cell["n"] for cell in grid) == 1000
    boston_sizes = sorted({cell["n"] for cell in grid if cell["table"] == "boston"})
    assert boston_sizes == [50, 100, 200, 400]
    assert {cell["n"] for cell in grid if cell["table"] == "challenger"} == {18}
    assert run_cell(grid[0] | {"table": "challenger", "n": 18})["failure"] == ""


@pytest.mark.slow
def test_intervals_of_counts_cover_about_what_those_of_the_true_distribution_do():
    shares = coverage("poisson", 60, 0, ("linear", "matern", "matern_warped"))
    assert list(shares.columns) == ["covered", "attainable", "least"]
    assert shares["attainable"].between(0.9, 0.97).all()
    assert (shares["covered"] - shares["attainable"]).abs().max() < 0.06
    assert (shares["least"] >= 0).all()
    assert shares["least"].is_monotonic_increasing
