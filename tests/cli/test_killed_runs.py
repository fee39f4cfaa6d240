"""A run that is killed leaves the old output or the new one, and never hinders the next run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = Path(__file__).with_name("killed_runs.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize(
    ("command", "there", "least"),
    [
        ("fit", "there", 20),
        ("fit", "absent", 15),
        ("fit", "empty", 20),
        ("compare", "there", 60),
        ("compare", "absent", 40),
    ],
)
def test_killed_before_each_change_of_files(tmp_path, command, there, least):
    """Old or new, byte for byte; files of others as they were; the next run ends well."""
    words = [sys.executable, "-W", "ignore", RUNS, command, tmp_path, there]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert result["killed"] >= least
