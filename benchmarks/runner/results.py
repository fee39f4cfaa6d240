"""The results file: one SQLite file with a row for each cell, written by one process alone."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from benchmarks.runner.cells import Row, canonical_json
from gpclml.errors import ArgumentError, DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["ResultsStore", "load_commands", "load_failures", "load_results", "open_results"]

BUSY_SECONDS = 60.0
APPLICATION_ID = 0x67706C6D  # marks the file as ours
LAYOUT = 6  # of the tables below; a file of another one is refused
TABLES = (
    "CREATE TABLE results (key TEXT PRIMARY KEY, status TEXT, row TEXT)",
    "CREATE TABLE commands (function, code_version, command, UNIQUE (function, code_version, "
    "command))",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {LAYOUT}",
)
PROVENANCE = (
    "key", "function", "code_version", "seconds", "finished_at", "host", "python", "gpclml",
    "torch", "gpytorch", "botorch",
)  # fmt: skip


class ResultsStore:
    """A results file that is open for writing; :func:`open_results` opens it.

    Args:
        path: The SQLite file.
        connection: The connection to it.
        about: What each row says of the run beside its cell: ``function``, ``code_version`` and
            the versions of Python and the packages.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, about: Mapping[str, str]
    ) -> None:
        self.path, self._connection, self._about = path, connection, dict(about)

    def stored(self) -> dict[str, str]:
        """``"done"`` or ``"failed"`` by the key of each stored cell."""
        return dict(self._connection.execute("SELECT key, status FROM results").fetchall())

    def record(self, rows: Iterable[Row]) -> None:
        """Writes what came of cells, all or none, in the place of what was there."""
        with _transaction(self._connection):
            for row in rows:
                text = json.dumps(self._about | row | {"finished_at": time.time()})
                entries = row["key"], "done" if "metrics" in row else "failed", text
                self._connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", entries)


