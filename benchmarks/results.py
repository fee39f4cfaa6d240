"""The durable table of benchmark results: one row a cell, in one SQLite file."""

from __future__ import annotations

import enum
import json
import os
import sqlite3
import threading
import time
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import _claims
from benchmarks._cells import Outcome
from benchmarks._database import Database
from gpclml.errors import DataError

if TYPE_CHECKING:
    import pandas

__all__ = ["Claim", "ResultsStore", "load_failures", "load_results"]

PROVENANCE = (
    "key", "function", "code_version", "attempts", "seconds", "finished_at", "host",
    "python", "gpclml", "torch", "gpytorch", "botorch",
)  # fmt: skip


class Claim(enum.Enum):
    """The answer to a runner that asks for a cell."""

    GRANTED = "granted"
    DONE = "done"
    FAILED = "failed"
    ELSEWHERE = "elsewhere"


class ResultsStore:
    """A results file opened by one runner, a context manager that releases its claims.

    Args:
        path: The SQLite file; made if it is missing.
        function: Name of the cell function.
        code_version: Version of the code.
        versions: Versions of Python and the packages, by name.

    Raises:
        ArgumentError: If the path cannot be a results file.
        DataError: If the file is of another kind, damaged, or not writable.
    """

    def __init__(
        self, path: str | os.PathLike, function: str, code_version: str, versions: dict[str, str]
    ) -> None:
        self._about = {"function": function, "code_version": code_version, **versions}
        self._database = Database(path, create=True)
        self._runner = _claims.Runner.here()
        self._closing = threading.Event()
        try:
            with self._database.transaction() as connection:
                _claims.drop_dead_runners(connection)
                _claims.heartbeat(connection, self._runner)
        except BaseException:
            self._database.close()
            raise
        self._pulse = threading.Thread(target=self._keep_alive, daemon=True, name="heartbeat")
        self._pulse.start()

    def __enter__(self) -> ResultsStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._pulse.join()
        try:
            with self._database.transaction() as connection:
                _claims.release(connection, self._runner)
        finally:
            self._database.close()

    def stored(self) -> dict[str, int | None]:
        """The stored cells by key: None if done, the number of attempts if failed."""
        rows = self._database.read("SELECT key, status, attempts FROM results")
        return {key: None if status == "done" else tries for key, status, tries in rows}

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self._database.path

    def claim(self, key: str, failed_attempts: int = 0) -> Claim:
        """Asks for a cell, so that no other runner computes it meanwhile.

        Args:
            key: Key of the cell.
            failed_attempts: A stored failure may be tried again if it had so many attempts;
                with more, another runner has tried it since.
        """
        return self.claim_all({key: failed_attempts})[key]

    def claim_all(self, failed_attempts: Mapping[str, int]) -> dict[str, Claim]:
        """Asks for several cells at once; another runner's claims come before or after all.

        Args:
            failed_attempts: As in :meth:`claim`, by key.
        """
        with self._database.transaction() as connection:
            return {
                key: self._claim(connection, key, count) for key, count in failed_attempts.items()
            }

    def _claim(self, connection: sqlite3.Connection, key: str, failed_attempts: int) -> Claim:
        query = "SELECT status, attempts FROM results WHERE key = ?"
        row = connection.execute(query, (key,)).fetchone()
        if row and row[0] == "done":
            return Claim.DONE
        if row and row[1] != failed_attempts:
            return Claim.FAILED
        granted = _claims.claim(connection, self._runner, key)
        return Claim.GRANTED if granted else Claim.ELSEWHERE

    def record(self, outcome: Outcome, configuration: str) -> None:
        """Writes the row of a cell and drops its claim; a row that is done stays as it is."""
        row = self._about | vars(outcome)
        row |= {
            "configuration": configuration,
            "status": "failed" if outcome.metrics is None else "done",
            "attempts": 1,
            "finished_at": time.time(),
        }
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        changes = ", ".join(f"{name} = excluded.{name}" for name in row if name != "attempts")
        with self._database.transaction() as connection:
            written = connection.execute(
                f"INSERT INTO results ({names}) VALUES ({marks}) ON CONFLICT (key) DO UPDATE "
                f"SET {changes}, attempts = attempts + 1 WHERE status = 'failed'",
                tuple(row.values()),
            )
            if written.rowcount:
                self._database.seal(connection, [outcome.key])
            connection.execute(
                "DELETE FROM claims WHERE key = ? AND run = ?", (outcome.key, self._runner.run)
            )

    def _keep_alive(self) -> None:
        while not self._closing.wait(_claims.LEASE_SECONDS / 10):
            try:
                with self._database.transaction() as connection:
                    _claims.heartbeat(connection, self._runner)
            except DataError:  # a lasting fault stops the runner at its next cell
                continue


def load_results(
    path: str | os.PathLike, *, code_version: str = "latest", provenance: bool = False
) -> pandas.DataFrame:
    """The finished cells: a row each, the configuration's columns, then the metrics'.

    Rows are in the order of their configuration's JSON text, not of computation.

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


def _load(
    path: str | os.PathLike, status: str, metrics: tuple, version: str, columns: tuple
) -> pandas.DataFrame:
    import pandas

    database = Database(path, create=False)
    try:
        wanted = ", ".join(("function", "code_version", "configuration", *metrics, *columns))
        rows = database.read(
            f"SELECT {wanted} FROM results WHERE status = ? ORDER BY configuration, key", (status,)
        )
        latest = dict(
            database.read("SELECT function, code_version FROM results ORDER BY finished_at, key")
        )
    finally:
        database.close()
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
    rows = [dict(ChainMap(*record)) for record in records]
    return pandas.DataFrame(rows, columns=list(names))
