"""Grids of cells: what is computed, kept, computed again; batches, workers, kills, interrupts."""

import contextlib
import json
import math
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
import torch
from grid_cells import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.runner import Batches, load_failures, load_results, run_grid
from benchmarks.runner.grid import cell_key
from benchmarks.runner.results import canonical_json
from gpclml.errors import ArgumentError, DataError

HERE = Path(__file__).parent
posix = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def run(cells, function, path, **options):
    return run_grid(cells, function, path, **{"progress": False} | options)


def seeds(count, **settings):
    return [{"seed": seed, **{name: str(v) for name, v in settings.items()}} for seed in count]


def undisturbed(cells, function, path):
    """The table of the cells computed one after the other in this process."""
    run(cells, function, path.with_name("undisturbed.sqlite"))
    return load_results(path.with_name("undisturbed.sqlite"))


def same(table, other):
    pandas.testing.assert_frame_equal(table, other, check_exact=True)


def batches(function, size=4):
    """Batches of all cells alike but for their seed."""
    return Batches(function, lambda cell: str(cell | {"seed": 0}), lambda cell: size)


def test_results_are_those_of_the_function(path):
    grid = seeds(range(3))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        summary = run(grid, grid_cells.cholesky_cell, path)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert (summary.total, summary.computed, summary.complete) == (3, 3, True)
    table = load_results(path)
    assert list(table.columns) == ["seed", "log_determinant", "spread", "threads"]
    assert table["threads"].tolist() == [1] * 3
    for cell, (_, row) in zip(grid, table.iterrows(), strict=True):
        expected = grid_cells.cholesky_cell(cell)
        assert row["seed"] == cell["seed"]
        assert row["log_determinant"] == pytest.approx(expected["log_determinant"].item())
        assert math.isnan(row["spread"]) == (cell["seed"] == 0)


def test_done_cells_are_not_computed_again(path, log):
    cells = seeds([1, 2, 1], log=log)
    assert run(cells, grid_cells.counted_cell, path).computed == 2
    summary = run([*cells, *seeds([3], log=log)], grid_cells.counted_cell, path)
    assert (summary.total, summary.computed, summary.skipped) == (3, 1, 2)
    assert log.read_text().split() == ["1", "2", "3"]
    with pytest.raises(ArgumentError, match="at least one"):
        run([], grid_cells.counted_cell, path)


CELLS = """
from math import cos as wave

from some_package import other
from some_package.source import A, words

B = 1

def cell(c):
    return {"value": A + other.C + wave(0)}

def batch(cells):
    return [{"value": B}] * len(cells)

def report(rows):
    return words(rows)
"""


@pytest.mark.slow
def test_results_are_valid_until_the_code_that_computed_them_changes(path, tmp_path, monkeypatch):
    """That of the cell function, of batches, and of what they call and import."""
    package = tmp_path / "some_package"
    package.mkdir()
    texts = {
        "__init__": "", "cells": CELLS, "other": "C = 1\n",
        "source": "A = 1\n\ndef words(rows):\n    return 'some'\n",
    }  # fmt: skip
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    from some_package import cells as some_cells

    some = batches(some_cells.batch)
    options = [(some_cells.cell, {}), (grid_cells.lethal_cell, {"batches": some})]
    edits = [  # a file, what stands there, what comes in its place, who computes anew
        ("cells", "", "# a comment\n", [False, False]),
        ("cells", "B = 1", "B = 2", [False, True]),
        ("cells", "return words(rows)", "return rows", [False, False]),
        ("cells", "cos", "cosh", [True, False]),
        ("source", "'some'", "'other'", [False, False]),
        ("source", "A = 1", "A = 2", [True, False]),
        ("other", "", "D = 3\n", [True, False]),
    ]
    cells = [{"seed": 0}, {"seed": 1}]
    for function, more in options:
        assert run(cells, function, path, **more).computed == 2
    for file, before, after, anew in edits:
        source = package / f"{file}.py"
        source.write_text(source.read_text().replace(before, after, 1))
        for changed, (function, more) in zip(anew, options, strict=True):
            assert run(cells, function, path, **more).computed == 2 * changed


