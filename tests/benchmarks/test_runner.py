import contextlib
import math
import os
import sqlite3
import sys

import grid_cells
import pandas
import pytest
import torch

from benchmarks.runner import load_failures, load_results, run_grid
from benchmarks.runner.results import open_results
from gpclml.errors import ArgumentError, DataError

ABOUT = {"function": "module:cell", "code_version": "v1"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


def run(cells, function, path, **options):
    return run_grid(cells, function, path, **{"progress": False} | options)


def test_results_are_those_of_the_function(path):
    grid = grid_cells.cholesky_grid(3)
    summary = run(grid, grid_cells.cholesky_cell, path)
    assert (summary.total, summary.computed, summary.complete) == (3, 3, True)
    table = load_results(path)
    assert list(table.columns) == [
        "noise", "num_data", "seed", "log_determinant", "spread", "threads",
    ]  # fmt: skip
    for cell, (_, row) in zip(grid, table.iterrows(), strict=True):
        expected = grid_cells.cholesky_cell(cell)
        assert row["seed"] == cell["seed"]
        assert row["log_determinant"] == expected["log_determinant"].item()
        assert math.isnan(row["spread"]) or row["spread"] == expected["spread"].item()


def test_done_cells_are_not_computed_again(path, tmp_path):
    log = tmp_path / "log"
    cells = [{"seed": seed, "log": str(log), "quiet": True} for seed in (1, 2, 1)]
    assert run(cells, grid_cells.counted_cell, path).computed == 2
    summary = run([*cells, {**cells[0], "seed": 3}], grid_cells.counted_cell, path)
    assert (summary.total, summary.computed, summary.skipped) == (3, 1, 2)
    assert log.read_text().split() == ["1", "2", "3"]


def test_edited_sources_are_computed_again(path, tmp_path, monkeypatch):
    module, cells = tmp_path / "some_source.py", [{"seed": 1, "fix": str(tmp_path / "fix")}]
    monkeypatch.syspath_prepend(tmp_path)
    for text in ("A = 1", "A = 2"):
        module.write_text(text)
        assert run(cells, grid_cells.faulty_cell, path, sources=("some_source",)).failed == 1
    assert len(load_failures(path)) == 1


def test_a_docstring_leaves_results_valid_and_a_statement_does_not(path, tmp_path, monkeypatch):
    module = tmp_path / "some_cells.py"
    module.write_text("def cell(configuration):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import some_cells

    assert run([{"seed": 1}], some_cells.cell, path).computed == 1
    text = 'def cell(configuration):\n    """Makes nothing."""\n    return {}  # at all\n'
    module.write_text(text)
    assert run([{"seed": 1}], some_cells.cell, path).skipped == 1
    module.write_text(text.replace("{}", "{'a': 1}"))
    assert run([{"seed": 1}], some_cells.cell, path).computed == 1


def test_failures_are_kept_and_retried_when_asked(path, tmp_path):
    fix = tmp_path / "fix"
    cells = [{"seed": seed, "fix": str(fix)} for seed in range(4)]
    summary = run(cells, grid_cells.faulty_cell, path)
    assert (summary.computed, summary.failed, summary.complete) == (2, 2, False)
    failures = load_failures(path)
    assert failures["seed"].tolist() == [1, 3]
    assert failures["_error_type"].tolist() == ["ZeroDivisionError"] * 2
    assert failures["_error_message"].tolist() == [f"seed {seed}" for seed in (1, 3)]
    assert failures["_traceback"].str.contains("faulty_cell").all()

    fix.touch()
    summary = run(cells, grid_cells.faulty_cell, path)
    assert (summary.computed, summary.skipped, summary.failed_before) == (0, 2, 2)
    assert "2 failed" in str(summary)
    summary = run(cells, grid_cells.faulty_cell, path, retry_failed=True)
    assert (summary.computed, summary.complete) == (2, True)
    assert load_results(path)["half"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert load_failures(path).empty


def test_a_lasting_failure_is_retried_once_a_run(path, tmp_path):
    cells = [{"seed": 1, "fix": str(tmp_path / "fix")}]
    for _ in range(3):
        assert run(cells, grid_cells.faulty_cell, path, retry_failed=True).failed == 1
        assert len(load_failures(path)) == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("list", "ArgumentError"),
        ("clash", "ArgumentError"),
        ("object", "TypeError"),
        ("exit", "SystemExit"),
    ],
)
def test_unusable_metrics_are_failures(path, kind, error):
    cells = [{"kind": kind}, {"kind": "tensor"}]
    summary = run(cells, grid_cells.returned_cell, path)
    assert (summary.computed, summary.failed) == (1, 1)
    assert load_failures(path)["_error_type"].tolist() == [error]
    row = load_results(path).iloc[0]
    assert row["rmse"] == torch.tensor(0.1).item()
    assert row["curve"] == [0, 1, 2]


def test_interrupt_keeps_what_ended(path, tmp_path, capfd):
    fix = tmp_path / "fix"
    cells = [{"seed": seed, "fix": str(fix)} for seed in range(6)]
    with pytest.raises(KeyboardInterrupt):
        run(cells, grid_cells.interrupted_cell, path)
    message = capfd.readouterr().err
    assert "3 of 6 cells are saved" in message
    assert "resume" in message
    fix.touch()
    summary = run(cells, grid_cells.interrupted_cell, path)
    assert (summary.computed, summary.skipped) == (3, 3)


def test_a_cell_has_one_thread(path):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run(grid_cells.cholesky_grid(1), grid_cells.cholesky_cell, path)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert load_results(path)["threads"].tolist() == [1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_environment_is_set_for_cells_alone(path, monkeypatch, jobs):
    monkeypatch.setenv("GPCLML_TEST", "before")
    cells = [{"names": ["GPCLML_TEST", "GPCLML_TEST_NEW"]}]
    variables = {"GPCLML_TEST": "a", "GPCLML_TEST_NEW": "b"}
    run(cells, grid_cells.environment_cell, path, jobs=jobs, environment=variables)
    assert load_results(path)["values"].tolist() == [["a", "b"]]
    assert os.environ["GPCLML_TEST"] == "before"
    assert "GPCLML_TEST_NEW" not in os.environ


def test_numbers_do_not_depend_on_the_number_of_jobs(path, tmp_path):
    grid = grid_cells.cholesky_grid(12)
    run(grid, grid_cells.cholesky_cell, path)
    summary = run(grid, grid_cells.cholesky_cell, tmp_path / "pooled.sqlite", jobs=2)
    assert summary.computed == 12
    pandas.testing.assert_frame_equal(
        load_results(path), load_results(tmp_path / "pooled.sqlite"), check_exact=True
    )


def test_a_cell_whose_worker_was_lost_is_computed_again(path, tmp_path):
    grid = grid_cells.lethal_grid(tmp_path, 8, lethal=3)
    summary = run(grid, grid_cells.lethal_cell, path, jobs=2)
    assert (summary.computed, summary.complete) == (8, True)
    undisturbed = tmp_path / "undisturbed.sqlite"
    run(grid, grid_cells.lethal_cell, undisturbed)
    pandas.testing.assert_frame_equal(
        load_results(path), load_results(undisturbed), check_exact=True
    )


def test_a_cell_that_costs_its_workers_is_computed_four_times(path, tmp_path):
    grid = grid_cells.lethal_grid(tmp_path, 4, lethal=1, when="always")
    summary = run(grid, grid_cells.lethal_cell, path, jobs=2)
    assert (summary.computed, summary.failed) == (3, 1)
    assert load_failures(path)["seed"].tolist() == [1]
    assert load_failures(path)["_error_type"].tolist() == ["TerminatedWorkerError"]
    assert (tmp_path / "1").read_text() == "+" * 4
    assert max(len((tmp_path / str(seed)).read_text()) for seed in (0, 2, 3)) <= 2


def test_a_second_run_on_an_open_file_is_refused_before_any_cell(path, tmp_path):
    log = tmp_path / "log"
    cells = [{"seed": 1, "log": str(log), "quiet": True}]
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    with open_results(path, ABOUT):
        for name in (path, link):
            with pytest.raises(DataError, match=r"another run is writing.*Wait") as caught:
                run(cells, grid_cells.counted_cell, name)
            assert str(name) in str(caught.value)
        assert load_results(path).empty  # it may be read meanwhile
    assert not log.exists()
    assert run(cells, grid_cells.counted_cell, link).complete


def test_progress_is_shown_on_stderr_when_asked(path, capfd):
    run(grid_cells.cholesky_grid(2), grid_cells.cholesky_cell, path, progress=True)
    shown = capfd.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""
    run(grid_cells.cholesky_grid(3), grid_cells.cholesky_cell, path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"jobs": 0}, "jobs"),
        ({"sources": ("no_such_module",)}, "sources"),
    ],
)
def test_bad_arguments_are_refused(path, options, match):
    with pytest.raises(ArgumentError, match=match):
        run(grid_cells.cholesky_grid(1), grid_cells.cholesky_cell, path, **options)
    assert not path.exists()


def test_a_cluster_needs_its_package(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)  # as if it were not installed
    with pytest.raises(ArgumentError, match=r"address.*distributed.*pip install"):
        run(
            grid_cells.cholesky_grid(1), grid_cells.cholesky_cell, path, address="tcp://127.0.0.1:1"
        )
    assert not path.exists()


def _text(path):
    path.write_text("seed,rmse\n")
    return path


def _other_schema(path):
    run(grid_cells.cholesky_grid(1), grid_cells.cholesky_cell, path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    return path


@pytest.mark.parametrize(
    "unusable",
    [
        _text,
        _other_schema,
        lambda path: path.parent,
        lambda path: path / "gone" / "results.sqlite",
    ],
)
def test_unusable_results_file_stops_before_any_cell(path, tmp_path, unusable):
    log = tmp_path / "log"
    cells = [{"seed": 1, "log": str(log), "quiet": True}]
    with pytest.raises((ArgumentError, DataError)):
        run(cells, grid_cells.counted_cell, unusable(path))
    assert not log.exists()
