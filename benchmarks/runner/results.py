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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runner.cells import Row, canonical_json
from gpclml._utils.files import write_atomically
from gpclml.errors import ArgumentError, DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["ResultsStore", "load_commands", "load_failures", "load_results"]

BUSY_SECONDS = 60.0
APPLICATION_ID = 0x67706C6D  # marks the file as ours
LAYOUT = 5  # of the tables below; a file of another one is refused
TABLES = f"""
    CREATE TABLE results (key TEXT PRIMARY KEY, status TEXT, row TEXT, digest TEXT);
    CREATE TABLE commands (
        function, code_version, command, UNIQUE (function, code_version, command)
    );
    PRAGMA application_id = {APPLICATION_ID};
    PRAGMA user_version = {LAYOUT};
"""
PROVENANCE = (
    "key", "function", "code_version", "seconds", "finished_at", "host", "python", "gpclml",
    "torch", "gpytorch", "botorch",
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
        about: What each row says of the run beside its cell: ``function``, ``code_version`` and
            the versions of Python and the packages.
        command: What computes the cells, to be kept with them; None for what no command does.

    Raises:
        ArgumentError: If the path cannot be a results file.
        DataError: If another process is writing the file, or it is of another kind, damaged, or
            not writable.
    """

    def __init__(
        self, path: str | os.PathLike, about: Mapping[str, str], command: str | None = None
    ) -> None:
        self.path = Path(path)
        self._about = dict(about)
        _check_path(self.path, writing=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_only_driver(self.path))
            if not self.path.exists():
                _make(self.path.resolve())  # a link stays one
            self._connection = stack.enter_context(_opened(self.path))
            with self._transaction() as connection:
                # In any case: a file that cannot be written is refused before any cell.
                connection.execute(f"PRAGMA user_version = {LAYOUT}")
                if command is not None:
                    row = about["function"], about["code_version"], command
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

    def record(self, rows: Iterable[Row]) -> None:
        """Writes what came of cells, all or none, in the place of what was there."""
        with self._transaction() as connection:
            for row in rows:
                text = json.dumps(self._about | row | {"finished_at": time.time()})
                entries = row["key"], "done" if "metrics" in row else "failed", text
                connection.execute(
                    "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)",
                    (*entries, _digest(entries)),
                )

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
    with _opened(path) as connection:
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
        held = lock.acquire(timeout=0)
    except Timeout as error:
        raise DataError(
            f"{path}: another run is writing this results file. Wait until it has ended, or name "
            "another results file."
        ) from error
    except (OSError, NotImplementedError) as error:
        raise DataError(f"{path}: it cannot be locked ({error}). {UNWRITABLE}") from error
    with held:
        yield


def _make(path: Path) -> None:
    """Makes the file with its tables at once, so that a killed run leaves none without them."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(TABLES)
        content = connection.serialize()
    try:
        write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        raise DataError(f"{path}: {error}. {UNWRITABLE}") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a results file that has been checked."""
    # Read-write even for reading: only so is a transaction cut off by a kill undone.
    address = f"{path.absolute().as_uri()}?mode=rw"
    with (
        _errors_named(path),
        contextlib.closing(
            sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        ) as connection,
    ):
        connection.execute("PRAGMA synchronous = EXTRA")
        _check_content(connection, path)
        yield connection


def _check_content(connection: sqlite3.Connection, path: Path) -> None:
    """Raises where the file is of another kind, or pages, indices or digests do not fit."""

    def answer(name: str) -> Any:
        return connection.execute(f"PRAGMA {name}").fetchall()

    if answer("application_id") != [(APPLICATION_ID,)]:
        raise DataError(
            f"{path}: an SQLite file, but not one of benchmark results. Name another results file."
        )
    [(layout,)] = answer("user_version")
    if layout != LAYOUT:
        raise DataError(
            f"{path}: results in layout {layout}, this code has layout {LAYOUT}. "
            "Use the code that wrote it, or name another results file."
        )
    if (problems := answer("integrity_check(3)")) != [("ok",)]:
        raise DataError(f"{path}: {'; '.join(text for (text,) in problems)[:300]}. {DAMAGED}")
    rows = connection.execute("SELECT key, status, row, digest FROM results").fetchall()
    unlike = [row[0] for row in rows if _digest(row[:-1]) != row[-1]]
    if unlike:
        first = ", ".join(map(repr, unlike[:3]))
        raise DataError(
            f"{path}: {len(unlike)} rows are not as they were written ({first}). {DAMAGED}"
        )


def _digest(entries: tuple) -> str:
    return hashlib.sha256(repr(entries).encode(errors="backslashreplace")).hexdigest()


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
