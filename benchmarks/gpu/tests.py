"""The tests that need a GPU, each outcome kept as it comes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.gpu.recording import read_outcomes
from benchmarks.gpu.records import Row

__all__ = ["outcome_rows", "outcomes_file", "run"]

_ROOT = Path(__file__).parents[2]
_GRACE = 60  # seconds that one test may go on when the time is over


def outcomes_file(folder: Path) -> Path:
    """The file of outcomes in a folder of results."""
    return folder / "tests.jsonl"


def run(folder: Path, tests: Path, minutes: float | None, workers: int = 0) -> bool:
    """Runs what is marked ``cuda`` and has not passed yet.

    Args:
        folder: Of the results.
        tests: Folder or file of tests.
        minutes: No test is started after so many.
        workers: Processes of pytest-xdist; 0 for none.

    Returns:
        Whether none failed and all came to an end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("pytest", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            print(f"tests: left out, {package} is not installed", flush=True)
            return False
    file = outcomes_file(folder).absolute()
    command = [
        sys.executable, "-m", "pytest", str(tests.absolute()), "-m", "cuda", "-q", "--tb=short",
        "--continue-on-collection-errors", "-p", "no:cacheprovider",
        "-p", "no:benchmark",  # whose warning of several workers would end them
        "-p", "benchmarks.gpu.recording", "--outcomes", str(file),
    ]  # fmt: skip
    if minutes is not None:
        command += ["--minutes", str(minutes)]
    if workers:
        command += ["-n", str(workers)]
    try:
        limit = None if minutes is None else 60 * minutes + _GRACE
        code = subprocess.run(command, cwd=_ROOT, check=False, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        print("tests: one did not end and was stopped", flush=True)
        code = -1
    counts = Counter(one["outcome"] for one in read_outcomes(file).values())
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no test")
    return code in (0, 5)  # 5: nothing was left to run


def outcome_rows(folder: Path) -> list[Row]:
    """A row for each count, and one for each test that failed."""
    found = read_outcomes(outcomes_file(folder))
    if not found:
        return []
    counts = Counter(one["outcome"] for one in found.values())
    rows: list[Row] = [
        {"part": "tests", "study": "outcomes", "method": name, "count": counts[name]}
        for name in ("passed", "failed", "skipped")
    ]
    return rows + [
        {"part": "tests", "study": "failed", "method": name, "error": one["reason"]}
        for name, one in found.items()
        if one["outcome"] == "failed"
    ]
