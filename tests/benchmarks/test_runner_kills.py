"""Runs in processes of their own: killed, interrupted, and two on one file."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import grid_cells
import pandas
import pytest
from grid_cells import wait_for

from benchmarks.runner import load_results, run_grid
from gpclml.errors import DataError

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


@contextlib.contextmanager
def sweep(cells, function, path, **options):
    """A sweep in a process group of its own, ready to start."""
    folders = [str(HERE), str(HERE.parents[1]), os.environ["PYTHONPATH"]]
    grid = path.with_suffix(".json")
    grid.write_text(json.dumps(cells))
    process = subprocess.Popen(
        [
            sys.executable, str(HERE / "grid_sweep.py"), function.__name__, grid, path,
            json.dumps(options),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def start(process):
    process.stdin.write("\n")
    process.stdin.flush()


def rows(path):
    """Number of rows, or 0 before the file is made."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as connection:
            return connection.execute("SELECT count(*) FROM results").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def group_lives(group):
    """Whether a process of a process group still runs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                return True
    return False


SEED = 3
BATCHES = [{}, {"batch": "gated_batch"}]
BATCHED = pytest.param({"jobs": 2, "batch": "counted_batch"}, marks=pytest.mark.slow)
KILLS = [(1, "group"), (2, "driver"), (1, "group"), (2, "group"), (1, "driver")]


@pytest.mark.slow
def test_five_times_killed_a_sweep_gives_the_undisturbed_table(tmp_path):
    path, moments = tmp_path / "killed.sqlite", random.Random(SEED)
    gate = tmp_path / "gate"
    grid = grid_cells.gated_grid(gate, 50)
    saved = [0]
    for (jobs, target), options in zip(KILLS, 2 * BATCHES + [{}], strict=True):
        # Eight more cells may end, of which the kill comes after some; the rest wait at the gate.
        gate.write_text(str(saved[-1] + 8))
        enough = saved[-1] + moments.randint(0 if jobs == 1 else 1, 5)
        with sweep(grid, grid_cells.gated_cell, path, jobs=jobs, **options) as process:
            start(process)
            wait_for(lambda enough=enough: rows(path) >= enough)
            kill = os.killpg if target == "group" else os.kill
            kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            saved.append(rows(path))
            if target == "driver" and sys.platform.startswith("linux"):
                wait_for(lambda group=process.pid: not group_lives(group))
    assert saved == sorted(saved)
    assert 0 < saved[-1] < len(grid)

    gate.write_text(str(len(grid)))
    summary = run_grid(grid, grid_cells.gated_cell, path, jobs=2, progress=False)
    assert (summary.skipped, summary.computed) == (saved[-1], len(grid) - saved[-1])
    undisturbed = tmp_path / "undisturbed.sqlite"
    run_grid(grid, grid_cells.gated_cell, undisturbed, progress=False)
    pandas.testing.assert_frame_equal(
        load_results(path), load_results(undisturbed), check_exact=True
    )


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path):
    path, gate = tmp_path / "shared.sqlite", tmp_path / "gate"
    grid = grid_cells.gated_grid(gate, 4)
    gate.write_text("2")
    with sweep(grid, grid_cells.gated_cell, path, jobs=2) as process:
        start(process)
        wait_for(lambda: rows(path) == 2)
        with pytest.raises(DataError, match="another run is writing"):
            run_grid(grid, grid_cells.gated_cell, path, progress=False)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        gate.write_text("4")
        summary = run_grid(grid, grid_cells.gated_cell, path, progress=False)
    assert (summary.skipped, summary.computed) == (2, 2)


@pytest.mark.parametrize("options", [{"jobs": 1}, {"jobs": 2}, BATCHED])
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_saves_what_ended(tmp_path, options):
    path, log = tmp_path / "stopped.sqlite", tmp_path / "log"
    grid = [{"seed": seed, "log": str(log), "quiet": True} for seed in range(1000)]
    with sweep(grid, grid_cells.counted_cell, path, **options) as process:
        start(process)
        wait_for(lambda: rows(path) > 2)
        os.killpg(process.pid, signal.SIGINT)
        _, message = process.communicate(timeout=600)
    saved = rows(path)
    assert process.returncode != 0
    assert f"{saved} of 1000 cells are saved in {path}" in message
    assert "resume" in message
    assert 2 < saved < 1000
