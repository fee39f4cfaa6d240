"""The results file: one SQLite file with a row for each cell, written by one process alone.

SQLite notices a damaged structure and not a damaged entry. So each row has a digest, and both are
checked when a file is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import time
from collections import ChainMap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runner.cells import Outcome
from gpclml._utils.files import sync_folder, temporary_name
from gpclml.errors import ArgumentError, DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["ResultsStore", "load_commands", "load_failures", "load_results"]

BUSY_SECONDS = 60.0
APPLICATION_ID = 0x67706C6D  # marks the file as ours
LAYOUT = 4  # the first had no digests, the second tables of several drivers, the third no commands
_TEXT, _NUMBER = "TEXT NOT NULL", "REAL NOT NULL"
_VERSIONS = ("python", "gpclml", "torch", "gpytorch", "botorch")
COLUMNS = {
    "key": "TEXT PRIMARY KEY", "status": f"{_TEXT} CHECK (status IN ('done', 'failed'))",
    "function": _TEXT, "code_version": _TEXT, "configuration": _TEXT, "metrics": "TEXT",
    "error_type": "TEXT", "error_message": "TEXT", "traceback": "TEXT",
    "attempts": "INTEGER NOT NULL", "seconds": _NUMBER, "finished_at": _NUMBER, "host": _TEXT,
    **dict.fromkeys(_VERSIONS, _TEXT),
}  # fmt: skip
DIGEST = "digest TEXT NOT NULL DEFAULT ''"  # of all columns before it
ENTRIES = ", ".join(COLUMNS)
OF_COMMANDS = "function, code_version, command, UNIQUE (function, code_version, command)"
PROVENANCE = (
    "key", "function", "code_version", "attempts", "seconds", "finished_at", "host", *_VERSIONS,
)  # fmt: skip
DAMAGED = (
    "It is damaged or was cut short: restore a copy, or remove it and repeat the run, which "
    "computes all cells again."
)
UNWRITABLE = "Make the file and its folder writable, or name another results file."
FIXES = {
    "SQLITE_NOTADB": "It is no SQLite file: name another results file.",
    "SQLITE_CORRUPT": DAMAGED,
    "SQLITE_ERROR": DAMAGED,  # tables or columns that are not there
    "SQLITE_READONLY": UNWRITABLE,
    "SQLITE_CANTOPEN": UNWRITABLE,
    "SQLITE_FULL": "Free some disk space; what was saved before is safe.",
    "SQLITE_BUSY": f"Another process held it for {BUSY_SECONDS:.0f} s: end it and try again.",
}


class ResultsStore:
    """A results file opened for writing by its only driver, a context manager.

    A hidden empty file beside it, ``.NAME.lock``, is locked meanwhile. The system releases the
    lock when the process ends, however it ends.

    The rollback journal is kept on purpose: a write-ahead log neither works between hosts that
    share a network folder nor lets the file be copied alone, and a row a cell is no load.
    ``synchronous=EXTRA`` makes a committed row outlast a power cut.

    Args:
        path: The SQLite file; made if it is missing.
        function: Name of the cell function.
        code_version: Version of the code.
        versions: Versions of Python and the packages, by name.
        command: What computes the cells, to be kept with them; None for what no command does.

    Raises:
        ArgumentError: If the path cannot be a results file.
        DataError: If another process is writing the file, or it is of another kind, damaged, or
            not writable.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        function: str,
        code_version: str,
        versions: dict[str, str],
        command: str | None = None,
    ) -> None:
        self.path = Path(path)
        self._about = {"function": function, "code_version": code_version, **versions}
        _check_path(self.path, writing=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_only_driver(self.path))
            if not self.path.exists():
                _make(self.path.resolve())  # a link stays one
            self._connection = stack.enter_context(_opened(self.path))
            with self._transaction() as connection:
                _bring_up_to_date(connection)
                if command is not None:
                    row = function, code_version, command
                    connection.execute("INSERT OR IGNORE INTO commands VALUES (?, ?, ?)", row)
            self._closing = stack.pop_all()

    def __enter__(self) -> ResultsStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def stored(self) -> dict[str, str]:
        """``"done"`` or ``"failed"`` by the key of each stored cell."""
        with _errors_named(self.path):
            return dict(self._connection.execute("SELECT key, status FROM results").fetchall())

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """Writes a row for each outcome, all or none; a row that is done stays as it is."""
        with self._transaction() as connection:
            for outcome in outcomes:
                row: dict[str, Any] = self._about | vars(outcome)
                row["status"] = "failed" if outcome.metrics is None else "done"
                row |= {"attempts": 1, "finished_at": time.time()}
                changes = ", ".join(
                    f"{name} = excluded.{name}" for name in row if name != "attempts"
                )
                written = connection.execute(
                    f"INSERT INTO results ({', '.join(row)}) VALUES ({', '.join('?' * len(row))}) "
                    f"ON CONFLICT (key) DO UPDATE SET {changes}, attempts = attempts + 1 "
                    "WHERE status = 'failed'",
                    tuple(row.values()),
                )
                if written.rowcount:
                    _seal(connection, outcome.key)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One write transaction: all of it is stored, or nothing."""
        with _errors_named(self.path):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


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
    return _load(path, "done", ("metrics",), code_version, PROVENANCE if provenance else ())


def load_failures(path: str | os.PathLike, *, code_version: str = "latest") -> pandas.DataFrame:
    """The failed cells: a row each, the configuration's columns and what went wrong.

    The further columns are ``_error_type``, ``_error_message``, ``_traceback`` and
    ``_attempts``.

    Args:
        path: The SQLite file.
        code_version: As in :func:`load_results`.

    Raises:
        DataError: If the file is missing or not a results file.
    """
    columns = ("error_type", "error_message", "traceback", "attempts")
    return _load(path, "failed", (), code_version, columns)


def load_commands(path: str | os.PathLike) -> list[str]:
    """The commands that asked for the cells of :func:`load_results`, in the order of their runs.

    Args:
        path: The SQLite file; one that was written before commands were kept has none.

    Raises:
        DataError: If the file is missing or not a results file.
    """
    path = Path(path)
    _check_path(path, writing=False)
    with _opened(path) as connection:
        if _layout(connection) < 4:
            return []
        latest = _latest_versions(connection)
        rows = connection.execute(
            "SELECT function, code_version, command FROM commands ORDER BY rowid"
        ).fetchall()
    return list(dict.fromkeys(text for name, version, text in rows if latest.get(name) == version))


def _latest_versions(connection: sqlite3.Connection) -> dict[str, str]:
    """The version of each function whose row was written last."""
    query = "SELECT function, code_version FROM results ORDER BY finished_at, key"
    return dict(connection.execute(query).fetchall())


def _load(
    path: str | os.PathLike, status: str, metrics: tuple, version: str, columns: tuple
) -> pandas.DataFrame:
    import pandas

    path = Path(path)
    _check_path(path, writing=False)
    wanted = ", ".join(("function", "code_version", "configuration", *metrics, *columns))
    with _opened(path) as connection:
        rows = connection.execute(
            f"SELECT {wanted} FROM results WHERE status = ? ORDER BY configuration, key", (status,)
        ).fetchall()
        latest = _latest_versions(connection)
    documents = 1 + len(metrics)
    records = []
    for function, row_version, *values in rows:
        if version in ("all", row_version) or (
            version == "latest" and latest[function] == row_version
        ):
            parts = [json.loads(text) for text in values[:documents]]
            named = dict(zip((f"_{name}" for name in columns), values[documents:], strict=True))
            records.append((*parts, named))
    names = {name: None for part in zip(*records, strict=True) for row in part for name in row}
    return pandas.DataFrame([dict(ChainMap(*record)) for record in records], columns=list(names))


def _check_path(path: Path, writing: bool) -> None:
    if path.is_dir():
        fix = f"Name a file in it, such as {path / 'results.sqlite'}."
        raise ArgumentError("results_path", f"the folder {path}", "a file", fix)
    if writing and not path.absolute().parent.is_dir():
        fix = f"Create the folder {path.absolute().parent} first."
        raise ArgumentError("results_path", path, "a file in a folder that exists", fix)
    if not path.exists():
        if not writing:
            raise DataError(f"{path}: no such results file. Run the sweep that writes it first.")
    elif not path.is_file():
        raise DataError(f"{path}: no file on a disk. Name another results file.")
    elif not path.stat().st_size:
        raise DataError(f"{path}: the file is empty. {DAMAGED}")


@contextlib.contextmanager
def _only_driver(path: Path) -> Iterator[None]:
    """Within the block no other run writes the file."""
    from filelock import FileLock, Timeout

    path = path.resolve()
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DataError(
            f"{path}: another run is writing this results file. Wait until it has ended, or name "
            "another results file."
        ) from error
    except (OSError, NotImplementedError) as error:
        raise DataError(f"{path}: it cannot be locked ({error}). {UNWRITABLE}") from error
    try:
        yield
    finally:
        lock.release()


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_SECONDS,
        isolation_level=None,
    )  # fmt: skip


def _make(path: Path) -> None:
    """Makes the file with its tables at once, so that a killed run leaves none without them."""
    part = temporary_name(path)
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    try:
        with _errors_named(path), contextlib.closing(_connected(part, "rwc")) as connection:
            connection.executescript(
                f"PRAGMA synchronous = EXTRA; BEGIN; CREATE TABLE results ({columns}, {DIGEST});"
                f"PRAGMA application_id = {APPLICATION_ID};"
                f"PRAGMA user_version = {LAYOUT}; COMMIT;"
            )
        os.replace(part, path)
        sync_folder(path.absolute().parent)
    except OSError as error:
        raise DataError(f"{path}: {error}. {UNWRITABLE}") from error
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a results file that has been checked."""
    # Read-write even for reading: only so is a transaction cut off by a kill undone.
    with _errors_named(path), contextlib.closing(_connected(path, "rw")) as connection:
        connection.execute("PRAGMA synchronous = EXTRA")
        _check_layout(connection, path)
        _check_whole(connection, path)
        yield connection


