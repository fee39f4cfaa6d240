import math
import os
import sqlite3
import struct
import subprocess
import sys
import time

import pytest

from benchmarks.runner import load_commands, load_failures, load_results
from benchmarks.runner.cells import Cell, done_row, failed_row
from benchmarks.runner.results import open_results
from gpclml.errors import ArgumentError, DataError

VERSIONS = dict.fromkeys(("python", "gpclml", "torch", "gpytorch", "botorch"), "1.0")


def store(path, version="v1", function="module:cell", command=None):
    return open_results(path, {"function": function, "code_version": version, **VERSIONS}, command)


def done(key, metrics=None, configuration='{"seed":1}'):
    return done_row(Cell(str(key), configuration), metrics or {"rmse": 1.0}, 0.5)


def failed(key, message="no", configuration='{"seed":1}'):
    return failed_row(Cell(str(key), configuration), ValueError(message), 0.5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


def execute(path, statement, *parameters):
    with sqlite3.connect(path) as connection:
        rows = connection.execute(statement, parameters).fetchall()
    connection.close()
    return rows


def test_numbers_return_exactly(path):
    floats = [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, math.inf, -math.inf, math.nan]
    with store(path) as results:
        for index, value in enumerate(floats):
            results.record([done(index, {"value": value}, f'{{"index":{index}}}')])
    table = load_results(path)
    assert list(table.columns) == ["index", "value"]
    packed = [struct.pack("d", value) for value in table["value"]]
    assert packed == [struct.pack("d", value) for value in floats]


def test_columns_of_unlike_cells_are_joined(path):
    with store(path) as results:
        results.record([done("a", {"rmse": 1.5}, '{"model":"gp","seed":1}')])
        results.record([done("b", {"nll": 2.5}, '{"depth":3,"model":"dkl"}')])
    table = load_results(path)
    assert list(table.columns) == ["depth", "model", "seed", "nll", "rmse"]
    assert list(table["model"]) == ["dkl", "gp"]
    assert table["nll"].isna().tolist() == [False, True]


def test_no_rows_make_an_empty_table(path):
    with store(path):
        pass
    assert load_results(path).empty
    assert load_failures(path).empty


def test_provenance_is_there_on_request(path):
    before = time.time()
    with store(path) as results:
        results.record([done("a")])
    row = load_results(path, provenance=True).iloc[0]
    assert row["_seconds"] == 0.5
    assert row["_function"] == "module:cell"
    assert row["_code_version"] == "v1"
    assert row["_torch"] == "1.0"
    assert before <= row["_finished_at"] <= time.time()


def test_versions_of_the_code_are_not_mixed(path):
    for version, value in [("v2", 2), ("v1", 1)]:
        with store(path, version) as results:
            results.record([done(f"a {version}", {"rmse": value})])
    with store(path, "w", "module:other") as results:
        results.record([done("b", {"rmse": 9}, '{"seed":2}')])
    assert load_results(path)["rmse"].tolist() == [1, 9]


def test_a_failure_gives_way_to_a_result(path):
    with store(path) as results:
        results.record([failed("a", "first")])
        results.record([failed("a", "second")])
        assert load_failures(path)["_error_message"].tolist() == ["second"]
        results.record([done("a")])
    assert load_failures(path).empty
    assert len(load_results(path)) == 1


CUT_OFF = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE results SET row = ?", ("x" * 1000000,))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_a_transaction_cut_off_by_a_kill_is_undone(path):
    with store(path) as results:
        for key in "abc":
            results.record([done(key, configuration=f'{{"key":"{key}"}}')])
    before = path.read_bytes()
    subprocess.run([sys.executable, "-c", CUT_OFF, str(path)])
    assert path.read_bytes() != before
    assert load_results(path)["rmse"].tolist() == [1.0] * 3


def test_a_link_to_a_file_that_is_not_there_yet_stays_one(path):
    link = path.with_name("link.sqlite")
    link.symlink_to(path)
    with store(link) as results:
        results.record([done("a")])
    assert link.is_symlink()
    assert len(load_results(path)) == 1


def test_outcomes_are_written_together_or_not_at_all(path):
    with store(path) as results:
        with pytest.raises(TypeError):
            results.record([done("a"), None])
        assert results.stored() == {}
        results.record([done("a"), failed("b")])
        assert results.stored() == {"a": "done", "b": "failed"}


def test_one_process_writes_a_file_at_a_time(path):
    with store(path), pytest.raises(DataError, match="another run is writing"), store(path):
        pass
    with store(path):
        pass


def _text(path):
    path.write_text("seed,rmse\n1,2\n")
    return path


def _foreign(path):
    execute(path, "CREATE TABLE results (key TEXT)")
    return path


def _newer(path):
    with store(path):
        pass
    execute(path, "PRAGMA user_version = 99")
    return path


def _older(path):
    with store(path):
        pass
    execute(path, "DROP TABLE commands")
    execute(path, "PRAGMA user_version = 5")
    return path


def _cut(path):
    with store(path) as results:
        results.record([done(key, {"curve": [0.1] * 999}) for key in range(9)])
    path.write_bytes(path.read_bytes()[:9000])
    return path


def _missing_folder(path):
    return path.parent / "gone" / "results.sqlite"


UNUSABLE = [
    (lambda path: path.parent, ArgumentError, "Name a file in it"),
    (_text, DataError, "not a database"),
    (_foreign, DataError, "not a file of benchmark results"),
    (_newer, DataError, "layout 99"),
    (_older, DataError, "layout 5, this code has layout 6"),
    (_cut, DataError, "malformed|damaged"),
]


@pytest.mark.parametrize(
    ("make", "error", "fix"),
    [*UNUSABLE, (_missing_folder, ArgumentError, "Create the folder")],
)
def test_unusable_files_are_refused(path, make, error, fix):
    unusable = make(path)
    with pytest.raises(error, match=fix) as caught, store(unusable):
        pass
    assert str(unusable) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "fix"), [*UNUSABLE, (_missing_folder, DataError, "Run the sweep")]
)
def test_unusable_files_are_not_read(path, make, error, fix):
    unusable = make(path)
    with pytest.raises(error, match=fix) as caught:
        load_results(unusable)
    assert str(unusable) in str(caught.value)


@pytest.mark.parametrize("protected", ["file", "folder"])
def test_write_protected_files_are_refused_but_read(path, protected):
    with store(path) as results:
        results.record([done("a")])
    target = path if protected == "file" else path.parent
    mode = target.stat().st_mode
    target.chmod(mode & ~0o222)
    try:
        if os.access(target, os.W_OK):
            pytest.skip("this user writes anywhere")
        with pytest.raises(DataError, match="writable") as caught, store(path):
            pass
        assert str(path) in str(caught.value)
        assert load_results(path)["rmse"].tolist() == [1.0]
    finally:
        target.chmod(mode)


def test_commands_of_the_latest_code_are_kept_once(path):
    def run(command, version, key):
        with store(path, version, command=command) as results:
            results.record([done(key)])

    run(None, "v0", "by no command")
    assert load_commands(path) == []
    run("old", "v0", "old")
    assert load_commands(path) == ["old"]
    for command in ("b", "a", "b"):
        run(command, "v2", f"of {command}")
    assert load_commands(path) == ["b", "a"]
