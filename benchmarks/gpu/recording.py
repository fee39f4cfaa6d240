"""A pytest plugin: outcomes are written as they come, and what has one is not run again.

pytest -p benchmarks.gpu.recording --outcomes FILE --minutes 4

"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.lines import append_line, lines_of

__all__ = ["read_outcomes"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file of outcomes, and how long tests are started."""
    group = parser.getgroup("recording")
    group.addoption("--outcomes", help="File of outcomes, a line of JSON each.")
    group.addoption("--minutes", type=float, help="No test is started after so many minutes.")


def pytest_configure(config: pytest.Config) -> None:
    """Records in the main process; workers of pytest-xdist only leave out what is done."""
    file = config.getoption("--outcomes")
    if file:
        config.pluginmanager.register(_Recorder(Path(file), config), "outcomes")


def read_outcomes(file: Path) -> dict[str, dict[str, Any]]:
    """Outcomes by test; a line that was cut while it was written is passed over."""
    return {one["test"]: one for one in lines_of(file)}


class _Recorder:
    def __init__(self, file: Path, config: pytest.Config) -> None:
        self._file = file
        self._done = {
            name for name, one in read_outcomes(file).items() if one["outcome"] == "passed"
        }
        self._writes = not hasattr(config, "workerinput")
        minutes = config.getoption("--minutes")
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._parts: dict[str, list[pytest.TestReport]] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if item.nodeid in self._done]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes:
            return
        parts = self._parts.setdefault(report.nodeid, [])
        parts.append(report)
        if report.when == "teardown":
            self._write(report.nodeid, self._parts.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self._writes and report.failed:
            self._write(report.nodeid, [report])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self._end is None or time.monotonic() < self._end:
            return None
        item.session.shouldstop = "the time is over"
        return True  # nothing more is to be done with it

    def _write(self, name: str, reports: Sequence[Any]) -> None:
        outcomes = [one.outcome for one in reports]
        outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
        entry = {"test": name, "outcome": outcome}
        entry["seconds"] = round(sum(getattr(one, "duration", 0.0) for one in reports), 2)
        if outcome != "passed":
            entry["reason"] = _reason(next(one for one in reports if one.outcome == outcome))
        append_line(self._file, entry)


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[-1])[:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return (text.strip().splitlines() or [""])[0][:300]
