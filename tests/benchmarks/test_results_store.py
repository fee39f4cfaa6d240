"""The results file: what is written returns, is never mixed or half there, or is refused."""

import contextlib
import math
import os
import sqlite3
import struct
import subprocess
import sys
import time

import pytest

from benchmarks.runner import load_commands, load_failures, load_results
from benchmarks.runner.results import open_results
from gpclml.errors import ArgumentError, DataError

VERSIONS = dict.fromkeys(("python", "gpclml", "torch", "gpytorch", "botorch"), "1.0")


def store(path, version="v1", function="module:cell", command=None):
    return open_results(path, {"function": function, "code_version": version, **VERSIONS}, command)


def done(key, metrics=None, **configuration):
    return {
        "key": str(key), "configuration": configuration or {"seed": 1}, "seconds": 0.5,
        "metrics": metrics or {"rmse": 1.0},
    }  # fmt: skip


def failed(key, message):
    texts = {"_error_type": "ValueError", "_error_message": message, "_traceback": ""}
    return {"key": key, "configuration": {"seed": 1}, "seconds": 0.5, "error": texts}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


def execute(path, statement):
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def test_numbers_return_exactly_with_where_they_come_from(path):
    floats = [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, math.inf, -math.inf, math.nan]
    before = time.time()
    with store(path) as results:
        assert load_results(path).empty
        assert load_failures(path).empty
        for index, value in enumerate(floats):
            results.record([done(index, {"value": value}, index=index)])
    table = load_results(path)
    assert list(table.columns) == ["index", "value"]
    packed = [struct.pack("d", value) for value in table["value"]]
    assert packed == [struct.pack("d", value) for value in floats]
    row = load_results(path, provenance=True).iloc[0]
    expected = {"seconds": 0.5, "function": "module:cell", "code_version": "v1", "torch": "1.0"}
    assert {name: row[f"_{name}"] for name in expected} == expected
    assert before <= row["_finished_at"] <= time.time()


def test_columns_of_unlike_cells_are_joined(path):
    with store(path) as results:
        results.record([done("a", {"rmse": 1.5}, model="gp", seed=1)])
        results.record([done("b", {"nll": 2.5}, depth=3, model="dkl")])
    table = load_results(path)
    assert list(table.columns) == ["depth", "model", "seed", "nll", "rmse"]
    assert list(table["model"]) == ["dkl", "gp"]
    assert table["nll"].isna().tolist() == [False, True]


def test_versions_of_the_code_are_not_mixed_nor_their_commands(path):
    for version, command in [("v2", "old"), ("v1", "b"), ("v1", "a"), ("v1", "b")]:
        with store(path, version, command=command) as results:
            results.record([done(f"a {version}", {"rmse": int(version[1])})])
    with store(path, "w", "module:other") as results:
        results.record([done("b", {"rmse": 9}, seed=2)])
    assert load_results(path)["rmse"].tolist() == [1, 9]
    assert load_commands(path) == ["b", "a"]


def test_a_failure_gives_way_to_a_result_and_rows_are_written_together(path):
    with store(path) as results:
        with pytest.raises(TypeError):
            results.record([done("a"), None])
        assert results.stored() == {}
        results.record([failed("a", "first"), done("b", seed=2)])
        results.record([failed("a", "second")])
        assert results.stored() == {"a": "failed", "b": "done"}
        assert load_failures(path)["_error_message"].tolist() == ["second"]
        results.record([done("a")])
    assert load_failures(path).empty
    assert len(load_results(path)) == 2


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
        results.record([done(key, name=key) for key in "abc"])
    before = path.read_bytes()
    subprocess.run([sys.executable, "-c", CUT_OFF, str(path)])
    assert path.read_bytes() != before
    assert load_results(path)["rmse"].tolist() == [1.0] * 3


def _text(path):
    path.write_text("seed,rmse\n1,2\n")


def _foreign(path):
    execute(path, "CREATE TABLE results (key TEXT)")


def _layout(path):
    with store(path):
        pass
    execute(path, "PRAGMA user_version = 5")


def _cut(path):
    with store(path) as results:
        results.record([done(key, {"curve": [0.1] * 999}) for key in range(9)])
    path.write_bytes(path.read_bytes()[:9000])


@pytest.mark.parametrize(
    ("make", "error", "fix"),
    [
        (lambda path: path.mkdir(), ArgumentError, "Name a file in it"),
        (_text, DataError, "not a database"),
        (_foreign, DataError, "not a file of benchmark results"),
        (_layout, DataError, "layout 5, this code has layout 6"),
        (_cut, DataError, "malformed|damaged"),
    ],
)
def test_unusable_files_are_refused_and_not_read(path, make, error, fix):
    make(path)
    with pytest.raises(error, match=fix) as caught, store(path):
        pass
    assert str(path) in str(caught.value)
    with pytest.raises(error, match=fix):
        load_results(path)


def test_a_missing_folder_is_named(path):
    gone = path.parent / "gone" / "results.sqlite"
    with pytest.raises(ArgumentError, match="Create the folder"), store(gone):
        pass
    with pytest.raises(DataError, match="Run the sweep"):
        load_results(gone)


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
