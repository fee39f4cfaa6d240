"""Tables of cells with known values, among them cells that failed and cells of two sweeps."""

import math

import pandas
import pytest

from benchmarks.runner import run_grid
from benchmarks.uci.report import baseline_table, load, make_report, objective_table
from benchmarks.uci.statistics import means
from gpclml.errors import DataError


def known_cell(cell):
    """An RMSE that is known; the CLML fails at seed 2."""
    if cell["objective"] == "clml" and cell["seed"] == 2:
        raise ValueError("covariance\nnot positive definite")
    value = 1.0 + 0.1 * cell["seed"] ** 2
    value -= 0.2 * (1 + cell["seed"]) * (cell["objective"] == "clml")
    value += 0.5 * (cell["kernel"] == "deep") + 0.25 * (cell["steps"] == 500)
    names = ("nll", "coverage_95", "train_objective", "noise", "num_steps", "ended_early")
    return {"rmse": value, **dict.fromkeys(names, 1.0)}


def known_cells(steps=300):
    for kernel in ("rbf", "deep"):
        for objective in ("lml", "clml"):
            for seed in range(3):
                adam = kernel == "deep"
                yield {
                    "dataset": "yacht", "n": 50, "seed": seed, "objective": objective,
                    "kernel": kernel, "mean": "constant", "optimizer": "adam" if adam else "lbfgs",
                    "steps": steps if adam else None, "lr": 0.01 if adam else None,
                    "held_out": 0.1 if objective == "clml" else None, "dtype": "float64",
                    "device": "cpu",
                }  # fmt: skip


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "results.sqlite"
    assert run_grid(known_cells(), known_cell, path, progress=False).failed == 2
    return path


def test_only_pairs_count_in_differences(path):
    results = load(path)
    table = objective_table(results.done, "rmse")
    row = table.loc["yacht", 50, "deep"]
    error = math.sqrt(((0.1 + 1 / 15) ** 2 + (1 / 15) ** 2 + (0.4 - 1 / 6) ** 2) / 6)
    assert row["lml"] == f"{1.5 + 1 / 6:.3f} ± {error:.3f} [3]"
    assert row["clml"] == "1.250 ± 0.050 [2]"  # 1.3 and 1.2
    assert row["clml - lml"] == "-0.300 ± 0.100 [2]"  # -0.2 and -0.4
    assert list(table.columns) == ["lml", "clml", "clml - lml"]


def test_differences_to_the_plain_gp(path):
    table = baseline_table(load(path).done, "rmse")
    assert table.loc["yacht", 50, "deep"].tolist() == ["0.500 ± 0.000 [3]", "0.200 ± 0.100 [2]"]
    assert table.loc["yacht", 50, "rbf"].tolist() == ["-", "-0.300 ± 0.100 [2]"]
    assert baseline_table(load(path, ["deep"]).done, "rmse").empty


def test_sweeps_with_other_settings_are_kept_apart(path):
    run_grid(known_cells(steps=500), known_cell, path, progress=False)
    table = objective_table(load(path).done, "rmse")
    assert table.index.get_level_values("kernel").tolist() == [
        "deep steps=300", "deep steps=500", "rbf",
    ]  # fmt: skip
    assert table["clml"].tolist() == [
        "1.250 ± 0.050 [2]", "1.500 ± 0.050 [2]", "0.750 ± 0.050 [2]",
    ]  # fmt: skip
    plain = baseline_table(load(path).done, "rmse")
    assert plain.loc[("yacht", 50, "deep steps=500"), "lml"] == "0.750 ± 0.000 [3]"


def test_failed_cells_and_unfinished_fits_are_listed(path):
    text = make_report(load(path))
    assert "10 cells done" in text
    assert "2 failed cells:" in text
    assert "yacht n=50 deep clml seed 2: ValueError: covariance" in text
    assert "10 fits ended early" in text


def test_a_file_without_finished_cells(tmp_path):
    cells = [cell for cell in known_cells() if cell["objective"] == "clml" and cell["seed"] == 2]
    run_grid(cells, known_cell, tmp_path / "a.sqlite", progress=False)
    with pytest.raises(DataError, match=r"no finished cell.*ValueError: covariance"):
        load(tmp_path / "a.sqlite")


def test_results_of_another_benchmark(tmp_path):
    run_grid([{"kernel": "rbf"}], other_cell, tmp_path / "a.sqlite", progress=False)
    with pytest.raises(DataError, match="another benchmark"):
        load(tmp_path / "a.sqlite")


def other_cell(cell):
    return {"milliseconds": 1.0}


def test_one_seed_has_no_standard_error():
    cells = pandas.DataFrame({"kernel": ["rbf"], "rmse": [0.5]})
    [row] = means(cells, "rmse", ["kernel"]).itertuples()
    assert (row[1], row.seeds) == (0.5, 1)
    assert math.isnan(row.se)
