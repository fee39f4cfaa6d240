"""One SQLite file: opening it, its schema, and transactions with errors that name it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from gpclml.errors import ArgumentError, DataError

__all__ = ["Database"]

BUSY_SECONDS = 60.0
APPLICATION_ID = 0x67706C6D  # marks the file as ours
SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE results (
    key TEXT PRIMARY KEY,
    status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
    function TEXT NOT NULL,
    code_version TEXT NOT NULL,
    configuration TEXT NOT NULL,
    metrics TEXT,
    error_type TEXT,
    error_message TEXT,
    traceback TEXT,
    attempts INTEGER NOT NULL,
    seconds REAL NOT NULL,
    finished_at REAL NOT NULL,
    host TEXT NOT NULL,
    python TEXT NOT NULL,
    gpclml TEXT NOT NULL,
    torch TEXT NOT NULL,
    gpytorch TEXT NOT NULL,
    botorch TEXT NOT NULL
);
CREATE TABLE runners (
    run TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started TEXT NOT NULL,
    heartbeat REAL NOT NULL
);
CREATE TABLE claims (key TEXT PRIMARY KEY, run TEXT NOT NULL);
"""

MENDS = {
    "SQLITE_NOTADB": "It is no SQLite file: name another results file.",
    "SQLITE_CORRUPT": "It is damaged: restore a copy, or name another results file.",
    "SQLITE_READONLY": "Make the file and its folder writable, or name another results file.",
    "SQLITE_CANTOPEN": "Make the file and its folder writable, or name another results file.",
    "SQLITE_FULL": "Free some disk space; what was saved before is safe.",
    "SQLITE_BUSY": f"Another process held it for {BUSY_SECONDS:.0f} s: end it and try again.",
}


class Database:
    """A results file, opened and checked; may be shared by the threads of a process.

    The rollback journal is kept on purpose: a write-ahead log neither works between hosts
    that share a network folder nor lets the file be copied alone, and a row a cell is no
    load. ``synchronous=EXTRA`` makes a committed row outlast a power cut.

    Args:
        path: The SQLite file.
        create: Make the file and its tables where they are missing; otherwise only read.

    Raises:
        ArgumentError: If the path cannot be a results file (a folder, a missing folder).
        DataError: If the file is not a results file or cannot be used; names the mend.
    """

    def __init__(self, path: str | os.PathLike, *, create: bool) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        _check_path(self.path, create)
        # Read-write even for reading: only so is a transaction cut off by a kill undone.
        address = f"{self.path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        with self._errors_named():
            self._connection = sqlite3.connect(
                address, uri=True, timeout=BUSY_SECONDS, isolation_level=None,
                check_same_thread=False,
            )  # fmt: skip
        try:
            self._prepare(create)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One write transaction: all of it is stored, or nothing."""
        with self._lock, self._errors_named():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def read(self, query: str, parameters: tuple = ()) -> list[tuple]:
        """The rows of a query."""
        with self._lock, self._errors_named():
            return self._connection.execute(query, parameters).fetchall()

    def _prepare(self, create: bool) -> None:
        with self._errors_named():
            self._connection.execute("PRAGMA synchronous = EXTRA")
        if not create:
            return self._check_schema()
        with self.transaction() as connection:  # two runners may make the file at once
            if not self.read("SELECT name FROM sqlite_master"):
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._check_schema()

    def _check_schema(self) -> None:
        application = self.read("PRAGMA application_id")[0][0]
        version = self.read("PRAGMA user_version")[0][0]
        if application != APPLICATION_ID:
            raise DataError(
                f"{self.path}: an SQLite file, but not one of benchmark results. "
                "Name another results file."
            )
        if version != SCHEMA_VERSION:
            raise DataError(
                f"{self.path}: results in layout {version}, this code reads {SCHEMA_VERSION}. "
                "Use the code that wrote it, or name another results file."
            )

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            mend = next((text for code, text in MENDS.items() if name.startswith(code)), "")
            raise DataError(f"{self.path}: {error}. {mend}".rstrip()) from error


def _check_path(path: Path, create: bool) -> None:
    if path.is_dir():
        mend = f"Name a file in it, such as {path / 'results.sqlite'}."
        raise ArgumentError("results_path", f"the folder {path}", "a file", mend)
    if create and not path.absolute().parent.is_dir():
        mend = f"Create the folder {path.absolute().parent} first."
        raise ArgumentError("results_path", path, "a file in a folder that exists", mend)
    if not create and not path.exists():
        raise DataError(f"{path}: no such results file. Run the sweep that writes it first.")