def test_failures_are_kept_and_retried_when_asked(path, tmp_path):
    fix = tmp_path / "fix"
    cells = seeds([0, 1, 2, 3, 6], fix=fix)
    summary = run(cells, grid_cells.faulty_cell, path)
    assert (summary.computed, summary.failed, summary.complete) == (2, 3, False)
    failures = load_failures(path)
    assert failures["seed"].tolist() == [1, 3, 6]
    assert failures["_error_type"].tolist() == ["ZeroDivisionError"] * 2 + ["SystemExit"]
    assert failures["_error_message"].tolist() == ["seed 1", "seed 3", "3"]
    assert failures["_traceback"].str.contains("faulty_cell").all()
    for _ in range(2):  # a lasting failure is retried once a run
        assert run(cells, grid_cells.faulty_cell, path, retry_failed=True).failed == 3
    fix.touch()
    summary = run(cells, grid_cells.faulty_cell, path)
    assert (summary.computed, summary.skipped, summary.failed_before) == (0, 2, 3)
    assert "3 failed" in str(summary)
    summary = run(cells, grid_cells.faulty_cell, path, retry_failed=True)
    assert (summary.computed, summary.complete) == (3, True)
    assert load_failures(path).empty


@pytest.mark.parametrize(
    ("kind", "error"),
    [("list", "ArgumentError"), ("clash", "ArgumentError"), ("object", "TypeError")],
)
def test_unusable_metrics_are_failures(path, kind, error):
    summary = run([{"kind": kind}, {"kind": "tensor"}], grid_cells.returned_cell, path)
    assert (summary.computed, summary.failed) == (1, 1)
    assert load_failures(path)["_error_type"].tolist() == [error]
    row = load_results(path).iloc[0]
    assert row["rmse"] == torch.tensor(0.1).item()
    assert row["curve"] == [0, 1, 2]


@pytest.mark.parametrize("more", [{}, {"batches": batches(grid_cells.faulty_batch, 2)}])
def test_interrupt_keeps_what_ended(path, tmp_path, capfd, more):
    fix = tmp_path / "fix"
    cells = seeds([0, 2, 4, 8], fix=fix)
    with pytest.raises(KeyboardInterrupt):
        run(cells, grid_cells.faulty_cell, path, **more)
    message = capfd.readouterr().err
    assert "2 of 4 cells are saved" in message
    assert "resume" in message
    fix.touch()
    summary = run(cells, grid_cells.faulty_cell, path, **more)
    assert (summary.computed, summary.skipped) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_workers_and_batches_give_the_same_table_in_their_environment(path, monkeypatch, jobs):
    grid = seeds(range(7))
    summary = run(
        grid, grid_cells.cholesky_cell, path, jobs=jobs, batches=batches(grid_cells.cholesky_batch)
    )
    assert (summary.computed, summary.complete) == (7, True)
    same(load_results(path), undisturbed(grid, grid_cells.cholesky_cell, path))
    monkeypatch.setenv("GPCLML_TEST", "before")
    cells = [{"names": ["GPCLML_TEST", "GPCLML_TEST_NEW"]}]
    variables = {"GPCLML_TEST": "a", "GPCLML_TEST_NEW": "b"}
    other = path.with_name("other.sqlite")
    run(cells, grid_cells.environment_cell, other, jobs=jobs, environment=variables)
    assert load_results(other)["values"].tolist() == [["a", "b"]]
    assert os.environ["GPCLML_TEST"] == "before"
    assert "GPCLML_TEST_NEW" not in os.environ


