"""Cells of studies computed again give the figures that are committed."""

from pathlib import Path

import pandas
import pytest

from benchmarks.dkt.cells import run_cell as run_tasks
from benchmarks.dkt.study import make_grid as make_tasks
from benchmarks.evidence.cells import make_grid as make_networks
from benchmarks.evidence.cells import run_cell as run_network
from benchmarks.tables.cells import run_cell as run_table
from benchmarks.tables.classes import run_class_cell
from benchmarks.uci.cells import run_cell as run_fit

ROOT = Path(__file__).parents[2] / "benchmarks"
COSTS = {"seconds", "seconds_each", "train_seconds", "num_steps"}


def check(run, cell, file):
    """Compares all figures but what it cost, which differs with processors and searches."""
    rows = pandas.read_csv(ROOT / file, comment="#")
    for name, value in cell.items():
        rows = rows[rows[name].isna() if value is None else rows[name] == value]
    [row] = rows.to_dict("records")
    repeated = {name: value for name, value in run(cell).items() if isinstance(value, float)}
    names = sorted(row.keys() & repeated.keys() - COSTS)
    assert len(names) > 1
    expected = {name: row[name] for name in names}
    assert {name: repeated[name] for name in names} == pytest.approx(expected, rel=5e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("hessian", ["ggn", "ef"])
def test_an_estimate_of_the_evidence(hessian):
    [cell] = [
        cell
        for cell in make_networks("bounds", architectures=("mlp-32x2",))
        if (cell["structure"], cell["hessian"], cell["batch_size"]) == ("kronecker", hessian, None)
    ]
    check(run_network, cell, "evidence/results/bounds.csv.gz")


@pytest.mark.slow
def test_tasks_without_training():
    [cell] = make_tasks(study=("digits",), kernels=("pixels",), shots=(1,), seeds=1)
    check(run_tasks, cell, "dkt/results/digits.csv.gz")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "method", "page"),
    [
        ("pima", "rbf-iso", "classes-kernels"),
        ("pima", "classifier", "classes"),
        ("quine", "matern", "classes"),
    ],
)
def test_classes_and_counts(table, method, page):
    cell = {"table": table, "n": 100, "split": 0, "method": method, "most_test": 1000}
    check(run_class_cell, cell, f"tables/results/{page}.csv.gz")


@pytest.fixture
def _real_data(data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))


@pytest.mark.data
@pytest.mark.usefixtures("_real_data")
@pytest.mark.parametrize("method", ["rbf", "ridge", "stack"])
def test_a_table(method):
    cell = {"table": "servo", "n": 50, "split": 0, "method": method, "most_test": 1000}
    check(run_table, cell, "tables/results/judged.csv.gz")


@pytest.mark.data
@pytest.mark.usefixtures("_real_data")
def test_a_fit():
    cell = {
        "dataset": "boston", "device": "cpu", "dtype": "float64", "held_out": None,
        "kernel": "rbf", "lr": None, "mean": "constant", "n": 100, "objective": "lml",
        "optimizer": "lbfgs", "seed": 1, "steps": None,
    }  # fmt: skip
    check(run_fit, cell, "uci/results/baselines.csv.gz")