@contextlib.contextmanager
def open_results(
    path: str | os.PathLike, about: Mapping[str, str], command: str | None = None
) -> Iterator[ResultsStore]:
    """Opens a results file for writing; within the block no other process may write it.

    A hidden empty file beside it, ``.NAME.lock``, is locked meanwhile. The system releases the
    lock when the process ends, however it ends. SQLite's rollback journal is kept, since a
    write-ahead log does not work between hosts that share a network folder.

    Args:
        path: The SQLite file; made if it is missing.
        about: As in :class:`ResultsStore`.
        command: What computes the cells, to be kept with them; None for what no command does.

    Raises:
        ArgumentError: If the path cannot be a results file.
        DataError: If another process is writing the file, or it is of another kind, damaged, or
            not writable.
    """
    path = Path(path)
    _check_path(path, writing=True)
    lock = FileLock(path.resolve().with_name(f".{path.resolve().name}.lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout as error:
        raise DataError(
            f"{path}: another run is writing this results file. Wait until it has ended, or name "
            "another results file."
        ) from error
    except (OSError, NotImplementedError) as error:
        fix = "Make its folder writable, or name another results file."
        raise DataError(f"{path}: it cannot be locked ({error}). {fix}") from error
    with held, _opened(path, "rwc") as connection:
        with _transaction(connection):  # so that a file that is read-only is refused
            connection.execute(f"PRAGMA user_version = {LAYOUT}")
            if command is not None:
                row = about["function"], about["code_version"], command
                connection.execute("INSERT OR IGNORE INTO commands VALUES (?, ?, ?)", row)
        yield ResultsStore(path, connection, about)


def load_results(
    path: str | os.PathLike, *, code_version: str = "latest", provenance: bool = False
) -> pandas.DataFrame:
    """The finished cells: a row each, the configuration's columns, then the metrics'.

    Rows are in the order of their configuration's JSON text, not of computation. A file may be
    read while a run writes it.

    Args:
        path: The SQLite file.
        code_version: A version; ``"all"``; or ``"latest"``: of each function, the version
            whose row was written last, so that a table never mixes two versions.
        provenance: Whether to add ``_seconds`` (wall time), ``_finished_at`` (Unix time),
            ``_code_version``, versions of packages and so on; all start with an underscore.

    Raises:
        DataError: If the file is missing or not a results file.
    """
    return _load(path, "metrics", code_version, PROVENANCE if provenance else ())


def load_failures(path: str | os.PathLike, *, code_version: str = "latest") -> pandas.DataFrame:
    """The failed cells: a row each, the configuration's columns and what went wrong.

    The further columns are ``_error_type``, ``_error_message`` and ``_traceback``.

    Args:
        path: The SQLite file.
        code_version: As in :func:`load_results`.

    Raises:
        DataError: If the file is missing or not a results file.
    """
    return _load(path, "error", code_version, ())


def load_commands(path: str | os.PathLike) -> list[str]:
    """The commands that asked for the cells of :func:`load_results`, in the order of their runs.

    Args:
        path: The SQLite file.

    Raises:
        DataError: If the file is missing or not a results file.
    """
    rows, commands = _read(path)
    latest = _latest_versions(rows)
    return list(dict.fromkeys(text for name, code, text in commands if latest.get(name) == code))


def _read(path: str | os.PathLike) -> tuple[list[Row], list[tuple[str, str, str]]]:
    """All rows and all commands, each in the order in which they were written."""
    path = Path(path)
    _check_path(path, writing=False)
    # Read-write: only so is a transaction undone that a kill has cut off.
    with _opened(path, "rw") as connection:
        texts = connection.execute("SELECT row FROM results").fetchall()
        commands = connection.execute("SELECT * FROM commands ORDER BY rowid").fetchall()
    rows = [json.loads(text) for (text,) in texts]
    return sorted(rows, key=lambda row: (row["finished_at"], row["key"])), commands


def _latest_versions(rows: Iterable[Row]) -> dict[str, str]:
    """The version of each function whose row was written last."""
    return {row["function"]: row["code_version"] for row in rows}


def _load(
    path: str | os.PathLike, part: str, version: str, columns: Iterable[str]
) -> pandas.DataFrame:
    """A table of the rows that have a part: their configuration, that part, and more columns."""
    import pandas

    rows, _ = _read(path)
    if version == "latest":
        latest = _latest_versions(rows)
        rows = [row for row in rows if row["code_version"] == latest[row["function"]]]
    elif version != "all":
        rows = [row for row in rows if row["code_version"] == version]
    rows = [row for row in rows if part in row]
    rows.sort(key=lambda row: (canonical_json(row["configuration"]), row["key"]))
    parts = [[row[name] for row in rows] for name in ("configuration", part)]
    parts.append([{f"_{name}": row[name] for name in columns} for row in rows])
    return pandas.concat([pandas.DataFrame(one) for one in parts], axis=1)


def _check_path(path: Path, writing: bool) -> None:
    if path.is_dir():
        fix = f"Name a file in it, such as {path / 'results.sqlite'}."
        raise ArgumentError("results_path", f"the folder {path}", "a file", fix)
    if writing and not path.absolute().parent.is_dir():
        fix = f"Create the folder {path.absolute().parent} first."
        raise ArgumentError("results_path", path, "a file in a folder that exists", fix)
    if not writing and not path.exists():
        raise DataError(f"{path}: no such results file. Run the sweep that writes it first.")
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: no file on a disk. Name another results file.")


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection to a results file; within the block SQLite's errors name the file."""
    address = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        with contextlib.closing(
            sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        ) as connection:
            connection.execute("PRAGMA synchronous = EXTRA")  # a saved row outlasts a power cut
            if mode == "rwc" and not connection.execute("SELECT * FROM sqlite_master").fetchone():
                with _transaction(connection):
                    for statement in TABLES:
                        connection.execute(statement)
            [(kind,)] = connection.execute("PRAGMA application_id").fetchall()
            [(layout,)] = connection.execute("PRAGMA user_version").fetchall()
            if kind != APPLICATION_ID:
                raise DataError(f"{path}: not a file of benchmark results. Name another one.")
            if layout != LAYOUT:
                raise DataError(
                    f"{path}: results in layout {layout}, this code has layout {LAYOUT}. "
                    "Use the code that wrote it, or name another results file."
                )
            yield connection
    except sqlite3.Error as error:
        raise DataError(
            f"{path}: {error}. Name another results file; or, if it is one, make it writable, or "
            "restore a copy of it if it is damaged."
        ) from error


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction: all of it is stored, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