@pytest.mark.slow
def test_a_batch_computes_what_is_missing(path, log):
    grid, function = seeds(range(10), log=log), grid_cells.counted_cell
    alone = batches(grid_cells.counted_batch, 1)
    assert run(grid[1:3], function, path, batches=alone).computed == 2
    assert not log.with_name("log.batches").exists()
    summary = run(grid, function, path, batches=batches(grid_cells.counted_batch))
    assert (summary.computed, summary.skipped) == (8, 2)
    assert log.with_name("log.batches").read_text().split() == ["4", "4"]
    assert sorted(map(int, log.read_text().split())) == list(range(10))
    seconds = load_results(path, provenance=True).set_index("seed")["_seconds"]
    assert seconds[3] == seconds[0]  # equal shares of one batch


@pytest.mark.slow
def test_batches_are_of_one_label_full_and_in_order(path, log):
    cells = [cell | {"n": n} for cell, n in zip(seeds(range(5), log=log), "57557", strict=True)]
    some = Batches(grid_cells.counted_batch, lambda c: c["n"], lambda c: 2)
    run(cells, grid_cells.counted_cell, path, batches=some)
    assert log.read_text().split() == ["0", "2", "1", "4", "3"]


def test_one_cell_of_a_batch_may_fail(path, tmp_path):
    fix = tmp_path / "fix"
    cells, some = seeds(range(4), fix=fix), batches(grid_cells.faulty_batch)
    summary = run(cells, grid_cells.faulty_cell, path, batches=some)
    assert (summary.computed, summary.failed) == (2, 2)
    assert load_failures(path)["seed"].tolist() == [1, 3]
    assert load_failures(path)["_traceback"].str.contains("faulty_cell").all()
    fix.touch()
    summary = run(cells, grid_cells.faulty_cell, path, batches=some, retry_failed=True)
    assert (summary.computed, summary.skipped) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [(grid_cells.raising_batch, "all of them"), (grid_cells.short_batch, "is shorter")],
)
def test_the_cells_of_a_failed_batch_are_computed_alone(path, log, capfd, function, message):
    grid = seeds(range(6), log=log)
    summary = run(grid, grid_cells.counted_cell, path, batches=batches(function, 3))
    assert (summary.computed, summary.complete) == (6, True)
    assert "3 cells failed and is computed cell by cell" in (told := capfd.readouterr().err)
    assert message in told
    assert sorted(map(int, log.read_text().split())) == list(range(6))


@pytest.mark.slow
@posix
@pytest.mark.parametrize("when", ["once", "always"])
def test_a_lost_worker(path, tmp_path, when):
    """What it had is computed again; one that is lost again and again ends the run."""
    grid = [cell | {"lethal": "no"} for cell in seeds(range(6), folder=tmp_path)]
    grid[3]["lethal"] = when
    if when == "once":
        assert run(grid, grid_cells.lethal_cell, path, jobs=2).complete
        same(load_results(path), undisturbed(grid, grid_cells.lethal_cell, path))
        return
    with pytest.raises(DataError, match=r"4 workers were lost.*fewer jobs"):
        run(grid, grid_cells.lethal_cell, path, jobs=2)
    assert (tmp_path / "3").read_text() == "+" * 4
    assert set(load_results(path)["seed"]) <= {0, 1, 2, 4, 5}


def test_progress_is_shown_on_stderr_when_asked(path, capfd):
    run(seeds(range(2)), grid_cells.cholesky_cell, path, progress=True)
    shown = capfd.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""
    run(seeds(range(3)), grid_cells.cholesky_cell, path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"jobs": 0}, "jobs"),
        ({"batches": batches(lambda cells: [])}, "import"),
        ({"address": "tcp://127.0.0.1:1"}, r"address.*distributed.*pip install"),
    ],
)
def test_bad_arguments_are_refused(path, monkeypatch, options, match):
    monkeypatch.setitem(sys.modules, "distributed", None)  # as if it were not installed
    with pytest.raises(ArgumentError, match=match):
        run(seeds([1]), grid_cells.cholesky_cell, path, **options)
    assert not path.exists()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(), scalars, max_size=3)
