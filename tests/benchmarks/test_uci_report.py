"""Tables of cells with known values, among them cells that failed and cells of two sweeps."""

import math

import pytest

from benchmarks.runner import run_grid
from benchmarks.uci.study import STUDY, labelled
from benchmarks.uci.tables import difference_table, less_lml, less_plain, mean_table, win_table


def known_cell(cell):
    """An RMSE that is known; the CLML fails at seed 2."""
    if cell["objective"] == "clml" and cell["seed"] == 2:
        raise ValueError("covariance\nnot positive definite")
    value = 1.0 + 0.1 * cell["seed"] ** 2
    value -= 0.2 * (1 + cell["seed"]) * (cell["objective"] == "clml")
    value += 0.4 * (cell["kernel"] == "deep") + 0.25 * (cell["steps"] == 500)
    names = ("nll", "crps", "coverage_95", "train_objective", "noise", "num_steps")
    names = (*names, "train_seconds", "ended_early")
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
                    "held_out": 0.1 if objective == "clml" else None,
                    "dtype": "float64", "device": "cpu",
                }  # fmt: skip


def load(path):
    return labelled(STUDY.load(path)[0])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "results.sqlite"
    assert run_grid(known_cells(), known_cell, path, progress=False).failed == 2
    return path


def test_only_pairs_count_in_differences(path):
    done = load(path)
    table = mean_table(done, "rmse")["yacht"]
    error = math.sqrt(((0.1 + 1 / 15) ** 2 + (1 / 15) ** 2 + (0.4 - 1 / 6) ** 2) / 6)
    assert table[50, "deep", "lml"] == f"{1.4 + 1 / 6:.3f} ± {error:.3f}"
    assert table[50, "deep", "clml"] == "1.150 ± 0.050 [2]"  # 1.2 and 1.1
    differences = difference_table(less_lml(done, "rmse"), "rmse")
    assert differences["yacht"].to_dict() == {
        (50, "deep", "clml"): "**-0.300 ± 0.100**",  # -0.2 and -0.4
        (50, "rbf", "clml"): "**-0.300 ± 0.100**",
    }
    assert differences["below 0 (p)"].tolist() == ["1 of 1 (1)"] * 2
    assert differences["wins / losses / ties"].tolist() == ["1 / 0 / 0"] * 2


@pytest.mark.slow
def test_differences_to_the_plain_gp(path):
    done = load(path)
    table = difference_table(less_plain(done, "rmse"), "rmse")["yacht"]
    assert table.to_dict() == {
        (50, "deep", "lml"): "**0.400 ± 0.000**",
        (50, "deep", "clml"): "0.100 ± 0.100 [2]",  # 0.2 and 0.0
        (50, "rbf", "clml"): "**-0.300 ± 0.100 [2]**",
    }
    wins = win_table(done)
    assert wins["RMSE, wins / losses / ties"].to_dict() == {
        ("deep", "lml"): "0 / 1 / 0", ("deep", "clml"): "0 / 0 / 1", ("rbf", "clml"): "1 / 0 / 0",
    }  # fmt: skip
    assert wins["most unfavourable RMSE"]["deep", "clml"] == "yacht n = 50: 0.1000 ± 0.1000"
    deep = done[done["kernel"] == "deep"]
    assert less_plain(deep, "rmse").empty
    assert win_table(deep).empty


def test_sweeps_with_other_settings_are_kept_apart(path):
    run_grid(known_cells(steps=500), known_cell, path, progress=False)
    table = mean_table(load(path), "rmse")["yacht"]
    assert table.xs("clml", level="objective").to_dict() == {
        (50, "deep steps=300"): "1.150 ± 0.050 [2]",
        (50, "deep steps=500"): "1.400 ± 0.050 [2]",
        (50, "rbf"): "0.750 ± 0.050 [2]",
    }
    plain = less_plain(load(path), "rmse")
    assert plain.loc[("yacht", 50, "deep steps=500", "lml"), "mean"] == pytest.approx(0.65)


@pytest.mark.slow
def test_failed_cells_and_unfinished_fits_are_listed(path):
    text = STUDY.sections(path)
    assert "10 cells done" in text
    assert "2 failed cells:" in text
    assert "- yacht n=50 deep clml seed 2: ValueError: covariance\n" in text
    assert "10 fits ended early" in text
