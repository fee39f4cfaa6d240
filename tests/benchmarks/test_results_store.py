import math
import os
import random
import re
import sqlite3
import struct
import subprocess
import sys
import time

import pytest

from benchmarks.runner import load_commands, load_failures, load_results
from benchmarks.runner.cells import Cell, done_row, failed_row
from benchmarks.runner.results import ResultsStore, _opened
from gpclml.errors import ArgumentError, DataError

VERSIONS = dict.fromkeys(("python", "gpclml", "torch", "gpytorch", "botorch"), "1.0")


def store(path, version="v1", function="module:cell", command=None):
    return ResultsStore(path, {"function": function, "code_version": version, **VERSIONS}, command)


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
    assert load_results(path, code_version="v2")["rmse"].tolist() == [2]
    assert sorted(load_results(path, code_version="all")["rmse"]) == [1, 2, 9]


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


def _filled(path):
    """A file of forty rows of both kinds, with pages that hold parts of long rows; its rows."""
    with store(path) as results:
        for index in range(40):
            metrics = {"rmse": index + 0.5, "curve": [0.125] * 30 * (index % 5)}
            cell = f'{{"seed":{index}}}'
            results.record(
                [failed(index, "x" * 99 * index, cell) if index % 3 else done(index, metrics, cell)]
            )
    return _rows(path)


def _rows(path):
    with _opened(path) as connection:
        return connection.execute("SELECT * FROM results ORDER BY key").fetchall()


def _damages(path, changed, expected):
    """Of these contents of the file, how many are refused, and which give other rows."""
    told, silent = [], []
    for index, content in enumerate(changed):
        path.write_bytes(content)
        try:
            if _rows(path) != expected:
                silent.append(index)
        except DataError as error:
            told.append(str(error))
    assert all(str(path) in message for message in told)
    what_to_do = re.compile("restore a copy|[Nn]ame another results file")
    assert [message for message in told if not what_to_do.search(message)] == []
    return len(told), silent


def test_no_flipped_bit_of_a_result_goes_unseen(path):
    expected = _filled(path)
    raw = path.read_bytes()
    changed = []
    for bit in random.Random(0).sample(range(8 * len(raw)), 1000):
        content = bytearray(raw)
        content[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(content))
    refused, silent = _damages(path, changed, expected)
    assert silent == []
    assert refused > 300  # others are in bytes that hold nothing, or a runner's


def test_files_cut_short_anywhere_are_refused(path):
    expected = _filled(path)
    raw = path.read_bytes()
    lengths = {0, 1, 16, 100, 4096, 8192, len(raw) - 4096, len(raw) - 1}
    lengths |= set(random.Random(1).sample(range(len(raw)), 150))
    refused, silent = _damages(path, [raw[:length] for length in lengths], expected)
    assert (refused, silent) == (len(lengths), [])
    for content in [raw[:0], raw[:5000]]:  # a runner does not start anew in them either
        path.write_bytes(content)
        with pytest.raises(DataError, match="remove it and repeat the run"):
            store(path)
        assert path.read_bytes() == content


def test_overwritten_parts_are_refused(path):
    expected = _filled(path)
    raw = path.read_bytes()
    noise = random.Random(2)
    changed = []
    for _ in range(100):
        start, length = noise.randrange(len(raw)), noise.choice([8, 100, 512, 4096])
        changed.append(raw[:start] + noise.randbytes(length) + raw[start + length :])
        changed.append(raw[:start] + bytes(length) + raw[start + length :])
    assert _damages(path, changed, expected)[1] == []


def test_a_row_that_was_changed_is_named(path):
    _filled(path)
    execute(path, "UPDATE results SET row = replace(row, '0.5', '9.5') WHERE key = '0'")
    with pytest.raises(DataError, match=r"1 rows are not as they were written \('0'\)"):
        load_results(path)


def names(path):
    return sorted(entry.name for entry in path.parent.iterdir())


def test_a_file_is_made_whole(path, monkeypatch):
    def interrupt(source, target):
        assert not path.exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store(path)
    assert names(path) == [f".{path.name}.lock"]
    with store(path) as results:
        results.record([done("a")])
    assert len(load_results(path)) == 1
    assert names(path) == [f".{path.name}.lock", path.name]


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
    with store(path), pytest.raises(DataError, match="another run is writing"):
        store(path)
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
    execute(path, "PRAGMA user_version = 4")
    return path


def _cut(path):
    with store(path):
        pass
    path.write_bytes(path.read_bytes()[:5000])
    return path


def _missing_folder(path):
    return path.parent / "gone" / "results.sqlite"


UNUSABLE = [
    (lambda path: path.parent, ArgumentError, "Name a file in it"),
    (_text, DataError, "no SQLite file"),
    (_foreign, DataError, "not one of benchmark results"),
    (_newer, DataError, "layout 99"),
    (_older, DataError, "layout 4, this code has layout 5"),
    (_cut, DataError, "malformed|damaged"),
]


@pytest.mark.parametrize(
    ("make", "error", "fix"),
    [*UNUSABLE, (_missing_folder, ArgumentError, "Create the folder")],
)
def test_unusable_files_are_refused(path, make, error, fix):
    unusable = make(path)
    with pytest.raises(error, match=fix) as caught:
        store(unusable)
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
        with pytest.raises(DataError, match="writable") as caught:
            store(path)
        assert str(path) in str(caught.value)
        assert load_results(path)["rmse"].tolist() == [1.0]
    finally:
        target.chmod(mode)


def test_commands_of_the_latest_code_are_kept_once(path):
    def run(command, version, key):
        with store(path, version, command=command) as results:
            results.record([done(key)])

    assert _filled(path)
    assert load_commands(path) == []  # that no command computed
    run("old", "v0", "old")
    assert load_commands(path) == ["old"]
    for command in ("b", "a", "b"):
        run(command, "v2", f"of {command}")
    assert load_commands(path) == ["b", "a"]