configurations = st.dictionaries(st.text(max_size=5), values, max_size=5)


@settings(deadline=None, max_examples=60)
@given(configurations, configurations, st.randoms(use_true_random=False))
def test_a_key_is_that_of_its_settings_whatever_their_order(cell, other, random):
    pairs = list(cell.items())
    random.shuffle(pairs)
    assert cell_key(dict(pairs), "v") == cell_key(cell, "v") != cell_key(cell, "w")
    equal = canonical_json(cell) == canonical_json(other)
    assert (cell_key(cell, "v") == cell_key(other, "v")) == equal


@pytest.mark.parametrize(
    ("value", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (None, "null"), ("1", 1), ([], {})]
)
def test_a_key_tells_look_alikes_apart(value, other):
    assert cell_key({"a": value}, "v") != cell_key({"a": other}, "v")


@contextlib.contextmanager
def sweep(cells, function, path, jobs):
    """A sweep in a process group of its own, ready to start."""
    folders = [str(HERE), str(HERE.parents[1]), os.environ["PYTHONPATH"]]
    grid = path.with_suffix(".json")
    grid.write_text(json.dumps(cells))
    process = subprocess.Popen(
        [sys.executable, HERE / "grid_cells.py", function.__name__, grid, path, str(jobs)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.stdin.write("\n")
        process.stdin.flush()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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


@posix
@pytest.mark.slow
def test_five_times_killed_a_sweep_gives_the_undisturbed_table(path, tmp_path):
    moments, gate, saved = random.Random(3), tmp_path / "gate", [0]
    grid = seeds(range(50), gate=gate)
    for jobs, target in [(1, "group"), (2, "driver"), (1, "group"), (2, "group"), (1, "driver")]:
        # Eight more cells may end, of which the kill comes after some; the rest wait at the gate.
        gate.write_text(str(saved[-1] + 8))
        enough = saved[-1] + moments.randint(jobs - 1, 5)
        with sweep(grid, grid_cells.cholesky_cell, path, jobs) as process:
            wait_for(lambda enough=enough: rows(path) >= enough)
            (os.killpg if target == "group" else os.kill)(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            saved.append(rows(path))
            if target == "driver" and sys.platform.startswith("linux"):
                wait_for(lambda group=process.pid: not group_lives(group))
    assert saved == sorted(saved)
    assert 0 < saved[-1] < len(grid)
    gate.write_text(str(len(grid)))
    summary = run(grid, grid_cells.cholesky_cell, path, jobs=2)
    assert (summary.skipped, summary.computed) == (saved[-1], len(grid) - saved[-1])
    same(load_results(path), undisturbed(grid, grid_cells.cholesky_cell, path))


@pytest.mark.slow
@posix
def test_a_second_run_is_refused_until_the_first_is_killed(path, tmp_path):
    gate = tmp_path / "gate"
    grid = seeds(range(4), gate=gate)
    gate.write_text("2")
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    with sweep(grid, grid_cells.cholesky_cell, path, 2) as process:
        wait_for(lambda: rows(path) == 2)
        for name in (path, link):
            with pytest.raises(DataError, match=rf"{name}: another run is writing.*Wait"):
                run(grid, grid_cells.cholesky_cell, name)
        assert len(load_results(path)) == 2  # it may be read meanwhile
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        gate.write_text("4")
        summary = run(grid, grid_cells.cholesky_cell, link)
    assert (summary.skipped, summary.computed) == (2, 2)


@pytest.mark.slow
@posix
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_saves_what_ended(path, log, jobs):
    with sweep(seeds(range(1000), log=log), grid_cells.counted_cell, path, jobs) as process:
        wait_for(lambda: rows(path) > 2)
        os.killpg(process.pid, signal.SIGINT)
        _, message = process.communicate(timeout=600)
    saved = rows(path)
    assert process.returncode != 0
    assert f"{saved} of 1000 cells are saved in {path}" in message
    assert "resume" in message
    assert 2 < saved < 1000
