"""Sweeps on a Ray cluster of this machine."""

from __future__ import annotations

import grid_cells
import pandas
import pytest

from benchmarks.results import load_failures, load_results
from benchmarks.runner import Batches, run_grid
from gpclml.errors import ArgumentError

pytest.importorskip("ray", reason="needs ray")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


def run(cells, function, path, **options):
    return run_grid(cells, function, path, **{"progress": False, "backend": "ray"} | options)


def test_a_killed_worker_leaves_the_undisturbed_table(path, tmp_path):
    grid = grid_cells.lethal_grid(tmp_path, 12, lethal=3)
    summary = run(grid, grid_cells.lethal_cell, path, jobs=2)
    assert (summary.computed, summary.complete) == (12, True)
    undisturbed = tmp_path / "undisturbed.sqlite"
    run_grid(grid, grid_cells.lethal_cell, undisturbed, progress=False)
    pandas.testing.assert_frame_equal(
        load_results(path), load_results(undisturbed), check_exact=True
    )


def test_a_cell_that_kills_its_workers_is_saved_as_failed(path, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks._ray.RETRIES", 0)
    grid = grid_cells.lethal_grid(tmp_path, 6, lethal=1, when="always")
    batches = Batches(grid_cells.lethal_batch, lambda cell: 0, lambda cell: 3)
    with pytest.warns(RuntimeWarning, match="computed cell by cell"):
        summary = run(grid, grid_cells.lethal_cell, path, jobs=2, batches=batches)
    assert (summary.computed, summary.failed) == (5, 1)
    assert load_failures(path)["_error_type"].tolist() == ["WorkerCrashedError"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", "auto"])
def test_unreachable_clusters_are_refused(path, address):
    grid = grid_cells.cholesky_grid(1)
    with pytest.raises(ArgumentError, match=r"address.*ray start"):
        run(grid, grid_cells.cholesky_cell, path, address=address)
    assert not path.exists()
