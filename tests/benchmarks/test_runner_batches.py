"""Sweeps whose cells are computed several at a time."""

from __future__ import annotations

import itertools
import time

import grid_cells
import pandas
import pytest

from benchmarks.runner import Batches, load_failures, load_results, run_grid
from gpclml.errors import ArgumentError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def by(function, size=4):
    """Batches of all cells alike but for their seed."""
    return Batches(function, lambda cell: str(cell | {"seed": 0}), lambda cell: size)


def run(cells, function, path, **options):
    return run_grid(cells, function, path, **{"progress": False} | options)


def counted_grid(log, count):
    return [{"seed": seed, "log": str(log), "quiet": True} for seed in range(count)]


def sizes(log):
    return [int(line) for line in log.with_name("log.batches").read_text().split()]


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_table_is_that_of_single_cells(path, tmp_path, jobs):
    grid = grid_cells.cholesky_grid(7)
    summary = run(
        grid, grid_cells.cholesky_cell, path, jobs=jobs, batches=by(grid_cells.cholesky_batch)
    )
    assert (summary.computed, summary.complete) == (7, True)
    run(grid, grid_cells.cholesky_cell, tmp_path / "single.sqlite")
    pandas.testing.assert_frame_equal(
        load_results(path), load_results(tmp_path / "single.sqlite"), check_exact=True
    )


def test_a_batch_computes_what_is_missing(path, log, monkeypatch):
    function, batches = grid_cells.counted_cell, by(grid_cells.counted_batch)
    grid = counted_grid(log, 10)
    assert run(grid[1:3], function, path, batches=by(grid_cells.counted_batch, 1)).computed == 2
    assert not log.with_name("log.batches").exists()
    clock = itertools.count(step=8.0)  # as if each batch of four took so many seconds
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", clock.__next__)
        summary = run(grid, function, path, batches=batches)
    assert (summary.computed, summary.skipped) == (8, 2)
    assert sizes(log) == [4, 4]
    assert sorted(map(int, log.read_text().split())) == list(range(10))
    seconds = load_results(path, provenance=True).set_index("seed")["_seconds"]
    assert seconds[3] == seconds[0] == 2.0  # equal shares of one batch


def test_one_cell_of_a_batch_may_fail(path, tmp_path):
    fix = tmp_path / "fix"
    cells = [{"seed": seed, "fix": str(fix)} for seed in range(4)]
    batches = by(grid_cells.faulty_batch)
    summary = run(cells, grid_cells.faulty_cell, path, batches=batches)
    assert (summary.computed, summary.failed) == (2, 2)
    failures = load_failures(path)
    assert failures["seed"].tolist() == [1, 3]
    assert failures["_error_type"].tolist() == ["ZeroDivisionError"] * 2
    assert failures["_traceback"].str.contains("faulty_cell").all()
    fix.touch()
    summary = run(cells, grid_cells.faulty_cell, path, batches=batches, retry_failed=True)
    assert (summary.computed, summary.skipped) == (2, 2)


def test_a_cell_of_a_batch_may_have_unusable_metrics(path):
    cells = [{"seed": seed, "kind": "list" if seed else "tensor"} for seed in range(2)]
    batches = Batches(grid_cells.returned_batch, lambda cell: 0, lambda cell: 2)
    summary = run(cells, grid_cells.returned_cell, path, batches=batches)
    assert (summary.computed, summary.failed) == (1, 1)
    assert load_failures(path)["_error_type"].tolist() == ["ArgumentError"]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (grid_cells.raising_batch, "ZeroDivisionError: all of them"),
        (grid_cells.exiting_batch, "SystemExit"),
        (grid_cells.short_batch, "is shorter"),
        (grid_cells.empty_batch, "NoneType"),
    ],
)
def test_the_cells_of_a_failed_batch_are_computed_alone(path, log, jobs, function, message):
    grid = counted_grid(log, 6)
    with pytest.warns(RuntimeWarning, match=message):
        summary = run(grid, grid_cells.counted_cell, path, jobs=jobs, batches=by(function, 3))
    assert (summary.computed, summary.complete) == (6, True)
    assert sorted(map(int, log.read_text().split())) == list(range(6))
    assert load_results(path)["square"].tolist() == [seed**2 for seed in range(6)]


@pytest.mark.slow
def test_the_cells_of_a_batch_that_crashes_are_computed_alone(path, log):
    grid, batches = counted_grid(log, 6), by(grid_cells.crashing_batch, 3)
    with pytest.warns(RuntimeWarning, match="computed cell by cell"):
        summary = run(grid, grid_cells.counted_cell, path, jobs=2, batches=batches)
    assert (summary.computed, summary.complete) == (6, True)
    assert sizes(log)[-1] == 3  # the other batch stays one


def test_an_interrupted_batch_leaves_the_others(path, tmp_path):
    fix = tmp_path / "fix"
    cells = [{"seed": seed, "fix": str(fix)} for seed in range(6)]
    batches = by(grid_cells.interrupted_batch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(cells, grid_cells.interrupted_cell, path, batches=batches)
    assert load_results(path)["seed"].tolist() == [0, 1]
    fix.touch()
    summary = run(cells, grid_cells.interrupted_cell, path, batches=batches)
    assert (summary.computed, summary.skipped) == (4, 2)


def test_the_module_of_the_batch_function_counts(path, tmp_path, monkeypatch):
    module = tmp_path / "some_batches.py"
    module.write_text("def batch(cells):\n    return [{}] * len(cells)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import some_batches

    cells = [{"seed": seed} for seed in range(2)]
    for computed in (2, 0):
        summary = run(cells, grid_cells.crashing_cell, path, batches=by(some_batches.batch))
        assert summary.computed == computed
    module.write_text(module.read_text() + "EDITED = 1\n")
    assert run(cells, grid_cells.crashing_cell, path, batches=by(some_batches.batch)).computed == 2


def test_batch_functions_out_of_reach_are_refused(path):
    with pytest.raises(ArgumentError, match="import"):
        run([{"seed": 1}], grid_cells.crashing_cell, path, batches=by(lambda cells: []))
    assert not path.exists()
