"""Large tables: each method on few rows, cells that fail, a run and its report."""

import shlex

import numpy as np
import pandas
import pytest
from table_files import register, smooth_rows, write_table
from typer.testing import CliRunner

from benchmarks.runner import load_results
from benchmarks.tables import large
from benchmarks.tables.large import LARGE, TABLES, make_large_grid, run_large_cell, split_rows
from benchmarks.tables.large_methods import LARGE_METHODS, OURS, Effort
from benchmarks.tables.peers import missing
from benchmarks.tables.scores import METRICS
from gpclml.errors import DataError, UnknownNameError

COSTS = {"seconds", "fit_seconds", "fit_cpu", "predict_seconds", "predict_cpu", "GiB"}
FEW = Effort(seconds=1e9, steps=3)  # the steps end it, on any machine


@pytest.fixture(autouse=True)
def _tables(tmp_path, monkeypatch):
    """Small tables in place of two registered ones."""
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    sources = [write_table(tmp_path, name, smooth_rows(120, 3)) for name in ("power", "kin8nm")]
    register(monkeypatch, sources)


def invoke(line, *more):
    return CliRunner().invoke(LARGE.make_app(), [*shlex.split(line), *map(str, more)])


def test_rows_of_a_split():
    x, y, test_x, test_y = split_rows("power", 0, 10**9)
    assert (x.shape, test_x.shape, test_y.shape) == ((108, 3), (12, 3), (12,))
    assert x.mean(0) == pytest.approx(0, abs=1e-12)
    assert (y.mean(), y.std()) == pytest.approx((0, 1), abs=1e-12)
    # As NumPy's generator of this seed permutes them: split 0 is that of earlier figures.
    raw = smooth_rows(120, 3)[np.random.default_rng(0).permutation(120)]
    scaled = (raw - raw[:108].mean(0)) / raw[:108].std(0)
    assert np.column_stack([test_x, test_y]) == pytest.approx(scaled[108:], abs=1e-6)
    few = split_rows("power", 0, 20)
    assert len(few[0]) == 20
    assert len(few[2]) == 12
    assert not np.allclose(split_rows("power", 1, 108)[3], test_y)


@pytest.mark.parametrize("name", LARGE_METHODS)
def test_methods_predict(name):
    if missing({name: LARGE_METHODS[name].package}):
        pytest.skip(f"{LARGE_METHODS[name].package} is not installed")
    effort = FEW if name not in ("svgp-1024", "regressor") else Effort(1e9, 1)
    results = large.measure(name, split_rows("power", 0, 60), 0, effort)
    assert set(results) == {*METRICS, *COSTS, "coverage_90"}
    assert results["rmse"] < 2
    assert 0 <= results["coverage_90"] <= 1
    assert results["seconds"] == pytest.approx(results["fit_seconds"] + results["predict_seconds"])


@pytest.mark.slow
def test_a_cell_has_a_process_of_its_own():
    [cell] = make_large_grid(tables=("power",), methods=("mean",))
    results = run_large_cell(cell)
    assert results["failure"] == ""
    assert (results["num_test"], results["num_data"], results["num_features"]) == (12, 120, 3)
    expected = large.measure("mean", split_rows("power", 0, 108), 0, FEW)
    assert results["nll"] == expected["nll"]
    failed = run_large_cell({**cell, "method": "absent"})
    assert failed["failure"] == "KeyError: 'absent'"
    assert "nll" not in failed
    late = run_large_cell({**cell, "limit": 0.0})
    assert late["failure"] == "not ended after 0.0 s"


def test_the_grid():
    grid = make_large_grid(tables=("power", "kin8nm"), splits=2, rows=50, methods=("mean",))
    assert [(cell["split"], cell["table"], cell["n"], cell["method"]) for cell in grid] == [
        (split, name, 50, "mean") for split in (0, 1) for name in ("power", "kin8nm")
    ]
    with pytest.raises(UnknownNameError, match="power"):
        make_large_grid(tables=("powr",))


@pytest.mark.slow
def test_a_run_and_its_report(tmp_path):
    path, rows = tmp_path / "a.sqlite", tmp_path / "a.csv.gz"
    line = "run --tables diabetes --methods mean --steps 2 --splits 2 --jobs 2 --quiet"
    answer = invoke(line, "--results", path)
    assert (answer.exit_code, answer.output) == (0, "")
    assert len(load_results(path)) == 2
    answer = invoke("report", "--results", path, "--csv", rows)
    assert answer.exit_code == 0, answer.output
    assert "python -m benchmarks.tables large run --tables diabetes" in answer.output
    for heading in ("Mean ranks", "RMSE", "COVERAGE 90", "Published"):
        assert f"## {heading}\n" in answer.output
    assert len(pandas.read_csv(rows, comment="#")) == 2


def made_cells(scores):
    """A cell for each table and method, from RMSEs and NLLs; None where it failed."""
    rows = []
    for (name, method), pair in scores.items():
        values = pair or (np.nan, np.nan)
        rows.append(
            {"table": name, "split": 0, "n": 100, "method": method, "num_test": 10, "num_data": 110}
            | dict(zip(("rmse", "nll"), values, strict=True))
            | dict.fromkeys((*COSTS, "crps", "coverage_50", "coverage_90", "coverage_95"), 1.0)
            | {"failure": "" if pair else "ValueError: why"}
        )
    return pandas.DataFrame(rows)


def test_the_report_says_where_others_are_better():
    mine, other = OURS[0], "catboost"
    scores = {
        ("bike", mine): (0.10, 0.0), ("bike", other): (0.099, -0.05),
        ("pol", mine): (0.10, 0.0), ("pol", other): (0.09, -0.2),
        ("power", mine): None, ("power", other): (1.0, 1.0),
    }  # fmt: skip
    report = "\n\n".join(LARGE.tables(made_cells(scores)))
    behind = report.partition("## Behind the best")[2].partition("## ")[0]
    assert [line for line in behind.splitlines() if line.startswith("- ")] == [
        "- neighbors-64, RMSE: pol (0.100; catboost 0.090), power (nan; catboost 1.000)",
        "- neighbors-64, NLL: pol (0.000; catboost -0.200), power (nan; catboost 1.000)",
    ]
    assert "| power | 0 | neighbors-64 | ValueError: why |" in report


def test_the_figure_is_of_kin40k(tmp_path):
    scores = {("kin40k", "regressor"): (0.02, -2.9), ("kin40k", "svgp-512"): (0.2, -0.1)}
    large.draw_figure(made_cells(scores), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(DataError, match="needs cells of kin40k"):
        large.draw_figure(made_cells({("pol", "regressor"): (0.02, -2.9)}), tmp_path / "b.png")


@pytest.mark.slow
@pytest.mark.data
def test_the_grid_of_all_tables(data_folder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    grid = make_large_grid(methods=("mean",))
    assert [cell["table"] for cell in grid] == list(TABLES)
    assert all(cell["n"] > 5000 for cell in grid)
    assert split_rows("naval", 0, 10**9)[0].shape == (10740, 14)
