"""The results file: one SQLite file with a row for each cell, written by one process alone."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from gpclml.errors import ArgumentError, DataError

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]
"""What came of a cell, of JSON values: its key, configuration and seconds, and either its metrics
or the error that ended it."""

BUSY_SECONDS = 60.0
APPLICATION_ID = 0x67706C6D  # marks the file as ours
LAYOUT = 6  # of the tables below; a file of another one is refused
TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE results (key TEXT PRIMARY KEY, status TEXT, row TEXT);
CREATE TABLE commands (
    function, code_version, command, UNIQUE (function, code_version, command)
);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {LAYOUT};
COMMIT;
"""
PROVENANCE = (
    "key", "function", "code_version", "seconds", "finished_at", "python", "gpclml", "torch",
    "gpytorch", "botorch",
)  # fmt: skip


def canonical_json(value: object) -> str:
    """JSON text that is equal for equal values, whatever the order of their keys.

    Floats are written by ``repr``, so they return exactly; NaN and infinities are written
    as ``NaN`` and ``Infinity``, which Python's own ``json`` reads back.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


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
        with self._connection:
            for row in rows:
                text = json.dumps(self._about | row | {"finished_at": time.time()})
                entries = row["key"], "done" if "metrics" in row else "failed", text
                # A retried cell takes the place of its failure.
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
    if not path.absolute().parent.is_dir():
        fix = f"Create the folder {path.absolute().parent} first."
        raise ArgumentError("results_path", path, "a file in a folder that exists", fix)
    lock = FileLock(path.resolve().with_name(f".{path.resolve().name}.lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout as error:
        raise DataError(
            f"{path}: another run is writing this results file. Wait until it has ended, or name "
            "another results file."
        ) from error
    except OSError as error:
        fix = "Make its folder writable, or name another results file."
        raise DataError(f"{path}: it cannot be locked ({error}). {fix}") from error
    with held, _opened(path, "rwc") as connection:
        connection.execute(f"PRAGMA user_version = {LAYOUT}")  # a read-only file is refused
        if command is not None:
            with connection:
                row = about["function"], about["code_version"], command
                connection.execute("INSERT OR IGNORE INTO commands VALUES (?, ?, ?)", row)
        yield ResultsStore(path, connection, about)


def load_results(path: str | os.PathLike, *, provenance: bool = False) -> pandas.DataFrame:
    """The finished cells: a row each, the configuration's columns, then the metrics'.

    Of each function only rows of the version of its code whose row was written last are taken, so
    that a table never mixes two versions. Rows are in the order of their configuration's JSON text,
    not of computation. A file may be read while a run writes it.

    Args:
        path: The SQLite file.
        provenance: Whether to add ``_seconds`` (wall time), ``_finished_at`` (Unix time),
            ``_code_version``, versions of packages and so on; all start with an underscore.

    Raises:
        DataError: If the file is missing or not a results file.
    """
    return _load(path, "metrics", PROVENANCE if provenance else ())


def load_failures(path: str | os.PathLike) -> pandas.DataFrame:
    """The failed cells: a row each, the configuration's columns and what went wrong.

    The further columns are ``_error_type``, ``_error_message`` and ``_traceback``. Versions and
    errors are as in :func:`load_results`.
    """
    return _load(path, "error", ())


def load_commands(path: str | os.PathLike) -> list[str]:
    """The commands that asked for the cells of :func:`load_results`, in the order of their runs.

    Errors are as there.
    """
    rows, commands = _read(path)
    latest = {(row["function"], row["code_version"]) for row in rows}
    return list(dict.fromkeys(text for *version, text in commands if tuple(version) in latest))


def load_rows(path: str | os.PathLike) -> list[Row]:
    """The rows that :func:`load_results` and :func:`load_failures` make tables of, as written.

    Each has its ``configuration``, ``metrics`` or ``error``, and provenance. Errors are as there.
    """
    rows = _read(path)[0]
    return sorted(rows, key=lambda row: (canonical_json(row["configuration"]), row["key"]))


def _read(path: str | os.PathLike) -> tuple[list[Row], list[tuple[str, str, str]]]:
    """The rows of the latest version of each function, and all commands in their order."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: no such results file. Run the sweep that writes it first.")
    # Read-write: only so is a transaction undone that a kill has cut off.
    with _opened(path, "rw") as connection:
        texts = connection.execute("SELECT row FROM results").fetchall()
        commands = connection.execute("SELECT * FROM commands ORDER BY rowid").fetchall()
    rows = sorted((json.loads(text) for (text,) in texts), key=lambda row: row["finished_at"])
    # Rows are in the order of writing, so that the last one decides.
    latest = {row["function"]: row["code_version"] for row in rows}
    return [row for row in rows if row["code_version"] == latest[row["function"]]], commands


def _load(path: str | os.PathLike, entry: str, columns: Iterable[str]) -> pandas.DataFrame:
    """A table of the rows that have an entry: their configuration, the entry, and more columns."""
    import pandas

    rows = [row for row in load_rows(path) if entry in row]
    groups = [[row[name] for row in rows] for name in ("configuration", entry)]
    groups.append([{f"_{name}": row[name] for name in columns} for row in rows])
    return pandas.concat([pandas.DataFrame(group) for group in groups], axis=1)


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection to a results file; within the block SQLite's errors name the file."""
    if path.is_dir():
        fix = f"Name a file in it, such as {path / 'results.sqlite'}."
        raise ArgumentError("results_path", f"the folder {path}", "a file", fix)
    address = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        with contextlib.closing(
            sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS)
        ) as connection:
            if mode == "rwc" and not connection.execute("SELECT * FROM sqlite_master").fetchone():
                connection.executescript(TABLES)
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
