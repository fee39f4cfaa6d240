"""Which runner computes which cell, and whether that runner still lives."""

from __future__ import annotations

import sqlite3
import time
import uuid
from dataclasses import astuple, dataclass

from benchmarks._process import Process

__all__ = ["LEASE_SECONDS", "Runner", "claim", "drop_dead_runners", "heartbeat", "release"]

LEASE_SECONDS = 300.0
"""A runner on another machine counts as dead when it was silent for so long."""


@dataclass(frozen=True)
class Runner:
    """A run of a grid.

    Args:
        run: Unique id of the run.
        process: The process it lives in.
    """

    run: str
    process: Process

    @classmethod
    def here(cls) -> Runner:
        """A new run in this process."""
        return cls(uuid.uuid4().hex, Process.here())

    def is_alive(self, heartbeat: float) -> bool:
        """Whether the runner may still be at work, given the time of its last heartbeat."""
        lives = self.process.lives()
        return time.time() - heartbeat < LEASE_SECONDS if lives is None else lives


def heartbeat(connection: sqlite3.Connection, runner: Runner) -> None:
    """Enters a runner, or says that it is still there."""
    connection.execute(
        "INSERT OR REPLACE INTO runners VALUES (?, ?, ?, ?, ?)",
        (runner.run, *astuple(runner.process), time.time()),
    )


def claim(connection: sqlite3.Connection, runner: Runner, key: str) -> bool:
    """Claims a cell unless another living runner has it; within a transaction."""
    held = connection.execute(
        "SELECT run, host, pid, started, heartbeat FROM claims JOIN runners USING (run) "
        "WHERE key = ?",
        (key,),
    ).fetchone()
    if held and held[0] != runner.run and _runner(held).is_alive(held[-1]):
        return False
    connection.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (key, runner.run))
    return True


def release(connection: sqlite3.Connection, runner: Runner) -> None:
    """Gives back all claims of a runner and takes it off the list."""
    connection.execute("DELETE FROM claims WHERE run = ?", (runner.run,))
    connection.execute("DELETE FROM runners WHERE run = ?", (runner.run,))


def drop_dead_runners(connection: sqlite3.Connection) -> None:
    """Releases what runners that were killed have left behind."""
    rows = connection.execute("SELECT run, host, pid, started, heartbeat FROM runners").fetchall()
    for row in rows:
        if not _runner(row).is_alive(row[-1]):
            release(connection, _runner(row))


def _runner(row: tuple) -> Runner:
    run, host, pid, started, _ = row
    return Runner(run, Process(host, pid, started))