def _check_layout(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise DataError(
            f"{path}: an SQLite file, but not one of benchmark results. Name another results file."
        )
    layout = _layout(connection)
    if layout not in range(1, LAYOUT + 1):
        raise DataError(
            f"{path}: results in layout {layout}, this code reads 1 to {LAYOUT}. "
            "Use the code that wrote it, or name another results file."
        )


def _check_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Raises where pages or indices do not fit together, or a row not to its digest."""
    problems = [line for (line,) in connection.execute("PRAGMA integrity_check(3)").fetchall()]
    if problems != ["ok"]:
        raise DataError(f"{path}: {'; '.join(problems)[:300]}. {DAMAGED}")
    if _layout(connection) > 1:
        rows = connection.execute(f"SELECT {ENTRIES}, digest FROM results").fetchall()
        unlike = [row[0] for row in rows if _row_digest(row[:-1]) != row[-1]]
        if unlike:
            first = ", ".join(map(repr, unlike[:3]))
            raise DataError(
                f"{path}: {len(unlike)} rows are not as they were written ({first}). {DAMAGED}"
            )


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Gives a file of an earlier layout this one, within a transaction."""
    if _layout(connection) == 1:
        connection.execute(f"ALTER TABLE results ADD COLUMN {DIGEST}")
        for (key,) in connection.execute("SELECT key FROM results").fetchall():
            _seal(connection, key)
    for table in ("claims", "runners"):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    connection.execute(f"CREATE TABLE IF NOT EXISTS commands ({OF_COMMANDS})")
    # Also where it is so already: a file that cannot be written is refused before any cell.
    connection.execute(f"PRAGMA user_version = {LAYOUT}")


def _layout(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _seal(connection: sqlite3.Connection, key: str) -> None:
    """Gives a row the digest of its entries, in the transaction that wrote it."""
    query = f"SELECT {ENTRIES} FROM results WHERE key = ?"
    digest = _row_digest(connection.execute(query, (key,)).fetchone())
    connection.execute("UPDATE results SET digest = ? WHERE key = ?", (digest, key))


def _row_digest(row: tuple) -> str:
    return hashlib.sha256(repr(row).encode(errors="backslashreplace")).hexdigest()


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Within the block SQLite's errors name the file and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        # Python's own, of a text that is none, has no name.
        name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
        fix = next((text for code, text in FIXES.items() if name.startswith(code)), "")
        raise DataError(f"{path}: {error}. {fix}".rstrip()) from error
    except UnicodeDecodeError as error:  # of SQLite's own message about a damaged name
        raise DataError(f"{path}: {error}. {DAMAGED}") from error
