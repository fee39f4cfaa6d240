"""A run that is killed leaves no model of two results, and never hinders the next run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = Path(__file__).with_name("killed_runs.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize("there", ["there", "absent", "empty", "here"])
@pytest.mark.parametrize(("command", "least"), [("fit", 15), ("compare", 40)])
def test_killed_before_each_change_of_files(tmp_path, command, there, least):
    """Each file is the old or the new one, those of others are as they were, the next run ends."""
    words = [sys.executable, "-W", "ignore", RUNS, command, tmp_path, there]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert result["killed"] >= least
