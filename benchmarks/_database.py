"""One SQLite file: opening it, its schema, and transactions with errors that name it.

SQLite notices a damaged structure and not a damaged entry. So each row of results has a digest, and
both are checked when a file is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpclml._files import sync_folder, temporary_name
from gpclml.errors import ArgumentError, DataError

__all__ = ["Database"]

BUSY_SECONDS = 60.0
APPLICATION_ID = 0x67706C6D  # marks the file as ours
SCHEMA_VERSION = 2  # the first had no digests

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
    botorch TEXT NOT NULL,
    digest TEXT NOT NULL DEFAULT ''
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
DIGESTED = (
    "key, status, function, code_version, configuration, metrics, error_type, error_message, "
    "traceback, attempts, seconds, finished_at, host, python, gpclml, torch, gpytorch, botorch"
)
DAMAGED = (
    "It is damaged or was cut short: restore a copy, or remove it and repeat the run, which "
    "computes all cells again."
)

MENDS = {
    "SQLITE_NOTADB": "It is no SQLite file: name another results file.",
    "SQLITE_CORRUPT": DAMAGED,
    "SQLITE_ERROR": DAMAGED,  # tables or columns that are not there
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
        if create and not self.path.exists():
            with self._errors_named():
                self._make()
        if not self.path.stat().st_size:
            raise DataError(f"{self.path}: the file is empty. {DAMAGED}")
        # Read-write even for reading: only so is a transaction cut off by a kill undone.
        with self._errors_named():
            self._connection = self._connect(self.path, "rw")
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

    def seal(self, connection: sqlite3.Connection, keys: Iterable[str]) -> None:
        """Gives rows of results the digest of their entries, in the transaction that wrote them.

        Args:
            connection: That of the transaction.
            keys: Keys of the rows.
        """
        for key in keys:
            query = f"SELECT {DIGESTED} FROM results WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone()
            connection.execute(
                "UPDATE results SET digest = ? WHERE key = ?", (_row_digest(row), key)
            )

    def _connect(self, path: Path, mode: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_SECONDS,
            isolation_level=None, check_same_thread=False,
        )  # fmt: skip

    def _make(self) -> None:
        """Makes the file with its tables at once, so that none without them is ever ours."""
        part = temporary_name(self.path)
        try:
            with contextlib.closing(self._connect(part, "rwc")) as connection:
                connection.executescript(
                    f"PRAGMA synchronous = EXTRA; BEGIN; {SCHEMA}"
                    f"PRAGMA application_id = {APPLICATION_ID};"
                    f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            with contextlib.suppress(FileExistsError):  # of two runners one makes the file
                try:
                    os.link(part, self.path)
                except FileExistsError:
                    raise
                except OSError:  # a file system without links
                    with open(self.path, "xb") as file:
                        file.write(part.read_bytes())
            sync_folder(self.path.absolute().parent)
        except OSError as error:
            raise DataError(f"{self.path}: {error}. {MENDS['SQLITE_CANTOPEN']}") from error
        finally:
            part.unlink(missing_ok=True)

    def _prepare(self, create: bool) -> None:
        with self._errors_named():
            self._connection.execute("PRAGMA synchronous = EXTRA")
        version = self._check_schema()
        self._check_whole(version)
        if create and version < SCHEMA_VERSION:
            with self.transaction() as connection:  # two runners may do so at once
                if self._check_schema() < SCHEMA_VERSION:
                    connection.execute(
                        "ALTER TABLE results ADD COLUMN digest TEXT NOT NULL DEFAULT ''"
                    )
                    keys = connection.execute("SELECT key FROM results").fetchall()
                    self.seal(connection, (key for (key,) in keys))
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _check_schema(self) -> int:
        """The layout of the file, if it is one that this code reads."""
        application = self.read("PRAGMA application_id")[0][0]
        version = self.read("PRAGMA user_version")[0][0]
        if application != APPLICATION_ID:
            raise DataError(
                f"{self.path}: an SQLite file, but not one of benchmark results. "
                "Name another results file."
            )
        if version not in range(1, SCHEMA_VERSION + 1):
            raise DataError(
                f"{self.path}: results in layout {version}, this code reads 1 to {SCHEMA_VERSION}. "
                "Use the code that wrote it, or name another results file."
            )
        return version

    def _check_whole(self, version: int) -> None:
        """Raises where pages or indices do not fit together, or a row not to its digest."""
        problems, unlike = [line for (line,) in self.read("PRAGMA integrity_check(3)")], []
        if version > 1 and problems == ["ok"]:
            rows = self.read(f"SELECT {DIGESTED}, digest FROM results")
            unlike = [row[0] for row in rows if _row_digest(row[:-1]) != row[-1]]
        if problems != ["ok"]:
            raise DataError(f"{self.path}: {'; '.join(problems)[:300]}. {DAMAGED}")
        if unlike:
            first = ", ".join(map(repr, unlike[:3]))
            raise DataError(
                f"{self.path}: {len(unlike)} rows are not as they were written ({first}). {DAMAGED}"
            )

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # Python's own, of a text that is none, has no name.
            name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
            mend = next((text for code, text in MENDS.items() if name.startswith(code)), "")
            raise DataError(f"{self.path}: {error}. {mend}".rstrip()) from error
        except UnicodeDecodeError as error:  # of SQLite's own message about a damaged name
            raise DataError(f"{self.path}: {error}. {DAMAGED}") from error


def _row_digest(row: tuple) -> str:
    return hashlib.sha256(repr(row).encode(errors="backslashreplace")).hexdigest()


def _check_path(path: Path, create: bool) -> None:
    if path.is_dir():
        mend = f"Name a file in it, such as {path / 'results.sqlite'}."
        raise ArgumentError("results_path", f"the folder {path}", "a file", mend)
    if create and not path.absolute().parent.is_dir():
        mend = f"Create the folder {path.absolute().parent} first."
        raise ArgumentError("results_path", path, "a file in a folder that exists", mend)
    if not create and not path.exists():
        raise DataError(f"{path}: no such results file. Run the sweep that writes it first.")
