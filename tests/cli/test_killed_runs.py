"""A run that is killed leaves the old output or the new one, and never hinders the next run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpclml.cli.exchange import exchange_folders

RUNS = Path(__file__).with_name("killed_runs.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize(
    ("command", "there", "way", "least"),
    [
        ("fit", "there", "exchanged", 60),
        ("fit", "absent", "exchanged", 15),
        ("fit", "empty", "exchanged", 25),
        ("compare", "there", "exchanged", 100),
        ("compare", "absent", "exchanged", 40),
        ("compare", "empty", "exchanged", 40),
        ("fit", "there", "replaced", 20),
        ("fit", "empty", "replaced", 20),
        ("compare", "there", "replaced", 60),
        ("fit", "there", "here", 20),
        ("compare", "there", "here", 60),
        ("fit", "there", "completed", 5),
    ],
)
def test_killed_before_each_change_of_files(tmp_path, command, there, way, least):
    """Old or new, byte for byte; files of others as they were; the next run ends well."""
    if way == "exchanged":
        check_exchange(tmp_path)
    words = [sys.executable, "-W", "ignore", RUNS, command, tmp_path, there, way]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert result["killed"] >= least


def check_exchange(folder):
    """Skips the test where the file system of temporary files cannot exchange folders."""
    one, other = folder / "one", folder / "other"
    for place in (one, other):
        place.mkdir()
    try:
        exchange_folders(one, other)
    except OSError as error:
        pytest.skip(f"folders cannot be exchanged here: {error}")
    finally:
        one.rmdir()
        other.rmdir()
